"""Naive float64 definitions with loops: the oracles. Nothing here is imported from the package."""

from __future__ import annotations

import itertools
import math

import numpy as np

Table = np.ndarray


def softmax(logits: Table) -> Table:
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return weights / weights.sum()


def log_softmax(logits: Table) -> Table:
    """Over the last axis, by the definition."""
    flat = np.asarray(logits, np.float64).reshape(-1, np.shape(logits)[-1])
    out = np.full(flat.shape, -np.inf)
    for i, row in enumerate(flat):
        peak = max(row)
        total = math.log(math.fsum(math.exp(z - peak) for z in row))
        for v, z in enumerate(row):
            out[i, v] = z - peak - total
    return out.reshape(np.shape(logits))


def kl(log_p: Table, log_q: Table) -> float:
    """sum p (log p - log q) of one pair of rows, 0 log 0 = 0."""
    terms = []
    for lp, lq in zip(log_p, log_q, strict=True):
        if lp == -math.inf:
            continue
        if lq == -math.inf:
            return math.inf
        terms.append(math.exp(lp) * (lp - lq))
    return math.fsum(terms)


def entropy(log_p: Table) -> float:
    return -math.fsum(math.exp(lp) * lp for lp in log_p if lp > -math.inf)


def tv(log_p: Table, log_q: Table) -> float:
    pairs = zip(log_p, log_q, strict=True)
    return 0.5 * math.fsum(abs(math.exp(a) - math.exp(b)) for a, b in pairs)


def js(log_p: Table, log_q: Table) -> float:
    terms = []
    for a, b in zip(log_p, log_q, strict=True):
        p, q = math.exp(a), math.exp(b)
        middle = 0.5 * (p + q)
        terms += [0.5 * x * math.log(x / middle) for x in (p, q) if x > 0]
    return math.fsum(terms)


def divergences(rollout_logits: Table, trainer_logits: Table) -> dict[str, Table]:
    """What ``token_divergences`` returns, row by row."""
    log_mu, log_pi = log_softmax(rollout_logits), log_softmax(trainer_logits)
    shape, size = log_mu.shape[:-1], log_mu.shape[-1]
    rows = list(zip(log_mu.reshape(-1, size), log_pi.reshape(-1, size), strict=True))
    out = {
        "kl": [kl(m, p) for m, p in rows],
        "kl_reverse": [kl(p, m) for m, p in rows],
        "js": [js(m, p) for m, p in rows],
        "tv": [tv(m, p) for m, p in rows],
        "uncovered_mass": [
            math.fsum(math.exp(b) for a, b in zip(m, p, strict=True) if a == -math.inf)
            for m, p in rows
        ],
        "entropy": [entropy(m) for m, _ in rows],
    }
    return {name: np.array(x).reshape(shape) for name, x in out.items()}


def mean_on_mask(x_BN: Table, mask_BN: Table) -> float:
    values = [x_BN[i] for i in np.ndindex(mask_BN.shape) if mask_BN[i]]
    return math.fsum(values) / len(values)


def rollout_corr(recorded_BN: Table, trainer_BN: Table, mask_BN: Table) -> dict[str, float]:
    """verl's definitions, one sequence at a time."""
    rollout, trainer, diff, k1, k3 = [], [], [], [], []
    for row in range(mask_BN.shape[0]):
        on = [n for n in range(mask_BN.shape[1]) if mask_BN[row, n]]
        rollout.append(-np.mean([recorded_BN[row, n] for n in on]))
        trainer.append(-np.mean([trainer_BN[row, n] for n in on]))
        diff.append(trainer[-1] - rollout[-1])
        deltas = [trainer_BN[row, n] - recorded_BN[row, n] for n in on]
        k1 += [-d for d in deltas]
        k3 += [math.exp(d) - 1 - d for d in deltas]
    return {
        "rollout_corr/kl": np.mean(k1),
        "rollout_corr/k3_kl": np.mean(k3),
        "rollout_corr/training_ppl": np.mean(np.exp(trainer)),
        "rollout_corr/training_log_ppl": np.mean(trainer),
        "rollout_corr/rollout_ppl": np.mean(np.exp(rollout)),
        "rollout_corr/rollout_log_ppl": np.mean(rollout),
        "rollout_corr/log_ppl_diff": np.mean(diff),
        "rollout_corr/log_ppl_abs_diff": np.mean(np.abs(diff)),
        "rollout_corr/log_ppl_diff_max": np.max(diff),
        "rollout_corr/log_ppl_diff_min": np.min(diff),
        "rollout_corr/ppl_ratio": np.mean(np.exp(diff)),
    }


def sequences(vocabulary: int, eos: int, max_length: int) -> list[tuple[int, ...]]:
    """Every response: tokens up to and including EOS, or ``max_length`` tokens without it."""
    out: list[tuple[int, ...]] = []
    for length in range(1, max_length + 1):
        for prefix in itertools.product([v for v in range(vocabulary) if v != eos], repeat=length):
            if length == max_length:
                out.append(prefix)
        for prefix in itertools.product(
            [v for v in range(vocabulary) if v != eos], repeat=length - 1
        ):
            out.append((*prefix, eos))
    return out


def kl_gradient(student_logits: Table, teacher_logits: Table) -> Table:
    """d KL(softmax(z) || q) / dz_v = s_v (log s_v - log q_v - KL), one row."""
    log_s, log_q = log_softmax(student_logits), log_softmax(teacher_logits)
    total = kl(log_s, log_q)
    return np.array([math.exp(a) * (a - b - total) for a, b in zip(log_s, log_q, strict=True)])
