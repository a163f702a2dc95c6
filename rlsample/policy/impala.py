"""IMPALA: actor-critic from older policies' rows (Espeholt et al. 2018, arXiv:1802.01561)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from torch import Tensor

from rlsample.errors import ConfigError
from rlsample.policy.device_support import PolicySupport
from rlsample.policy.loaded_rows import LoadedRows
from rlsample.policy.losses import policy_gradient
from rlsample.policy.torch_policy import TorchPolicy
from rlsample.policy.torch_settings import TorchSettings
from rlsample.policy.vtrace import VTrace
from rlsample.policy.vtrace_loss import VTRACE_COLUMNS, PolicyTerm, vtrace_backward, vtrace_loaded_loss
from rlsample.sample_batch import SampleBatch
from rlsample.settings import option

__all__ = ["IMPALAPolicy", "IMPALASettings", "impala_loaded_loss"]


@dataclass(frozen=True)
class IMPALASettings(TorchSettings):
    """Options of :class:`IMPALAPolicy`."""

    learning_rate: float = option(5e-4, "Step size of the optimizer.")
    max_grad_norm: float | None = option(40.0, "Gradients are scaled down to this common norm; null: never.")
    gamma: float = option(0.99, "Discount.")
    vf_coef: float = option(0.5, "Weight of the value loss.")
    ent_coef: float = option(0.01, "Weight of the entropy bonus.")
    rho_clip: float = option(1.0, "V-trace: importance weights in value targets are cut to this.")
    c_clip: float = option(1.0, "V-trace: importance weights that carry later errors back are cut to this.")
    pg_rho_clip: float = option(1.0, "V-trace: importance weights of the policy gradient are cut to this.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rho_clip", "c_clip", "pg_rho_clip"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} {getattr(self, name)}: must not be negative")


class IMPALAPolicy(TorchPolicy):
    """IMPALA's policy gradient on V-trace targets.

    A batch for learning needs obs, actions, action_logp (of the policy that acted), rewards, terminated and next
    observations, and holds whole fragments: V-trace runs from each row to the end of its fragment or episode.
    Nothing is added to batches after sampling. Losses are means over rows.

    Statistics: loss, policy_gradient_loss, value_loss, entropy_loss (minus the entropy), explained_variance (of the
    values of now), rho_mean (mean ratio of new to old probability), rho_clipped (part of the rows above ``rho_clip``).
    """

    settings: IMPALASettings

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        settings: IMPALASettings | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(observation_space, action_space, IMPALASettings() if settings is None else settings, seed)

    def backward(self, batch: SampleBatch) -> dict[str, float]:
        return vtrace_backward(self, batch, _policy_term)

    def multi_device_support(self) -> PolicySupport:
        """For loaders and several devices."""
        return PolicySupport(self, impala_loaded_loss, VTRACE_COLUMNS, whole_fragments=True)


def _policy_term(logp: np.ndarray, behaviour: np.ndarray, trace: VTrace) -> PolicyTerm:
    loss, d_logp = policy_gradient(logp, trace.pg_advantages)
    return PolicyTerm(loss, d_logp, {})


def impala_loaded_loss(policy: IMPALAPolicy, rows: LoadedRows) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss on loaded rows, with a graph."""
    return vtrace_loaded_loss(policy, rows, lambda logp, _, trace: (-(logp * trace.pg_advantages).mean(), {}))
