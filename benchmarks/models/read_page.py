# SPDX-License-Identifier: MIT
"""Reads a page by rapidocr's own pipeline, as its users do: knows nothing of ortplugins.

A script; prints seconds and the text that was read, in JSON.
"""

import json
import statistics
import time
from typing import Any

import cv2
import numpy as np
from rapidocr_onnxruntime import RapidOCR

_LINES = (
    "ConvFusion folds what exporters leave around",
    "convolutions: learnable scales and offsets,",
    "batch norms as Sub, Mul and Add in another",
    "layout, hard swishes in four nodes, and a",
    "Transpose in between. onnxruntime 1.32 folds a",
    "Mul, an Add or a BatchNormalization that stands",
    "right behind a Conv. Everything else runs as it",
    "is, and breaks the blocked layout in which its",
    "convolutions are fast: each break costs two",
    "copies of the image. This page has 14 lines of",
    "plain text, as large as a scan of A5 at 150 dpi",
    "would show it, and numbers: 3.14159, 2,718, 42.",
    "The detector finds the lines, the classifier",
    "turns them, and the recogniser reads them.",
)
_HEIGHT, _WIDTH, _STEP = 1240, 874, 80
_PAGES = 7


def main() -> None:
    """Read the page some times."""
    page = np.full((_HEIGHT, _WIDTH, 3), 255, np.uint8)
    for number, line in enumerate(_LINES):
        where = (40, 100 + _STEP * number)
        cv2.putText(page, line, where, cv2.FONT_HERSHEY_SIMPLEX, 0.95, (0, 0, 0), 2)
    begin = time.perf_counter()
    read: Any = RapidOCR(intra_op_num_threads=2)
    start = time.perf_counter() - begin
    took, processor = [], []
    found = read(page)[0]  # not counted: buffers are allocated
    for _ in range(_PAGES):
        begin, busy = time.perf_counter(), time.process_time()
        found = read(page)[0]
        took.append(time.perf_counter() - begin)
        processor.append(time.process_time() - busy)
    medians = [statistics.median(values) for values in (took, processor)]
    text = [line[1] for line in found]
    print(json.dumps({"start": start, "seconds": medians, "text": text}))


if __name__ == "__main__":
    main()
