"""What a policy would have earned, estimated from episodes that another policy played.

For episode i let ``ratio[i, t]`` be the product over k = 0..t of new probability / logged probability of action k.

* Importance sampling, per decision: the mean over episodes of ``sum_t gamma^t ratio[i, t] reward[i, t]``. Unbiased;
  its variance grows with the length of episodes. (Precup, Sutton, Singh 2000, "Eligibility traces for off-policy policy
  evaluation", section 3.)
* Weighted importance sampling, per decision: ``sum_t gamma^t sum_i ratio[i, t] reward[i, t] / sum_i ratio[i, t]``.
  Biased, by less the more episodes there are, and of far smaller variance. (Thomas 2015, "Safe reinforcement learning",
  chapter 3, "consistent weighted per-decision importance sampling"; Thomas and Brunskill 2016, arXiv:1604.00923.)

After its end an episode counts on with reward 0 and the ratio of its last step, as if it stayed in a state without
choices: else, at late t, the weights would not sum to what episodes that ended early take away.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rlsample.errors import ConfigError, unknown_name
from rlsample.policy.policy import Policy
from rlsample.sample_batch import ACTION_LOGP, ACTIONS, EPS_ID, OBS, REWARDS, SampleBatch
from rlsample.tree import concat

__all__ = [
    "ESTIMATORS",
    "EpisodeRatios",
    "ReturnEstimate",
    "episode_ratios",
    "estimate_from_ratios",
    "estimate_return",
    "require_logp",
]

ESTIMATORS = ("is", "wis")
_CHUNK_ROWS = 4096  # that the policy looks at in one pass


@dataclass(frozen=True)
class ReturnEstimate:
    """An estimated mean discounted return.

    Attributes:
        value: of the new policy.
        standard_error: of ``value``; its square is the variance. NaN with fewer than two episodes.
        effective_sample_size: ``(sum w)^2 / sum w^2`` of the episodes' last ratios w: about as many episodes of the new
            policy would say as much. Far below ``num_episodes``: do not trust ``value``.
        num_episodes: episodes used.
        logged_value: the mean discounted return of the episodes as logged.
    """

    value: float
    standard_error: float
    effective_sample_size: float
    num_episodes: int
    logged_value: float


@dataclass(frozen=True)
class EpisodeRatios:
    """N episodes, padded to the longest one (T steps), as the estimators take them.

    Attributes:
        log_ratios: float64[N, T], logarithms of ``ratio[i, t]``; -inf where the new policy never acts so. After an
            episode's end its last one goes on.
        rewards: float64[N, T], 0 after an episode's end.
    """

    log_ratios: np.ndarray
    rewards: np.ndarray


def estimate_return(
    episodes: Sequence[SampleBatch], policy: Policy, gamma: float = 1.0, estimator: str = "wis"
) -> ReturnEstimate:
    """Estimates what ``policy``, exploring as it does now, would have earned.

        with LogReader("logs") as reader:
            assembler = EpisodeAssembler()
            episodes = [episode for batch in reader for episode in assembler.add(batch)]
        estimate_return(episodes, policy, gamma=0.99)

    Args:
        episodes: whole ones, a batch each, with obs, actions, rewards and action_logp.
        estimator: "is" or "wis"; the module's docstring has the formulas.

    Raises:
        ConfigError: no episodes; an action_logp that is missing, NaN or infinite; a policy without ``logp``; a gamma
            outside [0, 1]; an unknown estimator.
    """
    return estimate_from_ratios(episode_ratios(episodes, policy), gamma, estimator)


def episode_ratios(episodes: Sequence[SampleBatch], policy: Policy) -> EpisodeRatios:
    """The policy's say on all rows, some thousands at a time. Raises as :func:`estimate_return`."""
    require_logp(episodes)
    new = np.concatenate([_logp(chunk, policy) for chunk in _chunks(episodes, _CHUNK_ROWS)]).astype(np.float64)
    old = np.concatenate([episode[ACTION_LOGP] for episode in episodes]).astype(np.float64)
    lengths = np.array([episode.count for episode in episodes])
    there = np.arange(int(lengths.max())) < lengths[:, None]
    log_ratios, rewards = np.zeros(there.shape), np.zeros(there.shape)
    log_ratios[there] = new - old
    rewards[there] = np.concatenate([episode[REWARDS] for episode in episodes])
    return EpisodeRatios(np.cumsum(log_ratios, axis=1), rewards)


def _chunks(episodes: Sequence[SampleBatch], size: int) -> Iterator[list[SampleBatch]]:
    """All rows in order, in stretches of episodes that have ``size`` rows together, the last ones fewer."""
    chunk: list[SampleBatch] = []
    room = size
    for episode in episodes:
        start = 0
        while start < episode.count:
            part = episode.slice(start, start + room)
            chunk.append(part)
            start += part.count
            room -= part.count
            if not room:
                yield chunk
                chunk, room = [], size
    if chunk:
        yield chunk


def _logp(parts: Sequence[SampleBatch], policy: Policy) -> np.ndarray:
    return policy.logp(concat([part[OBS] for part in parts]), concat([part[ACTIONS] for part in parts]))


def estimate_from_ratios(ratios: EpisodeRatios, gamma: float, estimator: str) -> ReturnEstimate:
    """As :func:`estimate_return`, of ratios that are at hand."""
    if estimator not in ESTIMATORS:
        raise unknown_name("estimator", estimator, ESTIMATORS)
    if not 0 <= gamma <= 1:
        raise ConfigError(f"gamma must be in [0, 1], not {gamma}")
    log_ratios, rewards = ratios.log_ratios, ratios.rewards
    number, length = rewards.shape
    discounts = gamma ** np.arange(length)
    if estimator == "is":
        with np.errstate(over="ignore"):
            returns = np.where(rewards == 0, 0.0, np.exp(np.where(rewards == 0, 0.0, log_ratios)) * rewards) @ discounts
        value, deviations = float(returns.mean()), returns - returns.mean()
    else:
        shares = _shares(log_ratios)
        step_values = (shares * rewards).sum(0)
        value = float(step_values @ discounts)
        # what each episode moves the ratios of sums by, to first order
        deviations = number * ((shares * (rewards - step_values)) @ discounts)
    error = math.sqrt(float(deviations @ deviations) / (number * (number - 1))) if number > 1 else math.nan
    last = _shares(log_ratios[:, -1:])[:, 0]
    size = float(last.sum() ** 2 / (last @ last)) if last.any() else 0.0
    return ReturnEstimate(value, error, size, number, float((rewards @ discounts).mean()))


def _shares(log_ratios: np.ndarray) -> np.ndarray:
    """``ratio[i, t] / sum_i ratio[i, t]``; zeros at a t where no episode is possible under the new policy."""
    top = log_ratios.max(0)
    weights = np.exp(log_ratios - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(0)
    return weights / np.where(total > 0, total, 1.0)


def require_logp(episodes: Sequence[SampleBatch]) -> None:
    """ConfigError unless there are episodes, and all have a finite action_logp in each row."""
    if not episodes:
        raise ConfigError("no whole episodes to estimate from")
    for episode in episodes:
        if ACTION_LOGP not in episode:
            raise ConfigError(
                "importance sampling needs the column action_logp, the log-probability each action was taken with; "
                f"these logs have {', '.join(episode)}"
            )
        _require_finite(episode)


def _require_finite(episode: SampleBatch) -> None:
    logp = episode[ACTION_LOGP]
    bad = np.flatnonzero(~np.isfinite(logp))
    if len(bad):
        where = f"row {bad[0]} of episode {int(episode[EPS_ID][0])}" if EPS_ID in episode else f"row {bad[0]}"
        raise ConfigError(
            f"action_logp is {float(logp[bad[0]])} at {where}: its probability when it was logged is unknown; leave "
            "such episodes out"
        )
