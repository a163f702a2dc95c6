"""How fast the learner is when sampling is not the limit: `rlsample bench learner`."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from rlsample.engine.thread_engine import ThreadEngine
from rlsample.errors import unknown_name
from rlsample.evaluation.evaluator_set import EvaluatorSet
from rlsample.evaluation.policy_evaluator import PolicyEvaluator
from rlsample.optimizers.async_samples_optimizer import AsyncSamplesOptimizer, AsyncSamplesSettings
from rlsample.policy.impala import IMPALAPolicy, IMPALASettings
from rlsample.sample_batch import NextObs, SampleBatch

__all__ = ["OBSERVATIONS", "ReadyMadeEvaluator", "bench_learner"]

OBSERVATIONS: Mapping[str, gymnasium.spaces.Box] = {
    "vector": gymnasium.spaces.Box(-1, 1, (8,), np.float32),
    "image": gymnasium.spaces.Box(0, 255, (4, 84, 84), np.uint8),
}


class ReadyMadeEvaluator(PolicyEvaluator):
    """Learns with IMPALA's policy; samples are made once and given out again and again, in turn.

    Args:
        worker_index: 0 for the one that learns.
        observation: a name of ``OBSERVATIONS``.
        rows: of each sample, in lanes of 50.
        device: of the model.
    """

    def __init__(self, worker_index: int, observation: str, rows: int, device: str = "cpu") -> None:
        self.policy = IMPALAPolicy(
            OBSERVATIONS[observation], gymnasium.spaces.Discrete(6), IMPALASettings(device=device), seed=worker_index
        )
        rng = np.random.default_rng(worker_index)
        self._samples = [] if worker_index == 0 else [_make_sample(self.policy, rows, rng) for _ in range(4)]
        self._given = 0

    def sample(self) -> SampleBatch:
        self._given += 1
        ready = self._samples[self._given % len(self._samples)]
        batch = SampleBatch(dict(ready.items()), ready.next_obs_source, ready.fragment_lengths)
        batch["policy_version"] = np.full(ready.count, self.policy.version)
        return batch

    def compute_gradients(self, samples: SampleBatch) -> tuple[Any, dict[str, Any]]:
        return self.policy.compute_gradients(samples)

    def apply_gradients(self, gradients: Any) -> None:
        self.policy.apply_gradients(gradients)

    def compute_apply(self, samples: SampleBatch) -> dict[str, Any]:
        return self.policy.learn(samples)

    def get_weights(self) -> Any:
        return self.policy.get_weights()

    def set_weights(self, weights: Any) -> None:
        self.policy.set_weights(weights)


def _make_sample(policy: IMPALAPolicy, rows: int, rng: np.random.Generator) -> SampleBatch:
    space: Any = policy.observation_space
    lengths = [50] * (rows // 50) + ([rows % 50] if rows % 50 else [])
    stops = np.cumsum(lengths)
    if space.dtype == np.uint8:
        everything = rng.integers(0, 256, (rows + len(lengths), *space.shape), np.uint8)
    else:
        everything = rng.normal(size=(rows + len(lengths), *space.shape)).astype(np.float32)
    index = np.arange(1, rows + 1)
    index[stops - 1] = -1 - np.arange(len(lengths))
    columns = {
        "obs": everything[:rows],
        "actions": rng.integers(0, 6, rows),
        "action_logp": np.full(rows, -np.log(6), np.float32),
        "rewards": rng.normal(size=rows).astype(np.float32),
        "terminated": rng.random(rows) < 0.01,
    }
    return SampleBatch(columns, NextObs(index, everything[rows:]), np.array(lengths))


def bench_learner(
    seconds: float,
    observation: str = "vector",
    train_batch_size: int = 500,
    num_data_loader_buffers: int = 0,
    device: str = "cpu",
    precision: str = "float32",
) -> dict[str, float]:
    """IMPALA's learner on ready-made samples, which two threads give out at no cost.

    Args:
        seconds: to measure; a warm-up of five updates comes before.
        observation: "vector" (8 floats) or "image" (4 x 84 x 84 bytes, the convolutional net).
        num_data_loader_buffers: 0: without loaders, by ``compute_apply``.

    Returns:
        rows_per_s, updates_per_s · wait_share: part of the learner's time without data · busy_share: the rest ·
        bytes_copied_per_row, from fragments to the device, counted by loaders (without them 0: not counted), row_bytes
        that the loss needs, and copies_per_row, their ratio · fill_s, copy_s, slot_wait_s and batch_wait_s of loaders,
        compute_s of the learner · policy_lag_mean.

    Raises:
        ConfigError: an unknown kind of observation or settings that cannot work.
    """
    if observation not in OBSERVATIONS:
        raise unknown_name("observation", observation, OBSERVATIONS)
    settings = AsyncSamplesSettings(
        train_batch_size=train_batch_size,
        num_data_loader_buffers=num_data_loader_buffers,
        devices=(device,),
        precision=precision,
        learner_queue_size=4,
    )
    make = functools.partial(_make_evaluator, observation, train_batch_size, device)
    evaluators = EvaluatorSet.create(make, 2, ThreadEngine(copies=False))
    with contextlib.closing(evaluators), contextlib.closing(AsyncSamplesOptimizer(evaluators, settings)) as optimizer:
        while optimizer.num_updates < 5:
            optimizer.step()
        optimizer.stats()
        started, updates, trained = time.perf_counter(), optimizer.num_updates, optimizer.num_steps_trained
        while time.perf_counter() - started < seconds:
            optimizer.step()
        elapsed = time.perf_counter() - started
        stats = optimizer.stats()
        rows = optimizer.num_steps_trained - trained
        updates = optimizer.num_updates - updates
    row_bytes = _row_bytes(observation)
    copied = stats["bytes_copied_per_row"]
    times = ("fill_s", "copy_s", "slot_wait_s", "batch_wait_s", "compute_s")
    return {
        "rows_per_s": rows / elapsed,
        "updates_per_s": updates / elapsed,
        "wait_share": stats["learner_wait_share"],
        "busy_share": 1 - stats["learner_wait_share"],
        "bytes_copied_per_row": copied,
        "row_bytes": row_bytes,
        "copies_per_row": copied / row_bytes,
        "policy_lag_mean": stats["policy_lag_mean"],
        **{name: stats.get(name, 0.0) for name in times},
    }


def _make_evaluator(observation: str, rows: int, device: str, worker_index: int) -> ReadyMadeEvaluator:
    return ReadyMadeEvaluator(worker_index, observation, rows, device if worker_index == 0 else "cpu")


def _row_bytes(observation: str) -> float:
    """Bytes of a row in the loss's columns, its index of the next observation, and its share of extra observations."""
    space = OBSERVATIONS[observation]
    obs = int(np.prod(space.shape)) * np.dtype(space.dtype).itemsize
    return obs * (1 + 1 / 50) + 8 + 4 + 4 + 1 + 8
