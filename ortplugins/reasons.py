# SPDX-License-Identifier: MIT
"""What to do about refusals and warnings, by their codes.

The code stands where a refusal is raised (:class:`rewrite_rules.remarks.Refusal`), and behind
the text of a remark or a warning. ``ortplugins explain`` looks it up here, and
docs/troubleshooting.md has the same table.
"""

from __future__ import annotations

from collections.abc import Mapping

# By section: a code for each cause, and what to do about it.
REASONS: Mapping[str, Mapping[str, str]] = {
    "Weights that stay as they are (dq_matmulnbits_fusion)": {
        "ORP101": (
            'A caller may feed another weight: export without "initializers as inputs" '
            "(keep_initializers_as_inputs=False)."
        ),
        "ORP102": (
            "The weight is computed in every run: fold constants first, with onnxruntime "
            "offline or onnx_ir.passes.common."
        ),
        "ORP103": (
            "No kernel takes such blocks: quantise in blocks of 16, 32, 64, 128 or 256, of "
            "the matrix as it is multiplied."
        ),
        "ORP104": "A row has an odd number of codes: pad K, or use 8 bits.",
        "ORP105": (
            "A Cast after DequantizeLinear loses bits, or its type has no kernel: export the "
            "model in float32 or float16, without Casts."
        ),
        "ORP106": (
            "Stacks of matrices have no kernel: split the MatMul, or let it become a float "
            "constant (slow_kernels=float)."
        ),
        "ORP107": "Export a MatMul with the weight on the right and nothing transposed.",
        "ORP108": (
            "The kernel gathers rows of a matrix, in blocks of 16, 32, ...: quantise and "
            "gather the table that way."
        ),
        "ORP109": (
            "It would have become a float constant, beyond float_limit_mb: raise that, use "
            "accuracy_level=4, or quantise to 4 bits."
        ),
        "ORP110": "Nothing to do: slow_kernels=keep leaves it as it is.",
        "ORP111": (
            "Nothing to do: it is a float constant, which is faster; slow_kernels=fuse keeps "
            "its codes."
        ),
        "ORP113": (
            "The older onnxruntime would compute wrong numbers: use the version that the "
            "remark names, or accuracy_level=0."
        ),
        "ORP114": "Nothing to do: this execution provider reads DequantizeLinear itself.",
        "ORP115": (
            "Nothing to do: onnxruntime computes on the codes itself (QLinearMatMul, "
            "QLinearConv, Gather of codes)."
        ),
        "ORP116": (
            "It is unpacked in every run: its consumer has no kernel for codes (Mul, for "
            "example), or the constant is an output of the graph."
        ),
        "ORP117": (
            "Its weights stay as they are: convert the function to the model's opset "
            "(onnx.version_converter), or give it a domain of its own."
        ),
    },
    "The file is damaged, or its exporter is wrong": {
        "ORP201": (
            "The type of codes or scales has no kernel: 4 or 8 bits with float32 or float16 "
            "scales fuse; cast bfloat16 scales to float32."
        ),
        "ORP202": (
            "Scales, zero points or axes do not fit the weight: quantise or export again."
        ),
        "ORP203": "Scales are NaN or infinite: quantise again, with float32 scales.",
        "ORP204": "A field has a value that ONNX does not allow: export again.",
    },
    "Activations that keep their type (mixed_precision_boundaries)": {
        "ORP301": "Quantise activations per tensor, not per axis or in blocks.",
        "ORP302": "Two grids meet here already: name another tensor.",
        "ORP304": (
            "A region is promoted whole or not at all: the text after the colon names the "
            "tensor that prevents it."
        ),
        "ORP305": (
            "Overrides contradict each other: give one type to all that an operator reads and "
            "writes."
        ),
        "ORP306": "Name the tensor of an activation, not a DequantizeLinear or a constant.",
        "ORP308": (
            "The scale is too small for its type: convert the model to float32, or promote in "
            'mode "float".'
        ),
        "ORP309": "Scale or zero point is invalid: quantise again.",
        "ORP310": (
            "A type is only refined, from 8 to 16 bits: quantise the float model to 8 bits "
            "first."
        ),
        "ORP311": (
            "A tensor and its scale must have one type: run shape inference; remove Casts, "
            "output_dtype and precision."
        ),
        "ORP313": "Convert the model to opset 11 or newer with onnx.version_converter.",
        "ORP315": "Add dq_matmulnbits_fusion, which reads the codes of 4-bit weights.",
        "ORP316": "Raise ortplugins.mixed_precision_boundaries.float_limit_mb.",
    },
    "Orders (shape_size_reorder)": {
        "ORP401": "Nothing to do: the order, or the setting, is better as it is.",
        "ORP402": "The nodes of a function form a cycle: export the model again.",
    },
    "Padding (trim_padding)": {
        "ORP501": (
            "Export the model with its attention mask, or set trim_padding.mask to the input "
            "of shape [batch, sequence] that is 0 at padding."
        ),
        "ORP502": (
            "Convert the model with onnx.version_converter, or export it with a newer opset."
        ),
        "ORP503": (
            "Results depend on how far the batch is padded: mask attention and pooling in the "
            "model, or keep it as it is."
        ),
        "ORP504": (
            "Lengths are not known: name the sequence axis in dynamic_axes or dynamic_shapes, "
            "and run shape inference."
        ),
        "ORP505": (
            "The proof cannot follow it: inline functions "
            "(onnx.inliner.inline_local_functions), or sort the graph (model.graph.sort() of "
            "onnx_ir). It never follows If, Loop and Scan."
        ),
        "ORP506": (
            "The output cannot be padded again: export it as float32, with batch and sequence "
            "as separate axes."
        ),
        "ORP508": (
            "Give TrimPadding the original model: run it before TransformerFusion, or both "
            "passes at once."
        ),
        "ORP509": (
            "Padding changes the scales of activations: run TrimPadding before you quantise, "
            "or quantise with --recipe encoder8."
        ),
    },
    "Attention, norms and rotary embeddings (transformer_fusion)": {
        "ORP601": "Part of the pattern cannot be fused: the text after the colon says why.",
        "ORP602": (
            "Shapes are not known: export with static ranks and numbers of heads, with "
            "declared inputs, without custom operators before the attention."
        ),
        "ORP603": (
            "Nothing to do: it is not attention, or not in a form that a kernel computes."
        ),
        "ORP604": 'Export with an additive mask (attn_implementation="eager").',
        "ORP605": "Attention is fused only in float32: export or convert to float32.",
        "ORP607": (
            "No converter can raise the model to the opset that the kernels need: export it "
            "with that opset or a newer one."
        ),
        "ORP609": (
            "Use kv_cache=exported: a shared cache needs a causal mask and a head size that "
            "is a multiple of 8."
        ),
    },
    "Convolutions (conv_fusion)": {
        "ORP651": (
            "The constant is not one number per channel: write it as [C, 1, 1], or as one "
            "number."
        ),
        "ORP652": (
            "The folded numbers would leave float32 or lose digits: check whether the "
            "constant is 0, infinite, huge or tiny."
        ),
        "ORP653": "Convolutions are folded only in float32: export or convert to float32.",
        "ORP654": (
            "Nothing to do: the offset stays, because the convolution after it pads with "
            "zeros."
        ),
        "ORP655": (
            "Nothing to do: something else needs the value, or onnxruntime fuses it itself."
        ),
    },
    "Packed weights (prepacked_weights); the model runs without them": {
        "ORP701": (
            "Weights are packed for the CPU, in graphs that onnxruntime no longer changes: "
            "leave ortplugins.bake on; for files, use --bake (bake=True)."
        ),
        "ORP703": "Nothing to do: Conv and others keep no packed weights.",
        "ORP704": (
            "A check failed, and the packed weights are not used: report it with the model."
        ),
        "ORP705": (
            "The process that packs was stopped: give it more memory or disk, or lift limits "
            "on processes (ulimit -u, seccomp)."
        ),
        "ORP706": (
            "Frozen and embedded programs (PyInstaller, uWSGI): set ORTPLUGINS_PYTHON to an "
            "interpreter, or run ortplugins cache warm with one beforehand."
        ),
    },
    "Weights that stay in float (quantize)": {
        "ORP801": "Convert bfloat16 and double to float32 first.",
        "ORP802": (
            "Only matrices, and tables gathered by rows, are quantised: split stacks, fold "
            "constants first."
        ),
        "ORP803": "Nothing to do: it is quantised already.",
    },
    "Warnings, and notes of a session": {
        "ORP901": (
            "A pass failed and was left out, so the result is correct; it is tried again "
            "after a day. strict=1 raises the error with a traceback: please report it."
        ),
        "ORP902": (
            "The session is correct, but not faster: the text before the code says what "
            "failed; strict=1 raises the error with a traceback."
        ),
        "ORP903": (
            "Set ORTPLUGINS_CACHE_DIR to a directory that only you can write to, or chmod 700 "
            "it."
        ),
        "ORP904": (
            "Results are correct: start one process first, or put the cache on a local disk."
        ),
        "ORP905": "The disk is full or failing: free space, or clean the cache.",
        "ORP906": (
            "Passes rewrite the file's own weights: leave out add_initializer and "
            "add_external_initializers, or the passes."
        ),
        "ORP907": (
            "Starts are slower, results the same: write sizes into the file instead of "
            "overriding free dimensions."
        ),
        "ORP908": (
            "A child process was killed or took too long: give it more memory, or run "
            "ortplugins cache warm beforehand."
        ),
        "ORP911": (
            "Give samples (calibration_data_reader, --samples or --text), shorter ones if "
            "memory is short."
        ),
    },
}
