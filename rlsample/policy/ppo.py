"""Proximal policy optimisation with a clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, equations 7 and 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import torch
from torch import Tensor

from rlsample.errors import ConfigError
from rlsample.policy.actor_critic import add_advantages, backpropagate, explained_variance, value_loss
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

    def backward(self, batch: SampleBatch) -> dict[str, Tensor]:
        s = self.settings
        inputs, values = self.forward(batch)
        logp = self.distribution.logp_torch(inputs, self.column(batch, "actions"))
        with torch.no_grad():
            clip = s.clip_range * self.remaining(s.clip_range_schedule)
            advantages = self.column(batch, "advantages")
            log_ratio = logp - self.column(batch, "action_logp")
            ratio = log_ratio.exp()
            gain = advantages * ratio
            clipped = advantages * ratio.clamp(1 - clip, 1 + clip)
            policy_loss = torch.minimum(gain, clipped).mean().neg_()
            # The minimum's gradient: that of the ratio where it is not clipped away, else none.
            d_logp = torch.where(gain <= clipped, gain, 0.0).mul_(-1.0 / batch.count)
            old_values = None if s.vf_clip is None else self.column(batch, "values")
            mse, d_values = value_loss(values, self.column(batch, "value_targets"), old_values, s.vf_clip)
            moved = ratio.sub_(1)
        entropy_loss = backpropagate(
            self.distribution, inputs, s.ent_coef, [logp, values], [d_logp, d_values.mul_(s.vf_coef)]
        )
        return {
            "policy_gradient_loss": policy_loss,
            "value_loss": mse,
            "entropy_loss": entropy_loss,
            "approx_kl": moved.mean() - log_ratio.mean(),
            "clip_fraction": (moved.abs() > clip).float().mean(),
            "explained_variance": torch.tensor(explained_variance(batch)),
            "loss": policy_loss + s.vf_coef * mse + s.ent_coef * entropy_loss,
        }
