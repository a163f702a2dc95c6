"""What actor-critic policies add to a batch after sampling."""

from __future__ import annotations

import numpy as np

from rlsample.errors import ConfigError
from rlsample.policy.gae import compute_gae
from rlsample.policy.policy import Policy
from rlsample.sample_batch import SampleBatch
from rlsample.tree import num_rows

__all__ = ["add_advantages"]


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
    next_obs = batch.next_obs_source
    if next_obs is not None and next_obs.source is None:
        extra = policy.values(next_obs.extra) if num_rows(next_obs.extra) else np.zeros(0, np.float32)
        next_values = batch.bootstrap(values, extra)
        follows = next_obs.index == np.arange(1, batch.count + 1)
    else:
        next_values = policy.values(batch["next_obs"])
        follows = _follows(batch)
    batch["advantages"], batch["value_targets"] = compute_gae(
        batch["rewards"], values, next_values, batch["terminated"], ~follows, gamma, lam
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
