"""The remote end of an EvaluatorSet: an evaluator whose results bring along what else the set wants to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rlsample.errors import ConfigError
from rlsample.evaluation.filters import FilterDelta, NoFilter, ObsFilter
from rlsample.evaluation.policy_evaluator import PolicyEvaluator
from rlsample.sample_batch import SampleBatch

__all__ = [
    "MAX_WORKERS",
    "Broadcast",
    "EvaluatorServer",
    "Fragment",
    "SampleGradients",
    "SampleInfo",
    "check_num_workers",
    "filter_of",
    "policy_version_of",
    "sample_of",
    "serve_evaluator",
    "set_weights",
]

MAX_WORKERS = 4096
_MOST_EMPTY = 1000  # samples without rows, in a row


class Broadcast(NamedTuple):
    """What the local evaluator tells the others.

    Attributes:
        version: counts broadcasts.
        policy_version: of the local policy when the weights were taken; None for an evaluator without one.
        weights: for ``set_weights``.
        obs_filter: the totals that all normalise with, or None.
        env_steps: for ``set_progress``.
    """

    version: int
    policy_version: int | None
    weights: Any
    obs_filter: ObsFilter | None
    env_steps: int


class SampleInfo(NamedTuple):
    """What travels with a fragment.

    Attributes:
        version: of the broadcast the evaluator had when it began; 0: none yet.
        episodes: finished since the last fragment.
        filter_delta: what the filter has seen since then, or None.
        timers: of the sampler, or None.
    """

    version: int
    episodes: list[Any]
    filter_delta: FilterDelta | None
    timers: dict[str, float] | None


class Fragment(NamedTuple):
    """The result of a remote ``sample()``."""

    batch: SampleBatch
    info: SampleInfo


class SampleGradients(NamedTuple):
    """The result of a remote ``sample_gradients()``.

    Attributes:
        gradients, stats: of ``compute_gradients`` on a fresh sample.
        num_rows: of that sample.
    """

    gradients: Any
    stats: dict[str, Any]
    num_rows: int
    info: SampleInfo


class EvaluatorServer:
    """Lives where the evaluator lives; any method not named here is the evaluator's own."""

    def __init__(self, evaluator: PolicyEvaluator) -> None:
        self.evaluator = evaluator
        self._version = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.evaluator, name)

    def take_broadcast(self, broadcast: Broadcast) -> None:
        """Takes over weights, filter totals and progress. Rows sampled from now on carry the local policy's version."""
        set_weights(self.evaluator, broadcast.weights, broadcast.policy_version)
        obs_filter = filter_of(self.evaluator)
        if obs_filter is not None and broadcast.obs_filter is not None:
            obs_filter.sync_from(broadcast.obs_filter)
        self.evaluator.set_progress(broadcast.env_steps)
        self._version = broadcast.version

    def sample(self) -> Fragment:
        """One batch and what belongs to it."""
        version = self._version
        batch = sample_of(self.evaluator)
        return Fragment(batch, self._info(version))

    def sample_gradients(self) -> SampleGradients:
        """The gradients on one fresh batch that has rows, which itself stays here."""
        version = self._version
        batch = sample_of(self.evaluator)
        empty = 0
        while not batch.count:
            empty += 1
            if empty == _MOST_EMPTY:
                raise ConfigError(f"{type(self.evaluator).__name__}.sample() returned no rows {empty} times in a row")
            batch = sample_of(self.evaluator)
        gradients, stats = self.evaluator.compute_gradients(batch)
        return SampleGradients(gradients, stats, batch.count, self._info(version))

    def flush_filter(self) -> FilterDelta | None:
        """What the filter has seen since this was last told."""
        obs_filter = filter_of(self.evaluator)
        return None if obs_filter is None else obs_filter.flush_delta()

    def _info(self, version: int) -> SampleInfo:
        get_timers = getattr(self.evaluator, "get_timers", None)
        timers = None if get_timers is None else get_timers()
        return SampleInfo(version, self.evaluator.get_metrics(), self.flush_filter(), timers)

    def close(self) -> None:
        self.evaluator.close()


def serve_evaluator(
    make_evaluator: Callable[[int], PolicyEvaluator], worker: int, index: int, incarnation: int
) -> EvaluatorServer:
    """An engine's factory for the set's worker number ``worker``, counted from 0.

    Each incarnation has a worker_index of its own, ``worker + 1 + 4096 * incarnation``: a replacement must repeat
    neither the seeds nor the episode ids of the one that died.
    """
    return EvaluatorServer(make_evaluator(worker + 1 + MAX_WORKERS * incarnation))


def sample_of(evaluator: PolicyEvaluator) -> SampleBatch:
    """``evaluator.sample()``; ConfigError if that is no SampleBatch."""
    batch = evaluator.sample()
    if not isinstance(batch, SampleBatch):
        raise ConfigError(f"{type(evaluator).__name__}.sample() returned {type(batch).__name__}, not a SampleBatch")
    return batch


def filter_of(evaluator: PolicyEvaluator) -> ObsFilter | None:
    """The evaluator's filter, if it has one that keeps statistics."""
    found = getattr(evaluator, "filter", None)
    return found if isinstance(found, ObsFilter) and not isinstance(found, NoFilter) else None


def policy_version_of(evaluator: PolicyEvaluator) -> int | None:
    """The version of the evaluator's policy, if it has one."""
    version = getattr(getattr(evaluator, "policy", None), "version", None)
    return version if isinstance(version, int) else None


def set_weights(evaluator: PolicyEvaluator, weights: Any, policy_version: int | None) -> None:
    """``evaluator.set_weights``; its policy then calls this state by the given version."""
    before = policy_version_of(evaluator)
    if policy_version is None or before is None:
        evaluator.set_weights(weights)
        return
    policy: Any = evaluator.policy  # type: ignore[attr-defined]
    if policy_version > before:
        policy.version = policy_version - 1
        evaluator.set_weights(weights)
    else:  # the local policy was set back: caches that go by the version must notice
        evaluator.set_weights(weights)
        policy.set_state({**policy.get_state(), "version": policy_version})


def check_num_workers(num_workers: int) -> None:
    """ConfigError unless it is in ``[0, 4096)``."""
    if not 0 <= num_workers < MAX_WORKERS:
        raise ConfigError(f"num_workers must be from 0 to {MAX_WORKERS - 1}, not {num_workers}")
