"""Intervals on the host: bootstrap over prompts, Wilson for shares, Student t on logs for the dose.

The unit that repeats is the *prompt*: tokens of one response share a prefix, and samples of one
prompt share the prompt, so an interval over tokens would be several times too narrow. D and quality
are ratios of sums, hence the bootstrap resamples (numerator, denominator) pairs together.

The bootstrap runs every training step, so it is written for speed, and ``scipy`` (slow to import)
is loaded only for the t quantile.

Left out: BCa and studentised bootstraps (slower, and no better for ratios at a hundred prompts or
more), and paired tests, which belong to the budget.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Interval = tuple[float, float, float]
"""(value, low, high)"""

_BLOCK = 2**20
"""Resampled entries held at once."""


def bootstrap_ratio(
    numerators_n: npt.ArrayLike,
    denominators_n: npt.ArrayLike,
    seed_key: int,
    resamples: int = 1000,
    level: float = 0.95,
    clusters: npt.ArrayLike | None = None,
) -> Interval:
    """Percentile bootstrap interval of sum(numerators) / sum(denominators), prompts resampled.

    Args:
        numerators_n: one number per row, for D the exact KL summed over the response.
        denominators_n: non-negative, for D the number of response tokens; their sum is positive.
        seed_key: non-negative integer, the step for instance: equal keys, equal intervals.
        resamples: how many bootstrap samples.
        level: two-sided confidence.
        clusters: prompt id of each row, where prompts have several; rows of a prompt are summed
            first, so that they are drawn together.

    Returns:
        ``(value, low, high)``; the bounds are order statistics, rounded outwards (interpolation
        would turn an infinite ratio into NaN). Resamples without any denominator are left out.

    >>> value, low, high = bootstrap_ratio([1.0, 2.0, 6.0], [2.0, 2.0, 2.0], seed_key=0)
    >>> value, low, high
    (1.5, 0.5, 3.0)

    Source: Efron and Tibshirani, "An introduction to the bootstrap" (1993), chapter 13.
    """
    top = np.asarray(numerators_n, dtype=np.float64)
    bottom = np.asarray(denominators_n, dtype=np.float64)
    if top.shape != bottom.shape or top.ndim != 1:
        raise ValueError(f"numerators and denominators must be [n]: {top.shape}, {bottom.shape}")
    if not bottom.sum() > 0 or bottom.min() < 0:
        raise ValueError("denominators must be non-negative with a positive sum")
    if clusters is not None:
        _, cluster_n = np.unique(np.asarray(clusters), return_inverse=True)
        top = np.asarray(np.bincount(cluster_n, weights=top), dtype=np.float64)
        bottom = np.asarray(np.bincount(cluster_n, weights=bottom), dtype=np.float64)
    pairs = np.empty(top.size, dtype=np.complex128)  # one gather and one sum for both
    pairs.real, pairs.imag = top, bottom
    totals = _resampled_sums(pairs, seed_key, resamples)
    totals = totals[totals.imag > 0]
    ratios = np.sort(totals.real / totals.imag)
    tail = 0.5 * (1.0 - level) * (ratios.size - 1)
    low, high = ratios[math.floor(tail)], ratios[ratios.size - 1 - math.floor(tail)]
    return float(top.sum() / bottom.sum()), float(low), float(high)


def _resampled_sums(values_n: np.ndarray, seed_key: int, resamples: int) -> np.ndarray:
    """Sums over ``resamples`` draws of n entries with replacement.

    Indices are the high words of n * (32 random bits), uniform to n / 2^32: twice as fast as
    ``Generator.integers``, and the bit stream of PCG64 is guaranteed across NumPy versions.
    """
    n = values_n.size
    bits = np.random.PCG64(seed_key)
    block = min(max(_BLOCK // n, 1), resamples)
    sums = []
    for begin in range(0, resamples, block):
        draws = min(block, resamples - begin) * n
        words = bits.random_raw((draws + 1) // 2).view(np.uint32)[:draws]
        index = (np.multiply(words, n, dtype=np.uint64) >> np.uint64(32)).view(np.int64)
        sums.append(values_n.take(index, mode="clip").reshape(-1, n).sum(axis=1))
    return np.concatenate(sums)


def wilson(successes: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a share successes / n of independent trials: ``(low, high)``.

    The shares p for which (successes - n p)^2 <= z^2 n p (1 - p): it stays in [0, 1] and keeps its
    width at 0 and n successes, where the normal interval has none. Without trials: (0, 1).

    >>> [round(x, 4) for x in wilson(0, 100)]
    [0.0, 0.037]

    Source: Wilson, "Probable inference" (1927).
    """
    if n == 0:
        return 0.0, 1.0
    z2 = NormalDist().inv_cdf(0.5 + 0.5 * level) ** 2
    share = successes / n
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    # At the ends the bound is exact, and rounding would put it beside the share itself.
    low = 0.0 if successes == 0 else max(centre - half, 0.0)
    high = 1.0 if successes == n else min(centre + half, 1.0)
    return low, high


def difference(new: Interval, old: Interval) -> Interval:
    """new - old for two values with intervals, as if they were independent (square-and-add).

    low = d - sqrt((new - new_low)^2 + (old_high - old)^2), and the same upwards: for two Wilson
    intervals this is Newcombe's score interval. Two evaluations on the same prompts and random
    numbers are positively correlated, so for them it is conservative.

    The example is the paper's.

    Source: Newcombe, "Interval estimation for the difference between independent proportions"
    (1998), method 10; Zou and Donner (2008) for intervals in general.

    >>> new, old = (56 / 70, *wilson(56, 70)), (48 / 80, *wilson(48, 80))
    >>> [round(x, 4) for x in difference(new, old)]
    [0.2, 0.0524, 0.3339]
    """
    (a, a_low, a_high), (b, b_low, b_high) = new, old
    down = math.hypot(a - a_low, b_high - b)
    up = math.hypot(a_high - a, b - b_low)
    return a - b, a - b - down, a - b + up


def lognormal_t_interval(values: npt.ArrayLike, level: float = 0.95) -> Interval:
    """Geometric mean of independent positive draws with a Student t interval on their logarithms.

    exp(mean(log v) -+ t_{n-1} sd(log v) / sqrt(n)): for the dose, whose draws differ by factors.
    With 8 draws it covers what it says, where a bootstrap covers 89 %.

    Zeros: if all are zero the answer is (0, 0, 0), the identity's dose. If only some are, logs do
    not exist and a geometric mean of 0 would deny the draws that are not; the answer is then the
    *arithmetic* mean with the plain t interval, its low end cut at 0. One draw says nothing about
    the spread: its interval is (0, inf), unless it is 0.

    Raises:
        ValueError: no values, or one that is negative or not finite.

    >>> [round(x, 4) for x in lognormal_t_interval([0.01, 0.02, 0.04])]
    [0.02, 0.0036, 0.1119]
    """
    draws = np.asarray(values, dtype=np.float64).ravel()
    if draws.size == 0 or not np.all(np.isfinite(draws) & (draws >= 0)):
        raise ValueError(f"values must be finite, non-negative and at least one: {draws.tolist()}")
    if not draws.any():
        return 0.0, 0.0, 0.0
    if draws.size == 1:
        return float(draws[0]), 0.0, math.inf
    import scipy.special  # the t quantile; scipy.stats would take a second to import

    quantile = float(scipy.special.stdtrit(draws.size - 1, 0.5 + 0.5 * level))
    is_log = bool(draws.all())
    sample = np.log(draws) if is_log else draws
    # Equal draws (a deterministic operator) must give exactly their value, not exp(log(.)).
    if sample.min() == sample.max():
        return (float(draws[0]),) * 3
    centre = float(sample.mean())
    half = quantile * float(sample.std(ddof=1)) / math.sqrt(draws.size)
    if is_log:
        return math.exp(centre), math.exp(centre - half), math.exp(centre + half)
    return centre, max(centre - half, 0.0), centre + half
