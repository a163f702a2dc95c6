"""What a torch policy needs to be trained on rows that lie on devices, one or several."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlsample.policy.loaded_rows import LoadedRows
from rlsample.policy.tensor_encoding import encode_tensors, mask_tensors

if TYPE_CHECKING:
    from rlsample.policy.torch_policy import TorchPolicy

__all__ = ["LoadedLoss", "PolicySupport", "clipped_surrogate_torch", "forward_loaded", "ppo_loaded_loss"]

LoadedLoss = Callable[[Any, LoadedRows], tuple[Tensor, dict[str, Tensor]]]


class PolicySupport:
    """A :class:`~rlsample.optimizers.MultiDeviceSupport` around a torch policy.

    It can be pickled: what arrives is a copy of the policy on the CPU, with weights and optimizer state.

    Args:
        loss: a module-level function ``(policy, rows) -> (loss, statistics)``.
        columns: what the loss reads.
        whole_fragments: the loss needs rows in order of time, and their next observations.
    """

    def __init__(
        self, policy: TorchPolicy, loss: LoadedLoss, columns: tuple[str, ...], whole_fragments: bool = False
    ) -> None:
        self.policy = policy
        self.columns = columns
        self.whole_fragments = whole_fragments
        self._loss = loss

    @property
    def module(self) -> nn.Module:
        """The policy's own model: training it trains the policy."""
        return self.policy.model

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.policy.device

    def loss(self, rows: LoadedRows) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss over the rows, with a graph, and statistics (scalar tensors)."""
        return self._loss(self.policy, rows)

    def update(self) -> None:
        """Clips the gradients that lie in ``.grad`` and takes one optimizer step, as ``policy.learn`` does.

        Raises:
            FloatingPointError: gradients that are not finite; the weights are as before.
        """
        self.policy._update()

    def get_progress(self) -> int:
        """The env steps that schedules go by."""
        return self.policy._env_steps

    def set_progress(self, env_steps: int) -> None:
        """Sets them, and what follows from them."""
        self.policy.set_progress(env_steps)

    def to(self, device: str) -> PolicySupport:
        """Itself if the policy is there, else a copy on that device."""
        if torch.device(device) == self.device:
            return self
        return _rebuild(*self._recipe(device))

    def _recipe(self, device: str) -> tuple[Any, ...]:
        policy = self.policy
        settings = dataclasses.replace(policy.settings, device=device)
        spaces = (policy.observation_space, policy.action_space)
        return type(policy), spaces, settings, policy.get_state(), self._loss, self.columns, self.whole_fragments

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._recipe("cpu")


def _rebuild(
    kind: Callable[..., TorchPolicy], spaces: tuple[Any, Any], settings: Any, state: Mapping[str, Any], *rest: Any
) -> PolicySupport:
    policy = kind(*spaces, settings=settings)
    policy.set_state(state)
    return PolicySupport(policy, *rest)


def forward_loaded(policy: Any, rows: LoadedRows) -> tuple[Tensor, Tensor]:
    """Masked distribution inputs [n, num_inputs] and values [n + e], with a graph, of rows and extra observations."""
    encoder = policy._encoder
    inputs, values = policy.model(encode_tensors(encoder, rows.all_obs))
    inputs, values = inputs[: rows.count].float(), values.float()
    if encoder.has_mask:
        inputs = policy.distribution.apply_mask_torch(inputs, mask_tensors(rows["obs"]))
    return inputs, values


def clipped_surrogate_torch(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """:func:`rlsample.policy.losses.clipped_surrogate` with a graph: the loss, approx_kl and clip_fraction."""
    log_ratio = logp - old_logp
    ratio = log_ratio.exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).mean()
    moved = ratio.detach() - 1
    outside = (moved.abs() > clip).float().mean()
    return loss, {"approx_kl": (moved - log_ratio.detach()).mean(), "clip_fraction": outside}


def ppo_loaded_loss(policy: Any, rows: LoadedRows) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of :class:`~rlsample.policy.PPOPolicy` on loaded rows."""
    s = policy.settings
    inputs, values = forward_loaded(policy, rows)
    logp = policy.distribution.logp_torch(inputs, rows["actions"])
    entropy = policy.distribution.entropy_torch(inputs).mean()
    clip = s.clip_range * policy.remaining(s.clip_range_schedule)
    policy_loss, stats = clipped_surrogate_torch(logp, rows["action_logp"], rows["advantages"], clip)
    old_values, targets = rows["values"], rows["value_targets"]
    if s.vf_clip is not None:
        values = old_values + (values - old_values).clamp(-s.vf_clip, s.vf_clip)
    mse = (values - targets).square().mean()
    loss = policy_loss + s.vf_coef * mse - s.ent_coef * entropy
    spread = targets.var(correction=0)
    explained = torch.where(spread > 0, 1 - (targets - old_values).var(correction=0) / spread, torch.zeros_like(spread))
    return loss, {
        "policy_gradient_loss": policy_loss,
        "value_loss": mse,
        "entropy_loss": -entropy,
        **stats,
        "explained_variance": explained,
        "loss": loss,
    }
