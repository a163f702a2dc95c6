"""Observation filters: what happens to observations between env and policy.

    f = make_filter("MeanStdFilter", env.observation_space)
    policy_obs = f(obs)                    # sampling: counts the rows, then normalises them
    policy_obs = f(obs, update=False)      # evaluation, serving: the statistics stay

Several samplers keep one set of statistics by :func:`synchronize`. Each filter has the totals (what it normalises
with) and a delta (what it has seen since the last flush). Only deltas are merged, so that no row is counted twice.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from rlsample import tree
from rlsample.errors import ConfigError, unknown_name
from rlsample.evaluation.running_stats import LeafStats, Moments
from rlsample.tree import Tree

__all__ = ["FilterDelta", "MeanStdFilter", "NoFilter", "ObsFilter", "make_filter", "synchronize"]


class FilterDelta(NamedTuple):
    """Statistics of rows that were not merged elsewhere yet.

    Attributes:
        rows: how many.
        mean: for each normalised leaf of the space, float64 of the leaf's shape.
        m2: likewise, sums of squared deviations from the mean.
    """

    rows: int
    mean: tuple[np.ndarray, ...]
    m2: tuple[np.ndarray, ...]


class ObsFilter(ABC):
    """Changes observations. May be called from several threads at once. Pickles with its statistics.

    Attributes:
        observation_space: of the results.
        count: rows in the statistics.
    """

    observation_space: gymnasium.Space[Any]
    count: int

    @abstractmethod
    def __call__(self, obs: Tree, update: bool = True) -> Tree:
        """K observations, changed. ``obs`` is not written to; leaves that are not changed are passed on, not copied."""

    @abstractmethod
    def flush_delta(self) -> FilterDelta:
        """What was seen since the last flush (copies); the delta is empty then, the totals stay."""

    @abstractmethod
    def apply_delta(self, delta: FilterDelta) -> None:
        """Adds another filter's delta to the totals."""

    @abstractmethod
    def sync_from(self, other: ObsFilter) -> None:
        """Takes over a copy of the other's totals. Rows seen here and not flushed yet are added to them."""

    @abstractmethod
    def get_state(self) -> dict[str, Any]:
        """Copies of the statistics: numbers and lists of arrays."""

    @abstractmethod
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from :meth:`get_state`; the arrays are copied. ConfigError if they do not fit the space."""


class NoFilter(ObsFilter):
    """Returns observations as they are, the same objects."""

    def __init__(self, observation_space: gymnasium.Space[Any]) -> None:
        self.observation_space = observation_space
        self.count = 0

    def __call__(self, obs: Tree, update: bool = True) -> Tree:
        """``obs`` itself."""
        return obs

    def flush_delta(self) -> FilterDelta:
        """An empty delta."""
        return FilterDelta(0, (), ())

    def apply_delta(self, delta: FilterDelta) -> None:
        """Nothing; ConfigError if the delta has rows, which only another kind of filter gives."""
        if delta.rows:
            raise ConfigError(f"NoFilter got a delta of {delta.rows} rows: the evaluators use different filters")

    def sync_from(self, other: ObsFilter) -> None:
        """Nothing."""
        _check_same_kind(self, other)

    def get_state(self) -> dict[str, Any]:
        """Empty."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Nothing; ConfigError if there is a state, which only another kind of filter gives."""
        if state:
            raise ConfigError(f"NoFilter got a state with {', '.join(state)}: it was saved with another filter")


class MeanStdFilter(ObsFilter):
    """Normalises Box leaves of float dtype by the mean and standard deviation of all rows seen so far.

    Elementwise: ``(obs - mean) / (std + 1e-8)``, limited to ``[-clip, clip]``, as float32 whatever the float dtype of
    the space; computed in float64. ``std`` is the sample's (n - 1). With fewer than two rows it is undefined, and 1 is
    used; without any the mean is 0. Leaves of other spaces pass unchanged.

    Args:
        observation_space: of one env, as it comes.
        clip: largest magnitude returned; None: no limit.

    Batches are merged by the parallel algorithm of Chan, Golub and LeVeque, "Updating Formulae and a Pairwise
    Algorithm for Computing Sample Variances" (1979).
    """

    def __init__(self, observation_space: gymnasium.Space[Any], clip: float | None = 10.0) -> None:
        if clip is not None and not clip > 0:
            raise ConfigError(f"MeanStdFilter: clip={clip} must be positive, or None for no limit")
        self._input_space = observation_space
        self._clip = clip
        self._lock = threading.Lock()
        self._leaves: list[LeafStats] = []
        self._by_leaf, self.observation_space = self._build(observation_space)
        self._only = self._by_leaf if isinstance(self._by_leaf, LeafStats) else None

    def _build(self, space: gymnasium.Space[Any]) -> tuple[Any, gymnasium.Space[Any]]:
        """Statistics (None where a leaf passes) in the structure of the space, and the space of the results."""
        if isinstance(space, spaces.Dict):
            parts = {k: self._build(v) for k, v in space.spaces.items()}
            return {k: p[0] for k, p in parts.items()}, spaces.Dict({k: p[1] for k, p in parts.items()})
        if isinstance(space, spaces.Tuple):
            pairs = [self._build(v) for v in space.spaces]
            return tuple(p[0] for p in pairs), spaces.Tuple([p[1] for p in pairs])
        if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
            self._leaves.append(LeafStats(space.shape, self._clip))
            limit = np.inf if self._clip is None else self._clip
            return self._leaves[-1], spaces.Box(-limit, limit, space.shape, np.float32)
        return None, space

    @property
    def count(self) -> int:  # type: ignore[override]
        """Rows in the totals; 0 in a space without a float Box."""
        return self._leaves[0].total.n if self._leaves else 0

    @property
    def delta_count(self) -> int:
        """Rows that the next :meth:`flush_delta` returns."""
        with self._lock:
            return self._leaves[0].delta().n if self._leaves else 0

    @property
    def mean(self) -> Tree:
        """float64, in the structure of the space, None where a leaf passes. A copy."""
        return tree.map_tree(lambda s: s and s.total.mean.reshape(s.shape).copy(), self._by_leaf)

    @property
    def std(self) -> Tree:
        """Sample standard deviation; float64, in the structure of the space, None where a leaf passes. A copy."""
        return tree.map_tree(lambda s: s and s.std().reshape(s.shape), self._by_leaf)

    def __call__(self, obs: Tree, update: bool = True) -> Tree:
        """K observations [K, ...] normalised, a new tree; with ``update`` they are counted first."""
        with self._lock:
            if self._only is not None:
                return self._only.apply(obs, update)
            return tree.map_tree(lambda s, leaf: leaf if s is None else s.apply(leaf, update), self._by_leaf, obs)

    def flush_delta(self) -> FilterDelta:
        """What was seen since the last flush (copies); the delta is empty then, the totals stay."""
        with self._lock:
            delta = _read([s.delta() for s in self._leaves], self._leaves)
            for s in self._leaves:
                s.delta().set(0, np.zeros(s.size), np.zeros(s.size))
        return delta

    def _check_fits(self, stats: FilterDelta) -> None:
        here, there = [s.shape for s in self._leaves], [np.shape(m) for m in stats.mean]
        if here != there or here != [np.shape(m) for m in stats.m2]:
            raise ConfigError(f"MeanStdFilter for leaves of shape {here} got statistics of shape {there}")

    def apply_delta(self, delta: FilterDelta) -> None:
        """Adds another filter's delta to the totals, not to the own delta."""
        if not delta.rows:
            return
        self._check_fits(delta)
        with self._lock:
            for s, mean, m2 in zip(self._leaves, delta.mean, delta.m2, strict=True):
                s.total.merge(delta.rows, np.ravel(mean), np.ravel(m2))
                s.refresh()

    def sync_from(self, other: ObsFilter) -> None:
        """Takes over a copy of the other's totals. Rows seen here and not flushed yet are added to them."""
        _check_same_kind(self, other)
        assert isinstance(other, MeanStdFilter)
        if other is self:
            return
        with other._lock:
            totals = _read([s.total for s in other._leaves], other._leaves)
        self._check_fits(totals)
        with self._lock:
            for s, mean, m2 in zip(self._leaves, totals.mean, totals.m2, strict=True):
                s.total.set(totals.rows, mean, m2)
                if s.delta().n:
                    s.total.merge(s.delta().n, s.delta().mean, s.delta().m2)
                s.refresh()

    def get_state(self) -> dict[str, Any]:
        """``count, mean, m2, delta_count, delta_mean, delta_m2``: ints and lists of float64 arrays, copies."""
        with self._lock:
            total = _read([s.total for s in self._leaves], self._leaves)
            delta = _read([s.delta() for s in self._leaves], self._leaves)
        state: dict[str, Any] = {"count": total.rows, "mean": list(total.mean), "m2": list(total.m2)}
        return {**state, "delta_count": delta.rows, "delta_mean": list(delta.mean), "delta_m2": list(delta.m2)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from :meth:`get_state`; the arrays are copied. ConfigError if they do not fit the space."""
        try:
            total = FilterDelta(state["count"], tuple(state["mean"]), tuple(state["m2"]))
            delta = FilterDelta(state["delta_count"], tuple(state["delta_mean"]), tuple(state["delta_m2"]))
        except KeyError as error:
            has = ", ".join(state) or "nothing"
            raise ConfigError(f"MeanStdFilter: the state lacks {error}; it has {has}") from error
        self._check_fits(total)
        self._check_fits(delta)
        with self._lock:
            for i, s in enumerate(self._leaves):
                s.total.set(total.rows, total.mean[i], total.m2[i])
                s.delta().set(delta.rows, delta.mean[i], delta.m2[i])
                s.refresh()

    def __reduce__(self) -> tuple[Any, ...]:
        return MeanStdFilter, (self._input_space, self._clip), self.get_state()

    __setstate__ = set_state


def _read(moments: Sequence[Moments], leaves: Sequence[LeafStats]) -> FilterDelta:
    """Copies, in the leaves' shapes."""
    return FilterDelta(
        moments[0].n if moments else 0,
        tuple(m.mean.reshape(s.shape).copy() for m, s in zip(moments, leaves, strict=True)),
        tuple(m.m2.reshape(s.shape).copy() for m, s in zip(moments, leaves, strict=True)),
    )


def synchronize(master: ObsFilter, workers: Iterable[ObsFilter]) -> None:
    """Merges the workers' new rows into the master and gives every worker a copy of its totals.

    Afterwards all have the same statistics and empty deltas. The master may have seen rows itself, and may be in
    ``workers`` too. Calling it again without new rows changes nothing.
    """
    others = [worker for worker in workers if worker is not master]
    for worker in others:
        master.apply_delta(worker.flush_delta())
    for worker in others:
        worker.sync_from(master)
    master.flush_delta()  # its rows are in every total now


def make_filter(name: str, observation_space: gymnasium.Space[Any]) -> ObsFilter:
    """A filter by its option name: ``NoFilter``, ``MeanStdFilter``, or ``ConcurrentMeanStdFilter`` (the same: all are
    safe to share between threads).

    Raises:
        ConfigError: an unknown name.
    """
    kinds: dict[str, type[NoFilter] | type[MeanStdFilter]] = {
        "NoFilter": NoFilter,
        "MeanStdFilter": MeanStdFilter,
        "ConcurrentMeanStdFilter": MeanStdFilter,
    }
    if name not in kinds:
        raise unknown_name("observation_filter", name, kinds)
    return kinds[name](observation_space)


def _check_same_kind(here: ObsFilter, there: ObsFilter) -> None:
    if type(here) is not type(there):
        raise ConfigError(f"cannot sync a {type(here).__name__} from a {type(there).__name__}; use one kind everywhere")
