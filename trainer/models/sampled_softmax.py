"""Sampled softmax: a masked-LM loss over part of the vocabulary (Jean et al. 2015, arXiv:1412.2007, section 3).

A small model with a large vocabulary spends half of its training time on the products with all word embeddings.

V: vocabulary, M: masked positions, N: words to draw, K = min(V, M + N): candidates. Where labels repeat, more than N
are drawn: the number of candidates is fixed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sampled_words(weight: Tensor, bias: Tensor, labels: Tensor, drawn: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of the decoder that a micro-batch's loss is over, instead of `weight` (V, H), `bias` (V,) and `labels`
    (M,): weights (K, H), biases (K,), and labels (M,) that are numbers of those rows."""
    ids, offsets, places = draw_candidates(labels, len(weight), drawn)
    return weight.index_select(0, ids), bias.index_select(0, ids) + offsets.to(bias.dtype), places


def draw_candidates(labels: Tensor, vocab_size: int, drawn: int) -> tuple[Tensor, Tensor, Tensor]:
    """All labels, and others drawn without replacement, each equally likely.

    `labels` (M,): ids; negative: none. Returns the candidates' ids (K,), ascending; what to add to their logits (K,),
    fp32; and the labels (M,) as numbers of candidates, negative where they were.

    A word that was drawn stands for the (V - L) / (K - L) words that could have been (L: different labels): with the
    logarithm of that added to its logit, the sum of exponentials has the expectation of the whole vocabulary's. Shapes
    depend on those of the arguments alone, and nothing is read from the device.
    """
    known = labels.clamp(min=0)
    scores = torch.rand(vocab_size, device=labels.device).index_fill(0, known, 2.0)  # more than any drawn number
    # + 0: torch_xla's index_select aborts on what sort itself returns.
    ids = scores.topk(min(vocab_size, len(labels) + drawn), sorted=False).indices.sort().values + 0
    is_label = scores[ids] > 1
    different = is_label.sum()
    stands_for = (vocab_size - different) / (len(ids) - different)
    numbers = torch.arange(len(ids), device=labels.device)
    places = torch.zeros(vocab_size, dtype=torch.int64, device=labels.device).scatter(0, ids, numbers)
    return ids, torch.where(is_label, 0.0, stands_for.log()), torch.where(labels < 0, labels, places[known])
