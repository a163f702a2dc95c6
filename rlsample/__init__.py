"""rlsample: any environment in, training data out.

    import rlsample

    with rlsample.CommonPolicyEvaluator("CartPole-v1", rlsample.PPOPolicy, num_envs=8) as evaluator:
        batch = evaluator.sample()

Names are loaded when first used: ``import rlsample`` alone brings neither torch nor ale_py nor ray.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "A2CPolicy": "policy",
    "A2CSettings": "policy",
    "BaseEnv": "env",
    "Callbacks": "evaluation",
    "CommonPolicyEvaluator": "evaluation",
    "EnvContext": "env",
    "EnvSettings": "env",
    "EvaluatorSet": "evaluation",
    "PPOPolicy": "policy",
    "PPOSettings": "policy",
    "Policy": "policy",
    "PolicyEvaluator": "evaluation",
    "PolicyOptimizer": "optimizers",
    "SampleBatch": "evaluation",
    "SamplerSettings": "evaluation",
    "StepBatch": "env",
    "SyncSamplesOptimizer": "optimizers",
    "SyncSamplesSettings": "optimizers",
    "TrainSettings": "algorithms",
    "Trainer": "algorithms",
    "VectorEnv": "env",
    "as_base_env": "env",
    "train": "algorithms",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'rlsample' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rlsample.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
