"""Wall times of the default command: ``python -m experiments.benchmarks.default_command``.

The first run warms the compilation cache and is not counted. Every counted run starts in an empty
folder, so it includes its clean reference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

FLAGS = ["-m", "mismatch_sim.run", "--noise.sigma", "0.01", "--staleness", "4"]


def timed(flags: list[str], folder: str) -> tuple[float, float]:
    """(seconds to the first output line, seconds in all)."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *flags],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    process.stdout.readline()
    first = time.perf_counter() - began
    process.stdout.read()
    assert process.wait() == 0
    return first, time.perf_counter() - began


def main(runs: int = 3) -> None:
    """Print one JSON line."""
    helps = sorted(timed([*FLAGS[:2], "--help"], ".")[1] for _ in range(5))
    times = []
    for _ in range(runs + 1):
        with tempfile.TemporaryDirectory() as folder:
            times.append(timed(FLAGS, folder))
    first, whole = zip(*times[1:], strict=True)
    print(
        json.dumps(
            {
                "help_s": round(helps[2], 2),
                "first_line_s": round(sorted(first)[runs // 2], 2),
                "default_command_s": [round(t, 1) for t in whole],
                "cold_s": round(times[0][1], 1),
            }
        )
    )


if __name__ == "__main__":
    main()
