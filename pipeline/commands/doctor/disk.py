"""Whether what is still to be made fits on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from common.errors import existing_parent
from pipeline.commands.doctor.estimates import Estimate
from pipeline.commands.doctor.finding import Finding, Plan
from stages.view.text import size

#: Any less would be filled by logs, reports and metrics alone.
_LEAST_BYTES = 16 << 20


def disk(plan: Plan, estimates: Sequence[Estimate]) -> Finding:
    place = existing_parent(plan.settings.work_dir)
    free = shutil.disk_usage(place).free
    known = [estimate.bytes for estimate in estimates if estimate.bytes is not None]
    needed, unknown = sum(known), len(estimates) - len(known)
    said = f"{size(free)} free in {place}, {'at least ' if unknown else ''}{size(needed)} still to be made"
    if estimates and free < max(needed, _LEAST_BYTES):
        return Finding("disk", "problem", f"{said}; make space (python -m pipeline clean), or set [run] work_dir")
    if unknown:
        said += f" ({unknown} stage{'s' if unknown > 1 else ''} unknown)"
    if needed > 0.8 * free:
        return Finding("disk", "warning", f"{said}: it will be nearly full; make space (python -m pipeline clean)")
    return Finding("disk", "ok", said)
