# SPDX-License-Identifier: MIT
"""Runs Olive's OrtSessionParamsTuning, in Olive's environment, without ortplugins.

python olive_session_params.py '{"model": ..., "shapes": {...}, "types": {...}, "folder": ...}'

Prints one line of JSON last: {"seconds": ..., "session_options": {...}}. The time includes the
imports, as ours includes those of the process that it measures from. Every combination of
modes and thread counts is searched, at the highest level.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Do the job that the command line holds."""
    start = time.perf_counter()
    from olive.workflows import run

    job = json.loads(sys.argv[1])
    dataset = {
        "type": "dummy_dataset",
        "input_names": list(job["shapes"]),
        "input_shapes": list(job["shapes"].values()),
        "input_types": list(job["types"].values()),
        "max_samples": 1,
    }
    average = {"name": "avg", "priority": 1}
    latency = {
        "name": "latency",
        "type": "latency",
        "sub_types": [average],
        "data_config": "data",
    }
    cpu = {"device": "cpu", "execution_providers": ["CPUExecutionProvider"]}
    threads = [1, 2]
    config = {
        "input_model": {"type": "ONNXModel", "model_path": job["model"]},
        "systems": {"here": {"type": "LocalSystem", "accelerators": [cpu]}},
        "data_configs": [
            {"name": "data", "type": "DummyDataContainer", "load_dataset_config": dataset}
        ],
        # Without a type of evaluator 0.13.0 ends in an AttributeError.
        "evaluators": {"latency": {"type": "OnnxEvaluator", "metrics": [latency]}},
        "passes": {
            "tuning": {
                "type": "OrtSessionParamsTuning",
                "data_config": "data",
                "execution_mode_list": [0, 1],
                "opt_level_list": [99],
                "intra_thread_num_list": threads,
                "inter_thread_num_list": threads,
            }
        },
        "search_strategy": {"execution_order": "joint", "sampler": "sequential"},
        "evaluator": "latency",
        "host": "here",
        "target": "here",
        "output_dir": job["folder"],
        "cache_dir": f"{job['folder']}/cache",
        "no_artifacts": True,
    }
    best = run(config).get_best_candidate().get_inference_config()
    seconds = time.perf_counter() - start
    print()
    print(json.dumps({"seconds": seconds, "session_options": best["session_options"]}))


if __name__ == "__main__":
    main()
