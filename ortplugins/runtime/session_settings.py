# SPDX-License-Identifier: MIT
"""What is read of a user's ``SessionOptions``, and set on them while a session is constructed.

onnxruntime's native constructor copies the options; the slow initialisation comes after it.
The options cannot be copied whole from Python (custom-op libraries stay behind), so they are
changed and put back. Every reader and writer here holds the lock of the object, so none of
them sees another one's settings.

They cannot be asked for dimensions and initializers that were set by hand, which change a
model when its session is created, and an artifact was made without them. A session on the
artifact shows the dimensions that its inputs got, and its copy of the options refuses an
initializer that it has already. A library of custom operators is loaded as long as options
name it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import onnxruntime

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

# What entries that passes and hints set mean where they are not set.
_DEFAULTS = {
    "mlas.enable_gemm_fastmath_arm64_bfloat16": "0",
    DISABLED_OPTIMIZERS_KEY: "",
    "optimization.enable_gelu_approximation": "0",
    "session.dynamic_block_base": "0",
    "session.inter_op.allow_spinning": "1",
    "session.intra_op.allow_spinning": "1",
    "session.set_denormal_as_zero": "0",
    DISABLED_PACKING_KEY: "0",
    PARALLEL_PACKING_KEY: "0",
    DATA_FOLDER_KEY: "",
}
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

_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()


def options_lock(options: onnxruntime.SessionOptions) -> threading.RLock:
    """Return the lock of one ``SessionOptions`` object."""
    with _locks_lock:
        return _locks.setdefault(options, threading.RLock())


@contextlib.contextmanager
def temporarily_set(
    options: onnxruntime.SessionOptions, settings: Mapping[str, str | int | bool]
) -> Iterator[None]:
    """Hold the lock of the user's options and change them; they come back as they were.

    In ``settings`` a key with a dot is an entry, one without an attribute, whose value may be
    the name of an enumeration's member, or "0" or "1" for a bool, digits for an int.
    """
    with options_lock(options):
        before = {name: _get(options, name) for name in settings}
        try:
            for name, value in settings.items():
                _set(options, name, value)
            yield
        finally:
            for name, value in before.items():
                if _get(options, name) != value:  # onnxruntime warns of entries set again
                    _set(options, name, value)


def construct_with(
    settings: Mapping[str, str | int | bool],
    construct: Callable[..., None],
    model: Any,
    options: onnxruntime.SessionOptions,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Construct a session with its options temporarily set.

    They come back, and the lock is released, as soon as the native constructor has copied the
    options: onnxruntime makes a set of ``disabled_optimizers`` between that and the slow
    initialisation. A version that does not gets the options for the whole constructor.
    """
    with contextlib.ExitStack() as until_copied:
        until_copied.enter_context(temporarily_set(options, settings))

        def disabled() -> Iterator[str]:
            until_copied.close()
            yield from kwargs.get("disabled_optimizers") or ()

        construct(model, options, *args, **{**kwargs, "disabled_optimizers": disabled()})


def given_entry(options: onnxruntime.SessionOptions, name: str) -> str | None:
    """Return a session entry; None where it was never set, or has been set back by us."""
    text = stored(options, name)
    return None if text == _DEFAULTS.get(name) else text


def _get(options: onnxruntime.SessionOptions, name: str) -> str | int | bool:
    if "." in name:
        # Entries cannot be removed again: one that was not set comes back as the default.
        return stored(options, name) or _DEFAULTS.get(name, "0")
    value = getattr(options, name)
    return str(value.name) if hasattr(value, "name") else value


def _set(options: onnxruntime.SessionOptions, name: str, value: str | int | bool) -> None:
    if name == MALLOC_THRESHOLD_KEY:
        libc = ctypes.CDLL(None)
        for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            libc.mallopt(parameter, int(value))
        return
    if "." in name:
        options.add_session_config_entry(name, str(value))
        return
    kind = type(getattr(options, name))
    if isinstance(value, str):
        if kind is int:
            value = int(value)
        else:
            value = parse_bool(name, value) if kind is bool else getattr(kind, value)
    setattr(options, name, value)


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
    entries = ((key, given_entry(options, key)) for key in _KEYS)
    return OptimizerSettings(
        options.graph_optimization_level.name,
        tuple(sorted(disabled_optimizers or ())),
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


def added_initializer(
    session: onnxruntime.InferenceSession, described: Mapping[str, Any]
) -> str | None:
    """Return the name of an initializer of the model that was added by hand, or None."""
    import numpy as np

    value = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32))
    # get_session_options() returns one object each time: what is added here would stay.
    copy = session._sess.session_options
    for name in described["initializers"]:
        try:
            copy.add_initializer(name, value)
        except RuntimeError:  # "has already been added"
            return str(name)
    return None


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
