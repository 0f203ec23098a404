"""Table and figure of the first look: ``python -m experiments.quality_vs_dose.analysis``.

Quality is read twice: after the last step, and early, at the evaluation at which the clean run of
the same seed first had 80 % of its gain, since a task that saturates hides harm done on the way.
Everything is read from run folders; the last line is the one number.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from scipy import stats

from experiments.quality_vs_dose import sweep
from mismatch_sim import runlog

RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    *("objective", "source", "operators", "seed"),
    *("dose", "dose_low", "dose_high", "early_step", "early", "final"),
)


def evaluations(out: Path) -> dict[int, float]:
    """Sampled accuracy by step."""
    tag = "quality/sampled_accuracy"
    return {m["step"]: m[tag] for m in runlog.read_metrics(out) if tag in m}


def early_step(clean: dict[int, float]) -> int:
    """The first evaluation at which the clean run has 80 % of its gain."""
    steps = sorted(clean)
    start, end = clean[steps[0]], clean[steps[-1]]
    return next(s for s in steps if clean[s] >= start + 0.8 * (end - start))


def table(root: Path = sweep.ROOT) -> list[dict]:
    """One row a finished run."""
    rows = []
    early: dict[tuple[str, int], int] = {}
    for source, config in sweep.configs():
        out = sweep.folder(config, root)
        if not (out / "result.json").exists():
            continue
        result, curve = runlog.read_result(out), evaluations(out)
        arm = (config.objective, config.seed)
        if source == "clean":
            early[arm] = early_step(curve)
        dose, at = result["dose"], early[arm]
        values = (config.objective, source, str(config.stack()), config.seed)
        numbers = (dose["value"], dose["low"], dose["high"], at, curve[at], curve[config.steps])
        rows.append(dict(zip(COLUMNS, (*values, *numbers), strict=True)))
    return rows


def paired_loss(rows: list[dict], operators: str, column: str) -> tuple[float, float]:
    """Mean loss against the clean run of the same seed, and half its 95 % interval (Student t)."""
    clean = {r["seed"]: r[column] for r in rows if r["source"] == "clean"}
    losses = np.array([clean[r["seed"]] - r[column] for r in rows if r["operators"] == operators])
    half = stats.t.ppf(0.975, len(losses) - 1) * stats.sem(losses)
    return float(losses.mean()), float(half)


def figure(rows: list[dict], path: Path) -> None:
    """Quality against dose: a column per objective, early above final, a colour per source."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(
        2, 2, figsize=(9.5, 6), sharex=True, sharey="row", layout="constrained"
    )
    titles = {"early": "when the clean run had 80 % of its gain", "final": "after the last step"}
    for column, objective in enumerate(sweep.OBJECTIVES):
        arm = [r for r in rows if r["objective"] == objective]
        for row, (reading, title) in enumerate(titles.items()):
            axis = axes[row, column]
            clean = 100 * np.array([r[reading] for r in arm if r["source"] == "clean"])
            axis.axhspan(clean.min(), clean.max(), color="0.85", lw=0)
            axis.axhline(clean.mean(), color="0.5", lw=1, label="clean (band: seeds)")
            for source, marker in zip(sweep.STACKS, "osD^", strict=True):
                points = [(r["dose"], 100 * r[reading]) for r in arm if r["source"] == source]
                axis.scatter(*zip(*points, strict=True), s=18, marker=marker, label=source)
            axis.set(xscale="log", title=f"{objective}, {title}")
            axis.title.set_fontsize(9)
            axis.grid(alpha=0.3)
        axes[1, column].set_xlabel("dose: KL(rollout || trainer), nats per token")
    for row in (0, 1):
        axes[row, 0].set_ylabel("sampled accuracy, %")
    axes[1, 0].legend(fontsize=8, loc="lower left")
    fig.savefig(path, dpi=130)


def main() -> None:
    """Write results/ and print the table."""
    rows = table()
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / "runs.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})
    figure(rows, RESULTS / "quality_vs_dose.png")
    print("| objective | operators | dose | early loss, points | final loss, points |")
    print("|---|---|---|---|---|")
    worst: dict[str, tuple[float, str]] = {}
    for objective in sweep.OBJECTIVES:
        arm = [r for r in rows if r["objective"] == objective]
        names = dict.fromkeys(r["operators"] for r in arm if r["source"] != "clean")
        doses = {n: float(np.mean([r["dose"] for r in arm if r["operators"] == n])) for n in names}
        for name in sorted(names, key=doses.__getitem__):
            early, final = (paired_loss(arm, name, column) for column in ("early", "final"))
            cells = [f"{100 * loss:+.1f} ± {100 * half:.1f}" for loss, half in (early, final)]
            print(f"| {objective} | `{name}` | {doses[name]:.2g} | {cells[0]} | {cells[1]} |")
            if doses[name] <= 0.1:
                worst[objective] = max(worst.get(objective, (0.0, "")), (final[0], name))
    print("largest mean final loss at doses up to 0.1:")
    for objective, (loss, name) in worst.items():
        print(f"  {objective}: {100 * loss:.1f} points ({name})")


if __name__ == "__main__":
    main()
