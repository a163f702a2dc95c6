"""Policies act on observations and learn from batches. Names load on first use, torch only where it is needed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsample.policy.a2c import A2CPolicy, A2CSettings
    from rlsample.policy.appo import APPOPolicy, APPOSettings
    from rlsample.policy.distributions import ActionDistribution, make_distribution
    from rlsample.policy.dqn import DQNPolicy, DQNSettings
    from rlsample.policy.gae import compute_gae, discounted_returns
    from rlsample.policy.impala import IMPALAPolicy, IMPALASettings
    from rlsample.policy.model_settings import ModelSettings
    from rlsample.policy.policy import ActOutput, Policy
    from rlsample.policy.policy_group import PolicyGroup
    from rlsample.policy.ppo import PPOPolicy, PPOSettings
    from rlsample.policy.random_policy import RandomPolicy
    from rlsample.policy.torch_policy import TorchPolicy
    from rlsample.policy.torch_settings import TorchSettings
    from rlsample.policy.vtrace import VTrace, VTraceClips, compute_vtrace

__all__ = [
    "A2CPolicy",
    "A2CSettings",
    "APPOPolicy",
    "APPOSettings",
    "ActOutput",
    "ActionDistribution",
    "DQNPolicy",
    "DQNSettings",
    "IMPALAPolicy",
    "IMPALASettings",
    "ModelSettings",
    "PPOPolicy",
    "PPOSettings",
    "Policy",
    "PolicyGroup",
    "RandomPolicy",
    "TorchPolicy",
    "TorchSettings",
    "VTrace",
    "VTraceClips",
    "compute_gae",
    "compute_vtrace",
    "discounted_returns",
    "make_distribution",
]

_MODULES = {
    "A2CPolicy": "a2c",
    "A2CSettings": "a2c",
    "APPOPolicy": "appo",
    "APPOSettings": "appo",
    "ActOutput": "policy",
    "ActionDistribution": "distributions",
    "DQNPolicy": "dqn",
    "DQNSettings": "dqn",
    "IMPALAPolicy": "impala",
    "IMPALASettings": "impala",
    "ModelSettings": "model_settings",
    "PPOPolicy": "ppo",
    "PPOSettings": "ppo",
    "Policy": "policy",
    "PolicyGroup": "policy_group",
    "RandomPolicy": "random_policy",
    "TorchPolicy": "torch_policy",
    "TorchSettings": "torch_settings",
    "VTrace": "vtrace",
    "VTraceClips": "vtrace",
    "compute_gae": "gae",
    "compute_vtrace": "vtrace",
    "discounted_returns": "gae",
    "make_distribution": "distributions",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
