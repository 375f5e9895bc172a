"""Time to quality: mini BERT on WikiText-2 with BERT's vocabulary. This project's recipe against BERT's (AdamW, static
masks, dropout 0.1) and against Hugging Face's Trainer; the disk space that both recipes' examples take; and the
embedded default, which needs no data, against guessing by word frequency.

Losses are those of the masked tokens of held-out rows, of which 15 % are masked. Our seconds are those of whole
processes, start-up and initial word embeddings included; Trainer's begin just before its model is made; examples are
made beforehand. It takes hours: with --work, what an interrupted run of the same code has finished is not repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.processes import ROOT, on_cores, python
from benchmarks.results import Result, machine, say, versions
from benchmarks.work import SHARED
from trainer.devices.cpu import CpuDevice
from trainer.models.config import ModelConfig

TEXT, VOCABULARY = SHARED / "data" / "wikitext-2", SHARED / "data" / "vocab" / "bert-uncased.txt"
#: Claimed: how many times sooner our recipe reaches the loss of BERT's, and of Trainer's; its accuracy in the time of
#: BERT's; how many times less disk its examples take.
SOONER, SOONER_THAN_TRAINER, ACCURACY, LESS_DISK = 15, 15, 0.50, 5
#: Claimed of the embedded default: its accuracy, nats below the loss of guessing by frequency, seconds of its chain.
DEFAULT_ACCURACY, DEFAULT_GAIN, DEFAULT_S = 0.38, 2.8, 300
#: Kinds of examples by name: words of stages.shard. All models are evaluated on the held-out rows of `PLAIN`, on whose
#: training rows Trainer draws its masks, too.
EXAMPLES = {
    "static masks": ("--masking=static", "--dupe-factor=5"),
    "dynamic masks": ("--masking=dynamic", "--dupe-factor=1"),
    "dynamic masks, no short rows": ("--masking=dynamic", "--dupe-factor=1", "--short-seq-prob=0"),
}
BERTS, PLAIN, OURS = EXAMPLES
#: Folders whose sources decide what a training reaches, beside its options.
SOURCES = ("trainer", "stages", "common", "benchmarks/references")


@dataclass(frozen=True)
class Recipe:
    """Options of the trainer, and what else a training begins with."""

    name: str
    options: Mapping[str, object]
    examples: str
    dropout: float = 0.0
    embeds: bool = False


@dataclass(frozen=True)
class Trained:
    seconds: float
    loss: float
    accuracy: float


BERT = Recipe(
    "AdamW, static masks",
    {"optimizer": "AdamW", "lr": 1e-3, "batch_size": 32, "grad_accum_usteps": 2, "warmup_steps": 100, "max_steps": 800},
    examples=BERTS,
    dropout=0.1,
)
_OURS = {
    "optimizer": "Muon",
    "lr": 1e-2,
    "batch_size": 16,
    "grad_accum_usteps": 1,
    "masked_lm_prob": 0.3,
    "final_masked_lm_prob": 0.15,
    "next_sentence_weight": 0.1,
    "initial_attention": "neighbours",
}
#: As short as it can be and still reach the loss of BERT's recipe; and as long as that takes.
SHORT = Recipe("ours, short", {**_OURS, "warmup_steps": 10, "max_steps": 70}, OURS, embeds=True)
LONG = Recipe(
    "ours, long",
    {
        **_OURS,
        "lr": 2e-3,
        "adamw_lr_ratio": 2.0,
        "masked_lm_prob": 0.5,
        "sampled_softmax": 4096,
        "batch_size": 32,
        "warmup_steps": 50,
        "max_steps": 1550,
    },
    OURS,
    embeds=True,
)


@dataclass(frozen=True)
class Settings:
    """Trainer's: words of `benchmarks.references.hugging_face_mlm`."""

    words: tuple[str, ...]
    dropout: float


def trainers() -> dict[str, Settings]:
    """Its own defaults, and the best settings of those in docs/trials.md."""
    bf16 = ("--bf16",) if CpuDevice().automatic_precision()[0] == "autocast" else ()
    return {
        "Trainer, its defaults": Settings(("--batch-size=8", "--lr=5e-5"), dropout=0.1),
        "Trainer, tuned": Settings(("--batch-size=8", "--lr=1e-3", "--warmup-steps=100", *bf16), dropout=0.0),
    }


@dataclass
class WikiText:
    """The examples, and the finished trainings: one line of runs.jsonl each."""

    directory: Path
    samples: int
    cores: int
    shards: dict[str, Path] = field(default_factory=dict)

    def make(self) -> None:
        examples = self.directory / f"examples-{code()[:12]}"  # a stage does not make again what older code has made
        examples.mkdir(parents=True, exist_ok=True)
        text = [f"--source={TEXT / 'train.txt'}", f"--held-out-source={TEXT / 'valid.txt'}"]
        python("-m", "stages.tokenize", *text, f"--vocab-file={VOCABULARY}", f"--out={examples / 'tokens'}")
        for name, words in EXAMPLES.items():
            self.shards[name] = examples / name
            words = (*words, "--seq-len=128", "--max-pred-len=20", f"--out={self.shards[name]}")
            python("-m", "stages.shard", f"--tokens={examples / 'tokens'}", *words)

    def model(self, dropout: float) -> Path:
        path = self.directory / f"dropout-{dropout}.json"
        rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        path.write_text(json.dumps(ModelConfig.preset("mini", **rates).to_hugging_face()))
        return path

    def once(self, what: Mapping[str, object], run: Callable[[], Trained]) -> Trained:
        """What `run` returns, or what it returned earlier for the same training by the same code, on a machine and with
        libraries like these."""
        record, here = self.directory / "runs.jsonl", f"{machine()[0]}, {self.cores} used, {versions()}"
        key = json.dumps({**what, "samples": self.samples, "where": here, "code": code()})
        found = []
        for line in record.read_text().splitlines() if record.exists() else []:
            with contextlib.suppress(ValueError):  # the last one, if it was being written
                entry = json.loads(line)
                found += [entry["trained"]] if entry["what"] == key else []
        trained = Trained(**found[-1]) if found else run()
        if not found:
            with record.open("a") as file:
                file.write(json.dumps({"what": key, "trained": dataclasses.asdict(trained)}) + "\n")
        reused = " (from an earlier run)" if found else ""
        print(f"{what['name']}, seed {what['seed']}: {describe(trained)}{reused}", flush=True)
        return trained

    def train(self, recipe: Recipe, seed: int) -> Trained:
        """Train and evaluate on the same held-out rows, whatever the recipe."""
        what = {**dataclasses.asdict(recipe), "examples": EXAMPLES[recipe.examples], "seed": seed}
        return self.once(what, lambda: self._train(recipe, seed))

    def _train(self, recipe: Recipe, seed: int) -> Trained:
        shards = self.shards[recipe.examples]
        with tempfile.TemporaryDirectory(dir=self.directory) as name:
            out = Path(name)
            began = time.monotonic()
            options = {
                **recipe.options, "data_dir": shards, "output_dir": out / "output", "seed": seed, "device": "cpu",
                "model_config": self.model(recipe.dropout), "ckpt_interval_steps": 0,
            }  # fmt: skip
            if recipe.embeds:
                python("-m", "stages.embed", str(shards), "--hidden-size=256", f"--out={out / 'embedded'}")
                options["word_embeddings"] = out / "embedded" / "embeddings.safetensors"
            python("-m", "trainer", *(f"--{key}={value}" for key, value in options.items()))
            seconds = time.monotonic() - began
            (checkpoint,) = (out / "output" / "checkpoints").glob("ckpt_*")
            python("-m", "stages.merge", str(checkpoint), str(out / "merged"))
            sampled = (f"--max-samples={self.samples}", f"--out={out / 'evaluated'}")
            python("-m", "stages.evaluate", str(out / "merged"), str(self.shards[PLAIN]), *sampled)
            found = json.loads((out / "evaluated" / "evaluation.json").read_text())
        return Trained(seconds, found["masked_lm_loss"], found["masked_lm_accuracy"])

    def train_theirs(self, name: str, seed: int, seconds: float) -> Trained:
        """Hugging Face's Trainer for `seconds`; its learning rate falls with the clock, to 0 at their end."""
        settings = trainers()[name]
        words = (*settings.words, f"--seed={seed}", f"--samples={self.samples}", f"--seconds={seconds}")
        where = (str(self.shards[PLAIN]), str(self.model(settings.dropout)))

        def run() -> Trained:
            found = json.loads(python("-m", "benchmarks.references.hugging_face_mlm", *where, *words).splitlines()[-1])
            return Trained(found["seconds"], found["loss"], found["accuracy"])

        return self.once({"name": name, "options": words, "dropout": settings.dropout, "seed": seed}, run)

    def bytes(self, name: str) -> int:
        return sum(path.stat().st_size for path in self.shards[name].glob("*_training_*.hdf5"))


def code() -> str:
    """A hash of the names and contents of the sources that decide."""
    found = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        content = path.read_bytes()
        found.update(f"{path.relative_to(ROOT)}\n{len(content)}\n".encode() + content)
    return found.hexdigest()


def describe(trained: Trained, *, timed: bool = True) -> str:
    said = f"loss {trained.loss:.3f}, accuracy {100 * trained.accuracy:.1f} %"
    return f"{said}, {trained.seconds:.0f} s" if timed else said


def median(runs: list[Trained]) -> Trained:
    """The median of each figure."""
    return Trained(*(statistics.median(getattr(run, name) for run in runs) for name in ("seconds", "loss", "accuracy")))


def compared(
    what: str, runs: Sequence[tuple[Trained, Trained, Trained]], theirs: Mapping[str, Sequence[Trained]]
) -> Iterator[Result]:
    """The claims on loss and time. `runs`: BERT's recipe, ours short and long, of each seed; `theirs`: Trainer's."""
    base, short, long = (median(list(side)) for side in zip(*runs, strict=True))
    beside = f"{BERT.name} {describe(base)}"
    said = f"{SHORT.name} {describe(short)}"
    sooner = tuple(a.seconds / b.seconds for a, b, _ in runs)
    reached = statistics.median(b.loss - a.loss for a, b, _ in runs)
    yield Result.median(f"{what}: time to BERT's loss", said, beside, sooner, " ×", SOONER)
    yield Result(f"{what}: loss in that time", said, beside, reached, " nats more", at_most=0)
    said = f"{LONG.name} {describe(long)}"
    as_long = tuple(c.seconds / a.seconds for a, _, c in runs)
    yield Result(f"{what}: accuracy in BERT's time", said, beside, 100 * long.accuracy, " %", 100 * ACCURACY)
    yield Result.median(f"{what}: time of that", said, beside, as_long, " ×", at_most=1)
    for name, others in theirs.items():
        ahead = tuple(other.loss - run[1].loss for run, other in zip(runs, others, strict=True))
        titled = f"{what}: loss of Trainer after {SOONER_THAN_TRAINER} × our time"
        said, other = f"{SHORT.name} {describe(short)}", f"{name} {describe(median(list(others)))}"
        yield Result.median(titled, said, other, ahead, " nats more", at_least=0)


def embedded_default(cores: int, seeds: int) -> Iterator[Result]:
    """The claims on the chain that runs without any settings but the seed, from its start to its evaluation."""
    runs, guessing = list[Trained](), list[Trained]()
    for seed in range(1, seeds + 1):
        with tempfile.TemporaryDirectory(prefix="benchmark-") as work:
            began = time.monotonic()
            given = ("--Run-work-dir", work, "--Run-seed", str(seed))
            settings = {"LUIGI_CONFIG_PATH": str(ROOT / "luigi.cfg")}  # not the caller's
            python("-m", "luigi", "--module", "pipeline", "BertPhase2", *given, environment=settings)
            seconds = time.monotonic() - began
            (report,) = Path(work).glob("evaluate-*/evaluation.json")
            found = json.loads(report.read_text())
        runs.append(Trained(seconds, found["masked_lm_loss"], found["masked_lm_accuracy"]))
        guessing.append(Trained(0.0, found["unigram_loss"], found["unigram_accuracy"]))
    in_time = DEFAULT_S if CpuDevice().automatic_precision()[0] == "autocast" else None
    what = f"the embedded default, {cores} cores, {seeds} seeds"
    said = describe(median(runs)), f"by frequency {describe(median(guessing), timed=False)}"
    accuracies = [100 * run.accuracy for run in runs]
    gains = [theirs.loss - ours.loss for ours, theirs in zip(runs, guessing, strict=True)]
    yield Result.median(f"{what}: accuracy", *said, accuracies, " %", 100 * DEFAULT_ACCURACY)
    yield Result.median(f"{what}: loss", *said, gains, " nats less", DEFAULT_GAIN)
    yield Result.median(f"{what}: time of the chain", *said, [run.seconds for run in runs], " s", at_most=in_time)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--seeds", type=int, default=3, help="trainings of each recipe")
    p.add_argument("--samples", type=int, default=2000, help="held-out rows")
    p.add_argument("--cores", type=int, default=2, help="cores for each side, one thread per core")
    p.add_argument("--only-default", action="store_true", help="only the embedded default: 5 minutes per seed")
    p.add_argument("--no-trainer", action="store_true", help="leave out Hugging Face's Trainer")
    p.add_argument(
        "--work", type=Path, help="folder where examples and finished trainings stay; default: a temporary one"
    )
    args = p.parse_args()
    with on_cores(args.cores):
        for result in embedded_default(args.cores, args.seeds):
            say(result)
    if args.only_default:
        return
    if not TEXT.is_dir():
        print(f"left out: {TEXT} was not found; BERT_SHARED_DIR names the folder of sample data")
        return
    seeds = range(1, args.seeds + 1)
    runs: list[tuple[Trained, Trained, Trained]] = []
    theirs: dict[str, list[Trained]] = {} if args.no_trainer else {name: [] for name in trainers()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_cores(args.cores))
        work = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-")))
        data = WikiText(work, args.samples, args.cores)
        data.make()
        for seed in seeds:
            runs.append((data.train(BERT, seed), data.train(SHORT, seed), data.train(LONG, seed)))
            for name, others in theirs.items():
                others.append(data.train_theirs(name, seed, SOONER_THAN_TRAINER * runs[-1][1].seconds))
    what = f"WikiText-2, mini, {args.cores} cores, {args.seeds} seeds"
    for result in compared(what, runs, theirs):
        say(result)
    disk = data.bytes(BERTS) / data.bytes(OURS)
    said, other = (f"{name} {data.bytes(name) / 1e6:.1f} MB" for name in (OURS, BERTS))
    say(Result("WikiText-2, phase 1: disk of the examples", said, other, disk, " × less", LESS_DISK))


if __name__ == "__main__":
    main()
