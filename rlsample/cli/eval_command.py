"""``rlsample eval``."""

from __future__ import annotations

import json

import click

from rlsample.cli.error_boundary import short_errors

__all__ = ["evaluate"]


@click.command()
@click.argument("run", metavar="DIR")
@click.option("--episodes", type=click.IntRange(min=1), default=10, show_default=True, help="How many to play.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the envs.  [derived from the run's]")
@click.option("--deterministic/--stochastic", default=True, help="Take the likeliest action, or draw.  [deterministic]")
@click.option("--video", is_flag=True, help="Also film one episode (needs rlsample[viz]).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, the last line on stdout.")
@short_errors
def evaluate(run: str, episodes: int, seed: int | None, deterministic: bool, video: bool, as_json: bool) -> None:
    """Play episodes with the policy of the run in DIR (or of one checkpoint in it)."""
    from rlsample.algorithms.evaluate import evaluate as play_episodes

    result = play_episodes(run, episodes, seed=seed, deterministic=deterministic)
    if video:
        from rlsample.algorithms.video import film

        click.echo(f"video: {film(run, seed=result.seed, deterministic=deterministic)}", err=True)
    numbers = result.to_json()
    if as_json:
        click.echo(json.dumps(numbers))
        return
    click.echo(
        f"{result.algo} on {result.env} after {result.env_steps:,} steps, {numbers['episodes']} episodes: "
        f"return {numbers['return_mean']:.1f} ± {numbers['return_std']:.1f} "
        f"({numbers['return_min']:.1f} to {numbers['return_max']:.1f}), length {numbers['length_mean']:.1f}"
    )
