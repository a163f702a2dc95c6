"""Advantage actor-critic, the synchronous form of Mnih et al. 2016 (arXiv:1602.01783, algorithm S3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from rlsample.policy.advantages import add_advantages
from rlsample.policy.losses import explained_variance, mean, policy_gradient, value_loss
from rlsample.policy.torch_policy import TorchPolicy
from rlsample.policy.torch_settings import TorchSettings
from rlsample.sample_batch import SampleBatch
from rlsample.settings import option

__all__ = ["A2CPolicy", "A2CSettings"]


@dataclass(frozen=True)
class A2CSettings(TorchSettings):
    """Options of :class:`A2CPolicy`."""

    learning_rate: float = option(7e-4, "Step size of the optimizer.")
    optimizer: str = option("rmsprop", "'adam' or 'rmsprop'.")
    gamma: float = option(0.99, "Discount.")
    gae_lambda: float = option(1.0, "Lambda of generalised advantage estimation; 1: plain discounted returns.")
    vf_coef: float = option(0.5, "Weight of the value loss.")
    ent_coef: float = option(0.0, "Weight of the entropy bonus.")


class A2CPolicy(TorchPolicy):
    """A2C. A batch for learning needs obs, actions, advantages, value_targets and values.

    Statistics: loss, policy_gradient_loss, value_loss, entropy_loss (minus the entropy), explained_variance (of the
    sampled values).
    """

    settings: A2CSettings

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        settings: A2CSettings | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(observation_space, action_space, A2CSettings() if settings is None else settings, seed)

    def postprocess(self, batch: SampleBatch) -> SampleBatch:
        """Adds advantages and value_targets, float32[N]."""
        return add_advantages(batch, self, self.settings.gamma, self.settings.gae_lambda)

    def backward(self, batch: SampleBatch) -> dict[str, float]:
        s = self.settings
        inputs, values = self.forward(batch)
        score = self.distribution.score(inputs, batch["actions"])
        policy_loss, d_logp = policy_gradient(score.logp, batch["advantages"])
        mse, d_values = value_loss(values, batch["value_targets"])
        self.model_pass.backward(score.gradient(d_logp, -s.ent_coef / batch.count), d_values * np.float32(s.vf_coef))
        entropy_loss = -mean(score.entropy)
        return {
            "policy_gradient_loss": policy_loss,
            "value_loss": mse,
            "entropy_loss": entropy_loss,
            "explained_variance": explained_variance(batch["values"], batch["value_targets"]),
            "loss": policy_loss + s.vf_coef * mse + s.ent_coef * entropy_loss,
        }
