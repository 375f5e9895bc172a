"""What the Hugging Face Hub files a model under: the YAML at the beginning of the model card."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from stages.view.run import Run

if TYPE_CHECKING:
    from huggingface_hub.repocard_data import EvalResult, ModelCardData

_TASK, _TASK_NAME = "fill-mask", "Masked Language Modeling"
#: Files of public text, by name: their data set on the Hub, and their language ('': the pattern's group).
_PUBLIC = (
    (re.compile(r"([a-z]{2,3}|simple)wiki-.*pages-articles.*\.xml.*"), "wikimedia/wikipedia", ""),
    (re.compile(r"wikitext-.*|wiki\.(?:train|valid|test)\.(?:tokens|raw)"), "Salesforce/wikitext", "en"),
)
_ON_THE_HUB = re.compile(r"https?://huggingface\.co/datasets/([\w.-]+/[\w.-]+).*")
#: A word of [corpus] source, which is quoted as in a shell.
_WORD = re.compile(r"\"[^\"]*\"|'[^']*'|\S+")
#: Counts of an evaluation: metric on the Hub, name.
_MEASURED = {
    "masked_lm_accuracy": ("accuracy", "masked-LM accuracy"),
    "masked_lm_loss": ("loss", "masked-LM loss"),
    "next_sentence_accuracy": ("accuracy", "next-sentence accuracy"),
    "next_sentence_loss": ("loss", "next-sentence loss"),
}


def metadata(run: Run, name: str) -> ModelCardData:
    """For the model `name`. What [card] says overrides what the text's name tells; unknown keys are left out."""
    from huggingface_hub.repocard_data import ModelCardData

    given = run.settings.get("card", {})
    known = list(_known(run.settings))
    datasets = given.get("datasets", "").split() or [name for name, _ in known if name]
    evaluation = run.stage("evaluate")
    # Of a subset of the pairs, the accuracy is not BLiMP's.
    is_subset = evaluation is not None and evaluation.record.get("parameters", {}).get("blimp_samples")
    results = list(_results(run.counts("evaluate"), with_blimp=not is_subset))
    return ModelCardData(
        license=_few(given.get("license", "").split()),
        language=_few(given.get("language", "").split() or [one for _, one in known if one]),
        library_name="transformers",
        pipeline_tag=_TASK,
        tags=["bert", "pretraining"],
        datasets=list(dict.fromkeys(datasets)) or None,
        model_name=name if results else None,
        eval_results=results or None,
    )


def words(source: str) -> list[str]:
    """The words of a setting that lists files, without their quotes."""
    return [word.strip("\"'") for word in _WORD.findall(source)]


def _known(settings: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """(data set on the Hub or '', language or '') of each source that is public text."""
    corpus, dataset = settings.get("corpus", {}), settings.get("dataset", {})
    ready = [url for url in (dataset.get("phase1_url", ""), dataset.get("phase2_url", "")) if url]
    for word in ready or words(corpus.get("source", "")):
        if word == "builtin":
            yield "", "en"
        if on_the_hub := _ON_THE_HUB.fullmatch(word):
            yield on_the_hub[1], ""
        for pattern, name, language in _PUBLIC:
            if found := pattern.fullmatch(word.rpartition("/")[2]):
                yield name, language or found[1].replace("simple", "en")


def _results(counts: Mapping[str, Any], *, with_blimp: bool) -> Iterator[EvalResult]:
    from huggingface_hub.repocard_data import EvalResult

    for count, (metric, title) in _MEASURED.items() if counts.get("samples") else ():
        if count in counts:
            yield EvalResult(
                task_type=_TASK, task_name=_TASK_NAME, dataset_type="held-out", dataset_name="held-out examples",
                metric_type=metric, metric_name=title, metric_value=float(f"{counts[count]:.6g}"),
            )  # fmt: skip
    if with_blimp and "blimp_accuracy" in counts:
        yield EvalResult(
            task_type=_TASK, task_name=_TASK_NAME, dataset_type="nyu-mll/blimp", dataset_name="BLiMP",
            metric_type="accuracy", metric_name="accuracy", metric_value=float(f"{counts['blimp_accuracy']:.6g}"),
        )  # fmt: skip


def _few(values: list[str]) -> Any:
    """As the Hub writes one or several values; None without any."""
    unique = list(dict.fromkeys(values))
    return unique[0] if len(unique) == 1 else unique or None
