"""Whether numbers that should be independent depart from independence by more than chance allows."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

#: The probability that a correct program fails one of this module's comparisons. The tests' seeds are fixed, so it
#: either always fails or never does.
FALSE_ALARM = 1e-6

Floats = NDArray[np.float64]


def bound(variance: ArrayLike, unit: float, comparisons: int) -> Floats:
    """The bound below which the absolute values of `comparisons` sums of independent terms of mean 0 all stay, except
    with probability `FALSE_ALARM`, by Bernstein's inequality.

    `variance`: of the sum; `unit`: each term z has E|z|ᵏ ≤ k!/2 · unitᵏ⁻² · E z², as any term with |z| ≤ unit does and,
    with unit 1, the product of two standard normal numbers.
    """
    nats = math.log(2 * comparisons / FALSE_ALARM)
    return unit * nats + np.sqrt((unit * nats) ** 2 + 2 * nats * np.asarray(variance, np.float64))


def assert_uncorrelated(rows: ArrayLike, variances: ArrayLike = 1.0, *, names: list[str]) -> None:
    """No two of `rows` (K, n) are correlated, nor are all pairs slightly. The values have mean 0 and the known
    `variances`; their products have `unit` 1 (see `bound`)."""
    x = np.asarray(rows, np.float64)
    v = np.broadcast_to(np.asarray(variances, np.float64), x.shape)
    first, second = np.triu_indices(len(x), 1)
    sums, expected = (x @ x.T)[first, second], (v @ v.T)[first, second]
    excess = np.abs(sums) / bound(expected, 1.0, len(sums))
    worst = int(excess.argmax())
    assert excess[worst] < 1, (
        f"{names[first[worst]]} and {names[second[worst]]}: correlation {sums[worst] / expected[worst]:.3f}, "
        f"{abs(sums[worst]) / math.sqrt(expected[worst]):.1f} standard errors in {len(sums)} pairs"
    )
    # Each squared z has mean 1 and a variance of nearly 2. Six standard errors: exceeded once in 10⁹.
    squares = float(np.mean(sums**2 / expected))
    assert abs(squares - 1) < 6 * math.sqrt(2.2 / len(sums)), f"mean squared z of {len(sums)} pairs: {squares:.3f}"


def assert_mean_zero(rows: ArrayLike, variances: ArrayLike = 1.0, *, names: list[str], unit: float = 1.0) -> None:
    """The mean of each of `rows` (K, n) is 0, as far as chance allows."""
    x = np.asarray(rows, np.float64)
    v = np.broadcast_to(np.asarray(variances, np.float64), x.shape).sum(axis=1)
    excess = np.abs(x.sum(axis=1)) / bound(v, unit, len(x))
    worst = int(excess.argmax())
    assert excess[worst] < 1, (
        f"{names[worst]}: mean {x[worst].mean():.4g}, {x[worst].sum() / math.sqrt(v[worst]):.1f} σ"
    )


def assert_flat(counts: ArrayLike) -> None:
    """The hit counts of equally likely places are even: each by Poisson's variance, all by chi-square."""
    seen = np.asarray(counts, np.float64)
    expected = seen.mean()
    assert expected >= 5, "too few hits for chi-square"
    assert (np.abs(seen - expected) < bound(expected, 1.0, len(seen))).all(), (seen.min(), seen.max(), expected)
    freedom = len(seen) - 1
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    # Wilson and Hilferty 1931: the cube root of chi-square over its degrees of freedom is nearly normal.
    z = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert abs(z) < 5, f"chi-square {chi_square:.1f} with {freedom} degrees of freedom, {z:.1f} σ"
