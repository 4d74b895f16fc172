# SPDX-License-Identifier: MIT
"""Samples that are read once from their source, and kept for replay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ortplugins.errors import CalibrationError
from ortplugins.samples.sources import CalibrationSource, Feed, checked_feeds


class KeptSamples:
    """Samples that can be gone through more than once, while the source is read once.

    The first time, samples come from the source and are copied (readers may use their arrays
    again); later, the copies are replayed. Beyond ``memory_bytes`` copies go to files in
    ``scratch``, which has to stay as long as this object is used. An iterator that was given
    up half-way costs nothing: the next one replays and reads on from there.

    With ``rewind`` nothing is kept: each new iteration calls the reader's ``rewind()``.
    """

    def __init__(
        self,
        source: CalibrationSource,
        model: ir.Model,
        *,
        scratch: Path,
        memory_bytes: int = 64 << 20,
        rewind: bool = False,
    ) -> None:
        """Check the source's kind; no sample is read."""
        self._source, self._model = source, model
        self._scratch, self._free = scratch, memory_bytes
        self._fresh: Iterator[Feed] | None = checked_feeds(source, model)
        self._kept: list[Feed | _SpooledFeed] = []
        self._largest = (-1, 0)  # bytes, index
        self._failure: CalibrationError | None = None
        self.count: int | None = None  # until the source has come to its end
        self.rewinds = rewind
        if rewind and not callable(getattr(source, "rewind", None)):
            raise CalibrationError(
                f"rewind is asked for, but a {type(source).__name__} has no rewind(): add it, "
                "or let samples be kept"
            )

    def __iter__(self) -> Iterator[Feed]:
        """Yield every sample, in the source's order."""
        if self.rewinds:
            yield from self._from_the_start()
            return
        index = 0
        while index < len(self._kept) or self._pull():
            yield self._load(index)
            index += 1

    def read_all(self) -> int:
        """Read the source to its end and return how many samples it has."""
        if self.rewinds:
            raise CalibrationError("samples that are rewound cannot be read ahead")
        while self._pull():
            pass
        return len(self._kept)

    def largest(self) -> Feed:
        """Return the sample of most bytes among those read, at least one; for planning memory.

        Where samples are rewound it is the first.
        """
        if not self.rewinds and self._kept:
            return self._load(self._largest[1])
        return next(iter(self))

    def _load(self, index: int) -> Feed:
        kept = self._kept[index]
        return kept.load() if isinstance(kept, _SpooledFeed) else dict(kept)

    def _pull(self) -> bool:
        """Keep one more sample of the source; False at its end."""
        if self._failure is not None:
            raise self._failure
        if self._fresh is None:
            return False
        try:
            feed = next(self._fresh)
        except StopIteration:
            self.count, self._fresh = len(self._kept), None
            return False
        except CalibrationError as error:
            self._failure = error
            raise
        size = feed_bytes(feed)
        if size > self._largest[0]:
            self._largest = (size, len(self._kept))
        if size <= self._free:
            self._free -= size
            self._kept.append({name: np.array(array) for name, array in feed.items()})
        else:
            path = self._scratch / f"sample-{len(self._kept)}.npz"
            self._kept.append(_SpooledFeed(path, feed))
        return True

    def _from_the_start(self) -> Iterator[Feed]:
        if self._fresh is None:
            self._source.rewind()  # type: ignore[union-attr]  # looked at in __init__
            fresh = checked_feeds(self._source, self._model)
        else:
            fresh, self._fresh = self._fresh, None
        count = 0
        for feed in fresh:
            count += 1
            yield feed
        if self.count is not None and count != self.count:
            raise CalibrationError(
                f"the calibration reader gave {self.count} samples, and {count} after "
                "rewind(): a pass must see what the last one saw"
            )
        self.count = count


class _SpooledFeed:
    """A sample in a .npz file; names and types stay here, as files know fewer of either."""

    def __init__(self, path: Path, feed: Feed) -> None:
        self._path = path
        self._members = [(name, array.dtype) for name, array in feed.items()]
        arrays = {f"input{index}": array for index, array in enumerate(feed.values())}
        np.savez(path, allow_pickle=False, **arrays)

    def load(self) -> Feed:
        with np.load(self._path, allow_pickle=False) as file:
            return {
                # bfloat16 and its like come back as raw bytes
                name: file[f"input{index}"].view(dtype)
                for index, (name, dtype) in enumerate(self._members)
            }


def feed_bytes(feed: Feed) -> int:
    """Return how many bytes the arrays of a sample have."""
    return sum(array.nbytes for array in feed.values())
