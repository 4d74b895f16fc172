# SPDX-License-Identifier: MIT
"""Tokens by optimum: ``MODEL_FOLDER OUTPUT.npz``. Knows nothing of ortplugins."""

from __future__ import annotations

import sys

import numpy as np
import torch
from optimum.onnxruntime import ORTModelForCausalLM

folder, output = sys.argv[1:]
model = ORTModelForCausalLM.from_pretrained(folder, use_cache=True)
prompt = torch.tensor([[1, 5, 9, 23]])
tokens = model.generate(prompt, do_sample=False, max_length=20)
np.savez(output, tokens=tokens[0].numpy())
