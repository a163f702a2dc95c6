"""The loss of policies that learn from older policies' rows by V-trace: on arrays, and on rows loaded to a device.

Both take whole fragments and value every observation by the weights of now: the rows' own, and the extra ones that
follow an episode's last row or a cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlsample.errors import ConfigError
from rlsample.policy.advantages import _follows
from rlsample.policy.device_support import forward_loaded
from rlsample.policy.loaded_rows import LoadedRows
from rlsample.policy.losses import explained_variance, mean, value_loss
from rlsample.policy.vtrace import VTrace, VTraceClips, compute_vtrace
from rlsample.sample_batch import SampleBatch
from rlsample.tree import num_rows

__all__ = ["VTRACE_COLUMNS", "PolicyTerm", "vtrace_backward", "vtrace_loaded_loss"]

VTRACE_COLUMNS = ("obs", "actions", "action_logp", "rewards", "terminated")


class PolicyTerm(NamedTuple):
    """The policy's part of the loss: a number, its gradient float32[N] with respect to logp, and statistics."""

    loss: float
    d_logp: np.ndarray
    stats: dict[str, float]


def vtrace_backward(
    policy: Any, batch: SampleBatch, policy_term: Callable[[np.ndarray, np.ndarray, VTrace], PolicyTerm]
) -> dict[str, float]:
    """Sets the gradients of ``policy_term + vf_coef * mean squared value error - ent_coef * mean entropy``.

    Args:
        policy: a TorchPolicy whose settings are IMPALASettings.
        policy_term: ``(logp, behaviour logp, trace) -> PolicyTerm``.
    """
    s = policy.settings
    source, extra_values = _extra_values(policy, batch)
    inputs, values = policy.forward(batch)
    if source is None:
        next_values, end = extra_values, ~_follows(batch)
    else:
        next_values, end = batch.bootstrap(values, extra_values), source.index != np.arange(1, batch.count + 1)
    score = policy.distribution.score(inputs, batch["actions"])
    behaviour = batch["action_logp"]
    trace = compute_vtrace(
        log_rhos=score.logp - behaviour,
        rewards=batch["rewards"],
        values=values,
        next_values=next_values,
        terminated=batch["terminated"],
        segment_end=end,
        gamma=s.gamma,
        clips=_clips(s),
    )
    term = policy_term(score.logp, behaviour, trace)
    mse, d_values = value_loss(values, trace.value_targets)
    explained = explained_variance(values, trace.value_targets)
    policy.model_pass.backward(score.gradient(term.d_logp, -s.ent_coef / batch.count), d_values * np.float32(s.vf_coef))
    entropy_loss = -mean(score.entropy)
    return {
        "policy_gradient_loss": term.loss,
        "value_loss": mse,
        "entropy_loss": entropy_loss,
        "explained_variance": explained,
        "rho_mean": mean(trace.rhos),
        "rho_clipped": int(np.count_nonzero(trace.rhos > s.rho_clip)) / batch.count,
        **term.stats,
        "loss": term.loss + s.vf_coef * mse + s.ent_coef * entropy_loss,
    }


def _extra_values(policy: Any, batch: SampleBatch) -> tuple[Any, np.ndarray]:
    """The batch's own next-observation index and V of its extra observations; or None and V of all next ones."""
    for name in VTRACE_COLUMNS:
        if name not in batch:
            raise ConfigError(f"V-trace needs the column {name!r}; this batch has " + ", ".join(batch))
    source = batch.next_obs_source
    if source is not None and source.source is None:
        obs = source.extra
    elif "next_obs" in batch:
        source, obs = None, batch["next_obs"]
    else:
        raise ConfigError("V-trace needs next observations; this batch has " + ", ".join(batch))
    if not num_rows(obs):
        return source, np.zeros(0, np.float32)
    with torch.no_grad():
        return source, policy.model_pass.forward(policy._encoder.encode(obs))[1]


def vtrace_loaded_loss(
    policy: Any, rows: LoadedRows, policy_term: Callable[[Tensor, Tensor, VTrace], tuple[Tensor, dict[str, Tensor]]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same loss on loaded rows, with a graph; ``policy_term`` gives the policy's part and its statistics."""
    s, n = policy.settings, rows.count
    if rows.next_index is None:
        raise ConfigError("V-trace needs whole fragments: load them with whole_fragments=True")
    inputs, all_values = forward_loaded(policy, rows)
    values = all_values[:n]
    logp = policy.distribution.logp_torch(inputs, rows["actions"])
    entropy = policy.distribution.entropy_torch(inputs).mean()
    behaviour = rows["action_logp"]
    trace = compute_vtrace(
        log_rhos=logp.detach() - behaviour,
        rewards=rows["rewards"],
        values=values.detach(),
        next_values=all_values.detach()[rows.next_index],
        terminated=rows["terminated"],
        segment_end=rows.next_index != torch.arange(1, n + 1, device=values.device),
        gamma=s.gamma,
        clips=_clips(s),
    )
    policy_loss, stats = policy_term(logp, behaviour, trace)
    error = values - trace.value_targets
    mse = error.square().mean()
    loss = policy_loss + s.vf_coef * mse - s.ent_coef * entropy
    spread = trace.value_targets.var(correction=0)
    explained = torch.where(spread > 0, 1 - error.detach().var(correction=0) / spread, torch.zeros_like(spread))
    return loss, {
        "policy_gradient_loss": policy_loss,
        "value_loss": mse,
        "entropy_loss": -entropy,
        "explained_variance": explained,
        "rho_mean": trace.rhos.mean(),
        "rho_clipped": (trace.rhos > s.rho_clip).float().mean(),
        **stats,
        "loss": loss,
    }


def _clips(settings: Any) -> VTraceClips:
    return VTraceClips(settings.rho_clip, settings.c_clip, settings.pg_rho_clip)
