from __future__ import annotations

import zlib

import jax
import numpy as np
import pytest
from scipy import stats as scipy_stats

from mismatch_sim import ops, rng


def jax_fold(words: np.ndarray, *data: int) -> np.ndarray:
    key = jax.random.wrap_key_data(np.asarray(words, np.uint32))
    for item in data:
        key = jax.random.fold_in(key, item)
    return np.asarray(jax.random.key_data(key))


def words(x: np.ndarray) -> list:
    return np.asarray(x).astype(np.uint32).tolist()


@pytest.mark.parametrize("seed", [0, 7, 2**31 + 5, 2**32 + 3, 2**63 - 1])
def test_root_keys_equal_jax(seed):
    with jax.enable_x64(True):  # without it JAX cuts seeds to 32 bits
        want = jax.random.key_data(jax.random.key(seed))
    assert words(rng.key(seed)) == words(want)


@pytest.mark.parametrize("data", [0, 1, 12345, 2**31, 2**32 - 1])
def test_fold_in_equals_jax_to_the_bit(xp, data):
    key = rng.key(42)
    want = words(jax_fold(key, np.uint32(data)))
    assert words(rng.fold(key, data)) == want
    assert words(xp.call(rng.fold, key, np.uint32(data))) == want


def test_fold_in_of_batched_keys_equals_jax_to_the_bit(xp):
    rows, positions = np.arange(3, dtype=np.int32), np.array([0, 9, 100, 7], np.int32)
    key = rng.key(3)
    want = [
        [jax_fold(key, zlib.crc32(b"sample"), int(r), int(p)).tolist() for p in positions]
        for r in rows
    ]

    def grid(key, rows, positions):
        return rng.fold(key, "sample", rows[:, None], positions)

    assert words(xp.call(grid, key, rows, positions)) == want
    assert words(rng.fold(key, "sample", rows[:, None], positions)) == want


@pytest.mark.parametrize("count", [1, 5])
def test_random_bits_equal_jax_to_the_bit(xp, count):
    keys = rng.fold(rng.key(11), np.arange(3)).astype(np.uint32)
    want = [
        words(jax.random.bits(jax.random.wrap_key_data(np.asarray(k, np.uint32)), (count,)))
        for k in keys
    ]
    assert words(xp.call(lambda k: ops.random_bits(k, count), keys)) == want
    top = xp.call(lambda k: ops.random_bits(k, count, bits=23), keys)
    assert words(top) == (np.array(want) >> 9).tolist()


def test_folding_depends_on_names_and_their_order_only():
    key = rng.key(0)
    assert words(rng.fold(key, "a", 1)) == words(rng.fold(rng.fold(key, "a"), 1))
    drawn = [(), ("a",), ("b",), ("a", 1), (1, "a"), ("a", 2)]
    assert len({tuple(words(rng.fold(key, *data))) for data in drawn}) == len(drawn)


def test_batched_keys_fold_in_numbers_and_names(xp):
    keys = rng.fold(rng.key(0), np.arange(3)).astype(np.uint32)
    want = [words(rng.fold(rng.key(0), row, "a", 5)) for row in range(3)]
    assert words(xp.call(lambda k: rng.fold(k, "a", 5), keys)) == want


def test_random_numbers_agree_across_frameworks(xp):
    keys = rng.fold(rng.key(5), np.arange(6)).astype(np.uint32)
    np.testing.assert_array_equal(
        xp.call(lambda k: rng.uniform(k, 500), keys), rng.uniform(keys, 500)
    )
    got = xp.call(lambda k: rng.gumbel(k, 500), keys)
    assert got.dtype == np.float32 and got.shape == (6, 500)
    np.testing.assert_allclose(got, rng.gumbel(keys, 500), rtol=2e-6, atol=2e-6)
    got, want = xp.call(lambda k: rng.normal(k, 500), keys), rng.normal(keys, 500)
    near = np.abs(want) < 3
    np.testing.assert_allclose(got[near], want[near], rtol=2e-6, atol=2e-6)
    # XLA's erfinv forms 1 - x * x in float32, which loses digits in the tails.
    np.testing.assert_allclose(got, want, rtol=1e-3)


@pytest.mark.parametrize(
    ("draw", "law"),
    [
        (rng.uniform, scipy_stats.uniform()),
        (rng.gumbel, scipy_stats.gumbel_r()),
        (rng.normal, scipy_stats.norm()),
    ],
)
def test_random_numbers_follow_their_law(draw, law):
    count = 200_000
    x = draw(rng.key(1), count).astype(np.float64)
    assert scipy_stats.kstest(x, law.cdf).pvalue > 1e-3
    mean, var, _, kurtosis = law.stats("mvsk")
    assert abs(x.mean() - mean) < 4 * np.sqrt(var / count)
    assert abs(x.var() - var) < 4 * var * np.sqrt((kurtosis + 2) / count)
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 4 / np.sqrt(count)


def test_keys_of_neighbouring_rows_are_independent():
    x = rng.normal(rng.fold(rng.key(0), np.arange(400)), 200)
    correlation = np.corrcoef(x) - np.eye(400)
    assert np.abs(correlation).max() < 6 / np.sqrt(200)


def test_random_numbers_stay_finite_at_the_extreme_words(monkeypatch):
    """All-zero and all-one words, which no test of moderate size would meet."""
    extremes = {32: [0, 2**32 - 1], 23: [0, 2**23 - 1]}
    monkeypatch.setattr(ops, "random_bits", lambda key, count, bits=32: np.array(extremes[bits]))
    u = rng.uniform(rng.key(0), 2)
    assert 0 < u[0] < 1e-9 and 0.9999999 < u[1] < 1
    assert np.isfinite(rng.gumbel(rng.key(0), 2)).all()
    low, high = rng.normal(rng.key(0), 2)
    assert low == -high and 5 < high < 6
