# SPDX-License-Identifier: MIT
"""The session entries that a start depends on, read as they were given.

``SessionOptions`` cannot list its entries, and to ask for one that was never set takes an
exception of onnxruntime's, 50 microseconds of a start. So only the options of passes that are
switched on are asked for. No pass of ours is imported: ``OPTIONS`` names their options, and a
test compares it with the classes.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from session_options.passes import Pass

ENTRY_POINT_GROUP = "ortplugins.passes"
NO_ENTRY_POINTS = "ORTPLUGINS_NO_ENTRY_POINTS"
PREFIX = "ortplugins"
HINT_KEY = f"{PREFIX}.hint"
CACHE_DIR_KEY = f"{PREFIX}.cache_dir"
CACHE_LIMIT_KEY = f"{PREFIX}.cache_limit"
STRICT_KEY = f"{PREFIX}.strict"
BAKE_KEY = f"{PREFIX}.bake"
IN_MEMORY_KEY = f"{PREFIX}.in_memory"

_PACKAGE = "session_options.builtin_passes"

# Our pass classes by name, or where they are: a start imports those that it builds with.
BUILTIN_PASSES: dict[str, str | type[Pass]] = {
    "trim_padding": f"{_PACKAGE}.trim_padding:TrimPadding",
    "mixed_precision_boundaries": (
        f"{_PACKAGE}.mixed_precision_boundaries:MixedPrecisionBoundaries"
    ),
    "dq_matmulnbits_fusion": f"{_PACKAGE}.dq_matmulnbits_fusion:DqMatMulNBitsFusion",
    "transformer_fusion": f"{_PACKAGE}.transformer_fusion:TransformerFusion",
    "conv_fusion": f"{_PACKAGE}.conv_fusion:ConvFusion",
    "shape_size_reorder": f"{_PACKAGE}.shape_size_reorder:ShapeSizeReorder",
    "prepacked_weights": f"{_PACKAGE}.prepacked_weights:PrepackedWeights",
}

# Of each of our passes, the options and their defaults as session entries.
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "trim_padding": {"multiple": "1", "mask": "", "pack": "0"},
    "mixed_precision_boundaries": {
        "overrides": "",
        "promote": "",
        "mode": "int16",
        "target": "cpu",
        "merge": "0",
        "float_limit_mb": "1024",
    },
    "dq_matmulnbits_fusion": {
        "accuracy_level": "auto",
        "slow_kernels": "float",
        "float_limit_mb": "1024",
    },
    "transformer_fusion": {
        "rotary": "1",
        "attention": "1",
        "projections": "1",
        "grouped_queries": "1",
        "norms": "1",
        "activations": "1",
        "kv_cache": "exported",
    },
    "conv_fusion": {"slow_kernels": "keep"},
    "shape_size_reorder": {"dims": "", "for_default_order": "0"},
    "prepacked_weights": {
        "verify": "size",
        "limit_mb": "0",
        "parallel": "0",
        "timeout": "1800",
    },
}

# Entries that say where the cache is, what to do on an error and how to build: the optimised
# model does not depend on them.
VERIFY_KEY = f"{PREFIX}.prepacked_weights.verify"
WITHOUT_EFFECT = (
    CACHE_DIR_KEY,
    CACHE_LIMIT_KEY,
    STRICT_KEY,
    VERIFY_KEY,
    f"{PREFIX}.prepacked_weights.timeout",
)

# Entries of onnxruntime that change what its optimisers do, and where external data is.
DATA_FOLDER_KEY = "session.model_external_initializers_file_folder_path"
DISABLED_OPTIMIZERS_KEY = "optimization.disable_specified_optimizers"
OF_ONNXRUNTIME = (
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

# Returns a session entry, or None where it was never set.
Lookup = Callable[[str], str | None]


def enable_key(pass_name: str) -> str:
    """Return the key that switches a pass on: ``ortplugins.enable_<pass>``."""
    return f"{PREFIX}.enable_{pass_name}"


def option_key(pass_name: str, option_name: str) -> str:
    """Return the key of one option: ``ortplugins.<pass>.<option>``."""
    return f"{PREFIX}.{pass_name}.{option_name}"


def pass_names() -> tuple[str, ...]:
    """Return the names of all passes, ours first; nothing of other packages is imported."""
    return (*BUILTIN_PASSES, *_names_of_others())


def given_entries(ask: Lookup, switched: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return ours of the entries that a session was given; none where no pass is on.

    Args:
        ask: Returns an entry of the session's options.
        switched: Entries that count for options which name no pass themselves.
    """
    enabling = {enable_key(name): name for name in pass_names()}
    own = _found(ask, (HINT_KEY, *enabling))
    entries = own
    if switched is not None and not (own.get(HINT_KEY) or own.keys() & enabling.keys()):
        entries = {**switched}
    on = [name for key, name in enabling.items() if entries.get(key, "0") != "0"]
    if hint := entries.get(HINT_KEY):
        from session_options.presets import PRESETS

        on += PRESETS[hint].passes if hint in PRESETS else ()
    elif not on:
        return {}
    general = (CACHE_DIR_KEY, CACHE_LIMIT_KEY, STRICT_KEY, BAKE_KEY, IN_MEMORY_KEY)
    keys = [key for name in on for key in _option_keys(name)]
    return {**entries, **_found(ask, (*general, *keys))}


def entries_of_onnxruntime(ask: Lookup) -> dict[str, str]:
    """Return those of onnxruntime's entries that an optimised model depends on."""
    return _found(ask, (DATA_FOLDER_KEY, *OF_ONNXRUNTIME))


def is_default(key: str, text: str) -> bool:
    """Whether an entry of one of our passes says what counts without it, too."""
    _, _, rest = key.partition(".")
    name, _, option = rest.partition(".")
    if rest.startswith("enable_"):
        return text == "0"
    return OPTIONS.get(name, {}).get(option) == text


def _names_of_others() -> tuple[str, ...]:
    """Return the names of the passes of installed packages; where there is none, quickly."""
    if os.environ.get(NO_ENTRY_POINTS) == "1":
        return ()
    if not _is_group_declared(tuple(entry for entry in sys.path if isinstance(entry, str))):
        return ()
    from session_options.registry import names_of_entry_points

    return names_of_entry_points()


@functools.cache
def _is_group_declared(path: tuple[str, ...]) -> bool:
    """Whether the metadata of a package on a path names our group of entry points.

    ``importlib.metadata`` says the same and takes tens of milliseconds to import.
    """
    for entry in path:
        folder = entry or os.curdir
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            continue
        except OSError:
            return True  # an archive, for instance: to be read by those who can
        for name in names:
            if not name.endswith((".dist-info", ".egg-info")):
                continue
            try:
                file = os.open(f"{folder}/{name}/entry_points.txt", os.O_RDONLY)
            except OSError:  # it has no entry points
                continue
            try:
                if ENTRY_POINT_GROUP.encode() in os.read(file, 1 << 20):
                    return True
            finally:
                os.close(file)
    return False


def _option_keys(name: str) -> Iterable[str]:
    if name in OPTIONS:
        return [option_key(name, option) for option in OPTIONS[name]]
    from session_options.keys import options_of
    from session_options.registry import find

    if (cls := find(name)) is None:
        return ()
    specs = options_of(cls)
    own = [option_key(name, spec.name) for spec in specs]
    return [*own, *(spec.onnxruntime_key for spec in specs if spec.onnxruntime_key)]


def _found(ask: Lookup, keys: Iterable[str]) -> dict[str, str]:
    pairs = ((key, ask(key)) for key in keys)
    return {key: text for key, text in pairs if text is not None}
