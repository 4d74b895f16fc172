# SPDX-License-Identifier: MIT
"""What is read of a user's ``SessionOptions``, and set on copies of them.

The user's own object is never changed: another thread may make a session from it at any
moment. Python has no way to copy options, but a native session has a copy of its own, and
returns copies of that; on an empty model it costs a tenth of a millisecond. Left behind are
libraries of custom operators and devices that were added as providers.

Options have no getters for weights that were given by hand, or for dimensions that were
overridden. A model with one external tensor is refused by options that hold external weights;
a copy refuses to add an initializer that it has already; a session on the artifact shows the
dimensions that its inputs got.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import onnxruntime
from onnxruntime.capi import _pybind_state, onnxruntime_pybind11_state

from session_options.keys import parse_bool, stored

if TYPE_CHECKING:
    import onnx_ir as ir

# Where the external data is of a model that is given as bytes.
DATA_FOLDER_KEY = "session.model_external_initializers_file_folder_path"
# Names of optimisers that are left out, semicolons between them.
DISABLED_OPTIMIZERS_KEY = "optimization.disable_specified_optimizers"

# Whether a start leaves weights unpacked, and whether it packs them on all threads.
DISABLED_PACKING_KEY = "session.disable_prepacking"
PARALLEL_PACKING_KEY = "session.prepack.enable_parallel"

# No setting of onnxruntime's: from how many bytes glibc returns memory to the system as soon
# as it is freed. It holds for the whole process, and stays.
MALLOC_THRESHOLD_KEY = "glibc.mmap_threshold"

# Of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# Entries that change what the optimisers do. SessionOptions cannot list its entries.
_KEYS = (
    "optimization.constant_folding_max_output_size_in_bytes",
    DISABLED_OPTIMIZERS_KEY,
    "optimization.enable_cast_chain_elimination",
    "optimization.enable_gelu_approximation",
    "optimization.minimal_build_optimizations",
    "session.disable_aot_function_inlining",
    "session.disable_double_qdq_remover",
    "session.disable_qdq_constant_folding",
    "session.disable_quant_qdq",
    "session.enable_dq_matmulnbits_fusion",
    "session.enable_quant_qdq_cleanup",
    "session.function_expansion_byte_limit",
    "session.function_expansion_node_limit",
    "session.gqa_value_layout",
    "session.graph_optimizations_loop_level",
    "session.qdq_matmulnbits_accuracy_level",
    "session.qdq_matmulnbits_block_size",
    "session.qdqisint8allowed",
    "session.set_denormal_as_zero",
    "session.strict_shape_type_inference",
    "session.x64quantprecision",
)
# The optimiser that fuses dequantised weights.
_QDQ = "QDQSelectorActionTransformer"
# Stands for providers that were set by device or by policy.
PROVIDERS_OF_OPTIONS = "those of the SessionOptions"

# Of a session that is never run.
_QUIET: dict[str, str | int | bool] = {
    "graph_optimization_level": "ORT_DISABLE_ALL",
    "intra_op_num_threads": 1,
    "log_severity_level": 4,
    "enable_profiling": False,
    "optimized_model_filepath": "",
}
# Models without a node, and with a byte of external data that a node reads.
_EMPTY_MODEL = b"\x08\x07:\x03\x12\x01gB\x04\n\x00\x10\r"
_EXTERNAL_MODEL = (
    b'\x08\x07:\xb1\x01\n\x10\n\x01a\x12\x01y"\x08Identity\x12\x01g*\x88\x01\x08\x01\x10\x02B\x01ajp'
    b"\n\x08location\x12d%bj\x0b\n\x06length\x12\x011p\x01b\x0f\n\x01y\x12\n\n\x08\x08\x02\x12\x04\n"
    b"\x02\x08\x01B\x04\n\x00\x10\r"
)
_LOCATION_BYTES = 100


class CopiedOptions:
    """The ``SessionOptions`` of a user as they were when this was made."""

    def __init__(self, options: onnxruntime.SessionOptions) -> None:
        """Copy them; raise what any session on them would raise."""
        self._native = _pybind_state.InferenceSession(options, _EMPTY_MODEL, False, False)
        if options.enable_profiling:
            os.unlink(self._native.end_profiling())

    def copy(
        self, settings: Mapping[str, str | int | bool] = MappingProxyType({})
    ) -> onnxruntime.SessionOptions:
        """Return a new copy; see :func:`apply_settings`."""
        copied = self._native.session_options
        apply_settings(copied, settings)
        return copied

    def have_external_weights(self) -> bool:
        """Whether external initializers were added, or files of them that are in memory.

        onnxruntime refuses a model that lacks one of the names, or whose data is in none of
        the files; without any it reads the data from disk, here from a library of its own.
        """
        folder, name = os.path.split(os.path.realpath(onnxruntime_pybind11_state.__file__))
        location = b"." + os.fsencode(name).rjust(_LOCATION_BYTES - 1, b"/")
        own = self.copy(
            {
                **_QUIET,
                DATA_FOLDER_KEY: folder,
            }
        )
        probe = _pybind_state.InferenceSession(own, _EXTERNAL_MODEL % location, False, False)
        try:
            probe.initialize_session([], [], set())
        except Exception:  # onnxruntime's own classes, none of which is documented
            return True
        return False

    def added_initializer(self, names: Iterable[str]) -> str | None:
        """Return the first of these initializers that was added by hand; None if none was."""
        import numpy as np

        value = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32))
        copied = self.copy()
        for name in names:
            try:
                copied.add_initializer(name, value)
            except RuntimeError:  # "has already been added"
                return name
        return None


def running_options(session: onnxruntime.InferenceSession) -> onnxruntime.SessionOptions:
    """Return a copy of what a session runs with; its own method names what its user gave."""
    return session._sess.session_options


def apply_settings(
    options: onnxruntime.SessionOptions, settings: Mapping[str, str | int | bool]
) -> None:
    """Change options.

    In ``settings`` a key with a dot is an entry, one without an attribute, whose value may be
    the name of an enumeration's member, or "0" or "1" for a bool, digits for an int.
    """
    for name, value in settings.items():
        if name == MALLOC_THRESHOLD_KEY:
            libc = ctypes.CDLL(None)
            for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
                libc.mallopt(parameter, int(value))
        elif "." in name:
            if stored(options, name) != str(value):  # onnxruntime warns of entries set again
                options.add_session_config_entry(name, str(value))
        else:
            setattr(options, name, _attribute(name, value, type(getattr(options, name))))


def _attribute(name: str, value: str | int | bool, kind: type[Any]) -> Any:
    if not isinstance(value, str) or kind is str:
        return value
    if kind is int:
        return int(value)
    return parse_bool(name, value) if kind is bool else getattr(kind, value)


class OptimizerSettings(NamedTuple):
    """How to run the optimisers: level, names of those to leave out, session entries."""

    level: str
    disabled: tuple[str, ...] = ()
    entries: tuple[tuple[str, str], ...] = ()

    @property
    def native_accuracy_level(self) -> int | None:
        """Level at which dequantised weights are fused; None where they are not."""
        entries = dict(self.entries)
        named = entries.get(DISABLED_OPTIMIZERS_KEY, "").split(";")
        if (
            self.level in ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC")
            or entries.get("session.disable_quant_qdq") == "1"
            or _QDQ in {*self.disabled, *map(str.strip, named)}
        ):
            return None
        level = entries.get("session.qdq_matmulnbits_accuracy_level", "4")
        # onnxruntime refuses any other.
        return int(level) if level in ("0", "1", "2", "3", "4") else None

    @property
    def native_block_size(self) -> int:
        """Block size of fused weights with one scale, or one for each column.

        0 is onnxruntime's default, -1 the size that pads K least.
        """
        text = dict(self.entries).get("session.qdq_matmulnbits_block_size", "0")
        return int(text) if text in ("-1", "16", "32", "64", "128", "256") else 0


# For a file that no session asked for.
ALL_OPTIMIZERS = OptimizerSettings("ORT_ENABLE_ALL")


def read_optimizer_settings(
    options: onnxruntime.SessionOptions, disabled_optimizers: Collection[str] | None
) -> OptimizerSettings:
    """Read the settings of a session."""
    entries = ((key, stored(options, key)) for key in _KEYS)
    return OptimizerSettings(
        options.graph_optimization_level.name,
        tuple(sorted({*(disabled_optimizers or ())})),
        tuple((key, text) for key, text in entries if text is not None),
    )


def describe_model(model: ir.Model) -> dict[str, Any]:
    """Return what the functions below compare with, as JSON."""
    fixed = {
        str(value.name): [isinstance(size, int) for size in value.shape]
        for value in model.graph.inputs
        if value.shape is not None
    }
    names = {name for graph in model.graphs() for name in graph.initializers}
    return {"fixed_dimensions": fixed, "initializers": sorted(names)}


def overrides_dimensions(
    session: onnxruntime.InferenceSession, described: Mapping[str, Any]
) -> bool:
    """Whether a free dimension of the model's inputs is overridden in a session."""
    fixed = described["fixed_dimensions"]
    return any(
        isinstance(size, int) and not was_fixed
        for meta in session.get_inputs()
        for size, was_fixed in zip(meta.shape, fixed.get(meta.name, ()), strict=False)
    )


def custom_op_libraries() -> tuple[str, ...]:
    """Return the paths of the loaded libraries that operators can be registered from.

    Those of every session of this process; none where the system has no /proc.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            lines = [line.split(maxsplit=5) for line in maps]
    except OSError:
        return ()
    found = []
    for path in dict.fromkeys(line[5].rstrip("\n") for line in lines if len(line) > 5):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:  # a mapped file that is not a library
            continue
        if hasattr(library, "RegisterCustomOps"):  # what onnxruntime calls
            found.append(path)
    return tuple(found)
