"""The picture of a run: mean return over env steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlsample.algorithms.progress_log import STEPS

__all__ = ["draw_learning_curve"]


def draw_learning_curve(
    rows: Sequence[Mapping[str, float | None]], path: Path, title: str, stop_return: float | None = None
) -> bool:
    """Draws ``rollout/ep_rew_mean`` over env steps as a PNG.

    Returns:
        Whether there was anything to draw: False, and no file, if no episode has ended yet.
    """
    steps, returns = [], []
    for row in rows:
        x, y = row[STEPS], row.get("rollout/ep_rew_mean")
        if x is not None and y is not None:
            steps.append(x)
            returns.append(y)
    if not steps:
        return False
    # The Figure alone, without pyplot: no window system, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, returns, color="#1f5fa8", linewidth=1.8, marker="o" if len(steps) == 1 else "")
    if stop_return is not None:
        axes.axhline(stop_return, color="#888888", linewidth=1, linestyle="--", label=f"goal {stop_return:g}")
        axes.legend(frameon=False, loc="lower right")
    axes.set(title=title, xlabel="env steps", ylabel="mean return, last 100 episodes")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
    return True
