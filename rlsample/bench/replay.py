"""Rows per second into and out of a replay buffer: ``python -m rlsample.bench.replay``."""

from __future__ import annotations

import json
from collections.abc import Callable
from time import perf_counter
from typing import Any

import click
import numpy as np

from rlsample.errors import ConfigError
from rlsample.optimizers.replay_buffer import PrioritizedReplayBuffer, ReplayBuffer
from rlsample.sample_batch import NextObs, SampleBatch

__all__ = ["bench_replay"]


def bench_replay(
    capacity: int = 100_000,
    num_rows: int = 32,
    batch_size: int = 256,
    obs_size: int = 4,
    prioritized: bool = True,
    seconds: float = 2.0,
) -> dict[str, Any]:
    """Fills a buffer, then adds, draws and gives priorities back, each for a third of the time.

    Args:
        num_rows: of one ``add``, in one fragment with its last next observation apart.
        batch_size: rows of one draw, and of one update of priorities.
        obs_size: float32 numbers of an observation.

    Returns:
        ``added_rows_per_s, sampled_rows_per_s, updated_rows_per_s`` (None for a uniform buffer), ``bytes_per_row``
        (memory over capacity), and what was measured.
    """
    for name, value in {"capacity": capacity, "num_rows": num_rows, "batch_size": batch_size}.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    if not seconds > 0:
        raise ConfigError(f"seconds must be positive, not {seconds}")
    buffer = PrioritizedReplayBuffer(capacity) if prioritized else ReplayBuffer(capacity)
    rng = np.random.default_rng(0)
    fragment = _fragment(num_rows, obs_size, rng)
    while len(buffer) < capacity:
        buffer.add(fragment)
    ids = buffer.sample(batch_size)["replay_id"]
    errors = rng.exponential(size=batch_size)
    updated = None
    if isinstance(buffer, PrioritizedReplayBuffer):
        buffer.update_priorities(ids, errors)
        prioritised = buffer
        updated = batch_size * _per_s(lambda: prioritised.update_priorities(ids, errors), seconds / 3)
    return {
        "added_rows_per_s": num_rows * _per_s(lambda: buffer.add(fragment), seconds / 3),
        "sampled_rows_per_s": batch_size * _per_s(lambda: buffer.sample(batch_size), seconds / 3),
        "updated_rows_per_s": updated,
        "bytes_per_row": buffer.nbytes / capacity,
        "capacity": capacity,
        "num_rows": num_rows,
        "batch_size": batch_size,
        "obs_size": obs_size,
        "prioritized": prioritized,
    }


def _fragment(num_rows: int, obs_size: int, rng: np.random.Generator) -> SampleBatch:
    columns = {
        "obs": rng.normal(size=(num_rows, obs_size)).astype(np.float32),
        "actions": rng.integers(0, 2, num_rows),
        "nstep_returns": rng.normal(size=num_rows).astype(np.float32),
        "nstep_discounts": np.full(num_rows, 0.99, np.float32),
    }
    index = np.append(np.arange(1, num_rows), -1)
    return SampleBatch(columns, NextObs(index, np.zeros((1, obs_size), np.float32)))


def _per_s(work: Callable[[], Any], seconds: float) -> float:
    calls, began = 0, perf_counter()
    while (passed := perf_counter() - began) < seconds:
        work()
        calls += 1
    return calls / passed


@click.command()
@click.option("--capacity", default=100_000, show_default=True)
@click.option("--num-rows", default=32, show_default=True, help="rows of one add")
@click.option("--batch-size", default=256, show_default=True, help="rows of one draw")
@click.option("--obs-size", default=4, show_default=True, help="float32 numbers of an observation")
@click.option("--prioritized/--uniform", default=True, show_default=True)
@click.option("--seconds", default=2.0, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def _main(as_json: bool, **options: Any) -> None:
    found = bench_replay(**options)
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:>20}  {value:,.0f}" if isinstance(value, float) else f"{name:>20}  {value}")


if __name__ == "__main__":
    _main()
