"""Rows kept for replay, in arrays: uniform and prioritised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlsample import tree
from rlsample.errors import ConfigError
from rlsample.optimizers.next_obs_ring import NextObsRing
from rlsample.optimizers.sum_tree import SumTree
from rlsample.sample_batch import NEXT_OBS, OBS, SampleBatch
from rlsample.settings import option

__all__ = ["PRIORITIES", "REPLAY_ID", "WEIGHTS", "PrioritizedReplayBuffer", "PrioritySettings", "ReplayBuffer"]

REPLAY_ID = "replay_id"
WEIGHTS = "weights"
PRIORITIES = "priorities"
_RESERVED = (REPLAY_ID, WEIGHTS)


@dataclass(frozen=True)
class PrioritySettings:
    """Options of :class:`PrioritizedReplayBuffer`."""

    prioritized_replay_alpha: float = option(0.6, "how strongly priorities count; 0: every row alike")
    prioritized_replay_beta: float = option(0.4, "how far weights make up for the priorities at first; 1: fully")
    final_prioritized_replay_beta: float = option(0.4, "the same at the end of beta_annealing_steps")
    beta_annealing_steps: int = option(20_000, "env steps over which beta goes from the first to the final value")
    prioritized_replay_eps: float = option(1e-6, "added to each error, so that every row may come again")

    def __post_init__(self) -> None:
        for name in ("prioritized_replay_alpha", "prioritized_replay_beta", "final_prioritized_replay_beta"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if not self.prioritized_replay_eps > 0 or self.beta_annealing_steps < 1:
            raise ConfigError(
                "prioritized_replay_eps must be above 0 and beta_annealing_steps 1 or more; got "
                f"{self.prioritized_replay_eps}, {self.beta_annealing_steps}"
            )

    def beta(self, env_steps: int) -> float:
        """Beta after that many env steps."""
        first, last = self.prioritized_replay_beta, self.final_prioritized_replay_beta
        return first + (last - first) * min(1.0, env_steps / self.beta_annealing_steps)


class ReplayBuffer:
    """The newest ``capacity`` rows, a ring of one array per column; draws are uniform, with replacement.

        buffer = ReplayBuffer(10_000, seed=0)
        buffer.add(evaluator.sample())
        batch = buffer.sample(32)             # the columns, next_obs, and replay_id

    The first batch declares columns, shapes and dtypes; memory for all rows is taken then. A next observation that is
    a row's own observation is not stored again: only those at ends and cuts are.

    Args:
        capacity: rows, and never more.
        columns: keep only these; None: all that the first batch has (``next_obs`` always, if there is one).
        seed: of the draws.

    Attributes:
        num_added: rows ever added. Row ``replay_id = i`` is the i-th of them, counted from 0: no two rows share one.
    """

    def __init__(self, capacity: int, columns: Sequence[str] | None = None, seed: Any = 0) -> None:
        if capacity < 1:
            raise ConfigError(f"the capacity of a replay buffer must be at least 1 row, not {capacity}")
        self.capacity = capacity
        self.num_added = 0
        self._wanted = None if columns is None else tuple(columns)
        self._rng = np.random.default_rng(seed)
        self._columns: dict[str, tree.Tree] = {}
        self._seen_names: tuple[Any, ...] = ()  # of the last batch: the same names need no second check
        self._next: NextObsRing | None = None

    def __len__(self) -> int:
        """Rows there are."""
        return min(self.num_added, self.capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of memory taken."""
        total = sum(leaf.nbytes for column in self._columns.values() for leaf in tree.leaves(column))
        return total + (self._next.nbytes if self._next is not None else 0)

    def add(self, batch: SampleBatch) -> np.ndarray:
        """Copies the rows in; the oldest go. Of a batch larger than the capacity the last rows stay.

        Returns:
            The ids of the rows that stay, int64: consecutive.

        Raises:
            ConfigError: columns, shapes or dtypes other than the first batch's (named); nothing changed.
        """
        skipped = max(0, batch.count - self.capacity)
        first, stop = self.num_added + skipped, self.num_added + batch.count
        ids = np.arange(first, stop)
        if not batch.count:
            return ids
        if not self.num_added:
            self._declare(batch)
        if skipped:
            batch = batch.slice(skipped, batch.count)
        values = self._checked(batch)
        if self._next is not None:
            self._next.add(batch, first)
        start = first % self.capacity
        end = start + stop - first
        rows = slice(start, end) if end <= self.capacity else ids % self.capacity
        for column, new in zip(self._columns.values(), values, strict=True):
            tree.assign(column, rows, new)
        self.num_added = stop
        return ids

    def sample(self, num_rows: int) -> SampleBatch:
        """Draws rows: their columns, copied, ``next_obs`` if there is one, and ``replay_id`` int64.

        Raises:
            ConfigError: the buffer is empty.
        """
        if not len(self):
            raise ConfigError("cannot sample from an empty replay buffer")
        return self.take(self.num_added - len(self) + self._rng.integers(0, len(self), num_rows))

    def take(self, ids: np.ndarray) -> SampleBatch:
        """Rows by their ids, which must still be here."""
        rows = ids % self.capacity
        columns = {name: tree.gather(column, rows) for name, column in self._columns.items()}
        if self._next is not None:
            columns[NEXT_OBS] = self._next.gather(rows, self._columns[OBS])
        columns[REPLAY_ID] = ids
        return SampleBatch(columns)

    def still_here(self, ids: np.ndarray) -> np.ndarray:
        """bool[K]: these rows were not replaced by others yet."""
        return (ids >= self.num_added - len(self)) & (ids < self.num_added)

    def _rows(self) -> np.ndarray:
        """Places of all rows, oldest first."""
        return np.arange(self.num_added - len(self), self.num_added) % self.capacity

    def _names(self, batch: SampleBatch) -> list[str]:
        names = [name for name in batch if name != NEXT_OBS] if self._wanted is None else list(self._wanted)
        return [name for name in names if name not in (NEXT_OBS, PRIORITIES)]

    def _declare(self, batch: SampleBatch) -> None:
        odd = [name for name in _RESERVED if name in batch]
        if odd:
            raise ConfigError(f"replay adds a column {odd[0]!r} of its own; the batch has one already")
        missing = [name for name in self._names(batch) if name not in batch]
        if missing:
            raise ConfigError(f"replay is to keep the column {missing[0]!r}; the batch has {', '.join(batch)}")

        def allocate(leaf: np.ndarray) -> np.ndarray:
            return np.zeros((self.capacity, *leaf.shape[1:]), leaf.dtype)

        if NEXT_OBS in batch and OBS not in self._names(batch):
            raise ConfigError("replay with next observations needs the column 'obs'")
        self._next = NextObsRing(self.capacity) if NEXT_OBS in batch else None
        self._columns = {name: tree.map_tree(allocate, batch[name]) for name in self._names(batch)}
        self._seen_names = ()

    def _checked(self, batch: SampleBatch) -> list[tree.Tree]:
        """The batch's columns, in the order of the buffer's."""
        names = (*batch.keys(), NEXT_OBS in batch)
        if names != self._seen_names:
            self._check_names(batch)
            self._seen_names = names
        values = []
        for name, column in self._columns.items():
            new = batch[name]
            if not tree.alike(new, column):
                got, kept = tree.row_form(new), tree.row_form(column)
                raise ConfigError(f"replay: column {name!r} is {got} in this batch, and was {kept} in the first one")
            values.append(new)
        return values

    def _check_names(self, batch: SampleBatch) -> None:
        odd = set(self._names(batch)) ^ set(self._columns)
        odd |= {name for name in self._columns if name not in batch}
        if (NEXT_OBS in batch) != (self._next is not None):
            odd.add(NEXT_OBS)
        if odd:
            raise ConfigError(f"replay: this batch and the first one differ in the columns {', '.join(sorted(odd))}")

    def get_state(self) -> dict[str, Any]:
        """All rows and the generator, copies, for a checkpoint; as large as the rows are."""
        rows, first = self._rows(), self.num_added - len(self)
        return {
            "num_added": self.num_added,
            "columns": {name: tree.gather(column, rows) for name, column in self._columns.items()},
            "next_obs": None if self._next is None else self._next.get_state(first, self.num_added),
            "rng": self._rng.bit_generator.state,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues with the same rows, ids and draws.

        Raises:
            ConfigError: more rows than fit, or other rows than this capacity holds; nothing changed.
        """
        num_added, columns = int(state["num_added"]), state["columns"]
        num_rows = tree.num_rows(next(iter(columns.values()))) if columns else 0
        if num_rows != min(num_added, self.capacity):
            raise ConfigError(
                f"the saved replay buffer holds {num_rows} of {num_added} rows; this one of {self.capacity} would hold "
                f"{min(num_added, self.capacity)}: use the buffer_size it was saved with"
            )
        rows = np.arange(num_added - num_rows, num_added) % self.capacity

        def restore(leaf: np.ndarray) -> np.ndarray:
            ring = np.zeros((self.capacity, *leaf.shape[1:]), leaf.dtype)
            ring[rows] = leaf
            return ring

        self._seen_names = ()
        self._columns = {name: tree.map_tree(restore, column) for name, column in columns.items()}
        self._next = None
        if state["next_obs"] is not None:
            self._next = NextObsRing(self.capacity)
            self._next.set_state(state["next_obs"], num_added - num_rows)
        self.num_added = num_added
        self._rng.bit_generator.state = state["rng"]


class PrioritizedReplayBuffer(ReplayBuffer):
    """Draws row i with probability ``p_i ** alpha / sum`` (Schaul et al. 2016, arXiv:1511.05952, proportional).

    A new row has the priority of its column ``priorities`` (errors, as in :meth:`update_priorities`), else the largest
    that was ever given. A batch has the column ``weights``, float32: ``(N * P(i)) ** -beta`` over its maximum in the
    buffer, so at most 1.

    Args:
        capacity, columns, seed: as for :class:`ReplayBuffer`.
        settings: alpha, beta and eps.
    """

    def __init__(
        self,
        capacity: int,
        columns: Sequence[str] | None = None,
        seed: Any = 0,
        settings: PrioritySettings | None = None,
    ) -> None:
        super().__init__(capacity, columns, seed)
        self.settings = settings or PrioritySettings()
        self._tree = SumTree(capacity)
        self._largest = 1.0

    def add(self, batch: SampleBatch) -> np.ndarray:
        given = self._priorities(batch[PRIORITIES]) if PRIORITIES in batch else np.full(batch.count, self._largest)
        ids = super().add(batch)
        self._set(ids, given[batch.count - len(ids) :])
        return ids

    def sample(self, num_rows: int, beta: float | None = None) -> SampleBatch:
        """As :meth:`ReplayBuffer.sample`, stratified by priority, with ``weights``.

        Args:
            beta: None: ``prioritized_replay_beta``.
        """
        if not len(self):
            raise ConfigError("cannot sample from an empty replay buffer")
        rows = self._tree.draw(num_rows, self._rng)
        oldest = self.num_added - len(self)
        ids = oldest + (rows - oldest) % self.capacity
        batch = self.take(ids)
        beta = self.settings.prioritized_replay_beta if beta is None else beta
        # N and the sum cancel against those of the row with the largest weight: the one of the smallest priority.
        batch[WEIGHTS] = ((self._tree.smallest / self._tree.get(rows)) ** beta).astype(np.float32)
        return batch

    def update_priorities(self, ids: np.ndarray, errors: np.ndarray) -> int:
        """Sets priorities to ``|error| + eps``, for float [K] errors of int64[K] ``replay_id``.

        Rows that are no longer here are left out: their successors keep their own priorities.

        Returns:
            How many were left out.

        Raises:
            ConfigError: errors that are not finite; nothing changed.
        """
        priorities = self._priorities(errors)
        here = self.still_here(ids)
        self._set(ids[here], priorities[here])
        return int(len(here) - here.sum())

    def _priorities(self, errors: np.ndarray) -> np.ndarray:
        priorities = np.abs(np.asarray(errors, np.float64)) + self.settings.prioritized_replay_eps
        if not np.isfinite(priorities).all():
            raise ConfigError(f"errors for priorities must be finite; row {np.isfinite(priorities).argmin()} is not")
        return priorities

    def _set(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        self._tree.set(ids % self.capacity, priorities**self.settings.prioritized_replay_alpha)
        self._largest = max(self._largest, float(priorities.max(initial=0.0)))

    def get_state(self) -> dict[str, Any]:
        rows = self._rows()
        return {**super().get_state(), "priorities": self._tree.get(rows), "largest": self._largest}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self._tree = SumTree(self.capacity)
        self._tree.set(self._rows(), state["priorities"])
        self._largest = float(state["largest"])
