# SPDX-License-Identifier: MIT
"""Sessions on the model of one dequantised weight, and the entries that they leave."""

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime as ort

import ortplugins
from builders.dequantized_models import DequantizedMatMul, relative_error
from ortplugins.cache.artifact import ARTIFACT, Artifact, Wanted, find_entry
from ortplugins.cache.store import ArtifactCache, Entry

DAY = 86400.0
CPU = ["CPUExecutionProvider"]
# The default level is onnxruntime's own where it would fuse a node: int8 activations.
EXACT = ortplugins.DqMatMulNBitsFusion(accuracy_level=0)

# All passes that keep the numbers, but for that which packs weights.
PASSES = (
    ortplugins.TrimPadding(),
    ortplugins.DqMatMulNBitsFusion(accuracy_level=0),
    ortplugins.TransformerFusion(),
    ortplugins.ConvFusion(),
    ortplugins.ShapeSizeReorder(),
)
# What the builder of an entry says of it.
MADE: dict[str, Any] = {
    "settings": {}, "data": {}, "baked": False, "has_custom_operators": False, "free": {},
    "initializers": [], "failed": [],
    "of_model": "bytes", "report": {},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Setting(ortplugins.Pass):
    """Needs an entry of its sessions that onnxruntime's optimisers look at."""

    name = "setting"
    summary = "sets an entry"

    def rewrite(self, model: ir.Model, context: object) -> bool:
        return True

    def session_settings(self) -> dict[str, str]:
        return {"session.disable_double_qdq_remover": "1"}


def save(case: DequantizedMatMul, path: Path, *, external: bool = True) -> Path:
    """Write the model of a case, with all its tensors in PATH.data or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = f"{path.name}.data" if external else None
    ir.save(case.model(), path, external_data=data, size_threshold_bytes=0)
    return path


def options(*passes: ortplugins.Pass, **general: Any) -> ort.SessionOptions:
    """Options that switch passes on, the exact fusion where none is given."""
    so = ort.SessionOptions()
    so.intra_op_num_threads = 1
    ortplugins.configure(so, *(passes or (EXACT,)), **general)
    return so


def start(
    model: str | bytes | os.PathLike[str], so: ort.SessionOptions | None = None, **general: Any
) -> ortplugins.InferenceSession:
    """Open a session on the CPU, with the exact fusion unless the options say otherwise."""
    return ortplugins.InferenceSession(model, so or options(**general), providers=CPU)


def source(model: str | bytes | os.PathLike[str], *args: Any, **general: Any) -> str:
    """Open a session; return where it has its model from: built, cache, untouched, stock."""
    return start(model, *args, **general).ortplugins_report.source


def check(session: ort.InferenceSession, case: DequantizedMatMul) -> None:
    feed = case.feed()
    assert relative_error(session.run(None, {"x": feed})[0], case.reference(feed)) <= 1e-5


# Facts of a session's model that ``get_modelmeta`` returns.
META = (
    "custom_metadata_map", "description", "domain", "graph_description", "graph_name",
    "producer_name", "version",
)  # fmt: skip


def facts(session: ort.InferenceSession) -> list[object]:
    """What a session says of its inputs, its outputs and its model."""
    values, meta = (*session.get_inputs(), *session.get_outputs()), session.get_modelmeta()
    return [*map(str, values), *(getattr(meta, name) for name in META)]


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder, with its size and its time of change."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
    }


def entries(cache_dir: Path) -> list[Entry]:
    """All of the cache, the one that was used longest ago first."""
    return sorted(ArtifactCache(cache_dir).entries(), key=lambda entry: entry.last_used)


def find(cache_dir: Path, key: str) -> Artifact | None:
    """What a session finds under a key."""

    class Keyed(Wanted):
        def known_key(self) -> str:
            return key

    return find_entry(Keyed("", {"ortplugins.cache_dir": str(cache_dir)}))


def backdate(folder: Path, seconds: float) -> None:
    """Have an entry published, and used, that long ago."""
    moment, artifact = time.time() - seconds, Artifact.read(folder)
    if artifact is None:
        raise FileNotFoundError(folder)
    artifact.made = moment
    (folder / ARTIFACT).unlink()
    artifact.write()
    os.utime(folder / ARTIFACT, (moment, moment))
