"""Phase 1 starts from word embeddings made from the text, through the real luigi."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from tests.helpers.chain import Chain
from tests.helpers.support import metrics


def test_phase_1_starts_from_the_text_and_random_embeddings_are_another_training(tmp_path: Path) -> None:
    """The output bias alone lowers the first loss from that of a uniform guess to that of the word frequencies."""
    chain = Chain(tmp_path)
    settings = chain.config.read_text().replace("word_embeddings = random", "word_embeddings = cooccurrence")
    chain.config.write_text(settings.replace("initial_attention = random", "initial_attention = neighbours"))
    chain.run("Pretrain", "--phase", "1")
    embedded, informed = chain.latest("embed_words"), chain.latest("pretrain-phase1")
    words = load_file(embedded / "embeddings.safetensors")["bert.embeddings.word_embeddings.weight"]
    assert words.shape[1] == 32
    assert words.any(dim=1).sum() >= 19  # the text's words, and its full stop
    assert (
        chain.manifest("pretrain-phase1")["upstream"]["word_embeddings"] == chain.manifest("embed_words")["fingerprint"]
    )  # type: ignore[index]
    assert chain.status()["embed_words"]["state"] == "complete"
    chain.run("Pretrain", "--phase", "1", "--Phase1-word-embeddings", "random")
    plain = chain.latest("pretrain-phase1")
    assert plain != informed
    assert embedded.exists()
    first = [next(iter(metrics(directory)))["masked_lm_loss"] for directory in (informed, plain)]
    assert first[0] < first[1] - 0.5, first
    made = chain.directories()
    chain.run("Pretrain", "--phase", "1")
    assert chain.directories() == made
