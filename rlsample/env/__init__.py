"""Environments: the polled contract, what users implement, and the conversion of everything else."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsample.env.async_vector_env import AsyncVectorEnv
    from rlsample.env.atari import AtariEnv, make_atari
    from rlsample.env.atari_settings import AtariSettings
    from rlsample.env.base_env import BaseEnv, EnvContext, StepBatch
    from rlsample.env.catalog import EnvRecord, list_all_envs
    from rlsample.env.convert import as_base_env
    from rlsample.env.dm_env_adapter import as_dm_env
    from rlsample.env.env_settings import EnvSettings
    from rlsample.env.serving import MultiAgentServingEnv, ServingEnv, ServingSettings
    from rlsample.env.vector_env import VectorEnv

__all__ = [
    "AsyncVectorEnv",
    "AtariEnv",
    "AtariSettings",
    "BaseEnv",
    "EnvContext",
    "EnvRecord",
    "EnvSettings",
    "MultiAgentServingEnv",
    "ServingEnv",
    "ServingSettings",
    "StepBatch",
    "VectorEnv",
    "as_base_env",
    "as_dm_env",
    "list_all_envs",
    "make_atari",
]

# Loaded on first use: the contract modules must not pull in the adapters.
_MODULES = {
    "AsyncVectorEnv": "async_vector_env",
    "AtariEnv": "atari",
    "AtariSettings": "atari_settings",
    "BaseEnv": "base_env",
    "EnvContext": "base_env",
    "EnvRecord": "catalog",
    "EnvSettings": "env_settings",
    "MultiAgentServingEnv": "serving",
    "ServingEnv": "serving",
    "ServingSettings": "serving",
    "StepBatch": "base_env",
    "VectorEnv": "vector_env",
    "as_base_env": "convert",
    "as_dm_env": "dm_env_adapter",
    "list_all_envs": "catalog",
    "make_atari": "atari",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
