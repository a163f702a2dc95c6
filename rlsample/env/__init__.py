"""Environments: the polled contract, what users implement, and the conversion of everything else."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsample.env.async_vector_env import AsyncVectorEnv
    from rlsample.env.base_env import BaseEnv, EnvContext, StepBatch
    from rlsample.env.convert import as_base_env
    from rlsample.env.env_settings import EnvSettings
    from rlsample.env.serving import ServingEnv, ServingSettings
    from rlsample.env.vector_env import VectorEnv

__all__ = [
    "AsyncVectorEnv",
    "BaseEnv",
    "EnvContext",
    "EnvSettings",
    "ServingEnv",
    "ServingSettings",
    "StepBatch",
    "VectorEnv",
    "as_base_env",
]

# Loaded on first use: the contract modules must not pull in the adapters.
_MODULES = {
    "AsyncVectorEnv": "async_vector_env",
    "BaseEnv": "base_env",
    "EnvContext": "base_env",
    "EnvSettings": "env_settings",
    "ServingEnv": "serving",
    "ServingSettings": "serving",
    "StepBatch": "base_env",
    "VectorEnv": "vector_env",
    "as_base_env": "convert",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
