"""What is told about finished episodes, and where the sampler's time goes."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import Any, Final, NamedTuple

from rlsample.errors import ConfigError

__all__ = ["NO_METRICS", "EpisodeMetrics", "MetricsWindow", "Timers"]


NO_METRICS: Final[Mapping[str, float]] = {}
"""One empty mapping for all episodes that have none of their own: read, never written to."""


class EpisodeMetrics(NamedTuple):
    """One finished episode. A tuple, since those of thousands of episodes a second cross between processes.

    Attributes:
        episode_return: sum of the env's own rewards, before any clipping; of several agents, over all of them.
        length: steps. Of several agents: env steps, as the env says.
        env_id: slot.
        eps_id: the episode's id in the batches.
        worker_index: of the evaluator.
        custom: the ``custom_metrics`` that callbacks left; of several agents, means over those that have the metric.
        agent_returns: agent, as text, -> its return; empty where there is only one.
    """

    episode_return: float
    length: int
    env_id: int
    eps_id: int
    worker_index: int = 0
    custom: Mapping[str, float] = NO_METRICS
    agent_returns: Mapping[str, float] = NO_METRICS


class MetricsWindow:
    """Means over the last ``size`` episodes, under the tags the field uses for TensorBoard.

    Args:
        size: episodes; memory is bounded by it.
    """

    def __init__(self, size: int = 100) -> None:
        if size < 1:
            raise ConfigError(f"metrics window of {size} episodes: must be at least 1")
        self._episodes: collections.deque[EpisodeMetrics] = collections.deque(maxlen=size)
        self._total = 0
        self._new = 0

    def add(self, episodes: Iterable[EpisodeMetrics]) -> None:
        """Takes in finished episodes, oldest first."""
        for episode in episodes:
            self._episodes.append(episode)
            self._total += 1
            self._new += 1

    def summary(self) -> dict[str, float]:
        """The figures of the window; starts a new iteration.

        * ``rollout/ep_rew_mean, ep_rew_max, ep_rew_min, ep_len_mean``: over the window; NaN before any episode ended
          (a 0 would be a score).
        * ``rollout/episodes``: all episodes ever added; ``rollout/episodes_this_iter``: since the last summary.
        * ``rollout/custom/<name>_mean``: over the episodes of the window that have the metric, without NaNs.
        * ``rollout/agent/<name>_rew_mean``: over the episodes of the window that the agent played in.
        """
        returns = [e.episode_return for e in self._episodes]
        means: dict[str, list[float]] = {}
        for episode in self._episodes:
            for name, value in episode.custom.items():
                if not math.isnan(value):
                    means.setdefault(f"rollout/custom/{name}_mean", []).append(value)
            for name, value in episode.agent_returns.items():
                means.setdefault(f"rollout/agent/{name}_rew_mean", []).append(value)
        new, self._new = self._new, 0
        return {
            "rollout/ep_rew_mean": _mean(returns),
            "rollout/ep_rew_max": max(returns, default=math.nan),
            "rollout/ep_rew_min": min(returns, default=math.nan),
            "rollout/ep_len_mean": _mean([e.length for e in self._episodes]),
            "rollout/episodes": self._total,
            "rollout/episodes_this_iter": new,
            **{name: _mean(values) for name, values in sorted(means.items())},
        }

    def get_state(self) -> dict[str, Any]:
        """Numbers, and a list of dicts of numbers: the episodes of the window."""
        episodes = [
            {**e._asdict(), "custom": dict(e.custom), "agent_returns": dict(e.agent_returns)} for e in self._episodes
        ]
        return {"total": self._total, "new": self._new, "episodes": episodes}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from :meth:`get_state`. A smaller window keeps the latest episodes."""
        self._total, self._new = int(state["total"]), int(state["new"])
        self._episodes.clear()
        self._episodes.extend(EpisodeMetrics(**{**e, "custom": dict(e["custom"])}) for e in state["episodes"])


def _mean(values: list[float] | list[int]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


class Timers:
    """Seconds the sampler spent, in plain attributes that its loop adds to.

    Args:
        clock: seconds of wall-clock time.

    Attributes:
        env_s: in the env: send, poll and reset.
        inference_s: in the policy's forward pass.
        processing_s: in between: filter, columns, bookkeeping.
        polls: how many polls that was.
    """

    __slots__ = ("_clock", "_since", "env_s", "inference_s", "polls", "processing_s")

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._since = clock, clock()
        self.env_s = self.inference_s = self.processing_s = 0.0
        self.polls = 0

    def drain(self) -> dict[str, float]:
        """Mean milliseconds per poll since the last drain, as ``sampler/env_ms, infer_ms, processing_ms`` and, with all
        that the sampler waited in between, ``elapsed_ms``; and ``sampler/polls``. NaN where there was no poll.
        Everything starts at 0 again."""
        polls, now = self.polls, self._clock()
        per_poll = 1e3 / polls if polls else math.nan
        result = {
            "sampler/env_ms": self.env_s * per_poll,
            "sampler/infer_ms": self.inference_s * per_poll,
            "sampler/processing_ms": self.processing_s * per_poll,
            "sampler/elapsed_ms": (now - self._since) * per_poll,
            "sampler/polls": polls,
        }
        self._since = now
        self.env_s = self.inference_s = self.processing_s = 0.0
        self.polls = 0
        return result
