# SPDX-License-Identifier: MIT
"""Opens and runs a session on command: the child process of :mod:`.measure`.

This is a script that is run by its path. For plain onnxruntime it imports nothing of
ortplugins, which would count as memory of the session.

Each line of standard input is a command, and each line of standard output is its answer, in
JSON::

    {"do": "open", "session": "module:class", "model": ..., ...}
                                          {"seconds": 0.1, "report": {...}, "modules": [...]}
    {"do": "run", "feed": "x.npz", ...}   {"seconds": 0.001}, the median of the runs
    {"do": "call", "function": "module:name", "arguments": {...}}       {"result": ...}
    {"do": "peak"}                        {"bytes": 123}

``{"error": message}`` is the last answer.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

# As in ortplugins.runtime.copied_options.
_DATA_FOLDER_KEY = "session.model_external_initializers_file_folder_path"


def main() -> None:
    """Execute the commands on standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # anything else that is printed goes to standard error

    def answer(content: Mapping[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        child = _Child()
        answer({})
        for line in sys.stdin:
            command = json.loads(line)
            answer(getattr(child, command.pop("do"))(**command))
    except Exception as error:  # onnxruntime's own classes, and a model that vanished
        answer({"error": str(error) or repr(error)})


class _Child:
    """The session and its inputs; one method per command."""

    def __init__(self) -> None:
        import numpy
        import onnxruntime

        self._numpy, self._onnxruntime = numpy, onnxruntime
        self._session: Any = None
        self._feeds: dict[str, dict[str, Any]] = {}

    def open(self, **job: Any) -> dict[str, Any]:
        module, _, name = job["session"].partition(":")
        make = getattr(importlib.import_module(module), name)
        others = {} if module == "ortplugins" else {"enable_fallback": 0}
        options = self._options(job)
        providers = [x if isinstance(x, str) else tuple(x) for x in job["providers"]]
        start = time.perf_counter()
        model = job["model"]
        if _DATA_FOLDER_KEY in job["settings"]:  # older versions heed it for bytes only
            with open(model, "rb") as file:
                model = file.read()
        self._session = make(model, options, providers=providers, **others)
        seconds = time.perf_counter() - start
        report = getattr(self._session, "ortplugins_report", None)
        return {
            "seconds": seconds,
            "report": report and report.to_dict(),
            "modules": sorted({name.partition(".")[0] for name in sys.modules}),
        }

    def run(self, feed: str, seconds: float, callers: int) -> dict[str, Any]:
        if feed not in self._feeds:
            self._feeds[feed] = self._read(feed)
        taken = self._feeds[feed]
        if callers > 1:
            return {"seconds": self._run_at_once(taken, seconds, callers)}
        took: list[float] = []
        end = time.perf_counter() + seconds
        while not took or time.perf_counter() < end:
            start = time.perf_counter()
            self._session.run(None, taken)
            took.append(time.perf_counter() - start)
        return {"seconds": sorted(took)[len(took) // 2]}  # importing statistics takes memory

    def _run_at_once(self, feed: dict[str, Any], seconds: float, callers: int) -> float:
        from concurrent.futures import ThreadPoolExecutor

        def call(end: float) -> int:
            number = 0
            while not number or time.perf_counter() < end:
                self._session.run(None, feed)
                number += 1
            return number

        with ThreadPoolExecutor(callers) as pool:
            start = time.perf_counter()
            done = [pool.submit(call, start + seconds) for _ in range(callers)]
            runs = sum(each.result() for each in done)
            return (time.perf_counter() - start) / runs

    def call(self, function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        module, _, name = function.partition(":")
        return {
            "result": getattr(importlib.import_module(module), name)(
                self._session, **arguments
            )
        }

    def peak(self) -> dict[str, Any]:
        most = None
        if sys.platform == "darwin":  # elsewhere it is not in bytes, or includes the parent
            import resource

            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"bytes": most}

    def _options(self, job: Mapping[str, Any]) -> Any:
        options = self._onnxruntime.SessionOptions()
        options.log_severity_level = 3
        for name, value in job["settings"].items():
            if "." in name:
                options.add_session_config_entry(name, str(value))
                continue
            kind = type(getattr(options, name))
            if isinstance(value, str) and kind is not str:
                value = kind(int(value)) if kind in (bool, int) else getattr(kind, value)
            setattr(options, name, value)
        return options

    def _read(self, path: str) -> dict[str, Any]:
        """Read the inputs, without those that the model does not have."""
        taken = {
            item.name
            for item in (
                *self._session.get_inputs(),
                *self._session.get_overridable_initializers(),
            )
        }
        with self._numpy.load(path, allow_pickle=False) as file:
            names = json.loads(str(file["names"]))
            return {n: file[f"input{i}"] for i, n in enumerate(names) if n in taken}


if __name__ == "__main__":
    main()
