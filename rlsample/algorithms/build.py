"""From a config to the evaluators it describes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from rlsample.algorithms.presets import find_algorithm
from rlsample.algorithms.run_config import RunConfig
from rlsample.engine.process_engine import ProcessEngine
from rlsample.evaluation import CommonPolicyEvaluator, EvaluatorSet
from rlsample.evaluation.callbacks import Callbacks

__all__ = ["build_evaluator", "build_evaluators", "child_seed"]


def build_evaluator(config: RunConfig, **changes: Any) -> CommonPolicyEvaluator:
    """The local evaluator of a config; ``changes`` go to its constructor in place of what the config says."""
    algorithm = find_algorithm(config.train.algo)
    arguments: dict[str, Any] = {
        "num_envs": config.train.num_envs,
        "seed": config.train.seed,
        **vars(config.sampler),
        **vars(config.envs),
        **changes,
    }
    make_policy = functools.partial(algorithm.make_policy, settings=config.policy)
    return CommonPolicyEvaluator(config.train.env, make_policy, **arguments)


def build_evaluators(config: RunConfig, callbacks: Callbacks | None = None) -> EvaluatorSet:
    """The local evaluator, and ``num_workers`` in processes of their own; each of these has a copy of the callbacks."""
    make = functools.partial(_build_numbered, config, callbacks)
    num_workers = config.train.num_workers or 0
    engine = ProcessEngine(config.engine) if num_workers else None
    return EvaluatorSet.create(make, num_workers, engine, config.workers)


def _build_numbered(config: RunConfig, callbacks: Callbacks | None, worker_index: int) -> CommonPolicyEvaluator:
    """Number 0 learns, on the first of the optimizer's ``devices`` if it has some; the others sample on the CPU."""
    devices = getattr(config.learning, "devices", None)
    device = "cpu" if worker_index else devices[0] if devices and devices != ("cpu",) else None
    if device is not None and hasattr(config.policy, "device"):
        config = dataclasses.replace(config, policy=dataclasses.replace(config.policy, device=device))
    return build_evaluator(config, callbacks=callbacks, worker_index=worker_index)


def child_seed(seed: int, use: str) -> int:
    """A seed for one use of a run's seed, unrelated to the seeds of other uses, slots and policies."""
    return int(np.random.SeedSequence(seed, spawn_key=tuple(use.encode())).generate_state(1)[0])
