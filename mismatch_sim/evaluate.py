"""Quality of a student, measured on clean samples: no perturbation, no sampler, current weights.

The evaluation prompts are the same for every run of a pair and length (drawn from the eval split by
a fixed seed), and the sampling keys depend on the run's seed alone, so runs that share a seed are
compared token by token on common random numbers. Intervals cluster by prompt.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mismatch_sim import metrics, ops, stats
from mismatch_sim import rng as rng_lib
from mismatch_sim.types import Params, Policy
from mismatch_sim.world import World


class Quality(NamedTuple):
    """Sampled and greedy accuracy, and KL(student || teacher) on clean student samples."""

    sampled: tuple[float, float, float]
    greedy: tuple[float, float, float]
    teacher_kl: tuple[float, float, float]

    def metrics(self) -> dict[str, float]:
        """As ``quality/*`` tags, value and 95 % interval."""
        named = {
            "quality/sampled_accuracy": self.sampled,
            "quality/greedy_accuracy": self.greedy,
            "quality/teacher_kl": self.teacher_kl,
        }
        return {
            tag + end: number
            for tag, value in named.items()
            for end, number in zip(("", "_low", "_high"), value, strict=True)
        }


def evaluate(world: World, params: Params) -> Quality:
    """Evaluate on ``--eval.samples`` problems, in batches of ``--eval.batch``."""
    config = world.config
    problems = world.pair.task.draw(
        "eval", config.eval.samples, np.random.default_rng(0), config.length
    )
    names = {prompt: i for i, prompt in enumerate(dict.fromkeys(p.prompt for p in problems))}
    clusters = np.array([names[p.prompt] for p in problems])
    hits: dict[bool, list[bool]] = {False: [], True: []}
    kl_sums, token_counts = [], []
    student = Policy(params)
    for number, start in enumerate(range(0, len(problems), config.eval.batch)):
        batch = problems[start : start + config.eval.batch]
        padded = batch + problems[: config.eval.batch - len(batch)]  # one shape, one program
        prompts = world.pair.encode(padded, world.width)
        for greedy in (False, True):
            key = rng_lib.fold(world.key, "eval", number)
            rollout = world.generate(student, prompts, key, greedy=greedy)
            texts = world.pair.decode(
                ops.to_numpy(rollout.tokens_BN), ops.to_numpy(rollout.mask_BN)
            )
            pairs = zip(batch, texts[: len(batch)], strict=True)
            hits[greedy] += [world.pair.task.correct(p, t) for p, t in pairs]
            if not greedy:
                _, rows = metrics.distill_metrics(
                    world.score(student, rollout), world.score_teacher(rollout), rollout
                )
                kl_sums.append(ops.to_numpy(rows["reverse_kl_sum"])[: len(batch)])
                token_counts.append(ops.to_numpy(rows["tokens"])[: len(batch)])
    return Quality(
        accuracy(np.array(hits[False]), clusters),
        accuracy(np.array(hits[True]), clusters),
        stats.bootstrap_ratio(
            np.concatenate(kl_sums), np.concatenate(token_counts), seed_key=0, clusters=clusters
        ),
    )


def accuracy(hits: np.ndarray, clusters: np.ndarray) -> tuple[float, float, float]:
    """Share of right answers, with a Wilson interval in which each *prompt* counts once.

    With one sample a prompt this is the usual interval; with several it is conservative, as if the
    samples of a prompt were copies of one another.
    """
    n = len(np.unique(clusters))
    value = float(hits.mean())
    return (value, *stats.wilson(value * n, n))
