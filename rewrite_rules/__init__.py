# SPDX-License-Identifier: MIT
"""A graph in, a graph out: declarative rewrite rules over ``onnx_ir`` models.

One module holds one family of rules; its docstring says ``before -> after`` and when it
refuses. Nothing is imported here, so that a cache hit never pays for ``onnx_ir`` or
``onnxscript``.
"""
