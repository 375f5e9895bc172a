"""Seconds to get a finished chain from the store onto an empty machine, compared with copying the same bytes.

A small chain is made, whose model is then padded with random bytes. `luigi BertPhase2` in an empty work directory only
fetches it and makes nothing. A folder is compared with `cp -r` and `sync` of the same files; S3 (moto's server) with
boto3's `download_file` of the same objects, one at a time and several at once, and `sync`. Ratios are given with and
without luigi's start (a run with everything there), which is the same for every size. Both sides begin equally long
after the last large deletion (see `benchmarks.stages.merge`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.faults.stores import KINDS, Place, client, place
from benchmarks.processes import ROOT, python
from benchmarks.results import Result, say
from benchmarks.stages.merge import SETTLE_S
from benchmarks.work import at_least
from common.files import read_json, sha256_of, write_json
from stages.directory.manifest import MANIFEST

MOST = 1.3
FETCHED = {"merge_shards", "evaluate", "report"}
CONFIG = """
[run]
processes = 1
[corpus]
source = "{root}/docs/*.md"
held_out = 0.1
vocab_size = 1000
[model]
preset = debug
[phase1]
seq_len = 32
max_pred_len = 5
global_batch_size = 16
micro_batch_size = 16
max_steps = 4
warmup_steps = 1
word_embeddings = random
initial_attention = random
[phase2]
seq_len = 64
max_pred_len = 10
global_batch_size = 16
micro_batch_size = 16
max_steps = 4
warmup_steps = 1
"""


class Chain:
    """A chain in `directory`, made without a store; then what is to be fetched is pushed to `store`."""

    def __init__(self, directory: Path, store: Place, megabytes: int) -> None:
        self.directory, self.store = directory, store
        self._config = directory / "luigi.cfg"
        self._config.write_text(CONFIG.format(root=ROOT))
        self.run("made")
        stages = self.stages("made", *FETCHED)
        pad(stages["merge_shards"], megabytes)
        self._config.write_text(self._config.read_text() + store.section)
        words = ("--store", store.url, *(("--s3-endpoint", store.endpoint) if store.endpoint else ()))
        python("-m", "stages.sync", "push", *map(str, stages.values()), *words)

    def run(self, name: str) -> float:
        """Run luigi with the work directory of this name; returns seconds."""
        os.environ["LUIGI_CONFIG_PATH"] = str(self._config)
        began = time.monotonic()
        python("-m", "luigi", "--module", "pipeline", "BertPhase2", "--Run-work-dir", str(self.directory / name))
        return time.monotonic() - began

    def stages(self, name: str, *some: str) -> dict[str, Path]:
        """The stage directories of a work directory: all, or those named."""
        found = {
            path.parent.name.rpartition("-")[0]: path.parent for path in (self.directory / name).glob("*/stage.json")
        }
        return {stage: path for stage, path in found.items() if not some or stage in some}


def pad(stage: Path, megabytes: int) -> None:
    """Add an output of random bytes to a complete stage."""
    path = stage / "model" / "padding.bin"
    with path.open("wb") as file:
        for _ in range(megabytes):
            file.write(os.urandom(1_000_000))
    manifest = read_json(stage / MANIFEST)
    assert manifest is not None
    output = {"path": "model/padding.bin", "bytes": path.stat().st_size, "sha256": sha256_of(path)}
    write_json(stage / MANIFEST, {**manifest, "outputs": [*manifest["outputs"], output]})


def sync(directory: Path) -> None:
    subprocess.run(["sync", *(path for path in directory.rglob("*") if path.is_file())], check=True)


def copied(chain: Chain) -> float:
    """Seconds that `cp` and `sync` take for what a run has fetched."""
    target = chain.directory / "copy"
    time.sleep(SETTLE_S)
    began = time.monotonic()
    subprocess.run(["cp", "-r", chain.directory / "again", target], check=True)
    sync(target)
    return time.monotonic() - began


def downloaded(chain: Chain, at_once: int) -> float:
    """Seconds that boto3 and `sync` take for the objects that a run has fetched."""
    listed = chain.directory / "objects.json"
    listed.write_text(json.dumps(objects(chain)))
    time.sleep(SETTLE_S)
    words = ("--download", str(listed), str(chain.directory / "copy"), chain.store.endpoint, str(at_once))
    return float(python("-m", "benchmarks.faults.store_fetch", *words).splitlines()[-1])


def objects(chain: Chain) -> dict[str, str]:
    """The objects that a run has fetched, by path."""
    from stages.store.complete import find_stage
    from stages.store.open import open_store

    backend, found = open_store(chain.store.options), dict[str, str]()
    for label, path in chain.stages("again").items():
        record = find_stage(backend, label, (read_json(path / MANIFEST) or {})["fingerprint"])
        assert record is not None
        found |= {f"{path.name}/{file.path}": f"store/{file.key}" for file in record.files}
    return found


def download(listed: Path, target: Path, endpoint: str, at_once: int) -> None:
    """Fetch the objects with boto3, `at_once` files at a time; print the seconds, not counting boto3's import."""
    boto = client(endpoint)
    bucket = boto.list_buckets()["Buckets"][0]["Name"]
    began = time.monotonic()

    def fetch(item: tuple[str, str]) -> None:
        (target / item[0]).parent.mkdir(parents=True, exist_ok=True)
        boto.download_file(bucket, item[1], str(target / item[0]))

    with ThreadPoolExecutor(at_once) as threads:
        list(threads.map(fetch, json.loads(listed.read_text()).items()))
    sync(target)
    print(time.monotonic() - began)


def compare(kind: str, directory: Path, pairs: int, megabytes: int) -> None:
    sides: dict[str, Any] = {"cp and sync": copied}
    if kind == "s3":
        sides = {f"boto3, {count} at once": lambda chain, n=count: downloaded(chain, n) for count in (1, 8)}
    with place(kind, directory) as store:
        chain = Chain(directory, store, megabytes)
        whole, starts = [], []
        others: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(pairs):
            shutil.rmtree(directory / "again", ignore_errors=True)
            time.sleep(SETTLE_S)
            whole.append(chain.run("again"))
            assert chain.stages("again").keys() == FETCHED, "something was made"
            starts.append(chain.run("again"))
            for name, side in sides.items():
                others[name].append(side(chain))
                shutil.rmtree(directory / "copy")
    ours = statistics.median(whole)
    for name, each in others.items():
        what = f"a finished chain from the store ({kind}), {megabytes:,} MB, beside {name}"
        beside = f"{name} {statistics.median(each):.2f} s"
        ratios = tuple((mine - start) / other for mine, start, other in zip(whole, starts, each, strict=True))
        said = f"fetched in {statistics.median(a - b for a, b in zip(whole, starts, strict=True)):.2f} s"
        say(Result.median(what, said, beside, ratios, " ×", at_most=MOST))
        ratios = tuple(mine / other for mine, other in zip(whole, each, strict=True))
        say(Result.median(f"{what}, luigi's start included", f"{ours:.2f} s", beside, ratios, " ×"))


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m benchmarks.faults.store_fetch", description=__doc__)
    p.add_argument("--stores", nargs="+", default=list(KINDS), choices=KINDS)
    p.add_argument("--pairs", type=at_least(1), default=7, help="runs of each side, alternating")
    p.add_argument("--megabytes", type=int, default=1340, help="of the model: BERT-Large's")
    p.add_argument("--download", nargs=4, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.download:
        listed, target, endpoint, at_once = args.download
        download(Path(listed), Path(target), endpoint, int(at_once))
        return
    for kind in args.stores:
        with tempfile.TemporaryDirectory(prefix="benchmark-", dir=ROOT) as name:
            compare(kind, Path(name), args.pairs, args.megabytes)


if __name__ == "__main__":
    main()
