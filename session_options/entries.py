# SPDX-License-Identifier: MIT
"""The names of session entries, and those that a start was given.

A start from the cache knows passes and options without importing one: ``OPTIONS`` names the
options of each, and a test compares it with the classes. ``SessionOptions`` cannot list their
entries, and to ask for one that was never set takes an exception of onnxruntime's, 50
microseconds of a start. So only the options of passes that are switched on are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

PREFIX = "ortplugins"
# Classes of other packages, "module:class" each, with commas between: switched on as well.
PASSES_KEY = f"{PREFIX}.passes"
HINT_KEY = f"{PREFIX}.hint"
CACHE_DIR_KEY = f"{PREFIX}.cache_dir"
CACHE_LIMIT_KEY = f"{PREFIX}.cache_limit"
STRICT_KEY = f"{PREFIX}.strict"
BAKE_KEY = f"{PREFIX}.bake"
IN_MEMORY_KEY = f"{PREFIX}.in_memory"

_PACKAGE = "session_options.builtin_passes"

# Our pass classes by name, or where they are: a start imports those that it builds with.
BUILTIN_PASSES: dict[str, str | type] = {
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

# Options of each of our passes, with their defaults as session entries.
OPTIONS: Mapping[str, Mapping[str, str]] = {
    "trim_padding": {"mask": "", "pack": "0"},
    "mixed_precision_boundaries": {
        "overrides": "",
        "promote": "",
        "mode": "int16",
        "float_limit_mb": "1024",
    },
    "dq_matmulnbits_fusion": {
        "accuracy_level": "auto",
        "slow_kernels": "float",
        "float_limit_mb": "1024",
    },
    "transformer_fusion": {"kv_cache": "exported"},
    "conv_fusion": {},
    "shape_size_reorder": {"dims": ""},
    "prepacked_weights": {"verify": "size"},
}

# Entries that say where the cache is, what to do on an error and how to build: the optimised
# model does not depend on them. With the values of those that starts from the cache read, too.
VERIFY_KEY = f"{PREFIX}.prepacked_weights.verify"
WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    CACHE_DIR_KEY: (),
    CACHE_LIMIT_KEY: (),
    STRICT_KEY: ("0", "1"),
    VERIFY_KEY: ("size", "digest"),
}

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

_GENERAL_DEFAULTS = {BAKE_KEY: "1", IN_MEMORY_KEY: "0", HINT_KEY: ""}

# Returns a session entry, or None where it was never set.
Lookup = Callable[[str], str | None]


def enable_key(pass_name: str) -> str:
    """Return the key that switches a pass on: ``ortplugins.enable_<pass>``."""
    return f"{PREFIX}.enable_{pass_name}"


def option_key(pass_name: str, option_name: str) -> str:
    """Return the key of one option: ``ortplugins.<pass>.<option>``."""
    return f"{PREFIX}.{pass_name}.{option_name}"


def is_default(key: str, text: str) -> bool:
    """Whether an entry of ours says what counts without it, too."""
    _, _, rest = key.partition(".")
    name, _, option = rest.partition(".")
    if rest.startswith("enable_"):
        return text == "0"
    if key in _GENERAL_DEFAULTS:
        return _GENERAL_DEFAULTS[key] == text
    return OPTIONS.get(name, {}).get(option) == text


def is_without_effect(key: str, text: str) -> bool:
    """Whether the optimised model does not depend on an entry.

    An invalid one counts: then nothing is found, and the build says what is wrong.
    """
    return key in WITHOUT_EFFECT and text in (WITHOUT_EFFECT[key] or (text,))


_ENABLING = {enable_key(name): name for name in BUILTIN_PASSES}


def stored(options: Any, key: str) -> str | None:
    """Return a session entry, or None if it was never set."""
    try:
        return str(options.get_session_config_entry(key))
    except RuntimeError:  # there is none
        return None


def given_entries(
    ask: Lookup,
    keys_of_others: Callable[[str], Iterable[str]],
    switched: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return ours of the entries that a session was given; none where no pass is on.

    Args:
        ask: Returns an entry of the session's options.
        keys_of_others: :func:`.registry.option_keys`, which few starts have to import.
        switched: Entries that count for options which name no pass themselves.
    """
    own = _found(ask, (HINT_KEY, PASSES_KEY, *_ENABLING))
    names_passes = own.get(HINT_KEY) or own.get(PASSES_KEY) or own.keys() & _ENABLING.keys()
    entries = own if switched is None or names_passes else {**switched}
    on = [name for key, name in _ENABLING.items() if entries.get(key, "0") != "0"]
    places = entries.get(PASSES_KEY)
    if hint := entries.get(HINT_KEY):
        from session_options.presets import PRESETS

        on += PRESETS[hint].passes if hint in PRESETS else ()
    elif not (on or places):
        return {}
    general = (CACHE_DIR_KEY, CACHE_LIMIT_KEY, STRICT_KEY, BAKE_KEY, IN_MEMORY_KEY)
    keys = [option_key(name, option) for name in on for option in OPTIONS[name]]
    keys += keys_of_others(places) if places else ()
    return {**entries, **_found(ask, (*general, *keys))}


def entries_of_onnxruntime(ask: Lookup) -> dict[str, str]:
    """Return those of onnxruntime's entries that an optimised model depends on."""
    return _found(ask, (DATA_FOLDER_KEY, *OF_ONNXRUNTIME))


def _found(ask: Lookup, keys: Iterable[str]) -> dict[str, str]:
    pairs = ((key, ask(key)) for key in keys)
    return {key: text for key, text in pairs if text is not None}
