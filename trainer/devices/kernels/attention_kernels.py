"""The Triton kernels of `attention`, each program for one head and one part of a sequence.

T: tokens of all sequences, A: heads, D: head size, DP: the same, padded to a power of 2, H = A · D, R: sequences.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trainer.devices.kernels.rows import ROUNDS

#: What differs between micro-batches: the kernels are not compiled again for it.
_NUMBERS = ["T", "words"]


@triton.jit
def _compared(place, below, limit: tl.constexpr):
    """For each bit, whether a number is below a limit, with one place more: `below` says so of the places before."""
    others = ~place.to(tl.int32, bitcast=True)
    return (others | below) if limit else (others & below)


@triton.jit(do_not_specialize=_NUMBERS)
def draw_kept(seed_of, lengths, kept, T, drop: tl.constexpr, BLOCK: tl.constexpr):
    """32 decisions at a time: bit i of word (head, j, token) says whether the token's weight of its sequence's token
    32j + i is kept. Eight random words give each bit a number below 256, which is compared with `drop`, place by place,
    for all 32 at once."""
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j, head = tl.program_id(1), tl.program_id(2)
    inside = tokens < T
    needed = tl.load(lengths + tokens, mask=inside, other=0) > j * 32
    if tl.max(needed.to(tl.int32)) > 0:
        place = (head * tl.num_programs(1) + j) * T + tokens
        seed = tl.load(seed_of)
        a, b, c, d = tl.randint4x(seed, place * 2, n_rounds=ROUNDS)
        e, f, g, h = tl.randint4x(seed, place * 2 + 1, n_rounds=ROUNDS)
        below = tl.zeros([BLOCK], tl.int32)
        below = _compared(a, below, drop & 1)
        below = _compared(b, below, drop & 2)
        below = _compared(c, below, drop & 4)
        below = _compared(d, below, drop & 8)
        below = _compared(e, below, drop & 16)
        below = _compared(f, below, drop & 32)
        below = _compared(g, below, drop & 64)
        below = _compared(h, below, drop & 128)
        tl.store(kept + place, ~below, mask=inside)


@triton.jit
def _words(kept, head, start, tokens, inside, T, words, KEYS: tl.constexpr):
    """The words of each token for the `KEYS` keys, 32 or 64, from `start` on; of 32 the same one twice."""
    j = start // 32
    place = kept + (head * words + j) * T + tokens
    first = tl.load(place, mask=inside & (j < words), other=0)
    second = first
    if KEYS > 32:
        second = tl.load(place + T, mask=inside & (j + 1 < words), other=0)
    return first, second


@triton.jit
def _decisions(first, second, keys, KEYS: tl.constexpr):
    """Whether each token's weights of `KEYS` keys, which count from 0, are kept. The words are a column and the keys a
    row, or the other way round."""
    word = first
    if KEYS > 32:
        word = tl.where(keys < 32, first, second)
    return (word & (1 << (keys % 32))) != 0


@triton.jit(do_not_specialize=_NUMBERS)
def forward(
    qkv, bounds, kept, out, log_sums, T, words, score_scale, kept_scale,
    H: tl.constexpr, D: tl.constexpr, DROPS: tl.constexpr, DP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The results of `QUERIES` tokens, and the base-2 logarithms of their sums of exponentials."""
    block, sequence, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(bounds + sequence)
    length = tl.load(bounds + sequence + 1) - begin
    if block * QUERIES < length:
        rows, columns, d = block * QUERIES + tl.arange(0, QUERIES), tl.arange(0, KEYS), tl.arange(0, DP)
        inside = rows < length
        mask = inside[:, None] & (d < D)[None, :]
        first = qkv + begin.to(tl.int64) * (3 * H) + head * D
        q = tl.load(first + rows[:, None] * (3 * H) + d[None, :], mask=mask, other=0.0)
        most = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        found = tl.zeros([QUERIES, DP], tl.float32)
        for start in range(0, length, KEYS):
            keys = start + columns
            places = keys[:, None] * (3 * H) + d[None, :]
            kv_mask = (keys < length)[:, None] & (d < D)[None, :]
            k = tl.load(first + H + places, mask=kv_mask, other=0.0)
            v = tl.load(first + 2 * H + places, mask=kv_mask, other=0.0)
            if DROPS:  # loaded before the product, which takes as long as loading
                word, next_word = _words(kept, head, start, begin + rows, inside, T, words, KEYS)
            beyond = tl.where(keys < length, 0.0, float("-inf"))
            scores = tl.dot(q, tl.trans(k)) * score_scale + beyond[None, :]
            larger = tl.maximum(most, tl.max(scores, 1))
            weights = tl.exp2(scores - larger[:, None])
            shrink = tl.exp2(most - larger)
            total = total * shrink + tl.sum(weights, 1)
            if DROPS:
                keep = _decisions(word[:, None], next_word[:, None], columns[None, :], KEYS)
                weights = tl.where(keep, weights, 0.0)
            found = tl.dot(weights.to(v.dtype), v, found * shrink[:, None])
            most = larger
        found = found * (kept_scale / total)[:, None]
        tl.store(out + (begin + rows).to(tl.int64)[:, None] * H + head * D + d[None, :], found, mask=mask)
        tl.store(log_sums + head * T + begin + rows, most + tl.log2(total), mask=inside)


@triton.jit(do_not_specialize=_NUMBERS)
def backward_queries(
    gradient, qkv, out, bounds, kept, log_sums, along, d_qkv, parts, T, words, score_scale, kept_scale, scale,
    H: tl.constexpr, D: tl.constexpr, DROPS: tl.constexpr, DP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The gradients of `QUERIES` queries. `along`: what is subtracted from the gradient of each weight, the result's
    product with its gradient (Dao et al. 2022, arXiv:2205.14135, appendix B.4), divided by `kept_scale`, which `scale`
    contains. `parts` (blocks · R, H): sums of the gradients over these tokens."""
    block, sequence, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(bounds + sequence)
    length = tl.load(bounds + sequence + 1) - begin
    d = tl.arange(0, DP)
    d_q = tl.zeros([QUERIES, DP], tl.float32)
    if block * QUERIES < length:
        rows, columns = block * QUERIES + tl.arange(0, QUERIES), tl.arange(0, KEYS)
        inside = rows < length
        mask = inside[:, None] & (d < D)[None, :]
        first = qkv + begin.to(tl.int64) * (3 * H) + head * D
        result = (begin + rows).to(tl.int64)[:, None] * H + head * D + d[None, :]
        q = tl.load(first + rows[:, None] * (3 * H) + d[None, :], mask=mask, other=0.0)
        given = tl.load(gradient + result, mask=mask, other=0.0)
        own = tl.sum(tl.load(out + result, mask=mask, other=0.0).to(tl.float32) * given.to(tl.float32), 1) / kept_scale
        tl.store(along + head * T + begin + rows, own, mask=inside)
        log_sum = tl.load(log_sums + head * T + begin + rows, mask=inside, other=0.0)
        for start in range(0, length, KEYS):
            keys = start + columns
            places = keys[:, None] * (3 * H) + d[None, :]
            kv_mask = (keys < length)[:, None] & (d < D)[None, :]
            k = tl.load(first + H + places, mask=kv_mask, other=0.0)
            v = tl.load(first + 2 * H + places, mask=kv_mask, other=0.0)
            if DROPS:
                word, next_word = _words(kept, head, start, begin + rows, inside, T, words, KEYS)
            scores = tl.dot(q, tl.trans(k)) * score_scale
            weights = tl.where((keys < length)[None, :], tl.exp2(scores - log_sum[:, None]), 0.0)
            d_weights = tl.dot(given, tl.trans(v))
            if DROPS:
                keep = _decisions(word[:, None], next_word[:, None], columns[None, :], KEYS)
                d_weights = tl.where(keep, d_weights, 0.0)
            d_q = tl.dot((weights * (d_weights - own[:, None])).to(k.dtype), k, d_q)
        d_q *= scale
        tl.store(d_qkv + (begin + rows).to(tl.int64)[:, None] * (3 * H) + head * D + d[None, :], d_q, mask=mask)
    part = parts + (sequence * tl.num_programs(0) + block) * H + head * D + d
    tl.store(part, tl.sum(d_q, 0), mask=d < D)


@triton.jit(do_not_specialize=_NUMBERS)
def backward_keys(
    gradient, qkv, bounds, kept, log_sums, along, d_qkv, parts, T, words, score_scale, kept_scale, scale,
    H: tl.constexpr, D: tl.constexpr, DROPS: tl.constexpr, DP: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The gradients of `KEYS` keys and values; the arguments are those of `backward_queries`, `parts` (blocks · R, 2H).
    Scores are (keys, queries) here, as both products that sum over the queries take them."""
    block, sequence, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(bounds + sequence)
    length = tl.load(bounds + sequence + 1) - begin
    d = tl.arange(0, DP)
    d_k, d_v = tl.zeros([KEYS, DP], tl.float32), tl.zeros([KEYS, DP], tl.float32)
    if block * KEYS < length:
        columns = tl.arange(0, KEYS)
        keys = block * KEYS + columns
        mask = (keys < length)[:, None] & (d < D)[None, :]
        first = qkv + begin.to(tl.int64) * (3 * H) + head * D
        places = keys[:, None] * (3 * H) + d[None, :]
        k = tl.load(first + H + places, mask=mask, other=0.0)
        v = tl.load(first + 2 * H + places, mask=mask, other=0.0)
        for start in range(0, length, QUERIES):
            rows = start + tl.arange(0, QUERIES)
            inside = rows < length
            row_mask = inside[:, None] & (d < D)[None, :]
            q = tl.load(first + rows[:, None] * (3 * H) + d[None, :], mask=row_mask, other=0.0)
            result = (begin + rows).to(tl.int64)[:, None] * H + head * D + d[None, :]
            given = tl.load(gradient + result, mask=row_mask, other=0.0)
            log_sum = tl.load(log_sums + head * T + begin + rows, mask=inside, other=0.0)
            own = tl.load(along + head * T + begin + rows, mask=inside, other=0.0)
            if DROPS:
                word, next_word = _words(kept, head, block * KEYS, begin + rows, inside, T, words, KEYS)
            scores = tl.dot(k, tl.trans(q)) * score_scale
            weights = tl.exp2(scores - log_sum[None, :])
            d_weights = tl.dot(v, tl.trans(given))
            used = weights
            if DROPS:
                keep = _decisions(word[None, :], next_word[None, :], columns[:, None], KEYS)
                used = tl.where(keep, weights, 0.0)
                d_weights = tl.where(keep, d_weights, 0.0)
            d_v = tl.dot(used.to(v.dtype), given, d_v)
            d_k = tl.dot((weights * (d_weights - own[None, :])).to(q.dtype), q, d_k)
        # Keys beyond the sequence have weights, too: only here are they without effect.
        d_k, d_v = tl.where(mask, d_k * scale, 0.0), tl.where(mask, d_v * kept_scale, 0.0)
        here = d_qkv + begin.to(tl.int64) * (3 * H) + head * D + places
        tl.store(here + H, d_k, mask=mask)
        tl.store(here + 2 * H, d_v, mask=mask)
    part = parts + (sequence * tl.num_programs(0) + block) * (2 * H) + head * D + d
    tl.store(part, tl.sum(d_k, 0), mask=d < D)
    tl.store(part + H, tl.sum(d_v, 0), mask=d < D)
