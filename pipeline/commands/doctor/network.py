"""What other machines provide: data, the store, credentials, and the time."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

from common.addresses import url_scheme
from common.errors import UserError, one_line
from common.secrets import Secret, public_address
from pipeline.commands.doctor.finding import Finding, Level, Plan
from pipeline.commands.doctor.places import why_unusable
from pipeline.tasks.bert import ConvertCheckpoint
from pipeline.tasks.dataset import DownloadDataset
from pipeline.tasks.mnist import DownloadMnist
from stages.mnist import file_address
from stages.store.backend import Backend, Conflict
from stages.store.open import open_store
from stages.store.options import StoreOptions
from stages.store.records import PROBES
from stages.transfer.remote import Transient
from stages.transfer.s3 import DEFAULT_PROFILE
from stages.transfer.urls import Transport, open_source
from stages.view.text import size
from trainer.metrics.trackers.options import MLFLOW, WANDB, mlflow_address

_AWS, _WANDB = "https://s3.amazonaws.com", "https://api.wandb.ai"
#: The smallest of MNIST's files.
_MNIST_FILE = "t10k-labels-idx1-ubyte.gz"
#: Seconds to connect to a server that is asked for the time, and to wait for its answer.
_PATIENCE_S = (5.0, 10.0)
#: Seconds by which a clock may differ before it is noted, and before it is a problem: S3 refuses requests that are 15
#: minutes off, and certificates that are not valid yet are refused at once.
_NOTED_S, _WRONG_S = 60.0, 300.0


def store(plan: Plan) -> Iterator[Finding]:
    """Whether the store can be read and written, and keeps writers apart."""
    settings = plan.settings.store
    options = settings.options
    if options is None:
        return
    failed = _why_store_fails(plan, options, writes=settings.push != "none")
    plan.store_answers = failed is None
    if failed is None:
        how = "read and written, with conditional writes" if settings.push != "none" else "read"
        yield Finding("store", "ok", f"{options.place} can be {how}")
    else:
        yield Finding("store", "problem", f"[store] url: {failed}")


def _why_store_fails(plan: Plan, options: StoreOptions, *, writes: bool) -> str | None:
    if not options.is_s3:  # writers are kept apart by locks
        why = why_unusable(Path(options.place)) if writes else None
        return f"{options.place}: {why}; check its permissions, and whether it is mounted" if why else None
    why = _ask(plan, options.s3_endpoint.reveal() or _AWS)
    if why is not None:
        return why
    try:
        backend = open_store(options)
        if writes:
            _probe(backend)
        else:
            next(iter(backend.list("")), None)
    except UserError as error:
        return str(error)
    return None


def _probe(backend: Backend) -> None:
    """Write a small object, read it, find that a second writer is refused, and remove it. Raises `UserError`."""
    key = f"{PROBES}/{uuid.uuid4().hex}"
    backend.write(key, b"first", replaces=None)  # S3: refuses a server without conditional writes
    try:
        backend.read(key)
        backend.write(key, b"second", replaces=None)
    except Conflict:
        return
    finally:
        backend.delete([key])
    raise UserError(f"{backend.url}: two machines could both write there; use another server")


def credentials(plan: Plan) -> Iterator[Finding]:
    """Whether boto3 finds the credentials that sign the requests."""
    import boto3
    import botocore.exceptions as boto

    for section, profile in dict(_signed(plan)).items():
        named = None if profile == DEFAULT_PROFILE else profile
        remedy = f"run `aws configure`, give the machine a role, or set [{section}] s3_profile (empty: unsigned)"
        try:
            found = boto3.Session(profile_name=named).get_credentials()
        except boto.BotoCoreError as error:
            yield Finding("credentials", "problem", f"[{section}] s3_profile: {one_line(error)}; {remedy}")
            continue
        if found is None:
            yield Finding("credentials", "problem", f"boto3 finds no AWS credentials for [{section}]; {remedy}")
        else:
            yield Finding("credentials", "ok", f"[{section}]: boto3 finds them via {found.method}")


def trackers(plan: Plan) -> Iterator[Finding]:
    """Whether MLflow and W&B answer, and W&B has a key. Training goes on without them, so nothing is a problem."""
    from requests.utils import get_netrc_auth

    options = plan.settings.trackers.options
    if plan.settings.cluster.launcher != "local":
        return
    asked = dict[str, Secret]()
    if MLFLOW in options.chosen:
        asked[MLFLOW] = mlflow_address(options)
    if WANDB in options.chosen and options.wandb_mode == "online":
        asked[WANDB] = Secret.address(os.environ.get("WANDB_BASE_URL") or _WANDB)
    for name, address in asked.items():
        is_server = url_scheme(address) in ("http", "https")
        why = _ask(plan, _server(plan, address)) if is_server else None
        if why is not None:
            yield Finding("trackers", "warning", f"{name}: {why}")
        elif name == WANDB and not os.environ.get("WANDB_API_KEY") and get_netrc_auth(address.reveal()) is None:
            yield Finding("trackers", "warning", "wandb: no key is known here; set WANDB_API_KEY, or run `wandb login`")
        else:
            yield Finding("trackers", "ok", f"{name}: {address}{' answers' if is_server else ''}")


def _signed(plan: Plan) -> Iterator[tuple[str, str]]:
    """(section, profile) of requests to S3 that are signed."""
    dataset, store = plan.settings.dataset, plan.settings.store
    if dataset.s3_profile and any(url.reveal().startswith("s3://") for url in _addresses(plan).values()):
        yield "dataset", dataset.s3_profile
    if store.options is not None and store.options.is_s3 and store.s3_profile:
        yield "store", store.s3_profile


def addresses(plan: Plan) -> Iterator[Finding]:
    """Whether what is to be downloaded is there."""
    transport = Transport(**plan.settings.dataset.transport)
    for setting, url in _addresses(plan).items():
        try:
            if url_scheme(url) in ("http", "https", "s3") and (why := _ask(plan, _server(plan, url))) is not None:
                yield Finding("network", "problem", f"{setting}: {why}")
                continue
            source = open_source(url, transport)
            length = bytes_in(source) if isinstance(source, Path) else source.head().length
        except UserError as error:
            yield Finding("network", "problem", f"{setting}: {error}")
        except Transient as error:
            yield Finding("network", "problem", f"{setting}: {url} does not answer: {error}; try again later")
        else:
            plan.lengths[setting] = length
            yield Finding("network", "ok", f"{setting}: {url} answers, {size(length)}")


def bytes_in(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else (path,)) if file.is_file())


def _addresses(plan: Plan) -> dict[str, Secret]:
    """The addresses that the stages to make fetch from, by setting."""
    found: dict[str, Secret] = {}
    for stage in plan.to_make():
        if isinstance(stage, DownloadDataset):
            found[f"[dataset] phase{stage.phase}_url"] = stage.url
        elif isinstance(stage, ConvertCheckpoint) and stage.given:
            found["[phase2] start_from"] = stage.given
        elif isinstance(stage, DownloadMnist):
            found["[mnist] url"] = file_address(plan.settings.mnist.url, _MNIST_FILE)
    return found


def _server(plan: Plan, url: Secret) -> str:
    parts = urlsplit(str(url))  # without its login, which only asking whether it answers does not need
    if parts.scheme == "s3":
        return plan.settings.dataset.s3_endpoint.reveal() or _AWS
    return f"{parts.scheme}://{parts.netloc}"


def _ask(plan: Plan, server: str) -> str | None:
    """Ask a server for anything, and note its time; returns why it does not answer, or None."""
    import requests

    shown, began = public_address(server), time.time()
    if shown in plan.ahead_s:
        return None
    try:
        answer = requests.head(f"{server}/", timeout=_PATIENCE_S, allow_redirects=False)
    except requests.RequestException as error:
        plan.silent.add(shown)
        return f"{shown} does not answer: {_reason(error)}; check the address and this machine's network"
    said = answer.headers.get("Date")
    try:
        moment = parsedate_to_datetime(said or "").timestamp()
    except ValueError:
        return None  # a server without a clock
    plan.ahead_s[shown] = moment - (began + time.time()) / 2
    return None


def _reason(error: Exception) -> str:
    """The innermost reason, without the pools and retries around it."""
    reason = getattr(error.args[0] if error.args else None, "reason", None)
    return one_line(reason or error).rpartition(": ")[2]


def clock(plan: Plan) -> Iterator[Finding]:
    """Compare this machine's clock with those of the servers that were asked; comes after the checks that ask them."""
    if not plan.ahead_s:
        silent = ", ".join(sorted(plan.silent))
        if silent:
            yield Finding("clock", "warning", f"not compared: {silent} does not answer")
        else:
            yield Finding("clock", "ok", "not compared: these settings use no server")
        return
    server, ahead = max(plan.ahead_s.items(), key=lambda pair: abs(pair[1]))
    off = f"this machine's clock is {abs(ahead):.0f} s {'behind' if ahead > 0 else 'ahead of'} that of {server}"
    level: Level = "problem" if abs(ahead) > _WRONG_S else "warning" if abs(ahead) > _NOTED_S else "ok"
    if level == "ok":
        yield Finding("clock", "ok", f"within {max(2, round(abs(ahead)) + 1)} s of {server}")
    else:
        yield Finding(
            "clock", level, f"{off}; S3 refuses requests that are 15 minutes off: set it (timedatectl, chrony)"
        )
