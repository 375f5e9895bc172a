"""torch.compile of the whole model on the CPU."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import UserError
from tests.helpers.support import MODEL, synthetic_rows
from tests.trainer.models.test_bert import batch_of
from trainer.devices.inductor import Inductor
from trainer.models.bert import BertForPreTraining
from trainer.models.config import ModelConfig


@pytest.mark.parametrize(("for_cpu", "variable", "missing"), [(True, "CXX", "C\\+\\+"), (False, "CC", "C")])
def test_a_missing_compiler_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, for_cpu: bool, variable: str, missing: str
) -> None:
    """On GPUs, too: Triton compiles its launchers with one."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(UserError, match=f"compile needs a {missing} compiler; install g"):
        Inductor(None, for_cpu=for_cpu)
    (tmp_path / "mine").touch(mode=0o755)
    monkeypatch.setenv(variable, str(tmp_path / "mine"))
    Inductor(None, for_cpu=for_cpu)


def test_nothing_is_chosen_by_a_stopwatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a run resumed on another machine could end with different bytes."""
    from torch._inductor import compile_fx, config

    def seen(graph: Any, inputs: Any, *, config_patches: dict[str, Any], decompositions: Any) -> Any:
        with config.patch(config_patches):  # refuses names that it does not know
            chosen = config.shape_padding, config.triton.autotune_pointwise, config.dynamic_scale_rblock
        return chosen, getattr(config, "deterministic", True) or config_patches["deterministic"]

    monkeypatch.setattr(compile_fx, "compile_fx", seen)
    graph: Any = None
    found: Any = Inductor(None, for_cpu=shutil.which("g++") is not None).lower(graph, [])
    assert found == ((False, False, False), True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # torch's own warnings while it compiles
def test_compiled_gradients_are_right_and_have_the_same_bits_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Otherwise a resumed run would not end with the same bytes. With Inductor's own gradient of embeddings, two of
    three runs on two threads differed from the first."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    torch.set_num_threads(2)  # one thread has only one order; the number is compiled in
    model = BertForPreTraining(ModelConfig(**MODEL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    model.initialise(1)
    parameters = list(model.parameters())
    call = Inductor(None, for_cpu=True).compile(model)
    batch = batch_of(synthetic_rows(24, seq_len=32, max_pred_len=5, seed=3), static=True)
    found = [torch.autograd.grad(sum(call(batch)), parameters) for _ in range(8)]
    for again in found[1:]:
        assert all(map(torch.equal, found[0], again))
    # Fused kernels sum in another order: some ten roundings of fp32 (6e-8) of each gradient's largest element. Those of
    # the keys' biases are 0 but for rounding, as softmax ignores what is added to a row.
    plain = torch.autograd.grad(sum(model(batch)), parameters)
    rounding = 1e-7 * max(float(gradient.abs().max()) for gradient in plain)
    for ours, theirs in zip(found[0], plain, strict=True):
        assert (ours - theirs).abs().max() <= max(rounding, 1e-6 * float(theirs.abs().max()))
