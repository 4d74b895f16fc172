# SPDX-License-Identifier: MIT
"""Text found in a picture by rapidocr: ``OUTPUT.npz``. Knows nothing of ortplugins."""

from __future__ import annotations

import sys

import cv2
import numpy as np
from rapidocr_onnxruntime import RapidOCR

picture = np.full((160, 480, 3), 255, np.uint8)
for line, text in enumerate(("Hello onnxruntime", "2026 passes")):
    where = (20, 60 + 60 * line)
    cv2.putText(picture, text, where, cv2.FONT_HERSHEY_SIMPLEX, 1.2, (0, 0, 0), 2)
found, _ = RapidOCR(intra_op_num_threads=1)(picture)
boxes, texts, scores = zip(*found, strict=True)
assert "Hello" in texts[0], texts
np.savez(
    sys.argv[1], boxes=np.array(boxes), texts=np.array(texts), scores=np.array(scores, float)
)
