"""Train batches of fresh fragments, mixed with fragments that were trained on before."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from rlsample.errors import ConfigError
from rlsample.optimizers.batch_queue import TrainBatch
from rlsample.sample_batch import SampleBatch

__all__ = ["ReplayMixer"]


class ReplayMixer:
    """Collects fragments until they make a train batch.

    With a proportion p, a batch of f fresh rows gets p * f replayed ones (the last fragment by chance, so that this
    holds in the mean), or fewer while fewer are stored. They are drawn from the fragments of earlier batches, none
    twice in one batch, and are held by reference, not copied.

    Args:
        train_batch_size: rows of a batch, fresh and replayed; reached with whole fragments.
        proportion: replayed rows per fresh one; 0: no replay.
        num_slots: fragments that are kept for replay; the oldest go first.
        rng: draws.
    """

    def __init__(self, train_batch_size: int, proportion: float, num_slots: int, rng: np.random.Generator) -> None:
        if not proportion >= 0 or num_slots < 0 or train_batch_size < 1:
            raise ConfigError(
                "train_batch_size must be at least 1, replay_proportion and replay_buffer_num_slots at least 0, not "
                f"{train_batch_size}, {proportion} and {num_slots}"
            )
        if proportion > 0 and num_slots == 0:
            raise ConfigError(f"replay_proportion={proportion} needs replay_buffer_num_slots of 1 or more")
        self._size, self._proportion, self._rng = train_batch_size, proportion, rng
        self._fresh: list[_Held] = []
        self._fresh_rows = 0
        self._stored: deque[_Held] = deque(maxlen=num_slots if proportion else 0)
        self._stored_rows = 0

    def add(self, fragment: SampleBatch, mean_version: float, oldest_version: int) -> TrainBatch | None:
        """Takes a fragment; returns a batch if it is complete now. Fragments without rows are left out."""
        if not fragment.count:
            return None
        self._fresh.append(_Held(fragment, (fragment.count, mean_version, oldest_version)))
        self._fresh_rows += fragment.count
        wanted = min(self._proportion * self._fresh_rows, self._stored_rows)
        if self._fresh_rows + wanted < self._size:
            return None
        replayed = self._draw(wanted)
        parts = [*self._fresh, *replayed]
        self._store()
        return TrainBatch(
            tuple(part.fragment for part in parts),
            sum(part.fragment.count for part in replayed),
            tuple(part.version for part in parts),
        )

    def _draw(self, wanted: float) -> list[_Held]:
        drawn: list[_Held] = []
        if not wanted:
            return drawn
        for i in self._rng.permutation(len(self._stored)).tolist():
            part = self._stored[i]
            if part.fragment.count > wanted:
                if self._rng.random() < wanted / part.fragment.count:
                    drawn.append(part)
                break
            drawn.append(part)
            wanted -= part.fragment.count
        return drawn

    def _store(self) -> None:
        if self._stored.maxlen:
            self._stored.extend(self._fresh)
            self._stored_rows = sum(part.fragment.count for part in self._stored)
        self._fresh, self._fresh_rows = [], 0

    @property
    def num_stored_rows(self) -> int:
        """Rows of the fragments that are kept for replay."""
        return self._stored_rows


class _Held:
    def __init__(self, fragment: SampleBatch, version: Any) -> None:
        self.fragment, self.version = fragment, version
