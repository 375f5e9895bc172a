"""Data preparation (text → token ids → shards of both phases) on one and two cores, against the tokenizers library.

Two processes are compared with two independent builds at the same time, which show what two cores of this machine can
do: they share caches and memory, and may be the two threads of one core.

Whole commands are timed, from the start of Python to the manifest on disk. The text is WikiText-2, repeated, with
BERT's vocabulary. If the shared data folder (BERT_SHARED_DIR) is missing, it is text that ships with Python; then a
vocabulary is learned too, and nothing is claimed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import ROOT, busy_s, on_cores, start
from benchmarks.results import Result, ratio, say
from benchmarks.work import SHARED, at_least
from common.hashing import InputHashes
from stages.text.base import text_of
from stages.text.corpus import BUILTIN, open_sources, raw_documents

_MB = 1e6
#: --seq-len and --max-pred-len of the phases.
_PHASES = {1: (128, 20), 2: (512, 80)}


@dataclass(frozen=True)
class Ran:
    wall_s: float
    #: User and system time of the command and its child processes, in seconds.
    cpu_s: float
    #: Average number of cores used by other programs.
    others: float
    #: Peak memory of the largest process.
    peak_mb: float

    def __add__(self, other: Ran) -> Ran:
        wall_s = self.wall_s + other.wall_s
        others = (self.others * self.wall_s + other.others * other.wall_s) / wall_s
        return Ran(wall_s, self.cpu_s + other.cpu_s, others, max(self.peak_mb, other.peak_mb))


class Text:
    """A text repeated to a size, and how it is turned into shards."""

    def __init__(self, directory: Path, *, megabytes: float) -> None:
        shared = SHARED / "data"
        found = (shared / "wikitext-2/train.txt").is_file()
        self.name = "WikiText-2" if found else "the documentation inside Python"
        self.has_claims = found
        self.vocabulary = ("--vocab-file", shared / "vocab/bert-uncased.txt") if found else ("--vocab-size", 8192)
        self._directory, self._label = directory, ""
        source = str(shared / "wikitext-2/train.txt") if found else BUILTIN
        sources = open_sources([source], InputHashes())
        documents = [text_of(document, Counter()) for document in raw_documents(sources, Counter())]
        self.lines = [line for document in documents for line in document.split("\n")]
        once = ("\n\n".join(documents) + "\n\n").encode()
        self.path = directory / f"{megabytes:g}.txt"
        with self.path.open("wb") as file:
            for _ in range(max(1, round(megabytes * _MB / len(once)))):
                file.write(once)
        self.mb = self.path.stat().st_size / _MB

    def tokens(self, processes: int) -> Path:
        return self._directory / f"{self.path.stem}-tokens-{processes}{self._label}"

    def other(self) -> Text:
        """The same text, built in other directories."""
        other = copy.copy(self)
        other._label = "-other"
        return other

    def tokenize(self, processes: int) -> Ran:
        return timed(
            "tokenize", "--source", self.path, *self.vocabulary, processes=processes, out=self.tokens(processes)
        )

    def shard(self, phase: int, processes: int) -> Ran:
        seq_len, max_pred_len = _PHASES[phase]
        words = ("--tokens", self.tokens(processes), "--seq-len", seq_len, "--max-pred-len", max_pred_len)
        return timed("shard", *words, processes=processes, out=self._directory / f"shards{self._label}")


def timed(stage: str, *words: object, processes: int, out: Path) -> Ran:
    shutil.rmtree(out, ignore_errors=True)
    command = ("-m", f"stages.{stage}", *map(str, words), "--processes", str(processes), "--out", str(out))
    with tempfile.TemporaryFile() as errors:
        busy, began, peak_mb = busy_s(), time.monotonic(), 0.0
        process = start(*command, stdout=subprocess.DEVNULL, stderr=errors)
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            peak_mb = max(peak_mb, _peak_mb(process.pid))
            time.sleep(0.05)
        wall_s, (_, status, usage) = time.monotonic() - began, ended
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{errors.read().decode()}")
    cpu_s = usage.ru_utime + usage.ru_stime
    return Ran(wall_s, cpu_s, max(0.0, (busy_s() - busy - cpu_s) / wall_s), peak_mb)


def _peak_mb(pid: int) -> float:
    """Peak memory of a process and its children so far (wait4's value includes this process, from before exec)."""
    peak = 0.0
    with contextlib.suppress(OSError, ProcessLookupError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for one in (pid, *children):
            found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{one}/status").read_text())
            peak = max(peak, int(found[1]) * 1024 / _MB if found else 0.0)
    return peak


def tokenizers_alone(text: Text, tokenizer: Path) -> tuple[float, float]:
    """The library's rate on one thread in MB/s, on paragraphs and on sentences."""
    from tokenizers import Tokenizer

    from stages.text.sentences import sentences

    library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    rates = []
    for lines in (text.lines, [sentence for line in text.lines for sentence in sentences(line)]):
        began = time.monotonic()
        for first in range(0, len(lines), 1000):
            library.encode_batch(lines[first : first + 1000], add_special_tokens=False)
        rates.append(sum(len(line.encode()) + 1 for line in lines) / _MB / (time.monotonic() - began))
    return rates[0], rates[1]


def whole(text: Text, processes: int) -> tuple[Ran, Ran, Ran]:
    """Tokens, phase 1, phase 2."""
    ran = (text.tokenize(processes), text.shard(1, processes), text.shard(2, processes))
    total = ran[0] + ran[1] + ran[2]
    seconds = " + ".join(f"{stage.wall_s:.1f}" for stage in ran)
    print(
        f"  --processes {processes}: {seconds} = {total.wall_s:.1f} s, {total.cpu_s:.1f} s of processor time; "
        f"other programs had {total.others:.2f} of {os.cpu_count()} cores",
        flush=True,
    )
    return ran


def at_once(text: Text) -> list[float]:
    """Seconds of each stage of two simultaneous builds with one process each: those of the slower one."""
    with ThreadPoolExecutor(2) as pool:
        builds = list(pool.map(lambda one: whole(one, 1), (text, text.other())))
    return [max(ran.wall_s for ran in stages) for stages in zip(*builds, strict=True)]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--pairs", type=at_least(1), default=3, help="runs with one process and with two, alternating")
    p.add_argument("--megabytes", type=float, default=100, help="text to measure speeds on")
    p.add_argument("--memory-megabytes", type=float, default=20, help="text to measure memory on, and ten times that")
    args = p.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=ROOT) as name:
        text = Text(Path(name), megabytes=args.megabytes)
        print(f"{text.name}, repeated to {text.mb:.0f} MB; seconds of tokens + phase 1 + phase 2:")
        one, two, independent = [], [], []
        for _ in range(args.pairs):
            with on_cores(1):
                one.append(whole(text, 1))
            with on_cores(2):
                two.append(whole(text, 2))
                independent.append(at_once(text))
        paragraphs, sentences = tokenizers_alone(text, text.tokens(1) / "tokenizer")

        alone = f"tokenizers alone, one thread: by paragraphs {paragraphs:.1f} MB/s, by sentences {sentences:.1f}"
        for what, stages, beside, least in (
            ("text → token ids", (0,), alone, None),
            ("text → phase-1 shards", (0, 1), "NVIDIA's script 0.36 MB/s (published)", 2.4),
            ("tokens → phase-1 shards", (1,), "", None),
            ("tokens → phase-2 shards", (2,), "NVIDIA's script, from text, 0.36 MB/s (published)", 8.0),
            ("text → both phases", (0, 1, 2), "NVIDIA's script 0.18 MB/s (published)", 2.0),
        ):
            seconds = [sum(run[stage].wall_s for stage in stages) for run in one]
            rates = [text.mb / wall_s for wall_s in seconds]
            said = f"{statistics.median(seconds):.1f} s for {text.mb:.0f} MB"
            asked = least if text.has_claims else None
            say(Result.median(f"{what}, {text.name}, one core", said, beside, rates, " MB/s", asked))
        for what, stages, least in (
            ("tokens and both phases", (0, 1, 2), 0.9), ("tokens", (0,), None), ("phase 1", (1,), None),
            ("phase 2", (2,), None),
        ):  # fmt: skip
            limits = [2 * text.mb / sum(seconds[n] for n in stages) for seconds in independent]
            rates = [text.mb / sum(run[n].wall_s for n in stages) for run in two]
            pairs = list(zip(rates, limits, strict=True))
            say(ratio(f"two processes, {text.name}: {what}", pairs, ours="two", beside="two builds at once",
                      unit="MB/s", at_least=least if text.has_claims else None))  # fmt: skip
            walls = [[sum(run[n].wall_s for n in stages) for run in pair] for pair in zip(two, one, strict=True)]
            pairs = [(text.mb / both_s, text.mb / one_s) for both_s, one_s in walls]
            say(ratio(f"two processes and one, {text.name}: {what}", pairs, ours="two", beside="one", unit="MB/s"))
        text.path.unlink()
        for megabytes in (args.memory_megabytes, 10 * args.memory_megabytes):
            sized = Text(Path(name), megabytes=megabytes)
            peaks = [stage.peak_mb for stage in whole(sized, 1)]
            said = f"tokens {peaks[0]:.0f} MB, phase 1 {peaks[1]:.0f} MB, phase 2 {peaks[2]:.0f} MB"
            say(Result(f"memory at {megabytes:g} MB of {text.name}", said, "", max(peaks), " MB",
                       at_most=700 if text.has_claims else None))  # fmt: skip


if __name__ == "__main__":
    main()
