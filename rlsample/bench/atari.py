"""How many steps per second the C++ Atari envs make, alone and with a policy that acts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from rlsample.env.atari import AtariEnv, make_atari
from rlsample.env.spaces import zeros_columns
from rlsample.errors import ConfigError

__all__ = ["bench_atari", "bench_atari_acting", "nature_cnn"]

_WARM_UP_S = 0.5
_TASKS = Path("/proc/self/task")


def bench_atari(
    game: str = "pong", num_envs: int = 8, batch_size: int | None = None, seconds: float = 4.0, **options: Any
) -> dict[str, Any]:
    """Steps games through EnvPool's interface with one fixed action each, resets included.

    Args:
        game: as :func:`~rlsample.env.atari.make_atari` takes it.
        batch_size: rows of a receive, first come, first served; None or ``num_envs``: all, in order.
        seconds: how long to measure, after half a second of warming up. Before that every game has begun: opening
            them, and the seeding that ale-py does at their first reset, is not counted.
        options: further fields of :class:`~rlsample.env.atari_settings.AtariSettings`, such as ``groups``.

    Returns:
        ``steps_per_s`` (agent steps; first observations not counted), ``frames_per_s`` (times the frame skip),
        ``rows_per_recv``, ``recv_p50_ms`` and ``recv_p99_ms``, ``cpu_us_per_step`` (all threads of this process),
        ``open_s``, ``seconds``, and what was measured.
    """
    _require_seconds(seconds)
    batch_size = None if batch_size == num_envs else batch_size
    with make_atari(game, num_envs, seed=0, batch_size=batch_size, **options) as env:
        started = perf_counter()
        env.async_reset()
        received = env.recv()
        actions = np.ones(env.num_envs, np.int64)
        begun = set(received[-1]["env_id"].tolist())
        while len(begun) < env.num_envs:  # first come, some are stepped before others have begun
            ids = received[-1]["env_id"]
            env.send(actions[: len(ids)], ids)
            received = env.recv()
            begun.update(received[-1]["env_id"].tolist())
        open_s = perf_counter() - started
        found: dict[str, Any] = {}
        for limit_s in (min(_WARM_UP_S, seconds), seconds):
            steps, waits = 0, []
            cpu_s, started = process_time(), perf_counter()
            now = started
            while now - started < limit_s:
                ids = received[-1]["env_id"]
                env.send(actions[: len(ids)], ids)
                sent = perf_counter()
                received = env.recv()
                now = perf_counter()
                waits.append(now - sent)
                steps += len(received[1]) - int(np.count_nonzero(received[-1]["is_first"]))
            found = _speeds(env, steps, now - started)
            found["rows_per_recv"] = steps / len(waits)
            found["recv_p50_ms"], found["recv_p99_ms"] = (np.percentile(waits, (50, 99)) * 1e3).tolist()
            found["cpu_us_per_step"] = (process_time() - cpu_s) / max(1, steps) * 1e6
        return {**found, "open_s": open_s, **_layout(env)}


def bench_atari_acting(
    game: str = "pong",
    num_envs: int = 16,
    groups: int = 2,
    seconds: float = 4.0,
    act: Callable[[np.ndarray], np.ndarray] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Steps games through the polled interface with actions from a policy: how long do the emulators wait for it?

    Args:
        groups: 1: they wait while it acts; 2: one half steps meanwhile.
        act: uint8[K, 4, 84, 84] -> int64[K]; None: :func:`nature_cnn`.
        game, num_envs, seconds, options: as in :func:`bench_atari`.

    Returns:
        ``steps_per_s``, ``frames_per_s``, ``emulators_busy`` (CPU time of the emulator threads per wall time and thread
        that could run, 0 to 1; None where /proc does not say), ``act_share`` (of the wall time), ``act_ms``,
        ``seconds``, and what was measured.
    """
    _require_seconds(seconds)
    with make_atari(game, num_envs, seed=0, groups=groups, **options) as env:
        act = act or nature_cnn(env)
        act(zeros_columns(env.observation_space, (env.batch_size,)))  # torch starts its threads
        before = _threads()
        batch = env.poll()
        emulators = _threads() - before - {t.native_id for t in threading.enumerate()}
        found: dict[str, Any] = {}
        for limit_s in (min(_WARM_UP_S, seconds), seconds):
            steps = polls = 0
            acting = 0.0
            busy, started = _ran_s(emulators), perf_counter()
            while perf_counter() - started < limit_s:
                over = batch.terminated | batch.truncated
                ids, obs = batch.env_ids, batch.obs
                if over.any():
                    first = env.try_reset(ids[over])
                    if first is not None:
                        obs[over] = first.obs
                    else:
                        ids, obs = ids[~over], obs[~over]
                asked = perf_counter()
                actions = act(obs)
                acting += perf_counter() - asked
                env.send_actions(ids, actions)
                batch = env.poll()
                steps += len(batch.env_ids) - int(np.count_nonzero(batch.is_first))
                polls += 1
            took = perf_counter() - started
            could_s = took * min(len(os.sched_getaffinity(0)), len(emulators)) if emulators else 0.0
            found = {
                **_speeds(env, steps, took),
                "emulators_busy": (_ran_s(emulators) - busy) / could_s if could_s else None,
                "act_share": acting / took,
                "act_ms": acting / polls * 1e3,
            }
        return {**found, **_layout(env)}


def nature_cnn(env: AtariEnv) -> Callable[[np.ndarray], np.ndarray]:
    """A PPO policy on the Nature CNN with random weights; torch takes the threads it is set to."""
    from rlsample.policy.ppo import PPOPolicy

    policy = PPOPolicy(env.observation_space, env.action_space, seed=0)
    return lambda obs: policy.act(obs, True).actions


def _require_seconds(seconds: float) -> None:
    if not seconds > 0:
        raise ConfigError(f"seconds must be positive, not {seconds}")


def _speeds(env: AtariEnv, steps: int, took_s: float) -> dict[str, Any]:
    rate = steps / took_s
    return {"steps_per_s": rate, "frames_per_s": rate * env.settings.frame_skip, "seconds": took_s}


def _layout(env: AtariEnv) -> dict[str, Any]:
    return {
        "game": env.game,
        "num_envs": env.num_envs,
        "batch_size": env.batch_size,
        "groups": env.settings.groups,
        "num_threads": env.settings.num_threads,
        "cores": len(os.sched_getaffinity(0)),
    }


def _threads() -> set[int]:
    return {int(path.name) for path in _TASKS.iterdir()} if _TASKS.is_dir() else set()


def _ran_s(threads: set[int]) -> float:
    """Seconds these threads have been on a core."""
    total = 0
    for thread in threads:
        try:
            total += int((_TASKS / str(thread) / "schedstat").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            continue
    return total / 1e9
