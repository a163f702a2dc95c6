"""``rlsample tune``: which way to run an env is the fastest here, and why."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from rlsample.cli.error_boundary import short_errors

__all__ = ["tune"]


@click.command()
@click.option("--env", required=True, help="Gymnasium id.")
@click.option("--num-envs", type=click.IntRange(min=1), default=16, show_default=True, help="Slots.")
@click.option("--seconds", type=float, default=2.0, show_default=True, help="For the one env, and for each layout.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, the last line on stdout.")
@short_errors
def tune(env: str, num_envs: int, seconds: float, as_json: bool) -> None:
    """Measure one env, try the layouts that could suit it, and name the one to use."""
    from rlsample.bench.tune import tune as measure

    report = measure(env, num_envs, seconds)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report)))
    else:
        _show(report)


def _show(report: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    costs = report.costs
    click.echo(
        f"one {report.env}: step {costs.step_us:,.0f} us (99 % below {costs.step_p99_us:,.0f}), "
        f"reset {costs.reset_us:,.0f} us, built in {costs.build_ms:,.0f} ms"
    )
    table = Table("layout", "steps/s", "rows a poll", "memory MB", box=None, pad_edge=False)
    for trial in report.trials:
        mark = " *" if trial == report.best else ""
        table.add_row(
            trial.name + mark, f"{trial.steps_per_s:,.0f}", f"{trial.rows_per_poll:.1f}", f"{trial.memory_mb:.0f}"
        )
    Console().print(table)
    click.echo(f"use: {report.best.config}\nbecause {report.reason}")
