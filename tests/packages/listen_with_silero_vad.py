# SPDX-License-Identifier: MIT
"""Voice activity by silero-vad: ``OUTPUT.npz``. Knows nothing of ortplugins."""

from __future__ import annotations

import sys

import numpy as np
import torch
from silero_vad import load_silero_vad

model = load_silero_vad(onnx=True)
random = np.random.default_rng(0)
seconds = np.arange(3 * 16000) / 16000
tone = sum(np.sin(2 * np.pi * 120 * k * seconds) / k for k in range(1, 20))
voiced = tone * (np.sin(2 * np.pi * 3 * seconds) > 0) * 0.2
audio = torch.tensor(voiced + 0.01 * random.normal(size=seconds.size), dtype=torch.float32)
results = {}
for rate, window in ((16000, 512), (8000, 256)):  # a branch of the model's If each
    model.reset_states()
    steps = [model(part, rate).numpy() for part in audio.split(window) if len(part) == window]
    results[f"probabilities_{rate}"] = np.stack(steps)
np.savez(sys.argv[1], **results)
