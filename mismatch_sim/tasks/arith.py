"""Left-to-right arithmetic modulo 10, every intermediate result written out.

Prompt ``3+4*2-5=``, response ``749``: 3+4 = 7, 7*2 = 4, 4-5 = 9. Each digit is computed from the
digit before it, so one wrong digit sends the rest of the response down another path: the prefix
matters, as in a chain of thought. The answer is right only if every digit is.

``length`` is the largest number of operations; prompts have between half of it and all of it, so a
batch holds prompts and responses of unequal length.
"""

from __future__ import annotations

import numpy as np

from mismatch_sim.tasks import Problem, Split, split_of

OPERATIONS = {
    "+": lambda a, b: (a + b) % 10,
    "-": lambda a, b: (a - b) % 10,
    "*": lambda a, b: (a * b) % 10,
}
CHARACTERS = "0123456789" + "".join(OPERATIONS) + "="


def solve(prompt: str) -> str:
    """The right response.

    >>> solve("3+4*2-5=")
    '749'
    """
    value, steps = int(prompt[0]), ""
    for operation, digit in zip(prompt[1:-1:2], prompt[2:-1:2], strict=True):
        value = OPERATIONS[operation](value, int(digit))
        steps += str(value)
    return steps


class Arith:
    """The task object; see the module."""

    name = "arith"
    lengths = (1, 12)

    def draw(
        self, split: Split, count: int, rng: np.random.Generator, length: int
    ) -> list[Problem]:
        """Uniform operands, operations and number of operations, kept if of ``split``."""
        problems: list[Problem] = []
        symbols = np.array(list(OPERATIONS))
        while len(problems) < count:
            batch = max(2 * count, 64) if split == "train" else 10 * count
            sizes = rng.integers((length + 1) // 2, length + 1, batch)
            digits = rng.integers(0, 10, (batch, length + 1)).astype("U1")
            cells = np.empty((batch, 2 * length + 1), "U1")
            cells[:, 0::2] = digits
            cells[:, 1::2] = symbols[rng.integers(0, len(symbols), (batch, length))]
            texts = np.ascontiguousarray(cells).view(f"U{2 * length + 1}")[:, 0]
            for text, size in zip(texts.tolist(), sizes.tolist(), strict=True):
                prompt = text[: 2 * size + 1] + "="
                if split_of(prompt) == split:
                    problems.append(Problem(prompt, solve(prompt)))
                    if len(problems) == count:
                        break
        return problems

    def longest(self, length: int) -> list[Problem]:
        """One prompt with ``length`` operations."""
        return [Problem("0" + "+0" * length + "=", "0" * length)]

    def max_new_tokens(self, length: int) -> int:
        """One digit an operation, and the EOS."""
        return length + 1

    def correct(self, problem: Problem, response: str) -> bool:
        """Every intermediate result right, and nothing more."""
        return response == problem.answer


TASK = Arith()
