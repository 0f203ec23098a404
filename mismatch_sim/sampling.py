"""Choosing tokens and looking up their log-probabilities, written once for every framework.

Tokens are drawn by the Gumbel-max trick: argmax(logits + Gumbel noise) follows softmax(logits)
exactly, needs no cumulative sum (whose rounding differs by framework), and turns into greedy
decoding by leaving the noise out, so one compiled program serves both. The noise is keyed per row
and position (``mismatch_sim.rng``); nothing depends on the order in which tokens are drawn.

Logits arrive here divided by the task's temperature and passed through ``on_logits``, so the
log-probability recorded with a token is that of the law it was drawn from.

Left out: temperature, top-p, top-k and min-p. They are operators on logits (an impossible token has
logit -inf), and nothing here needs to know.
"""

from __future__ import annotations

from typing import Any

from mismatch_sim import ops, rng
from mismatch_sim.types import Array, Key


def log_softmax(logits: Array) -> Array:
    """Log-probabilities log softmax(z) = z - max z - log sum exp(z - max z), over the last axis.

    Args:
        logits: ``[..., V]``; -inf marks an impossible token, whose log-probability is exactly -inf.
            At least one logit of each row must be finite.

    Returns:
        ``[..., V]``, in the dtype of ``logits``. A one-token support gives exactly 0 there.

    >>> import numpy as np
    >>> log_softmax(np.array([3.0, -np.inf])).tolist()
    [0.0, -inf]
    """
    xp = ops.xp_of(logits)
    # Any constant may be subtracted, so the maximum needs no gradient (ties would split it).
    shifted = logits - ops.stop_gradient(xp.max(logits, axis=-1, keepdims=True))
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))


def take(logprobs_XV: Array, tokens_X: Array) -> Array:
    """The entry of each token: out[x] = logprobs[x, tokens[x]], for any leading shape ``X``.

    Ids must be valid, also where a mask is 0 (the pad id is): out of range JAX answers NaN and
    torch raises.

    >>> import numpy as np
    >>> take(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([1, 0])).tolist()
    [2.0, 3.0]
    """
    xp = ops.xp_of(logprobs_XV, tokens_X)
    # torch gathers by int64 only; JAX warns when asked for it.
    index = xp.astype(tokens_X, xp.__array_namespace_info__().default_dtypes()["indexing"])
    return xp.take_along_axis(logprobs_XV, index[..., None], axis=-1)[..., 0]


def choose(logits: Array, gumbel: Array, greedy: Any) -> Array:
    """Tokens argmax(logits + gumbel), or argmax(logits) where ``greedy``: int32 ``[...]``.

    Args:
        logits: ``[..., V]``. A logit of -inf stays -inf under finite noise: never chosen.
        gumbel: standard Gumbel noise ``[..., V]`` (``rng.gumbel`` is always finite).
        greedy: a bool, or a scalar array that may be traced: no second program for evaluation.

    >>> import numpy as np
    >>> logits, noise = np.array([0.0, 1.0]), np.array([2.0, 0.0])
    >>> int(choose(logits, noise, False)), int(choose(logits, noise, True))
    (0, 1)
    """
    xp = ops.xp_of(logits, gumbel)
    is_greedy = xp.astype(ops.asarray_like(greedy, logits), xp.bool)
    noise = xp.where(is_greedy, xp.zeros_like(gumbel), gumbel)
    return xp.astype(xp.argmax(logits + noise, axis=-1), xp.int32)


def sample(logits: Array, rng_keys: Key, greedy: Any) -> tuple[Array, Array]:
    """Draw one token per row and record its log-probability log softmax(logits)[token].

    The recorded value is the one under the sampling law also when ``greedy`` picks the token.

    Args:
        logits: ``[..., V]``.
        rng_keys: one key per row, ``[..., 2]``; always V numbers are drawn per key, whatever the
            support, so a truncating sampler moves no other row's noise.
        greedy: see ``choose``.

    Returns:
        ``(tokens int32 [...], logprobs [...])``.

    >>> import numpy as np
    >>> tokens, logprobs = sample(np.log(np.array([[0.25, 0.75]])), rng.key(0)[None], True)
    >>> tokens.tolist(), np.exp(logprobs).round(6).tolist()
    ([1], [0.75])

    Source: Gumbel, "Statistical theory of extreme values" (1954); Maddison et al., "A* sampling",
    NeurIPS 2014.
    """
    noise = ops.asarray_like(rng.gumbel(rng_keys, logits.shape[-1]), logits)
    tokens = choose(logits, noise, greedy)
    return tokens, take(log_softmax(logits), tokens)
