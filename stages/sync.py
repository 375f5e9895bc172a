"""Push complete stages to a shared store, or fetch them.

    python -m stages.sync push work/shard_dataset-phase1-0123456789 --store s3://bucket/prefix
    python -m stages.sync pull shard_dataset-phase1-0123456789 --work-dir work --store s3://bucket/prefix

luigi does both by itself with `[store] url`: docs/store.md.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from common.command_line import Parser
from common.errors import UserError
from common.files import failpoint
from common.options import add_options, from_namespace
from common.process import give_way
from stages.directory import command
from stages.directory.lock import hold
from stages.directory.manifest import Identity, directory_name, stage_label, why_incomplete
from stages.directory.progress import transfer
from stages.directory.records import read_identity
from stages.store.backend import Backend
from stages.store.checkpoints import conclude
from stages.store.companion import Companion
from stages.store.complete import fetch_stage, find_stage, push_stage
from stages.store.files import NotUsable
from stages.store.lease import Lease, lease_key
from stages.store.open import open_store
from stages.store.options import StoreOptions
from stages.store.records import STAGES, stage_of_key


def push(backend: Backend, directories: list[Path]) -> None:
    """Push complete stages. Raises `UserError`."""
    for directory in directories:
        identity = _identity_of(directory)
        with hold(directory):
            label = stage_label(identity.stage, identity.phase)
            record = push_stage(backend, directory, label)
            conclude(backend, directory, label, record.fingerprint)
        print(f"{directory.name}: {len(record.files):,} files, {record.total_bytes:,} bytes are in {backend.url}")


def pull(backend: Backend, names: list[str], work_dir: Path) -> None:
    """Fetch the stages called `<label>-<first characters of the fingerprint>`. Raises `UserError`."""
    for name in names:
        label, fingerprint = _resolve(backend, name)
        record = find_stage(backend, label, fingerprint)
        if record is None:
            raise UserError(f"{name} is damaged in {backend.url}; see python -m pipeline store verify")
        directory = work_dir / directory_name(label, fingerprint)
        with hold(directory):
            if why_incomplete(directory, fingerprint) is None:
                print(f"{directory} is complete already")
                continue
            with transfer(directory, f"fetch {label}", record.total_bytes) as bar:
                try:
                    beside = [path.name for path in work_dir.iterdir() if path != directory and path.is_dir()]
                    if lacking := sorted(record.beside - set(beside)):
                        raise UserError(f"{name} puts files into {lacking[0]}, which is not here; pull that first")
                    fetch_stage(backend, record, directory, siblings=beside, report=bar.update)
                except NotUsable as error:
                    raise UserError(f"{error}; remove it with python -m pipeline store verify --remove") from None
        print(f"{directory}: {record.total_bytes:,} bytes")


def _resolve(backend: Backend, name: str) -> tuple[str, str]:
    """The one stage of the store that `name` means. Raises `UserError`."""
    label, _, short = name.rpartition("-")
    found = [stage_of_key(entry.key) for entry in backend.list(f"{STAGES}/{label}/{short}")] if label and short else []
    stages = [one for one in found if one is not None]
    if len(stages) != 1:
        which = "several stages" if stages else "no stage"
        raise UserError(f"{backend.url} has {which} {name}; python -m pipeline store lists what there is")
    return stages[0]


def _identity_of(directory: Path) -> Identity:
    record = read_identity(directory)
    if record is None:
        raise UserError(
            f"{directory} is not a stage directory: it has no stage.json; `python -m pipeline status` lists them"
        )
    return Identity.of_record(record)


def accompany(backend: Backend, directory: Path, holder: str, token: int) -> None:
    """Run while a stage is being made whose lease luigi has taken. Raises `UserError`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # luigi ends it
    failpoint("companion")
    identity = _identity_of(directory)
    label = stage_label(identity.stage, identity.phase)
    lease = Lease.resume(backend, lease_key(label, identity.fingerprint), holder, token)
    Companion(backend, lease, directory, label, identity.fingerprint).run()


def parser() -> argparse.ArgumentParser:
    p = Parser(prog="python -m stages.sync", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = p.add_subparsers(dest="verb", required=True, metavar="push|pull")
    sender = verbs.add_parser("push", help="push complete stages")
    sender.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="directory of a complete stage")
    fetcher = verbs.add_parser("pull", help="fetch stages")
    fetcher.add_argument("names", nargs="+", metavar="STAGE", help="<stage>-<first characters of its fingerprint>")
    fetcher.add_argument("--work-dir", type=Path, default=Path("work"), metavar="DIR", help="destination (work)")
    beside = verbs.add_parser("accompany")  # luigi's own; not in --help
    beside.add_argument("directory", type=Path)
    beside.add_argument("--holder", required=True)
    beside.add_argument("--token", type=int, required=True)
    for verb in (sender, fetcher, beside):
        add_options(verb, StoreOptions)
    return p


def main() -> None:
    args = parser().parse_args()
    if args.verb == "accompany":
        give_way()  # during training, a push waits for free processor time
    backend = open_store(from_namespace(StoreOptions, args))
    if args.verb == "push":
        push(backend, args.directories)
    elif args.verb == "pull":
        pull(backend, args.names, args.work_dir)
    else:
        accompany(backend, args.directory, args.holder, args.token)


if __name__ == "__main__":
    command.run(main)
