"""`python -m tests.helpers.known_peak …`: the trainer on a CPU whose peak is set to `PEAK_FLOPS_PER_S`."""

from __future__ import annotations

import sys

from trainer.__main__ import main
from trainer.devices.cpu import CpuDevice

PEAK_FLOPS_PER_S = 1e12

if __name__ == "__main__":
    CpuDevice.peak_flops_per_s = lambda device, precision: PEAK_FLOPS_PER_S  # type: ignore[method-assign]
    sys.exit(main())
