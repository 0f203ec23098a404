"""Perturbation operators: trainer policy in, rollout policy out (see ``base``)."""
