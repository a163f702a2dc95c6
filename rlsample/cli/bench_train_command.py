"""``rlsample bench train``: in a file of its own, since its options are those of every algorithm."""

from __future__ import annotations

import click

from rlsample.algorithms.bench_train import bench_train
from rlsample.cli.bench_command import print_figures
from rlsample.cli.error_boundary import short_errors
from rlsample.cli.settings_options import SettingsCommand, given_options

__all__ = ["train"]


@click.command(cls=SettingsCommand)
@click.option("--seconds", type=float, default=4.0, show_default=True, help="How long to measure.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, the last line on stdout.")
@click.pass_context
@short_errors
def train(ctx: click.Context, seconds: float, as_json: bool) -> None:
    """Sampled and trained steps per second of an algorithm; takes every option of `rlsample train`."""
    print_figures(bench_train(given_options(ctx), seconds=seconds), as_json)
