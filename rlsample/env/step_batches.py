"""Putting step batches together and taking rows out of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlsample.env.base_env import StepBatch
from rlsample.tree import concat, gather

__all__ = ["merge", "without_slots"]

_COLUMNS = ("env_ids", "obs", "rewards", "terminated", "truncated", "is_first")


def merge(parts: Sequence[StepBatch]) -> StepBatch:
    """One batch of the rows of all parts, in their order (copies)."""
    infos: dict[int, dict[str, Any]] = {}
    failures: dict[int, BaseException] = {}
    offset = 0
    for part in parts:
        infos.update({row + offset: info for row, info in part.infos.items()})
        failures.update(part.failures)
        offset += len(part.env_ids)
    columns = {name: concat([getattr(part, name) for part in parts]) for name in _COLUMNS}
    return StepBatch(**columns, infos=infos, failures=failures)


def without_slots(batch: StepBatch, failures: Mapping[int, BaseException]) -> StepBatch:
    """The batch less the rows of these slots, with the failures noted."""
    good = np.flatnonzero([slot not in failures for slot in batch.env_ids.tolist()])
    infos = {new: batch.infos[old] for new, old in enumerate(good.tolist()) if old in batch.infos}
    columns = {name: gather(getattr(batch, name), good) for name in _COLUMNS}
    return StepBatch(**columns, infos=infos, failures=dict(failures))
