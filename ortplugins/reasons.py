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
            "Fold constants first, with onnxruntime offline or onnx_ir.passes.common: the "
            "exporter computes them in every run."
        ),
        "ORP103": (
            "No kernel takes such blocks: quantise in blocks of 16, 32, 64, 128 or 256, of "
            "the matrix as it is multiplied."
        ),
        "ORP104": "An odd number of codes in a row: pad K, or take 8 bits.",
        "ORP105": (
            "Casts after DequantizeLinear lose bits, or go to a type without a kernel: "
            "export the model in float32 or float16, without them."
        ),
        "ORP106": (
            "Stacks of matrices have no kernel: split the product, or take the float constant."
        ),
        "ORP107": ("Write it as MatMul with the weight on the right, and nothing transposed."),
        "ORP108": (
            "Tables have a kernel for rows of a matrix: gather rows, in blocks of 16, 32 ..."
        ),
        "ORP109": (
            "It would have become a float constant: raise float_limit_mb, take "
            "accuracy_level=4, or quantise to 4 bits."
        ),
        "ORP110": "Nothing to do: slow_kernels=keep leaves it.",
        "ORP111": (
            "Nothing to do: it is a float constant, which is faster; slow_kernels=fuse "
            "keeps its codes."
        ),
        "ORP113": (
            "The older onnxruntime would compute wrong numbers: use the version that the "
            "text names, or accuracy_level=0."
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
            "Convert the function to the model's opset (onnx.version_converter), or give it"
            " a domain of its own: what it holds stays as it is."
        ),
    },
    "The file is damaged, or its exporter is wrong": {
        "ORP201": (
            "The type of codes or scales has no kernel: 4 or 8 bits with float32 or "
            "float16 scales fuse; cast bfloat16 scales to float32."
        ),
        "ORP202": (
            "Scales, zero points or axes do not fit the weight: quantise or export again."
        ),
        "ORP203": "Scales are lost (NaN, infinity): quantise again, with float32 scales.",
        "ORP204": "A field holds what ONNX does not allow: export again.",
    },
    "Activations that keep their type (mixed_precision_boundaries)": {
        "ORP301": "Quantise activations per tensor: neither in blocks nor per axis.",
        "ORP302": "Two grids meet here already: name another tensor.",
        "ORP304": (
            "A region is promoted whole or not at all: the text after the colon names the "
            "tensor that prevents it."
        ),
        "ORP305": (
            "Overrides contradict each other: give one type to all that an operator reads "
            "and writes."
        ),
        "ORP306": "Name an activation: its tensor, not a DequantizeLinear or a constant.",
        "ORP308": (
            "The scale is too small for its type: convert the model to float32, or promote "
            'in mode "float".'
        ),
        "ORP309": "Scale or zero point is invalid: quantise again.",
        "ORP310": "16 bits become no 8: quantise the float model to 8 bits first.",
        "ORP311": (
            "Only tensors of the type of their scale are rewritten: run shape inference; "
            "remove Casts, output_dtype and precision."
        ),
        "ORP313": "Convert the model by onnx.version_converter, to opset 11 or newer.",
        "ORP315": "Add dq_matmulnbits_fusion, which reads the codes of 4-bit weights.",
        "ORP316": "Raise ortplugins.mixed_precision_boundaries.float_limit_mb.",
    },
    "Orders (shape_size_reorder)": {
        "ORP401": "Nothing to do: the order, or the setting, is better as it is.",
        "ORP402": "The nodes of a function form a cycle: export the model again.",
    },
    "Padding (trim_padding)": {
        "ORP501": (
            "Export the model with its attention mask, or name the input of [batch, "
            "sequence] that is 0 at padding by trim_padding.mask."
        ),
        "ORP502": (
            "Convert the model by onnx.version_converter, or export it at a newer opset."
        ),
        "ORP503": (
            "Results depend on how far the batch is padded: mask attention and pooling in "
            "the model, or keep it as it is."
        ),
        "ORP504": (
            "Lengths are not known: name the sequence axis in dynamic_axes or "
            "dynamic_shapes, and run shape inference."
        ),
        "ORP505": (
            "The proof cannot follow it: inline functions "
            "(onnx.inliner.inline_local_functions), or sort the graph (model.graph.sort() "
            "of onnx_ir). If, Loop and Scan stay."
        ),
        "ORP506": (
            "Such an output cannot be padded back: export it as float32, with batch and "
            "sequence as axes of their own."
        ),
        "ORP508": (
            "Give TrimPadding the original model: run it before TransformerFusion, or both "
            "passes at once."
        ),
        "ORP509": (
            "Padding changes the scales of activations: run TrimPadding before you "
            "quantise, or quantise by --recipe encoder8."
        ),
    },
    "Attention, norms and rotary embeddings (transformer_fusion)": {
        "ORP601": "A part of the pattern stays: the text after the colon says why.",
        "ORP602": (
            "Shapes are not known: export with static ranks and numbers of heads, with "
            "declared inputs, without custom operators before the attention."
        ),
        "ORP603": "Nothing to do: it is not attention, or not as a kernel computes it.",
        "ORP604": 'Export with a mask that is added (attn_implementation="eager").',
        "ORP605": "Attention is fused in float32: export or convert to that.",
        "ORP607": (
            "Neither converter takes the model to the opset that the kernels need: export "
            "it at that, or a newer one."
        ),
        "ORP609": (
            "Leave kv_cache as exported: a shared cache takes a causal mask and heads of a "
            "multiple of 8."
        ),
    },
    "Convolutions (conv_fusion)": {
        "ORP651": (
            "Its numbers do not run along the channels: give them as [C, 1, 1], or as one "
            "number."
        ),
        "ORP652": (
            "The folded numbers would leave float32 or lose digits: check the constant, it "
            "is 0, infinite, huge or tiny."
        ),
        "ORP653": "Convolutions fold in float32: export or convert to that.",
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
            "It packs for the CPU, in graphs that onnxruntime no longer changes: leave "
            "ortplugins.bake on; for files, --bake (bake=True)."
        ),
        "ORP703": "Nothing to do: Conv and others keep no packed weights.",
        "ORP704": (
            "A check failed, and the packed weights are not used: report it with the model."
        ),
        "ORP705": (
            "The process that packs was stopped: more memory or disk, no limit on processes"
            " (ulimit -u, seccomp)."
        ),
        "ORP706": (
            "Frozen and embedded programs (PyInstaller, uWSGI): set ORTPLUGINS_PYTHON to an"
            " interpreter, or run ortplugins cache warm with one beforehand."
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
            "A pass failed; the result is correct, and the pass is tried again after a day; "
            "strict raises with a traceback: report that."
        ),
        "ORP902": (
            "The session is correct, but not faster: the text in front says what failed; "
            "strict raises with a traceback."
        ),
        "ORP903": (
            "Choose a directory that only you may write to by ORTPLUGINS_CACHE_DIR, or "
            "chmod 700 it."
        ),
        "ORP904": (
            "Results are correct: start one process first, or put the cache on a local disk."
        ),
        "ORP905": ("The disk is full or failing: free space, or clean the cache."),
        "ORP906": (
            "Passes rewrite the file's own weights: leave out add_initializer and "
            "add_external_initializers, or the passes."
        ),
        "ORP907": (
            "Starts are slower, results the same: write sizes into the file instead of "
            "overriding free dimensions."
        ),
        "ORP908": (
            "A child process was killed or took too long: more memory, or ortplugins cache "
            "warm ahead."
        ),
        "ORP911": (
            "Give samples (calibration_data_reader, --samples or --text), shorter ones "
            "where memory is short."
        ),
    },
}
