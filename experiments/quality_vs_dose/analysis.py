"""Table and figure of the first look: ``python -m experiments.quality_vs_dose.analysis``.

Quality is read twice: after the last step, and early, at the evaluation at which the clean run of
the same seed first had 80 % of its gain, since a task that saturates hides harm done on the way.
Everything is read from run folders; the last line is the one number.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from experiments.quality_vs_dose import sweep
from mismatch_sim import runlog

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("source", "operators", "seed", "dose", "dose_low", "dose_high", "early", "final")


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
    early: dict[int, int] = {}
    for source, config in sweep.configs():
        out = sweep.folder(config, root)
        if not (out / "result.json").exists():
            continue
        result, curve = runlog.read_result(out), evaluations(out)
        if source == "clean":
            early[config.seed] = early_step(curve)
        dose = result["dose"]
        values = (
            source,
            str(config.stack()),
            config.seed,
            dose["value"],
            dose["low"],
            dose["high"],
        )
        accuracies = (curve[early[config.seed]], result["quality"]["value"])
        rows.append(dict(zip(COLUMNS, (*values, *accuracies), strict=True)))
    return rows


def paired_loss(rows: list[dict], column: str) -> dict[str, tuple[float, float, float]]:
    """Operators -> (mean dose, mean loss against clean of the same seed, its standard error)."""
    clean = {r["seed"]: r[column] for r in rows if r["source"] == "clean"}
    out = {}
    for operators in dict.fromkeys(r["operators"] for r in rows if r["source"] != "clean"):
        mine = [r for r in rows if r["operators"] == operators]
        losses = np.array([clean[r["seed"]] - r[column] for r in mine])
        error = losses.std(ddof=1) / np.sqrt(len(losses)) if len(losses) > 1 else float("nan")
        out[operators] = (float(np.mean([r["dose"] for r in mine])), float(losses.mean()), error)
    return out


def figure(rows: list[dict], path: Path) -> None:
    """Early and final quality against dose, one colour a source."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharex=True, layout="constrained")
    markers = dict(zip(sweep.STACKS, "osD^", strict=True))
    for axis, column in zip(axes, ("early", "final"), strict=True):
        clean = np.array([r[column] for r in rows if r["source"] == "clean"])
        axis.axhspan(100 * clean.min(), 100 * clean.max(), color="0.85", lw=0)
        axis.axhline(100 * clean.mean(), color="0.5", lw=1, label="clean, range over seeds")
        for source, marker in markers.items():
            points = [(r["dose"], 100 * r[column]) for r in rows if r["source"] == source]
            axis.scatter(*zip(*points, strict=True), s=18, marker=marker, label=source, alpha=0.8)
        axis.set(xscale="log", xlabel="dose: KL(rollout || trainer), nats per token")
        axis.grid(alpha=0.3)
    axes[0].set(title="when the clean run had 80 % of its gain", ylabel="sampled accuracy, %")
    axes[1].set(title="after the last step")
    axes[0].legend(fontsize=8, loc="lower left")
    fig.savefig(path, dpi=130)


def main() -> None:
    """Write results/ and print the table."""
    rows = table()
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / "runs.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in r.items()} for r in rows
        )
    figure(rows, RESULTS / "quality_vs_dose.png")
    early, final = paired_loss(rows, "early"), paired_loss(rows, "final")
    print("| operators | dose | early loss, points | final loss, points |\n|---|---|---|---|")
    for name, (dose, loss, error) in sorted(early.items(), key=lambda item: item[1]):
        last, last_error = final[name][1:]
        print(
            f"| `{name}` | {dose:.2g} | {100 * loss:+.1f} ± {100 * error:.1f}"
            f" | {100 * last:+.1f} ± {100 * last_error:.1f} |"
        )
    doses, losses = np.array([v[:2] for v in early.values()]).T
    from scipy import stats

    print(
        f"rank correlation of dose and early loss: {stats.spearmanr(doses, losses).statistic:.2f}"
    )


if __name__ == "__main__":
    main()
