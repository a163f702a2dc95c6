"""From a config to the evaluator it describes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rlsample.algorithms.presets import find_algorithm
from rlsample.algorithms.run_config import RunConfig
from rlsample.evaluation import CommonPolicyEvaluator

__all__ = ["build_evaluator", "child_seed"]


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


def child_seed(seed: int, use: str) -> int:
    """A seed for one use of a run's seed, unrelated to the seeds of other uses, slots and policies."""
    return int(np.random.SeedSequence(seed, spawn_key=tuple(use.encode())).generate_state(1)[0])
