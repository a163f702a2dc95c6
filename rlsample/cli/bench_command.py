"""``rlsample bench``: a group; each measurement is a command, and its figures can be had as one JSON object."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import click

from rlsample.cli.error_boundary import short_errors
from rlsample.cli.main_group import LazyGroup

__all__ = [
    "atari",
    "bench",
    "learner",
    "measurement",
    "pool",
    "print_figures",
    "sampling",
    "serving",
    "straggler",
]


_LAZY = {
    "train": ("rlsample.cli.bench_train_command:train", "Sampled and trained steps per second of an algorithm."),
}


@click.group(cls=LazyGroup, lazy=_LAZY)
def bench() -> None:
    """Measure speed."""


def measurement(command: Callable[..., Mapping[str, Any]]) -> click.Command:
    """A command of the group: adds ``--seconds`` and ``--json`` and prints what the function returns."""

    @functools.wraps(command)
    def run(seconds: float, as_json: bool, **options: Any) -> None:
        print_figures(command(seconds=seconds, **options), as_json)

    seconds = click.option("--seconds", type=float, default=4.0, show_default=True, help="How long to measure.")
    as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object, the last line on stdout.")
    return bench.command(name=command.__name__)(seconds(as_json(short_errors(run))))


def print_figures(found: Mapping[str, Any], as_json: bool) -> None:
    """As one JSON object, or one line each."""
    if as_json:
        click.echo(json.dumps(dict(found)))
        return
    for name, value in found.items():
        click.echo(f"{name:24} {value:,.4g}" if isinstance(value, float) else f"{name:24} {value}")


@bench.command()
@click.option("--env", default="CartPole-v1", show_default=True, help="Gymnasium id.")
@click.option("--num-envs", type=click.IntRange(min=1), default=64, show_default=True, help="Slots of each evaluator.")
@click.option("--num-workers", type=click.IntRange(min=0), default=0, show_default=True, help="In processes; 0: here.")
@click.option("--vectorize", default="auto", show_default=True, help="auto, loop or native.")
@click.option("--inference", default="auto", show_default=True, help="auto, numpy or torch.")
@click.option("--seconds", type=float, default=4.0, show_default=True, help="How long to measure.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, the last line on stdout.")
@short_errors
def sampling(
    env: str, num_envs: int, num_workers: int, vectorize: str, inference: str, seconds: float, as_json: bool
) -> None:
    """Actions per second of one evaluator on one core, or of several in processes. Two 64x64 nets, full rows kept."""
    from rlsample.algorithms.bench_sampling import bench_sampling

    found = bench_sampling(
        env, num_envs, num_workers=num_workers, vectorize=vectorize, inference=inference, seconds=seconds
    )
    if as_json:
        click.echo(json.dumps(found))
        return
    where = f"{num_workers} workers of {num_envs} envs" if num_workers else f"{num_envs} envs"
    click.echo(f"{env}, {where}: {found['actions_per_s']:,.0f} actions/s")
    parts = ", ".join(f"{name} {found[f'{name}_us']:.1f}" for name in ("env", "infer", "processing", "other"))
    click.echo(f"microseconds per poll: {parts}")


_positive = click.IntRange(min=1)


@measurement
@click.option("--env", default="CartPole-v1", show_default=True, help="Gymnasium id.")
@click.option("--num-envs", type=_positive, default=64, show_default=True, help="Slots.")
@click.option("--num-workers", type=_positive, default=None, help="Worker processes; the default fits the machine.")
@click.option("--batch-size", type=_positive, default=None, help="Rows a receive waits for; the default is num-envs.")
def pool(env: str, num_envs: int, num_workers: int | None, batch_size: int | None, seconds: float) -> Mapping[str, Any]:
    """Env steps per second of the worker pool, stepping only."""
    from rlsample.bench.pool import bench_pool

    return bench_pool(env, num_envs, num_workers=num_workers, batch_size=batch_size, seconds=seconds)


@measurement
@click.option("--num-envs", type=_positive, default=16, show_default=True, help="Slots.")
@click.option("--mean-ms", type=float, default=5.0, show_default=True, help="Mean of the time a step sleeps.")
@click.option("--num-workers", type=_positive, default=None, help="Worker processes; default: one for each slot.")
def straggler(num_envs: int, mean_ms: float, num_workers: int | None, seconds: float) -> Mapping[str, Any]:
    """Env steps per second where steps take unequal time: first come, first served."""
    from rlsample.bench.straggler import bench_straggler

    return bench_straggler(num_envs, mean_ms, seconds=seconds, num_workers=num_workers)


@measurement
@click.option("--game", default="pong", show_default=True, help="ROM id, ALE id or EnvPool task.")
@click.option("--num-envs", type=_positive, default=8, show_default=True, help="Slots.")
@click.option("--batch-size", type=_positive, default=None, help="Rows a receive waits for; the default is num-envs.")
def atari(game: str, num_envs: int, batch_size: int | None, seconds: float) -> Mapping[str, Any]:
    """Agent steps and frames per second of the C++ Atari envs, stepping only."""
    from rlsample.bench.atari import bench_atari

    return bench_atari(game, num_envs, batch_size=batch_size, seconds=seconds)


@measurement
@click.option("--observation", default="vector", show_default=True, help="vector or image.")
@click.option("--train-batch-size", type=_positive, default=500, show_default=True, help="Rows of one update.")
@click.option("--loaders", type=click.IntRange(min=0), default=2, show_default=True, help="Loader slots; 0: none.")
@click.option("--device", default="cpu", show_default=True, help="A torch device.")
def learner(observation: str, train_batch_size: int, loaders: int, device: str, seconds: float) -> Mapping[str, Any]:
    """Rows per second the IMPALA learner takes from samplers that are fast enough."""
    from rlsample.bench.learner import bench_learner

    return bench_learner(seconds, observation, train_batch_size, num_data_loader_buffers=loaders, device=device)


@measurement
@click.option("--clients", type=_positive, default=16, show_default=True, help="Threads that ask for actions.")
@click.option("--http", is_flag=True, help="Over HTTP, from another process.")
@click.option("--batch", type=_positive, default=1, show_default=True, help="With --http: observations a call.")
def serving(clients: int, http: bool, batch: int, seconds: float) -> Mapping[str, Any]:
    """Actions per second a ServingEnv answers, every row kept for training."""
    from rlsample.bench.serving import bench_serving

    return bench_serving(clients, seconds, http=http, batch=batch)
