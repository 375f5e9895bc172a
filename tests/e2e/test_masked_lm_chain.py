"""The whole chain without next-sentence prediction, through the real luigi."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.helpers.chain import STAGES, Chain
from tests.helpers.support import assert_one_line_error, command, metrics

OFF = "\n[dataset]\nnext_sentence = false\n"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Chain, str]:
    """A chain that has run to its end, and what it printed. Phase 2 is packed."""
    chain = Chain(tmp_path_factory.mktemp("chain"))
    chain.config.write_text(chain.config.read_text().replace("[dataset]\n", OFF))
    return chain, chain.run("BertPhase2").stderr


@pytest.mark.slow
def test_the_merged_model_loads_as_bert_for_masked_lm_and_gives_the_recorded_scores(ran: tuple[Chain, str]) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    chain, _ = ran
    directory = chain.latest("merge_shards") / "model"
    model, info = transformers.BertForMaskedLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    assert type(transformers.AutoModelForMaskedLM.from_pretrained(directory)) is transformers.BertForMaskedLM
    losses, right, masked = 0.0, 0, 0
    for path in sorted(chain.latest("shard_dataset-phase2").glob("*_test_*.hdf5")):
        with h5py.File(path) as file:
            assert "next_sentence_labels" not in file
            data = {key: torch.from_numpy(file[key][:].astype(np.int64)) for key in file}
        labels = torch.full_like(data["input_ids"], -100)
        row, entry = data["masked_lm_positions"].nonzero(as_tuple=True)
        labels[row, data["masked_lm_positions"][row, entry]] = data["masked_lm_ids"][row, entry]
        with torch.inference_mode():
            logits = model.eval()(data["input_ids"], attention_mask=data["input_mask"]).logits
        chosen = labels >= 0
        losses += torch.nn.functional.cross_entropy(logits[chosen], labels[chosen], reduction="sum").item()
        right += int((logits[chosen].argmax(-1) == labels[chosen]).sum())
        masked += int(chosen.sum())
    counts = json.loads((chain.latest("evaluate") / "evaluation.json").read_text())
    # fp32 on both sides, with different kernels.
    assert counts["masked_lm_loss"] == pytest.approx(losses / masked, rel=1e-4)
    assert counts["masked_lm_accuracy"] == pytest.approx(right / masked)
    assert not [name for name in counts if "next_sentence" in name]


def test_no_view_shows_next_sentences(ran: tuple[Chain, str]) -> None:
    chain, said = ran
    assert "masked-LM accuracy" in said
    card = (chain.latest("merge_shards") / "model" / "README.md").read_text()
    page = (chain.latest("report") / "report.html").read_text()
    assert "A `BertForMaskedLM`" in card
    assert "from transformers import BertForMaskedLM" in card
    # The setting itself is in the tables of settings.
    for text in (said, card, page):
        assert "ext-sentence" not in text
        assert "nan" not in text.split("## Settings")[0].lower().replace("nanos", "")
    for phase in (1, 2):
        assert all(
            record["loss"] == record["masked_lm_loss"] for record in metrics(chain.latest(f"pretrain-phase{phase}"))
        )


@pytest.mark.slow
def test_it_is_complete_and_predicts(ran: tuple[Chain, str]) -> None:
    chain, _ = ran
    assert {row["state"] for row in chain.status().values()} == {"complete"}
    assert set(chain.status()) == set(STAGES)
    assert len(chain.ask("try", "The [MASK] is here.").stdout.splitlines()) == 6
    done = command("-m", "pipeline", "try", "A man.", "A [MASK].", env={"LUIGI_CONFIG_PATH": str(chain.config)})
    assert_one_line_error(done, "two texts were given", "without next-sentence prediction", "give one with [MASK]")


@pytest.mark.slow
@pytest.mark.usefixtures("torch_xla")
def test_on_xla_it_compiles_only_what_precompile_listed(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.config.write_text(chain.config.read_text().replace("[dataset]\n", OFF))
    assert "warning: graph" not in chain.run("BertPhase2", "--Cluster-device", "xla").stderr
    for phase in (1, 2):
        assert chain.manifest(f"precompile-phase{phase}")["counts"] == {"graphs": 2}
        assert metrics(chain.latest(f"pretrain-phase{phase}"))[-1]["compiled_graphs"] == 2
