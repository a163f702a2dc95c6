"""How fast an algorithm trains, sampling and learning together: ``rlsample bench train``."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter, process_time
from typing import Any

from rlsample.algorithms.run_config import configure
from rlsample.algorithms.trainer import Trainer
from rlsample.errors import ConfigError

__all__ = ["bench_train"]

_FOR_EVER = 10**12
_WARM_UPDATES = 5
_WARM_S = 1.0


def bench_train(options: Mapping[str, Any] | None = None, /, *, seconds: float = 4.0, **more: Any) -> dict[str, Any]:
    """Trains as ``rlsample train`` does, without files, and measures.

    Evaluators start, and at least five updates and a second pass, before the clock starts; it starts and stops between
    two iterations. Schedules that end with the run stay at their beginning.

    Args:
        options, more: of :func:`~rlsample.algorithms.run_config.configure`: algo, env, num_envs, num_workers, ...
        seconds: how long to measure; the last iteration is finished.

    Returns:
        ``sampled_steps_per_s``: rows that evaluators handed over; ``trained_steps_per_s``: rows a loss was computed on,
        each as often as it was used; ``policy_lag_mean``: updates between the weights a row was sampled under and its
        use; None where the optimizer does not count it; ``learner_wait_share``: part of a learner thread's time
        without data, or None; ``driver_busy_share``: CPU time of this process over the time measured;
        ``updates_per_s``, ``seconds``, and what was measured.

    Raises:
        ConfigError: options that cannot work.
    """
    if not seconds > 0:
        raise ConfigError(f"seconds must be positive, not {seconds}")
    config = configure(options, **{"max_steps": _FOR_EVER, **more, "out": None})
    with Trainer(config) as trainer:
        optimizer, policy = trainer.optimizer, trainer.evaluator.policy
        began, version = perf_counter(), policy.version
        while policy.version - version < _WARM_UPDATES or perf_counter() - began < _WARM_S:
            trainer.step()
        sampled, trained, version = optimizer.num_steps_sampled, optimizer.num_steps_trained, policy.version
        results = []
        started, cpu = perf_counter(), process_time()
        while perf_counter() - started < seconds:
            results.append(trainer.step())
        took, cpu = perf_counter() - started, process_time() - cpu
        return {
            "sampled_steps_per_s": (optimizer.num_steps_sampled - sampled) / took,
            "trained_steps_per_s": (optimizer.num_steps_trained - trained) / took,
            "policy_lag_mean": _lag_mean(results, trained),
            "learner_wait_share": _wait_share(results),
            "driver_busy_share": cpu / took,
            "updates_per_s": (policy.version - version) / took,
            "seconds": took,
            "algo": config.train.algo,
            "env": str(config.train.env),
            "num_envs": config.train.num_envs,
            "num_workers": config.train.num_workers,
        }


def _lag_mean(results: list[dict[str, Any]], trained: int) -> float | None:
    """Over all rows trained on: each iteration tells the mean over its own."""
    if "optimizer/policy_lag_mean" not in results[-1]:
        return None
    lags = 0.0
    before = first = trained
    for result in results:
        now = result["optimizer/num_steps_trained"]
        lags, before = lags + result["optimizer/policy_lag_mean"] * (now - before), now
    return lags / max(1, before - first)


def _wait_share(results: list[dict[str, Any]]) -> float | None:
    """Of the learner thread's time in these iterations, the part in which it had no data."""
    if "optimizer/learner_wait_share" not in results[-1]:
        return None
    waited, busy = (
        sum(result.get(f"optimizer/{name}_s", 0.0) for result in results) for name in ("learner_wait", "compute")
    )
    return waited / max(1e-9, waited + busy)
