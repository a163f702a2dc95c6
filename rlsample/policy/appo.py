"""APPO: PPO's clipped surrogate on V-trace advantages, for samplers that run ahead of the learner.

The surrogate is that of Schulman et al. 2017 (arXiv:1707.06347, equation 7) with the policy that acted as the old one;
the advantages are those of Espeholt et al. 2018 (arXiv:1802.01561) without their importance weight, which is the
surrogate's ratio already.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from torch import Tensor

from rlsample.errors import ConfigError
from rlsample.policy.device_support import PolicySupport, clipped_surrogate_torch
from rlsample.policy.impala import IMPALASettings
from rlsample.policy.loaded_rows import LoadedRows
from rlsample.policy.losses import clipped_surrogate
from rlsample.policy.torch_policy import TorchPolicy
from rlsample.policy.vtrace import VTrace
from rlsample.policy.vtrace_loss import VTRACE_COLUMNS, PolicyTerm, vtrace_backward, vtrace_loaded_loss
from rlsample.sample_batch import SampleBatch
from rlsample.settings import option

__all__ = ["APPOPolicy", "APPOSettings", "appo_loaded_loss"]


@dataclass(frozen=True)
class APPOSettings(IMPALASettings):
    """Options of :class:`APPOPolicy`."""

    clip_range: float = option(0.4, "The ratio of new to old probability is clipped to 1 +- this.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.clip_range > 0:
            raise ConfigError(f"clip_range {self.clip_range}: must be above 0")


class APPOPolicy(TorchPolicy):
    """Asynchronous PPO. Batches as for :class:`~rlsample.policy.impala.IMPALAPolicy`.

    Statistics: those of IMPALA, approx_kl (between the policy of now and the one that acted) and clip_fraction.
    """

    settings: APPOSettings

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        settings: APPOSettings | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(observation_space, action_space, APPOSettings() if settings is None else settings, seed)

    def backward(self, batch: SampleBatch) -> dict[str, float]:
        return vtrace_backward(self, batch, functools.partial(_policy_term, self.settings.clip_range))

    def multi_device_support(self) -> PolicySupport:
        """For loaders and several devices."""
        return PolicySupport(self, appo_loaded_loss, VTRACE_COLUMNS, whole_fragments=True)


def _policy_term(clip: float, logp: np.ndarray, behaviour: np.ndarray, trace: VTrace) -> PolicyTerm:
    surrogate = clipped_surrogate(logp, behaviour, trace.advantages, clip)
    stats = {"approx_kl": surrogate.approx_kl, "clip_fraction": surrogate.clip_fraction}
    return PolicyTerm(surrogate.loss, surrogate.d_logp, stats)


def appo_loaded_loss(policy: APPOPolicy, rows: LoadedRows) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss on loaded rows, with a graph."""
    clip = policy.settings.clip_range
    return vtrace_loaded_loss(
        policy, rows, lambda logp, old, trace: clipped_surrogate_torch(logp, old, trace.advantages, clip)
    )
