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
        optimizer.stats()
        sampled, trained, version = optimizer.num_steps_sampled, optimizer.num_steps_trained, policy.version
        started, cpu = perf_counter(), process_time()
        while perf_counter() - started < seconds:
            trainer.step()
        took, cpu = perf_counter() - started, process_time() - cpu
        stats = optimizer.stats()
        return {
            "sampled_steps_per_s": (optimizer.num_steps_sampled - sampled) / took,
            "trained_steps_per_s": (optimizer.num_steps_trained - trained) / took,
            "policy_lag_mean": stats.get("policy_lag_mean"),
            "learner_wait_share": stats.get("learner_wait_share"),
            "driver_busy_share": cpu / took,
            "updates_per_s": (policy.version - version) / took,
            "seconds": took,
            "algo": config.train.algo,
            "env": str(config.train.env),
            "num_envs": config.train.num_envs,
            "num_workers": config.train.num_workers,
        }
