"""Divergences between the rollout policy mu and the trainer policy pi, exact and sampled.

The exact ones sum over the vocabulary; the sampled ones (k1, k2, k3) see only the token that was
drawn, as production dashboards do. Both are per token; masked means turn them into numbers.

The choice that matters is how KL is summed. sum mu (log mu - log pi) cancels terms of both signs
and errs by 4e-7 in float32, about as much as a good kernel's whole mismatch. Here, with
d = log pi - log mu,

    KL(mu || pi) = sum_{v: mu(v) > 0} mu(v) (expm1(d_v) - d_v)  +  pi({v: mu(v) = 0}),

every term is non-negative, equal inputs give exactly 0, and the error near D = 1e-6 is below 1e-9.
Impossible tokens have logit -inf; a result is infinite only where the divergence is, never NaN for
logits that are not. NaN logits do give NaN: a diverged model must not look fine.

Legend: B rows, N positions, V vocabulary; mu, pi as above. Left out: chi2 and effective sample
sizes, which belong to the weights (``corrections``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from mismatch_sim import ops
from mismatch_sim.sampling import log_softmax, take
from mismatch_sim.types import Array

CHUNK = 2**24
"""Elements (tokens x vocabulary) per temporary: 64 MiB in float32, of which a dozen are alive."""


class Divergences(NamedTuple):
    """Per-token divergences over the full vocabulary, in nats: each of ``logits.shape[:-1]``."""

    kl: Array
    """KL(mu || pi), mu the rollout policy: the one scale, D is its token-weighted mean."""
    kl_reverse: Array
    """KL(pi || mu); infinite as soon as mu truncates its support."""
    js: Array
    """Jensen-Shannon divergence: mean KL of both to their mixture; at most log 2."""
    tv: Array
    """Total variation, half the L1 distance of probabilities; at most 1."""
    uncovered_mass: Array
    """1 - pi(S): what pi puts on tokens that mu cannot draw."""
    entropy: Array
    """Entropy of mu."""


def token_divergences(
    rollout_logits: Array, trainer_logits: Array, chunk: int = CHUNK
) -> Divergences:
    """All divergences between mu = softmax(rollout_logits) and pi = softmax(trainer_logits).

    Args:
        rollout_logits: ``[..., V]``, -inf where mu cannot draw.
        trainer_logits: ``[..., V]``.
        chunk: how many elements one temporary may hold (never less than two rows of V). The
            result does not depend on it, to the bit (JAX outside jit: to the last bit, as the
            slices are compiled).

    >>> import numpy as np
    >>> out = token_divergences(np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]]))
    >>> [round(float(x[0]), 4) for x in (out.kl, out.kl_reverse, out.js, out.tv)]
    [0.1438, 0.1308, 0.0338, 0.25]

    Source: Lin, "Divergence measures based on the Shannon entropy" (1991), for JS.
    """
    return Divergences(*_in_chunks(_divergences, (rollout_logits, trainer_logits), chunk))


def _divergences(rollout_logits: Array, trainer_logits: Array) -> tuple[Array, ...]:
    xp = ops.xp_of(rollout_logits, trainer_logits)
    log_mu, log_pi = log_softmax(rollout_logits), log_softmax(trainer_logits)
    # Rounding of expm1 may leave a term at -1e-15; clipping keeps sums monotone.
    kl = xp.sum(xp.clip(_kl_terms(log_mu, log_pi), min=0.0), axis=-1)
    kl_reverse = xp.sum(xp.clip(_kl_terms(log_pi, log_mu), min=0.0), axis=-1)
    uncovered = xp.sum(xp.where(log_mu == -math.inf, xp.exp(log_pi), 0.0), axis=-1)
    js, tv = _symmetric(log_mu, log_pi)
    return kl, kl_reverse, js, tv, uncovered, _entropy(log_mu)


def _kl_terms(log_p: Array, log_q: Array) -> Array:
    """Non-negative terms of KL(p || q), with values and gradients that never meet inf - inf.

    p (expm1(d) - d) with d = log q - log p; q where p = 0; inf where q = 0 < p. For d > 1 the same
    number is written q - p (1 + d): expm1(d) overflows where p is tiny, and the term is about q.
    """
    xp = ops.xp_of(log_p, log_q)
    p_is_zero, q_is_zero = log_p == -math.inf, log_q == -math.inf
    either = p_is_zero | q_is_zero
    d = xp.where(either, 0.0, log_q) - xp.where(either, 0.0, log_p)
    p, q = xp.exp(log_p), xp.exp(log_q)
    is_large = d > 1.0
    small = xp.where(is_large, 1.0, d)
    terms = xp.where(is_large, q - p * (1.0 + d), p * (xp.expm1(small) - small))
    return xp.where(p_is_zero, q, xp.where(q_is_zero, math.inf, terms))


def _symmetric(log_p: Array, log_q: Array) -> tuple[Array, Array]:
    """(JS, TV) from the larger probability P and gap = log(smaller / larger) <= 0, term by term.

    TV = 1/2 sum P (1 - e^gap); JS = 1/2 sum P (c + e^gap (gap + c)) with c = log(2 / (1 + e^gap)).
    """
    xp = ops.xp_of(log_p, log_q)
    log_larger, log_smaller = xp.maximum(log_p, log_q), xp.minimum(log_p, log_q)
    neither = log_larger == -math.inf
    gap = xp.where(neither, 0.0, log_smaller) - xp.where(neither, 0.0, log_larger)
    gap = xp.clip(gap, min=-100.0)  # e^gap gap is 0 by then, and at -inf it would be NaN
    larger, fall = xp.exp(log_larger), xp.expm1(gap)
    c = -xp.log1p(0.5 * fall)
    js_terms = larger * xp.clip((2.0 + fall) * c + (1.0 + fall) * gap, min=0.0)
    return 0.5 * xp.sum(js_terms, axis=-1), -0.5 * xp.sum(larger * fall, axis=-1)


def _entropy(logprobs: Array) -> Array:
    xp = ops.xp_of(logprobs)
    finite = xp.where(logprobs == -math.inf, 0.0, logprobs)
    return -xp.sum(xp.exp(logprobs) * finite, axis=-1) + 0.0  # + 0.0: no negative zero


def entropy(logits: Array, chunk: int = CHUNK) -> Array:
    """Entropy -sum p log p of p = softmax(logits), nats: ``[...]`` for ``[..., V]``.

    >>> import numpy as np
    >>> round(float(entropy(np.zeros((1, 4)))[0]), 4)
    1.3863
    """
    return _in_chunks(lambda z: (_entropy(log_softmax(z)),), (logits,), chunk)[0]


def token_logprobs(logits: Array, tokens: Array, chunk: int = CHUNK) -> Array:
    """Log-probability of each token, log softmax(logits)[token]: ``[...]`` for ``[..., V]``.

    >>> import numpy as np
    >>> token_logprobs(np.zeros((1, 2)), np.array([1])).round(4).tolist()
    [-0.6931]
    """
    return _in_chunks(lambda z, y: (take(log_softmax(z), y),), (logits, tokens), chunk)[0]


def _in_chunks(
    fn: Callable[..., tuple[Array, ...]], arrays: tuple[Array, ...], chunk: int
) -> tuple[Array, ...]:
    """``fn`` on slices of the flattened token axis, so that temporaries stay below ``chunk``.

    All slices have one size (the last overlaps its neighbour) of at least two rows: torch sums a
    lone row in several threads, which would move its last bit.
    """
    xp = ops.xp_of(*arrays)
    shape, vocabulary = arrays[0].shape[:-1], arrays[0].shape[-1]
    tokens = math.prod(shape)
    size = max(chunk // vocabulary, 2)
    if size >= tokens:
        return fn(*arrays)
    flat = [xp.reshape(a, (tokens, *a.shape[len(shape) :])) for a in arrays]
    begins = range(0, tokens, size)
    starts = [min(begin, tokens - size) for begin in begins]
    slices = ops.map_slices(fn, flat, starts, size)
    fresh = [begin - start for begin, start in zip(begins, starts, strict=True)]
    return tuple(
        xp.reshape(xp.concat([part[i, skip:] for i, skip in enumerate(fresh)]), shape)
        for part in slices
    )


def reverse_kl(student_logprobs: Array, teacher_logprobs: Array) -> Array:
    """Distillation KL(student || teacher) per position over the full vocabulary, differentiable.

    sum_v s(v) (log s(v) - log q(v)), summed in the non-negative form of the module docstring. The
    gradient in log s(v) is s(v) (log s(v) - log q(v)), finite for extreme and for -inf entries.

    Args:
        student_logprobs: ``[..., V]``, normalised (the non-negative form relies on it).
        teacher_logprobs: ``[..., V]``. An impossible token that the student can draw makes the
            value infinite and contributes no gradient.

    >>> import numpy as np
    >>> round(float(reverse_kl(np.log([0.5, 0.5]), np.log([0.25, 0.75]))), 4)
    0.1438
    """
    xp = ops.xp_of(student_logprobs, teacher_logprobs)
    return xp.sum(_kl_terms(student_logprobs, teacher_logprobs), axis=-1)


def sampled_estimators(
    rollout_logprobs: Array, trainer_logprobs: Array
) -> tuple[Array, Array, Array]:
    """k1, k2, k3 of each sampled token, y ~ mu, with Delta = log pi(y) - log mu(y).

    k1 = -Delta, k2 = Delta^2 / 2, k3 = expm1(Delta) - Delta. E[k1] = KL(mu || pi); E[k3] is KL less
    the uncovered mass; k2 estimates a functional of its own. With *recorded* rollout
    log-probabilities E[k1] = KL - sampler gap. Written exp(Delta) - 1 - Delta, k3
    would be 270 times too large at Delta = 1e-5.

    >>> import numpy as np
    >>> [round(float(k), 4) for k in sampled_estimators(np.log(0.5), np.log(0.25))]
    [0.6931, 0.2402, 0.1931]

    Source: Schulman, "Approximating KL divergence" (2020), joschu.net/blog/kl-approx.html.
    """
    xp = ops.xp_of(rollout_logprobs, trainer_logprobs)
    log_ratio = trainer_logprobs - rollout_logprobs
    return -log_ratio, 0.5 * log_ratio * log_ratio, xp.expm1(log_ratio) - log_ratio


def on_mask(x: Array, mask: Array) -> Array:
    """``x`` where the mask is 1 and 0 elsewhere, whatever stands there (inf and NaN included)."""
    xp = ops.xp_of(x, mask)
    return xp.where(xp.astype(mask, xp.bool), x, 0.0)


def masked_mean(x: Array, mask: Array) -> Array:
    """Token-weighted mean sum m x / sum m over all axes; 0 where there is no token at all.

    >>> import numpy as np
    >>> float(masked_mean(np.array([[1.0, 3.0, np.nan]]), np.array([[1, 1, 0]])))
    2.0
    """
    xp = ops.xp_of(x, mask)
    return xp.sum(on_mask(x, mask)) / xp.clip(xp.sum(xp.astype(mask, x.dtype)), min=1.0)


def by_position(x_BN: Array, mask_BN: Array) -> Array:
    """Mean over the rows still generating at each position: ``[N]``; 0 where none is.

    >>> import numpy as np
    >>> by_position(np.array([[1.0, 3.0], [5.0, 7.0]]), np.array([[1, 0], [1, 0]])).tolist()
    [3.0, 0.0]
    """
    xp = ops.xp_of(x_BN, mask_BN)
    tokens_N = xp.sum(xp.astype(mask_BN, x_BN.dtype), axis=0)
    return xp.sum(on_mask(x_BN, mask_BN), axis=0) / xp.clip(tokens_N, min=1.0)


def sequence_sums(x_BN: Array, mask_BN: Array) -> Array:
    """Sum over the response tokens of each row: ``[B]``.

    >>> import numpy as np
    >>> sequence_sums(np.array([[1.0, np.inf]]), np.array([[1, 0]])).tolist()
    [1.0]
    """
    return ops.xp_of(x_BN, mask_BN).sum(on_mask(x_BN, mask_BN), axis=-1)


def sequence_means(x_BN: Array, mask_BN: Array) -> Array:
    """Mean over the response tokens of each row: ``[B]``; 0 for a row without tokens."""
    xp = ops.xp_of(x_BN, mask_BN)
    tokens_B = xp.sum(xp.astype(mask_BN, x_BN.dtype), axis=-1)
    return sequence_sums(x_BN, mask_BN) / xp.clip(tokens_B, min=1.0)
