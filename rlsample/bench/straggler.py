"""Envs of uneven speed: what waiting for the slowest costs."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np

from rlsample.bench.pool import drive
from rlsample.env.convert import as_base_env
from rlsample.errors import ConfigError

__all__ = ["SleepyEnv", "bench_straggler"]


class SleepyEnv(gymnasium.Env[np.ndarray, int]):
    """A step sleeps for an exponentially distributed time of ``mean_s`` on average."""

    observation_space: gymnasium.Space[Any] = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(2)

    def __init__(self, mean_s: float = 0.005) -> None:
        self.mean_s = mean_s

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self.np_random.exponential(self.mean_s))
        return np.zeros(4, np.float32), 0.0, False, False, {}


def bench_straggler(
    num_envs: int = 16, mean_ms: float = 5.0, seconds: float = 4.0, num_workers: int | None = None, **options: Any
) -> dict[str, Any]:
    """Steps sleeping envs, first come, first served, one worker per env (sleeping needs no core).

    Args:
        num_workers: None: one per env.
        options: fields of PoolSettings; ``batch_size=num_envs`` gives the barrier.

    Returns:
        ``steps_per_s``, ``frames_per_s`` (the same), ``possible_steps_per_s`` (no env ever waits), ``share`` of it,
        ``rows_per_poll``, and what was measured.
    """
    if not (seconds > 0 and mean_ms > 0):
        raise ConfigError(f"seconds and mean_ms must be positive, not {seconds} and {mean_ms}")
    pool = {"num_workers": num_workers or num_envs, "batch_size": 1, **options}
    config = {"mean_s": mean_ms / 1000}
    with as_base_env(SleepyEnv, num_envs, backend="process", pool=pool, env_config=config, seed=0) as env:
        found = drive(env, seconds)
    possible = num_envs / mean_ms * 1000
    return {
        "steps_per_s": found["steps_per_s"],
        "frames_per_s": found["steps_per_s"],
        "possible_steps_per_s": possible,
        "share": found["steps_per_s"] / possible,
        "rows_per_poll": found["steps"] / found["polls"],
        "num_envs": num_envs,
        "num_workers": pool["num_workers"],
        "mean_ms": mean_ms,
        "seconds": found["seconds"],
    }
