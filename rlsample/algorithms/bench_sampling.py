"""How many actions per second one core samples, and where the time goes."""

from __future__ import annotations

import contextlib
from time import perf_counter
from typing import Any

from rlsample.algorithms.build import build_evaluator
from rlsample.algorithms.run_config import configure
from rlsample.algorithms.torch_threads import torch_threads
from rlsample.errors import ConfigError
from rlsample.evaluation import CommonPolicyEvaluator

__all__ = ["bench_sampling"]

ROWS = 2048


def bench_sampling(
    env: str = "CartPole-v1",
    num_envs: int = 64,
    *,
    vectorize: str = "auto",
    inference: str = "auto",
    seconds: float = 4.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Samples with PPO's policy (two 64x64 tanh nets by default settings) and measures.

    Full rows are kept: obs, action, reward, both flags, log-prob, value and the ids; no learning columns are added.
    A call of ``sample()`` returns about 2048 rows; one such call warms up. Torch uses one thread; pin the process to a
    core yourself (``taskset -c 1``).

    Args:
        vectorize, inference: options of the env and of the policy.
        seconds: how long to measure; the last call is finished.

    Returns:
        ``actions_per_s``; ``env_us``, ``infer_us``, ``processing_us``, ``other_us``: means per poll; ``polls``,
        ``rows``, ``seconds``, and what was measured.
    """
    if not seconds > 0:
        raise ConfigError(f"seconds must be positive, not {seconds}")
    config = configure(
        algo="ppo",
        env=env,
        num_envs=num_envs,
        seed=seed,
        vectorize=vectorize,
        inference=inference,
        rollout_fragment_length=max(1, ROWS // num_envs),
        postprocess=False,
    )
    with torch_threads(1), contextlib.closing(build_evaluator(config)) as evaluator:
        found = _measure(evaluator, seconds)
    return {**found, "env": env, "num_envs": num_envs, "vectorize": vectorize, "inference": inference}


def _measure(evaluator: CommonPolicyEvaluator, seconds: float) -> dict[str, Any]:
    evaluator.sample()
    evaluator.get_timers()
    rows = 0
    started = perf_counter()
    while perf_counter() - started < seconds:
        rows += evaluator.sample().count
    took = perf_counter() - started
    timers = evaluator.get_timers()
    polls = int(timers["sampler/polls"])
    split = {f"{name}_us": timers[f"sampler/{name}_ms"] * 1e3 for name in ("env", "infer", "processing")}
    other_us = took / polls * 1e6 - sum(split.values())
    return {"actions_per_s": rows / took, **split, "other_us": other_us, "polls": polls, "rows": rows, "seconds": took}
