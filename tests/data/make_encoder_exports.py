"""Make encoder_exports.zip: tiny encoders with random weights, as users export them.

usage: make_encoder_exports.py [OUT.zip]

Needs torch 2.13, transformers 5.23, onnxscript 0.7 and onnx. Both exporters of torch, eager
and scaled-dot-product attention; graphs without the exporter's notes.
"""

import io
import itertools
import os
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
import onnx
import torch
import transformers as tf

SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 48, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TYPES = {**SIZES, "type_vocab_size": 2}
ONE_TYPE = {**SIZES, "type_vocab_size": 1}
DISTILBERT = {"vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24,
              "max_position_embeddings": 48}  # fmt: skip
DEBERTA = {**SIZES, "type_vocab_size": 0, "relative_attention": True, "position_buckets": 8,
           "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm",
           "share_att_key": True, "position_biased_input": False}  # fmt: skip
MODERNBERT = {**SIZES, "global_attn_every_n_layers": 2, "local_attention": 6,
              "cls_token_id": 1, "sep_token_id": 2, "reference_compile": False}  # fmt: skip
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
      "decoder_start_token_id": 0, "relative_attention_num_buckets": 8,
      "relative_attention_max_distance": 16}  # fmt: skip
CLIP = {**SIZES, "eos_token_id": 39}
# name: class, configuration, output
MODELS = {
    "bert": ("Bert", "Model", TYPES, "last_hidden_state pooler_output"),
    "bert-mean": ("Bert", "Model", TYPES, "mean"),
    "bert-reranker": ("Bert", "ForSequenceClassification", TYPES, "logits"),
    "bert-answers": ("Bert", "ForQuestionAnswering", TYPES, "start_logits end_logits"),
    "roberta": ("Roberta", "Model", ONE_TYPE, "last_hidden_state pooler_output"),
    "xlmr": ("XLMRoberta", "Model", ONE_TYPE, "last_hidden_state"),
    "distilbert": ("DistilBert", "Model", DISTILBERT, "last_hidden_state"),
    "mpnet": ("MPNet", "Model", SIZES, "last_hidden_state"),
    "modernbert": ("ModernBert", "Model", MODERNBERT, "last_hidden_state"),
    "deberta2": ("DebertaV2", "Model", DEBERTA, "last_hidden_state"),
    "cliptext": ("CLIPText", "Model", CLIP, "last_hidden_state pooler_output"),
    "t5": ("T5", "EncoderModel", T5, "last_hidden_state"),
}  # fmt: skip


class Wrapped(torch.nn.Module):
    """Plain tensors in, plain tensors out."""

    def __init__(self, model: torch.nn.Module, outputs: list[str]) -> None:
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, input_ids, attention_mask, token_type_ids=None):
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        result = self.model(input_ids=input_ids, attention_mask=attention_mask, **types)
        if self.outputs == ["mean"]:
            weights = attention_mask.unsqueeze(-1).to(torch.float32)
            states = result.last_hidden_state * weights
            return states.sum(1) / weights.sum(1).clamp(min=1e-9)
        return tuple(getattr(result, name) for name in self.outputs)


def made(prefix: str, suffix: str, sizes: dict, attention: str) -> torch.nn.Module:
    """Return a model with weights wide enough that masking shows."""
    config = getattr(tf, f"{prefix}Config")(**sizes)
    config._attn_implementation = attention
    model = getattr(tf, prefix + suffix)._from_config(config, attn_implementation=attention)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.eval().named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(values / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(0.1 * values + name.endswith("weight"))
    return model


def exported(name: str, exporter: str, attention: str) -> bytes:
    prefix, suffix, sizes, outputs = MODELS[name]
    module = Wrapped(made(prefix, suffix, sizes, attention), outputs.split())
    inputs = ["input_ids", "attention_mask"]
    ids = torch.randint(3, 39, (2, 7))
    arguments = [ids, torch.ones_like(ids)]
    if sizes.get("type_vocab_size", 0) > 1:
        inputs.append("token_type_ids")
        arguments.append(torch.zeros_like(ids))
    dynamic = torch.export.Dim.DYNAMIC
    shapes = tuple({0: dynamic, 1: dynamic} for _ in inputs)
    axes = {key: {0: "batch", 1: "sequence"} for key in (*inputs, *outputs.split())}
    for pooled in axes.keys() & {"pooler_output", "logits", "mean"}:
        axes[pooled] = {0: "batch"}
    names = {"input_names": inputs, "output_names": outputs.split()}
    return written(module, tuple(arguments), exporter, shapes, axes, **names)


def written(
    module: torch.nn.Module,
    arguments: tuple,
    exporter: str,
    shapes: tuple,
    axes: dict,
    **names,
) -> bytes:
    """Export with dynamic shapes (dynamo) or dynamic axes (torchscript)."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = str(Path(folder, "model.onnx"))
        if exporter == "dynamo":
            program = torch.onnx.export(
                module, arguments, dynamo=True, opset_version=21, dynamic_shapes=shapes,
                verbose=False, **names,
            )  # fmt: skip
            program.save(path, external_data=False)
        else:
            torch.onnx.export(
                module, arguments, path, dynamo=False, opset_version=17, dynamic_axes=axes,
                **names,
            )  # fmt: skip
        return without_notes(onnx.load(path))


def without_notes(model: onnx.ModelProto) -> bytes:
    """Strip what exporters note beside the graph."""
    for node in model.graph.node:
        node.ClearField("doc_string")
        node.ClearField("metadata_props")
    for value in model.graph.value_info:
        value.ClearField("metadata_props")
    model.graph.ClearField("metadata_props")
    model.ClearField("metadata_props")
    return model.SerializeToString()


def write_archive(file: str, models: Iterable[str], export: Callable[..., bytes]) -> None:
    """Write each model by both exporters to the command line's archive, or to this one.

    torchscript cannot have them all, and some have no attention but the eager one.
    """
    warnings.simplefilter("ignore")
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for kind in itertools.product(models, ("dynamo", "torchscript"), ("eager", "sdpa")):
            try:
                model = export(*kind)
            except Exception as error:
                print(*kind, "not exported:", str(error)[:200])
                continue
            info = zipfile.ZipInfo(f"{'-'.join(kind)}.onnx")
            archive.writestr(info, model, zipfile.ZIP_DEFLATED, 9)
            print(info.filename, len(model), flush=True)
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name(file)
    target.write_bytes(content.getvalue())


if __name__ == "__main__":
    write_archive("encoder_exports.zip", MODELS, exported)
