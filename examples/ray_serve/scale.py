# SPDX-License-Identifier: MIT
"""Change the number of replicas: ``RAY_ADDRESS=auto python -m examples.ray_serve.scale 5``."""

from __future__ import annotations

import sys

from ray import serve

from examples.ray_serve.app import Embeddings

replicas = Embeddings.options(num_replicas=int(sys.argv[1]))
serve.run(replicas.bind(), route_prefix="/embed")
