"""torch.compile of the whole model on the CPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.support import MODEL, synthetic_rows
from tests.trainer.models.test_bert import batch_of
from trainer.devices.inductor import Inductor
from trainer.models.bert import BertForPreTraining
from trainer.models.config import ModelConfig


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_compiled_gradients_have_the_same_bits_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Else a resumed run would not end with the same bytes. With Inductor's own gradient of embeddings two of three
    runs on two threads differed from the first."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    torch.set_num_threads(2)  # one has one order; the number is compiled in
    model = BertForPreTraining(ModelConfig(**MODEL))
    model.initialise(1)
    call = Inductor(None, needs_cxx=True).compile(model)
    batch = batch_of(synthetic_rows(24, seq_len=32, max_pred_len=5, seed=3), static=True)
    found = []
    for _ in range(8):
        torch.manual_seed(5)
        found.append(torch.autograd.grad(sum(call(batch)), list(model.parameters())))
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))
