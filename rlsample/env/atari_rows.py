"""Batches of rows put together and taken apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlsample.env.base_env import StepBatch

__all__ = ["chosen", "merged", "split"]


def merged(parts: list[StepBatch], obs_shape: tuple[int, ...]) -> StepBatch:
    """One batch of several, in their order; an empty one of none."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        no = np.zeros(0, bool)
        obs = np.zeros((0, *obs_shape), np.uint8)
        return StepBatch(np.zeros(0, np.int64), obs, np.zeros(0, np.float32), no, no.copy(), no.copy())
    infos: dict[int, dict[str, Any]] = {}
    failures: dict[int, BaseException] = {}
    start = 0
    for part in parts:
        infos.update({start + row: info for row, info in part.infos.items()})
        failures.update(part.failures)
        start += len(part.env_ids)
    return _batch((np.concatenate([part[k] for part in parts]) for k in range(6)), infos, failures)


def split(batch: StepBatch, count: int) -> tuple[StepBatch, StepBatch]:
    """The first ``count`` rows (views), and the others; failures stay with the first."""
    before = {row: info for row, info in batch.infos.items() if row < count}
    after = {row - count: info for row, info in batch.infos.items() if row >= count}
    return (
        _batch((column[:count] for column in batch[:6]), before, batch.failures),
        _batch((column[count:] for column in batch[:6]), after, {}),
    )


def chosen(batch: StepBatch, rows: np.ndarray) -> StepBatch:
    """These rows of a batch (copies)."""
    infos = {new: batch.infos[old] for new, old in enumerate(rows.tolist()) if old in batch.infos}
    return _batch((column[rows] for column in batch[:6]), infos, batch.failures)


def _batch(columns: Any, infos: Any, failures: Any) -> StepBatch:
    env_ids, obs, rewards, terminated, truncated, is_first = columns
    return StepBatch(env_ids, obs, rewards, terminated, truncated, is_first, infos, failures)
