"""How fast evaluators sample: ``rlsample bench sampling``."""

from __future__ import annotations

import contextlib
from time import perf_counter, process_time
from typing import Any

from rlsample.algorithms.build import build_evaluator, build_evaluators
from rlsample.algorithms.run_config import configure
from rlsample.algorithms.torch_threads import torch_threads
from rlsample.errors import ConfigError
from rlsample.evaluation import CommonPolicyEvaluator, EvaluatorSet
from rlsample.evaluation.requests import Requests

__all__ = ["bench_sampling"]

ROWS = 2048
_AHEAD = 2  # samples asked of each worker before its answers come, as the asynchronous optimizers do


def bench_sampling(
    env: str = "CartPole-v1",
    num_envs: int = 64,
    *,
    num_workers: int = 0,
    vectorize: str = "auto",
    inference: str = "auto",
    seconds: float = 4.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Samples with PPO's policy (two 64x64 tanh nets by default settings) and measures.

    Full rows are kept: obs, action, reward, both flags, log-prob, value and the ids; no learning columns are added.
    A call of ``sample()`` returns about 2048 rows. Torch uses one thread per process.

    Without workers one evaluator samples in this process; one such call warms up. Pin the process to a core yourself
    (``taskset -c 1``). With workers, evaluators in processes of their own send their rows here, and this process takes
    them; each has answered three times before the clock starts. The clock starts and stops with an answer, so that
    rows and time belong together.

    Args:
        num_envs: slots of each evaluator.
        num_workers: evaluators in processes; 0: none.
        vectorize, inference: options of the env and of the policy.
        seconds: how long to measure; the last call is finished.

    Returns:
        ``actions_per_s``; ``env_us``, ``infer_us``, ``processing_us``, ``other_us``: means per poll of one evaluator;
        ``polls``, ``rows``, ``seconds``, and what was measured. With workers also ``driver_busy_share``: CPU time of
        this process over the time measured.
    """
    if not seconds > 0:
        raise ConfigError(f"seconds must be positive, not {seconds}")
    config = configure(
        algo="ppo",
        env=env,
        num_envs=num_envs,
        num_workers=num_workers,
        seed=seed,
        vectorize=vectorize,
        inference=inference,
        rollout_fragment_length=max(1, ROWS // num_envs),
        postprocess=False,
    )
    with torch_threads(1), contextlib.ExitStack() as stack:
        if num_workers:
            found = _measure_workers(stack.enter_context(build_evaluators(config)), seconds)
        else:
            found = _measure(stack.enter_context(contextlib.closing(build_evaluator(config))), seconds)
    measured = {"env": env, "num_envs": num_envs, "num_workers": num_workers}
    return {**found, **measured, "vectorize": vectorize, "inference": inference}


def _measure(evaluator: CommonPolicyEvaluator, seconds: float) -> dict[str, Any]:
    evaluator.sample()
    evaluator.get_timers()
    rows = 0
    started = perf_counter()
    while perf_counter() - started < seconds:
        rows += evaluator.sample().count
    return _figures(rows, perf_counter() - started, evaluator.get_timers(), 1)


def _measure_workers(evaluators: EvaluatorSet, seconds: float) -> dict[str, Any]:
    evaluators.sync_weights()
    requests = Requests(evaluators)
    workers = range(evaluators.num_remote)
    requests.ask_all(_AHEAD)
    answered = dict.fromkeys(workers, 0)
    while min(answered.values()) < 3:
        for answer in requests.take():
            answered[answer.worker] += 1
            requests.ask(answer.worker)
    evaluators.get_timers()
    rows = 0
    started, cpu = perf_counter(), process_time()
    while perf_counter() - started < seconds:
        for answer in requests.take():
            rows += answer.value.count
            requests.ask(answer.worker)
        evaluators.get_metrics()  # as a train loop does, or finished episodes pile up
    took, cpu = perf_counter() - started, process_time() - cpu
    timers = evaluators.get_timers()
    requests.take(requests.in_flight())
    return {**_figures(rows, took, timers, evaluators.num_remote), "driver_busy_share": cpu / took}


def _figures(rows: int, took: float, timers: dict[str, float], evaluators: int) -> dict[str, Any]:
    polls = int(timers["sampler/polls"])
    split = {f"{name}_us": timers[f"sampler/{name}_ms"] * 1e3 for name in ("env", "infer", "processing")}
    other_us = evaluators * took / polls * 1e6 - sum(split.values())
    return {"actions_per_s": rows / took, **split, "other_us": other_us, "polls": polls, "rows": rows, "seconds": took}
