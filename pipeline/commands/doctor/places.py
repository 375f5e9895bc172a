"""What is on disks: the work directory, the text, the vocabulary."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common.errors import UserError, existing_parent
from pipeline.commands.doctor.finding import Finding, Plan
from pipeline.tasks.dataset import DownloadDataset, TokenizeCorpus
from stages.text.corpus import BUILTIN, find_files, kind_of
from stages.text.patterns import split
from stages.view.text import size


def work_directory(plan: Plan) -> Iterator[Finding]:
    """Whether a file in it can be written, made durable and locked."""
    path = plan.settings.work_dir
    why = why_unusable(path)
    if why is None:
        yield Finding("work directory", "ok", f"{path.absolute()} can be written")
    else:
        remedy = "check its permissions, and whether its disk is mounted for writing, or set [run] work_dir"
        yield Finding("work directory", "problem", f"{path.absolute()}: {why}; {remedy}")


def why_unusable(directory: Path) -> str | None:
    """Why a file cannot be written and locked in a directory, or where that would be made; None: it can."""
    place = existing_parent(directory)
    if not place.is_dir():
        return f"{place} is a file"
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return f"cannot write and lock a file in {place}: {error.strerror}"
    return None


def text(plan: Plan) -> Iterator[Finding]:
    """The files that [corpus] names."""
    if not any(isinstance(stage, TokenizeCorpus) for stage in plan.to_make()):
        return
    corpus = plan.settings.corpus
    for key in ("source", "held_out_source"):
        given = getattr(corpus, key)
        try:
            found = find_files(split(given))
            for kind, name in {kind_of(name): name for name in found if name != BUILTIN}.items():
                kind.require_packages(name)
        except UserError as error:
            yield Finding("text", "problem", f"[corpus] {key}: {error}")
            continue
        unreadable = [name for name in found if name != BUILTIN and not os.access(name, os.R_OK)]
        if unreadable:
            yield Finding("text", "problem", f"[corpus] {key}: {unreadable[0]} cannot be read; check its permissions")
        elif found:
            total = sum(os.path.getsize(name) for name in found if name != BUILTIN)
            named = given if len(given) < 60 else f"…{given[-59:]}"
            files = f"{len(found)} file{'s' if len(found) > 1 else ''}, {size(total)}"
            yield Finding("text", "ok", f"[corpus] {key} = {named}" + ("" if found == [BUILTIN] else f": {files}"))


def vocabulary(plan: Plan) -> Iterator[Finding]:
    """Whether [corpus] vocab_file is there and whole, and has as many entries as the model."""
    from trainer.data.vocabulary import read_vocabulary

    settings = plan.settings
    if not settings.corpus.vocab_file:
        return
    at = f"[corpus] vocab_file = {settings.corpus.vocab_file}"
    try:
        pieces = len(read_vocabulary(Path(settings.corpus.vocab_file)))
    except UserError as error:
        yield Finding("vocabulary", "problem", f"[corpus] vocab_file: {error}")
        return
    is_ready_data = any(isinstance(stage, DownloadDataset) for stage in plan.stages())
    entries = settings.model.downloaded_vocab_size if is_ready_data else settings.model.vocab_size
    if entries is None or entries == pieces:
        yield Finding("vocabulary", "ok", f"{at}: {pieces:,} entries")
    elif is_ready_data or entries < pieces:
        yield Finding("vocabulary", "problem", f"{at} has {pieces:,} entries, and [model] vocab_size is {entries:,}; "
                      f"give the vocabulary that the data was made with, or change vocab_size")  # fmt: skip
    else:
        yield Finding("vocabulary", "warning", f"{at} has {pieces:,} entries, and [model] vocab_size is {entries:,}: "
                      f"the model's remaining entries stay untrained")  # fmt: skip
