"""Proximal policy optimisation with a clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, equations 7 and 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from rlsample.errors import ConfigError
from rlsample.policy.advantages import add_advantages
from rlsample.policy.device_support import PolicySupport, ppo_loaded_loss
from rlsample.policy.losses import clipped_surrogate, explained_variance, mean, value_loss
from rlsample.policy.torch_policy import TorchPolicy
from rlsample.policy.torch_settings import TorchSettings
from rlsample.sample_batch import SampleBatch
from rlsample.settings import option

__all__ = ["PPOPolicy", "PPOSettings"]


@dataclass(frozen=True)
class PPOSettings(TorchSettings):
    """Options of :class:`PPOPolicy`."""

    gamma: float = option(0.99, "Discount.")
    gae_lambda: float = option(0.95, "Lambda of generalised advantage estimation; 1: plain discounted returns.")
    clip_range: float = option(0.2, "The ratio of new to old probability is clipped to 1 +- this.")
    clip_range_schedule: str = option("constant", "'constant', or 'linear': down to 0 over schedule_steps.")
    vf_coef: float = option(0.5, "Weight of the value loss.")
    vf_clip: float | None = option(None, "Values may move this far from the sampled ones per batch; null: freely.")
    ent_coef: float = option(0.0, "Weight of the entropy bonus.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_schedule("clip_range_schedule", self.clip_range_schedule)
        if not self.clip_range > 0:
            raise ConfigError(f"clip_range {self.clip_range}: must be above 0")


class PPOPolicy(TorchPolicy):
    """PPO. A batch for learning needs obs, actions, action_logp, advantages, value_targets and values.

    Advantages are used as they come: standardise them where minibatches are made, if at all.

    Statistics: loss, policy_gradient_loss, value_loss, entropy_loss (minus the entropy), approx_kl (estimator k3 of
    http://joschu.net/blog/kl-approx.html), clip_fraction, explained_variance (of the sampled values).
    """

    settings: PPOSettings

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        settings: PPOSettings | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(observation_space, action_space, PPOSettings() if settings is None else settings, seed)

    def postprocess(self, batch: SampleBatch) -> SampleBatch:
        """Adds advantages and value_targets, float32[N]."""
        return add_advantages(batch, self, self.settings.gamma, self.settings.gae_lambda)

    def backward(self, batch: SampleBatch) -> dict[str, float]:
        s = self.settings
        inputs, values = self.forward(batch)
        score = self.distribution.score(inputs, batch["actions"])
        clip = s.clip_range * self.remaining(s.clip_range_schedule)
        surrogate = clipped_surrogate(score.logp, batch["action_logp"], batch["advantages"], clip)
        old_values, targets = batch["values"], batch["value_targets"]
        mse, d_values = value_loss(values, targets, old_values, s.vf_clip)
        d_inputs = score.gradient(surrogate.d_logp, -s.ent_coef / batch.count)
        self.model_pass.backward(d_inputs, d_values * np.float32(s.vf_coef))
        entropy_loss = -mean(score.entropy)
        return {
            "policy_gradient_loss": surrogate.loss,
            "value_loss": mse,
            "entropy_loss": entropy_loss,
            "approx_kl": surrogate.approx_kl,
            "clip_fraction": surrogate.clip_fraction,
            "explained_variance": explained_variance(old_values, targets),
            "loss": surrogate.loss + s.vf_coef * mse + s.ent_coef * entropy_loss,
        }

    def multi_device_support(self) -> PolicySupport:
        """For loaders and several devices: :class:`~rlsample.optimizers.MultiDeviceSupport`."""
        columns = ("obs", "actions", "action_logp", "advantages", "value_targets", "values")
        return PolicySupport(self, ppo_loaded_loss, columns)
