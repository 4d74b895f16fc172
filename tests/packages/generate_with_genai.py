# SPDX-License-Identifier: MIT
"""Tokens by onnxruntime-genai: ``MODEL_FOLDER OUTPUT.npz``. Knows nothing of ortplugins."""

from __future__ import annotations

import sys

import numpy as np
import onnxruntime_genai as genai

folder, output = sys.argv[1:]
model = genai.Model(folder)
parameters = genai.GeneratorParams(model)
parameters.set_search_options(do_sample=False, max_length=20)
generator = genai.Generator(model, parameters)
generator.append_tokens([1, 5, 9, 23])
while not generator.is_done():
    generator.generate_next_token()
np.savez(output, tokens=generator.get_sequence(0))
