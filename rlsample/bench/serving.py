"""Served actions per second: client threads that ask as fast as they are answered, every row kept for training."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from rlsample.env.serving import ServingEnv
from rlsample.errors import ConfigError, ServingError
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.policy import PPOPolicy

__all__ = ["bench_serving"]

_EPISODE_STEPS = 200
_FRAGMENT_ROWS, _BATCH_ROWS = 128, 2048  # at least


class _AskingClients(ServingEnv):
    """K threads that play episodes of 200 steps on CartPole's spaces, with nothing behind them."""

    def __init__(self, clients: int) -> None:
        super().__init__(Box(-np.inf, np.inf, (4,), np.float32), Discrete(2), max_concurrent=clients + 1)
        self.waits_s: list[list[float]] = [[] for _ in range(clients)]
        self.measuring = False

    def run(self) -> None:
        threads = [threading.Thread(target=self._play, args=(waits,), daemon=True) for waits in self.waits_s]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _play(self, waits: list[float]) -> None:
        obs = np.zeros(4, np.float32)
        clock = time.perf_counter
        try:
            while True:
                self.start_episode()
                for _ in range(_EPISODE_STEPS):
                    asked = clock()
                    self.get_action(obs)
                    if self.measuring:
                        waits.append(clock() - asked)
                    self.log_returns(1.0)
                self.end_episode(obs)
        except ServingError:  # closed
            pass


def bench_serving(clients: int, seconds: float, http: bool = False, batch: int = 1) -> dict[str, float]:
    """Measures served actions: two 64x64 nets that act by numpy, batches taken as they come.

    Args:
        clients: threads that ask, each an episode at a time.
        seconds: to measure, after half a second to warm up.
        http: over HTTP, from another process; see :func:`~rlsample.bench.serving_http.bench_serving_http`.
        batch: with ``http``: observations a call.

    Returns:
        ``actions_per_s``; ``p50_ms`` and ``p99_ms`` of the time a client waits; ``rows``, sampled meanwhile.

    Raises:
        ConfigError: no client, or a batch without ``http``.
    """
    if http:
        from rlsample.bench.serving_http import bench_serving_http

        return bench_serving_http(clients, seconds, batch)
    if clients < 1:
        raise ConfigError(f"clients must be at least 1, got {clients}")
    if batch != 1:
        raise ConfigError("several observations a call: only over HTTP (--http)")
    env = _AskingClients(clients)
    options: dict[str, Any] = {
        "rollout_fragment_length": max(_FRAGMENT_ROWS, _BATCH_ROWS // clients),
        "sample_queue_size": 64,
    }
    evaluator = CommonPolicyEvaluator(env, PPOPolicy, num_envs=clients, seed=0, **options)
    with evaluator:
        _sample_for(evaluator, 0.5)
        env.measuring = True
        started = time.perf_counter()
        rows = _sample_for(evaluator, seconds)
        env.measuring = False
        elapsed = time.perf_counter() - started
        dropped = evaluator.get_timers()["sampler/rows_dropped"]
    waits = np.concatenate([np.array(w) for w in env.waits_s])
    if dropped or not len(waits):
        raise ServingError(f"{dropped} rows were dropped, {len(waits)} actions served: this is no measurement")
    p50, p99 = np.percentile(waits, [50, 99]) * 1e3
    return {"actions_per_s": len(waits) / elapsed, "p50_ms": float(p50), "p99_ms": float(p99), "rows": float(rows)}


def _sample_for(evaluator: CommonPolicyEvaluator, seconds: float) -> int:
    stop = time.perf_counter() + seconds
    rows = 0
    while time.perf_counter() < stop:
        rows += evaluator.sample().count
    return rows
