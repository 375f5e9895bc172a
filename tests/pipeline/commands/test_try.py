"""`python -m pipeline try`: what Hugging Face's own pipeline says, and one line for what cannot be answered."""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path

import pytest

from common.errors import UserError
from stages.predict import load, predict
from tests.helpers.chain import Chain, finished_chain
from tests.helpers.support import assert_one_line_error, command


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return finished_chain(tmp_path_factory)


@pytest.fixture(scope="module")
def loaded(chain: Chain):  # type: ignore[no-untyped-def]
    pytest.importorskip("transformers")
    model = chain.latest("merge_shards") / "model"
    return load(model, model)


@pytest.mark.slow
def test_the_command_prints_five_fillings_and_the_next_sentence(chain: Chain) -> None:
    done = chain.ask("try", "--Phase1-lr", "0.5", "The [MASK] is here.", "A child and a [MASK].")
    lines = done.stdout.splitlines()
    assert lines[0] == "The [MASK] is here. / A child and a [MASK]."
    fillings = [line for line in lines if re.fullmatch(r" +\d+\.\d\d%  \S+", line)]
    assert len(fillings) == 10
    shares = re.fullmatch(r"next sentence: ([\d.]+)%, not: ([\d.]+)%", lines[-1])
    assert shares is not None
    assert float(shares[1]) + float(shares[2]) == pytest.approx(100, abs=0.02)
    assert str(chain.latest("merge_shards").name) in done.stderr


def test_the_fillings_are_those_of_hugging_faces_pipeline(loaded) -> None:  # type: ignore[no-untyped-def]
    import transformers

    model, tokenizer = loaded
    masked = transformers.BertForMaskedLM(model.config).eval()
    masked.bert.load_state_dict(model.bert.state_dict(), strict=False)  # it has no pooler
    masked.cls.predictions.load_state_dict(model.cls.predictions.state_dict())
    theirs = transformers.pipeline("fill-mask", model=masked, tokenizer=tokenizer, device="cpu")
    for text in ("The [MASK] is here.", "People [MASK] the school and the country."):
        (ours,) = predict(model, tokenizer, [text]).fillings
        expected = theirs(text, top_k=5)
        assert [piece for piece, _ in ours] == [one["token_str"] for one in expected]
        assert [share for _, share in ours] == pytest.approx([one["score"] for one in expected], rel=1e-5)


def test_the_next_sentence_score_is_that_of_hugging_faces_own_head(loaded) -> None:  # type: ignore[no-untyped-def]
    import torch
    import transformers

    model, tokenizer = loaded
    head = transformers.BertForNextSentencePrediction(model.config).eval()
    head.bert.load_state_dict(model.bert.state_dict())
    head.cls.seq_relationship.load_state_dict(model.cls.seq_relationship.state_dict())
    texts = ["The child is here.", "A woman and a man."]
    with torch.inference_mode():
        loss = head(**tokenizer(*texts, return_tensors="pt"), labels=torch.tensor([0])).loss
    said = predict(model, tokenizer, texts)
    assert said.fillings == []
    assert said.follows == pytest.approx(torch.exp(-loss).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        (["no mask here"], r"no \[MASK\] in the text"),
        ([" "], "a text is empty"),
        (["word " * 63 + "[MASK]"], "too long: .* tokens, 2 of them special, and the model takes 64"),
        (["word " * 40, "word " * 40], "3 of them special"),
    ],
    ids=("no mask", "empty", "long", "long pair"),
)
def test_what_has_no_answer_is_one_line(loaded, texts: list[str], line: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=line):
        predict(*loaded, texts)


def test_without_a_model_it_says_how_to_get_one(chain: Chain, tmp_path: Path) -> None:
    env = {"LUIGI_CONFIG_PATH": str(chain.config)}
    done = command("-m", "pipeline", "try", "a [MASK]", "--Run-work-dir", str(tmp_path), env=env)
    assert_one_line_error(done, "no merged model in", "BertPhase2", "--model", status=35)
    done = command("-m", "pipeline", "try", "a [MASK]", "--model", str(tmp_path), env=env)
    assert_one_line_error(done, "has no config.json")


def test_what_hugging_faces_trainer_leaves_beside_a_model_is_not_read(chain: Chain, tmp_path: Path) -> None:
    source = chain.latest("merge_shards") / "model"
    for path in source.iterdir():
        shutil.copyfile(path, tmp_path / path.name)
    (tmp_path / "training_args.bin").write_bytes(pickle.dumps(print))
    load(tmp_path, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(print))
    load(tmp_path, tmp_path)  # from_pretrained prefers safetensors, too


def test_a_model_that_is_not_whole_is_refused(chain: Chain, tmp_path: Path) -> None:
    source = chain.latest("merge_shards") / "model"
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be loaded"):
        load(tmp_path, source)
    with pytest.raises(UserError, match="has no tokenizer"):
        load(source, tmp_path)
