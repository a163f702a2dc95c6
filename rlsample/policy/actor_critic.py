"""What PPO and A2C share: advantages after sampling, and one backward pass from gradients in closed form."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlsample.errors import ConfigError
from rlsample.policy.distributions import ActionDistribution
from rlsample.policy.gae import compute_gae
from rlsample.policy.policy import Policy
from rlsample.sample_batch import SampleBatch
from rlsample.tree import num_rows

__all__ = ["add_advantages", "backpropagate", "explained_variance", "value_loss"]


def add_advantages(batch: SampleBatch, policy: Policy, gamma: float, lam: float) -> SampleBatch:
    """Adds the columns ``advantages`` and ``value_targets`` (float32[N]) to a batch that has ``values``.

    Bootstraps from V of each row's true next observation, computed with the policy's weights of now for the
    observations that are no row's own. Returns the same batch.

    Raises:
        ConfigError: the batch has no ``values``, or no next observations.
    """
    if "values" not in batch:
        raise ConfigError("advantages need the column 'values'; this batch has " + ", ".join(batch))
    values = batch["values"]
    terminated = batch["terminated"]
    next_obs = batch.next_obs_source
    if next_obs is not None and next_obs.source is None:
        extra = policy.values(next_obs.extra) if num_rows(next_obs.extra) else np.zeros(0, np.float32)
        next_values = batch.bootstrap(values, extra)
        follows = next_obs.index == np.arange(1, batch.count + 1)
    else:
        next_values = policy.values(batch["next_obs"])
        follows = _follows(batch)
    end = terminated | batch["truncated"] | ~follows
    batch["advantages"], batch["value_targets"] = compute_gae(
        batch["rewards"], values, next_values, terminated, end, gamma, lam
    )
    return batch


def _follows(batch: SampleBatch) -> np.ndarray:
    """bool[N]: the next row continues this row's segment."""
    follows = np.ones(batch.count, bool)
    follows[-1:] = False
    for name in ("eps_id", "fragment_id", "env_id", "agent_id"):
        if name in batch:
            follows[:-1] &= batch[name][1:] == batch[name][:-1]
    if "t" in batch:
        follows[:-1] &= batch["t"][1:] == batch["t"][:-1] + 1
    if "eps_id" not in batch:
        raise ConfigError("advantages of rows without derived next_obs need the column 'eps_id'")
    return follows


def explained_variance(batch: SampleBatch) -> float:
    """``1 - var(value_targets - values) / var(value_targets)`` of a batch's columns; 0 where targets are constant."""
    targets = batch["value_targets"]
    spread = _variance(targets)
    return 1.0 - _variance(targets - batch["values"]) / spread if spread > 0 else 0.0


def _variance(x: np.ndarray) -> float:
    x = x - np.add.reduce(x) / len(x)
    return float(x.dot(x)) / len(x)


def value_loss(
    values: Tensor, targets: Tensor, old_values: Tensor | None = None, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Mean squared error and its gradient with respect to ``values`` [N]; call it without a graph.

    With ``clip`` (and ``old_values``), predictions are held within that distance of the old ones, and those outside
    get no gradient.
    """
    error = values - targets
    if clip is not None and old_values is not None:
        moved = values - old_values
        error = old_values + moved.clamp(-clip, clip) - targets
        gradient = torch.where(moved.abs() <= clip, error, 0.0)
    else:
        gradient = error
    return error.dot(error) / len(error), gradient * (2.0 / len(error))


def backpropagate(
    distribution: ActionDistribution,
    inputs: Tensor,
    ent_coef: float,
    outputs: list[Tensor],
    gradients: list[Tensor],
) -> Tensor:
    """One backward pass from the given gradients and the entropy bonus; returns minus the mean entropy."""
    if ent_coef == 0:
        with torch.no_grad():
            entropy = distribution.entropy_torch(inputs)
        torch.autograd.backward(outputs, gradients)
    else:
        entropy = distribution.entropy_torch(inputs)
        bonus = torch.full_like(entropy, -ent_coef / len(entropy))
        torch.autograd.backward([*outputs, entropy], [*gradients, bonus])
    return -entropy.detach().mean()
