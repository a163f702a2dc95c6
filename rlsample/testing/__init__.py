"""Public checks for envs, engines and optimizers, and tiny envs and evaluators whose every value is known."""

import importlib
from typing import Any

from rlsample.testing.base_env_player import ConformanceError
from rlsample.testing.base_env_rules import check_base_env
from rlsample.testing.scripted import CountEnv, CountVectorEnv

__all__ = [
    "ConformanceError",
    "CountEnv",
    "CountVectorEnv",
    "RowEvaluator",
    "check_base_env",
    "check_engine",
    "check_optimizer",
]

_LATER = {"RowEvaluator": "row_evaluator", "check_engine": "engine_rules", "check_optimizer": "optimizer_rules"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:  # those bring engines and optimizers along
        raise AttributeError(f"module 'rlsample.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rlsample.testing.{_LATER[name]}"), name)
