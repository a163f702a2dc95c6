"""How many steps per second the worker pool makes, with no policy in the way."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from rlsample.env.async_vector_env import AsyncVectorEnv
from rlsample.env.base_env import BaseEnv
from rlsample.env.convert import as_base_env
from rlsample.env.spaces import ObsWriter, zeros_columns
from rlsample.errors import ConfigError
from rlsample.tree import Tree, gather

__all__ = ["bench_pool", "drive", "fixed_actions", "frame_skip", "refuse_atari", "worker_cpu_s"]

_WARM_UP_S = 0.5


def bench_pool(
    env_id: str = "CartPole-v1",
    num_envs: int = 64,
    num_workers: int | None = None,
    batch_size: int | None = None,
    seconds: float = 4.0,
    **options: Any,
) -> dict[str, Any]:
    """Steps ``num_envs`` envs on a pool, every slot with one fixed random action, resets included.

    Args:
        num_workers, batch_size: as in :class:`~rlsample.env.pool.pool_settings.PoolSettings`; None: their defaults.
        seconds: how long to measure, after half a second of warming up.
        options: further fields of PoolSettings.

    Returns:
        ``steps_per_s`` (first observations not counted), ``frames_per_s`` (times the id's frame skip),
        ``rows_per_poll``, ``pool_us_per_poll`` (CPU time of this process), ``worker_us_per_step`` (CPU time of the
        workers), ``polls``, ``seconds``, and what was measured.
    """
    if not seconds > 0:
        raise ConfigError(f"seconds must be positive, not {seconds}")
    refuse_atari(env_id)
    pool = {"num_workers": num_workers, "batch_size": batch_size, **options}
    with as_base_env(env_id, num_envs, backend="process", pool=pool, seed=0) as env:
        assert isinstance(env, AsyncVectorEnv)
        found = drive(env, seconds, lambda: worker_cpu_s(env.worker_pids))
        layout = {"num_workers": env.num_workers, "batch_size": env.batch_size, "ordered": env.ordered}
    return {
        "steps_per_s": found["steps_per_s"],
        "frames_per_s": found["steps_per_s"] * frame_skip(env_id),
        "rows_per_poll": found["steps"] / found["polls"],
        "pool_us_per_poll": found["cpu_s"] / found["polls"] * 1e6,
        "worker_us_per_step": found["worker_cpu_s"] / found["steps"] * 1e6,
        "polls": found["polls"],
        "seconds": found["seconds"],
        "env_id": env_id,
        "num_envs": num_envs,
        **layout,
    }


def drive(env: BaseEnv, seconds: float, others_cpu_s: Callable[[], float] = lambda: 0.0) -> dict[str, float]:
    """Polls and acts for some seconds; returns ``steps``, ``polls``, ``seconds``, ``steps_per_s`` and CPU times.

    Raises:
        EnvFailedError: a slot failed.
    """
    actions = fixed_actions(env)
    batch = env.poll()
    found: dict[str, float] = {}
    for limit_s in (min(_WARM_UP_S, seconds), seconds):
        steps = polls = 0
        theirs, mine, started = others_cpu_s(), process_time(), perf_counter()
        while perf_counter() - started < limit_s:
            ids = batch.env_ids
            ended = batch.terminated | batch.truncated
            if ended.any():
                first = env.try_reset(ids[ended])
                if first is None:
                    ids = ids[~ended]
                elif first.failures:
                    raise next(iter(first.failures.values()))
            if len(ids):
                env.send_actions(ids, actions if len(ids) == env.num_envs else gather(actions, ids))
            batch = env.poll()
            for failure in batch.failures.values():
                raise failure
            steps += len(batch.env_ids) - int(np.count_nonzero(batch.is_first))
            polls += 1
        took = perf_counter() - started
        found = {"steps": steps, "polls": polls, "seconds": took, "steps_per_s": steps / took}
        found.update(cpu_s=process_time() - mine, worker_cpu_s=others_cpu_s() - theirs)
    return found


def fixed_actions(env: BaseEnv) -> Tree:
    """One random action per slot, tree [num_envs, ...]."""
    space = copy.deepcopy(env.action_space)
    space.seed(0)
    columns, writer = zeros_columns(space, (env.num_envs,)), ObsWriter(space, any_size=True)
    for slot in range(env.num_envs):
        writer.write(columns, slot, space.sample(), slot, None)
    return columns


def refuse_atari(env: Any) -> None:
    """Raises ConfigError for ``atari:Pong-v5``, which no worker process can run."""
    if isinstance(env, str) and env.startswith("atari:"):
        game = env.partition(":")[2]
        raise ConfigError(f"{env} runs on C++ threads of its own: measure it with `rlsample bench atari --game {game}`")


def worker_cpu_s(pids: list[int]) -> float:
    """CPU seconds these processes have used so far; 0 where /proc does not say."""
    total = 0.0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def frame_skip(env_id: str) -> int:
    """Frames per step of a Gymnasium id, from its registered options; 1 if it has none."""
    import gymnasium

    spec = gymnasium.registry.get(env_id)
    skip = spec.kwargs.get("frameskip", 1) if spec is not None else 1
    return skip if isinstance(skip, int) else 1
