"""How a stage differs from the existing directories of the same stage."""

from __future__ import annotations

import re
from typing import Any

from pipeline.status.chain import StageTask, is_complete
from pipeline.status.stage_dirs import StageDirs
from stages.directory.manifest import difference
from stages.directory.records import flat

_HASH = re.compile(r"\b([0-9a-f]{10})[0-9a-f]{54}\b")


def cause(task: StageTask, stage_dirs: StageDirs) -> str | None:
    """The first setting or input in which `task` differs from the newest other directory of its stage, traced to its
    upstream stage: `lr: 0.001 → 0.0005`; None if there is no other directory."""
    others = stage_dirs.others(task.label, task.identity.fingerprint)
    return _cause(task, others[0].record, stage_dirs) if others else None


def _cause(task: StageTask, old: dict[str, Any], stage_dirs: StageDirs) -> str:
    changed = first_difference(old, task.identity.record())
    upstream = {name: up for name, up in task.requires().items() if changed.startswith(f"upstream.{name}:")}
    for name, up in upstream.items():
        before = old.get("upstream", {}).get(name)
        if before is None:
            break
        before = str(before)
        stage_dir = stage_dirs.of_fingerprint(before)
        verb = "changed" if is_complete(up) else "would change"
        if stage_dir is None:
            return f"its upstream {up.label} {verb} (the previous one, {before[:10]}, is gone)"
        deeper = _cause(up, stage_dir.record, stage_dirs)
        return deeper if deeper.startswith("its upstream ") else f"its upstream {up.label} {verb}: {deeper}"
    return changed


def first_difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """`stages.directory.manifest.difference` of single values (`model.hidden_size: 128 → 256`), with short hashes."""
    flattened = (
        record | {part: flat(record.get(part) or {}) for part in ("parameters", "inputs")} for record in (old, new)
    )
    return _HASH.sub(r"\1…", difference(*flattened) or "fingerprint")
