"""Threads other than the one that trains."""

from __future__ import annotations

import ctypes

import torch


def use_one_core() -> None:
    """Have torch's operators in the calling thread, which is not the one that trains, use no further threads.

    GNU's OpenMP has separate threads for each thread that asks for some. Once there are more of them than cores, all
    sleep whenever they wait for each other, instead of spinning for some milliseconds first (libgomp,
    `gomp_throttled_spin_count_var`), for as long as the thread lives: one `zero_()` in a thread that writes
    checkpoints made every step take 1.3 to 1.5 times as long (docs/decisions.md). Does nothing without OpenMP.
    """
    set_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if set_threads is not None:
        torch.get_num_threads()  # torch would otherwise read it at the first operator, and set it again
        set_threads(1)
