# SPDX-License-Identifier: MIT
"""Times imports and starts in a process that has imported onnxruntime, and no more."""

import time


def import_seconds(_: object) -> float:
    """Return the seconds to import the package and its InferenceSession."""
    start = time.perf_counter()
    import ortplugins

    _ = ortplugins.InferenceSession
    return time.perf_counter() - start


def start_seconds(_: object, model: str, entries: dict[str, str]) -> list[float]:
    """Return the seconds of a start, and those of onnxruntime's constructor within it.

    What differs between two starts of onnxruntime itself is not in their difference.

    Args:
        _: No session is open yet.
        model: Path of the model.
        entries: Of its SessionOptions; none of a pass counts as imported already.
    """
    import onnxruntime

    import ortplugins

    native: list[float] = []
    construct = onnxruntime.InferenceSession.__init__

    def timed(*args: object, **kwargs: object) -> None:
        start = time.perf_counter()
        construct(*args, **kwargs)
        native.append(time.perf_counter() - start)

    onnxruntime.InferenceSession.__init__ = timed
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    session_class = ortplugins.InferenceSession
    start = time.perf_counter()
    session = session_class(model, options, providers=["CPUExecutionProvider"])
    seconds = time.perf_counter() - start
    del session  # which takes its time, too
    return [seconds, sum(native)]
