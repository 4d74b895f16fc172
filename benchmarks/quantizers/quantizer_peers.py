# SPDX-License-Identifier: MIT
"""Runs another project's quantizer in that project's environment, without ortplugins.

python quantizer_peers.py '{"tool": "modelopt_awq_lite", "model": ..., ...}'

Prints one line of JSON last: {"seconds": ..., "versions": {...}}. The time starts after the
imports and ends with the file that was written; reading model and samples is in it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import onnx


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be quantised, and how.

    Attributes:
        tool: One of :data:`TOOLS`.
        model: The float model, at opset 21.
        output: File to write.
        external: Whether its tensors go to a file next to it.
        calibration: A .npz file, arrays with the samples along their first axis; or empty.
        block_size: Of symmetric int4 codes.
        exclude: Regular expressions of nodes that stay in float, anchored at the start.
        fast: For ModelOpt: all activations of all samples at once, one run per sample; else
            a run per sample and node.
    """

    tool: str
    model: str
    output: str
    external: bool = True
    calibration: str = ""
    block_size: int = 32
    exclude: tuple[str, ...] = ()
    fast: bool = False


class Samples:
    """Reads samples out of a .npz file; onnxruntime calls get_next(), ModelOpt iterates."""

    def __init__(self, path: str) -> None:
        with np.load(path) as arrays:
            self._arrays = {name: arrays[name] for name in arrays.files}
        self._next, self._count = 0, len(next(iter(self._arrays.values())))

    def get_next(self) -> dict[str, Any] | None:
        """Return the next sample; None after the last."""
        if self._next == self._count:
            return None
        self._next += 1
        return {name: array[self._next - 1] for name, array in self._arrays.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (sample := self.get_next()) is not None:
            yield sample


def import_modelopt() -> Callable[[Job], None]:
    """Import ModelOpt and return what runs its AWQ-lite."""
    from modelopt.onnx.quantization.int4 import quantize

    def run(job: Job) -> None:
        model = quantize(
            job.model,
            calibration_method="awq_lite",
            calibration_data_reader=Samples(job.calibration),
            calibration_eps=["cpu"],
            use_external_data_format=True,
            block_size=job.block_size,
            nodes_to_exclude=list(job.exclude),
            log_level="WARNING",
            # On CPUs the default, True, ends in an AttributeError: numpy has no .get().
            awqlite_fuse_nodes=False,
            enable_fast_path_using_high_sysram=job.fast,
        )
        save(model, job)

    return run


def import_onnxruntime_rtn() -> Callable[[Job], None]:
    """Import onnxruntime's quantizer and return what rounds to nearest."""
    from onnxruntime.quantization import QuantFormat
    from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig

    def run(job: Job) -> None:
        config = DefaultWeightOnlyQuantConfig(
            block_size=job.block_size, is_symmetric=True, quant_format=QuantFormat.QDQ
        )
        run_onnxruntime(job, config)

    return run


def import_olive_rtn() -> Callable[[Job], None]:
    """Import Olive and return its own rounding to nearest, which writes MatMulNBits."""
    from olive.model import ONNXModelHandler
    from olive.passes.olive_pass import create_pass_from_dict
    from olive.passes.onnx.rtn_quantization import OnnxBlockWiseRtnQuantization

    def run(job: Job) -> None:
        config = {
            "block_size": job.block_size,
            "is_symmetric": True,
            "nodes_to_exclude": excluded_nodes(job),
            "save_as_external_data": job.external,
        }
        made = create_pass_from_dict(OnnxBlockWiseRtnQuantization, config, disable_search=True)
        made.run(ONNXModelHandler(model_path=job.model), job.output)

    return run


def import_onnxruntime_gptq() -> Callable[[Job], None]:
    """Import onnxruntime's quantizer and return its GPTQ."""
    from onnxruntime.quantization.matmul_nbits_quantizer import GPTQWeightOnlyQuantConfig

    def run(job: Job) -> None:
        # It opens the model from memory and looks for its data in the working directory.
        os.chdir(Path(job.model).parent)
        # Its block_size is that of GPTQ's column blocks: codes' blocks are the quantizer's.
        config = GPTQWeightOnlyQuantConfig(calibration_data_reader=Samples(job.calibration))
        run_onnxruntime(job, config)

    return run


def run_onnxruntime(job: Job, config: Any) -> None:
    """Quantise with one of onnxruntime's configurations."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(
        job.model,
        block_size=job.block_size,
        is_symmetric=True,
        nodes_to_exclude=excluded_nodes(job),
        algo_config=config,
    )
    quantizer.process()
    quantizer.model.save_model_to_file(job.output, use_external_data_format=job.external)


def excluded_nodes(job: Job) -> list[str]:
    """Names of the nodes that stay in float."""
    nodes = onnx.load(job.model, load_external_data=False).graph.node
    return [
        node.name for node in nodes if any(re.match(each, node.name) for each in job.exclude)
    ]


def save(model: onnx.ModelProto, job: Job) -> None:
    """Write the model as the job wants it."""
    data = {"save_as_external_data": True, "location": Path(job.output).name + ".data"}
    onnx.save(model, job.output, **(data if job.external else {}))


TOOLS: dict[str, Callable[[], Callable[[Job], None]]] = {
    "modelopt_awq_lite": import_modelopt,
    "onnxruntime_rtn": import_onnxruntime_rtn,
    "onnxruntime_gptq": import_onnxruntime_gptq,
    "olive_rtn": import_olive_rtn,
}


def main() -> None:
    """Do the job that the command line holds."""
    job = Job(**json.loads(sys.argv[1]))
    # ModelOpt builds an extension with setuptools, which takes the project of the working
    # directory for its own, and fails in ours.
    os.chdir(Path(job.output).resolve().parent)
    run = TOOLS[job.tool]()
    logging.getLogger("onnxruntime").setLevel(logging.ERROR)  # or a line for each node
    start = time.perf_counter()
    run(job)
    seconds = time.perf_counter() - start
    versions = {}
    for name in ("nvidia-modelopt", "olive-ai", "torch", "onnxruntime", "onnx", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    # Some of them leave a progress bar behind, and no line feed.
    print()
    print(json.dumps({"seconds": seconds, "versions": versions}))


if __name__ == "__main__":
    main()
