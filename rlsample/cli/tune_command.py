"""``rlsample tune``: which way to run an env is the fastest here, and why."""

from __future__ import annotations

import dataclasses
import json

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
    from rlsample.bench.tune import format_report
    from rlsample.bench.tune import tune as measure

    report = measure(env, num_envs, seconds)
    click.echo(json.dumps(dataclasses.asdict(report)) if as_json else format_report(report))
