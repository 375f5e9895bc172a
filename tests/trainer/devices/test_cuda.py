"""What is known about NVIDIA's GPUs without having one."""

from __future__ import annotations

import pytest
import torch

from trainer.devices.cuda import CudaDevice, bf16_peak


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        # Names as torch reports them; dense bf16 rates from NVIDIA's data sheets.
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA A10G", 70),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", None),  # not 989, the H200's: no data sheet at hand
        # Other GPUs whose names contain one of these.
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A1000", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("Tesla T4", None),
    ],
)
def test_a_peak_is_that_of_the_gpu_by_its_whole_name(name: str, teraflops: int | None) -> None:
    assert bf16_peak(name) == (None if teraflops is None else teraflops * 1e12)


def test_a_copy_for_a_checkpoint_is_complete_when_it_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies do not wait for the GPU; the thread that writes them knows nothing of it."""
    done: list[str] = []

    class Copy:
        def copy_(self, source: str, *, non_blocking: bool) -> None:
            assert non_blocking
            done.append(source)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append(str(device)))
    device = CudaDevice.__new__(CudaDevice)
    device.torch_device = torch.device("cuda", 1)
    device.copy_to_host(["a", "b"], [Copy(), Copy()])  # type: ignore[list-item]
    assert done == ["a", "b", "cuda:1"]
