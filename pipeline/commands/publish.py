"""`python -m pipeline publish hf://org/name | s3://bucket/prefix | FOLDER`: the finished model, its tokenizer and its
model card, for others."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from common.console import log
from common.errors import EXIT_INTERRUPTED, UserError, one_line
from common.secrets import Secret
from pipeline.settings.load import load
from pipeline.settings.sections import Settings
from pipeline.status.comparison import evaluation_of
from pipeline.status.live_report import settings_by_section, view
from pipeline.status.stage_dirs import StageDirs
from pipeline.store.transfer import transfer_bar
from pipeline.tasks.bert import BertPhase2, MergeShards
from stages.directory.manifest import why_incomplete
from stages.directory.records import read_manifest
from stages.merge import MODEL, TOKENIZER_FILES
from stages.report import view_of
from stages.view.card import CARD, NAME, card, is_edited
from stages.view.run import Run
from stages.view.text import size

if TYPE_CHECKING:
    from stages.store.publish import Publication, Target

SUMMARY = "publish the finished model with its model card: to the Hugging Face Hub, S3 or a folder"
_WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
#: Files that transformers loads a model and its tokenizer from, and the card. Moments and pickles are not published.
PATTERNS = ("config.json", "generation_config.json", *_WEIGHTS, *TOKENIZER_FILES, "added_tokens.json", CARD)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="hf://org/name, s3://bucket/prefix, or a folder")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a model other than that of the present settings: a merge's directory"
    )
    parser.add_argument("--private", action="store_true", help="create the Hub repository as private")
    parser.add_argument("--dry-run", action="store_true", help="list what would be published, and publish nothing")


def run(args: argparse.Namespace) -> int:
    """Raises `UserError`."""
    settings = load()
    target = _target(args.target, settings, private=args.private)
    model, made = _model_of_settings(settings) if args.model is None else _model_in(args.model, settings)
    with tempfile.TemporaryDirectory(prefix="publish-") as scratch:
        publication = _publication(model, _card(model, made, target), Path(scratch))
        for name, path in publication.files.items():
            print(f"{size(path.stat().st_size):>10}  {name}")
        target.check(publication)
        what = f"{size(publication.total_bytes)} in {len(publication.files)} files of {model}"
        if args.dry_run:
            print(f"{target.address} would get {what}")
            return 0
        try:
            _publish(target, publication)
        except KeyboardInterrupt:
            print("interrupted: the model is not published; run the same again", file=sys.stderr)
            return EXIT_INTERRUPTED
    print(f"{target.address} has {what}")
    return 0


def _target(address: str, settings: Settings, *, private: bool) -> Target:
    """Raises `UserError`."""
    from stages.store.options import StoreOptions
    from stages.store.publish import Folder, scheme_of

    shown_address = Secret.address(address)
    scheme = scheme_of(shown_address)
    if private and scheme != "hf":
        raise UserError(f"--private is for the Hub; leave it out for {shown_address}")
    if scheme == "hf":
        from stages.store.publish_hub import HubRepository

        return HubRepository(shown_address, private=private)
    if scheme == "s3":
        from stages.store.publish_s3 import S3Prefix

        names = ("s3_profile", "s3_endpoint", "connections", "encryption", "kms_key")
        return S3Prefix(StoreOptions(url=shown_address, **{name: getattr(settings.store, name) for name in names}))
    return Folder(address)


def _publish(target: Target, publication: Publication) -> None:
    with transfer_bar("publish", publication.total_bytes, hidden=target.shows_progress) as bar:
        target.publish(publication, bar.update)


def _model_of_settings(settings: Settings) -> tuple[Path, Run]:
    """The model of the present settings, and the run that made it. Raises `UserError`."""
    goal = BertPhase2()
    merge = goal.sibling(MergeShards)
    reason = why_incomplete(merge.directory, merge.identity.fingerprint, verify=True)
    if reason is not None:
        raise UserError(
            f"the model of these settings is not usable: {reason}; run `luigi --module pipeline BertPhase2`, or name "
            f"another with --model DIR"
        )
    return merge.model_directory, view(goal)


def _model_in(directory: Path, settings: Settings) -> tuple[Path, Run | None]:
    """The model in a directory, and the run that made it, if its stage is there. Raises `UserError`."""
    model = directory / MODEL if (directory / MODEL / "config.json").is_file() else directory
    if not (model / "config.json").is_file():
        raise UserError(f"{directory} has no config.json; give a Hugging Face directory, e.g. work/latest/merge_shards")
    stage = model.resolve().parent
    manifest = read_manifest(stage)
    if manifest is None:
        return model, None
    if (reason := why_incomplete(stage, manifest["fingerprint"], verify=True)) is not None:
        raise UserError(f"{model} is not usable: {reason}; merge it again, or give another")
    stage_dirs = StageDirs(stage.parent)
    merged = stage_dirs.of_fingerprint(manifest["fingerprint"])
    chain = [] if merged is None else [*stage_dirs.made_with(merged), *evaluation_of(merged, stage_dirs)]
    run = view_of([one.path for one in chain] or [stage], None)
    return model, Run(run.stages, {**run.settings, "card": settings_by_section(settings)["card"]}, written=run.written)


def _card(model: Path, made: Run | None, target: Target) -> str:
    """The card beside the model if a person has edited it or nothing is known of the run; else the run's. Raises
    `UserError`."""
    beside = model / CARD
    if beside.is_file():
        text = beside.read_text(encoding="utf-8", errors="replace")
        if is_edited(text) or made is None:
            _require_metadata(text, beside)
            if is_edited(text):
                log(f"note: {beside} was written or edited by hand, so it is published as it is")
            return text
    if made is None:
        raise UserError(
            f"{model} has no {CARD}, and nothing there tells how the model was made; write a model card there"
        )
    if not made.counts("evaluate"):
        log("note: the model has not been evaluated, so its card has no results")
    if made.settings.get("card", {}).get("license") in ("", "unknown"):
        log("note: the card names no licence; set [card] license, e.g. --Card-license apache-2.0")
    return card(made, target.path.rpartition("/")[2] if target.path != "PATH" else NAME, target.path)


def _require_metadata(text: str, path: Path) -> None:
    """Raise `UserError` unless `huggingface_hub` reads the card's metadata."""
    import yaml
    from huggingface_hub import ModelCard

    try:
        ModelCard(text)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"{path}: the metadata at its beginning cannot be read ({one_line(error)}); correct it"
        ) from None


def _publication(model: Path, text: str, scratch: Path) -> Publication:
    """Raises `UserError` for a model that nobody could use."""
    from stages.store.publish import Publication

    (scratch / CARD).write_text(text, encoding="utf-8")
    everything = Publication({}, PATTERNS)
    found = {path.name: path for path in sorted(model.iterdir()) if everything.is_of_a_model(path.name)}
    if not any(name.endswith(".safetensors") for name in found):
        raise UserError(f"{model} has no model.safetensors; publish takes no other format (python -m stages.merge)")
    if "tokenizer.json" not in found:
        raise UserError(
            f"{model} has no tokenizer.json, without which nobody can use it; set [corpus] vocab_file to the "
            f"vocabulary of its data and run BertPhase2 again, or merge with --tokenizer"
        )
    return Publication({**found, CARD: scratch / CARD}, PATTERNS)
