"""``rlsample bench``: a group; each measurement is a command."""

from __future__ import annotations

import json

import click

from rlsample.cli.error_boundary import short_errors

__all__ = ["bench", "sampling"]


@click.group()
def bench() -> None:
    """Measure speed."""


@bench.command()
@click.option("--env", default="CartPole-v1", show_default=True, help="Gymnasium id.")
@click.option("--num-envs", type=click.IntRange(min=1), default=64, show_default=True, help="Slots.")
@click.option("--vectorize", default="auto", show_default=True, help="auto, loop or native.")
@click.option("--inference", default="auto", show_default=True, help="auto, numpy or torch.")
@click.option("--seconds", type=float, default=4.0, show_default=True, help="How long to measure.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, the last line on stdout.")
@short_errors
def sampling(env: str, num_envs: int, vectorize: str, inference: str, seconds: float, as_json: bool) -> None:
    """Actions per second of one evaluator on one core, two 64x64 nets, full rows kept."""
    from rlsample.algorithms.bench_sampling import bench_sampling

    found = bench_sampling(env, num_envs, vectorize=vectorize, inference=inference, seconds=seconds)
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(f"{env}, {num_envs} envs: {found['actions_per_s']:,.0f} actions/s")
    parts = ", ".join(f"{name} {found[f'{name}_us']:.1f}" for name in ("env", "infer", "processing", "other"))
    click.echo(f"microseconds per poll: {parts}")
