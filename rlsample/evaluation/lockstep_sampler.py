"""The sampler for vector envs, whose slots all step in each turn, some of them only to be reset.

Every slot is written in every turn, as one strided slice per column; the rows in which a slot was reset are marked as
holes and left out when the batch is made. That costs one copy of the block if there are holes, and saves an index array
per column and turn.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from rlsample.env.base_env import StepBatch
from rlsample.env.lockstep import LockstepEnv
from rlsample.evaluation.fragment_buffer import FragmentBuffer
from rlsample.evaluation.sampler import TRUE, Sampler
from rlsample.sample_batch import REWARDS, TERMINATED, TRUNCATED, SampleBatch
from rlsample.tree import Tree, assign, gather, map_tree

__all__ = ["LockstepSampler", "make_sampler"]


def make_sampler(env: Any, policy: Any, settings: Any, worker_index: int = 0, callbacks: Any = None) -> Sampler:
    """The sampler that suits the env; arguments as for :class:`Sampler`."""
    together = isinstance(env, LockstepEnv) and settings.batch_mode == "truncate_episodes"
    return (LockstepSampler if together else Sampler)(env, policy, settings, worker_index, callbacks)


class LockstepSampler(Sampler):
    """Samples truncated fragments of a :class:`LockstepEnv`; otherwise as :class:`Sampler`.

    Attributes:
        env: moved by ``turn``, which spares the look-up of each slot's state.

    ``_waiting`` holds the slots that wait for an action, and what *all* slots see.
    """

    env: LockstepEnv

    def _sample_block(self) -> SampleBatch:
        buffer = self._buffer
        buffer.mark_start(self._slots, self.episodes.eps_id.copy(), self.episodes.lengths(self._slots))
        while not buffer.target_reached():
            if buffer.any_full():
                buffer.grow()
            self._turn()
        ids, obs = self._waiting
        seen = obs if ids is self._slots else gather(obs, ids)
        batch = buffer.build(ids, seen, self._fragment_ids(len(self._slots)))
        self._buffer = self._new_buffer()
        return batch

    def _new_buffer(self) -> FragmentBuffer:
        length = self.settings.rollout_fragment_length
        return FragmentBuffer(self._allocate, self._slots, length, spare=length // 8 + 1 if self._holes_seen() else 0)

    def _holes_seen(self) -> bool:
        """Whether slots were reset by stepping before; the buffer grows once if that is not known yet."""
        return bool(getattr(self, "_reset_by_stepping", False))

    def _turn(self) -> None:
        started = perf_counter()
        env, timers = self.env, self.timers
        ids, obs = self._waiting
        acting = len(ids) > 0
        if acting:
            out = self.policy.act(obs, self.settings.explore)
            acted = perf_counter()
            timers.inference_s += acted - started
            self._write_choice(self._slots, obs, out.actions, out.extras)
            actions = self.to_env(out.actions)
            started = perf_counter()
            timers.processing_s += started - acted
            self._waiting = self._nobody
            batch = env.turn(actions)
        else:
            batch = env.poll()
        polled = perf_counter()
        timers.env_s += polled - started
        timers.polls += 1
        before = timers.env_s
        if batch.failures:
            self._fail(batch.failures)  # raises: no slot of a vector env can be replaced
        self._waiting = self._book_all(batch) if acting else self._begin_all(batch)
        timers.processing_s += perf_counter() - polled - (timers.env_s - before)

    def _begin_all(self, batch: StepBatch) -> tuple[np.ndarray, Tree]:
        """Nobody acted, so every row is a first one."""
        self._start_episodes(self._slots)
        return self._slots, self._filtered(batch.obs)

    def _book_all(self, batch: StepBatch) -> tuple[np.ndarray, Tree]:
        buffer, slots, columns = self._buffer, self._slots, self._buffer.columns
        obs, rewards, terminated, truncated = (
            self._filtered(batch.obs),
            batch.rewards,
            batch.terminated,
            batch.truncated,
        )
        first = batch.is_first.nonzero()[0] if TRUE in batch.is_first.tobytes() else None
        rows = buffer.rows(slots)
        self.episodes.add(slots, rewards)
        soft = None
        if self.settings.horizon is not None:
            no_end = terminated if first is None else terminated | batch.is_first
            truncated, soft = self._apply_horizon(slots, no_end, truncated)
        columns[REWARDS][rows] = rewards if self._clip is None else self._clip(rewards)
        ends = TRUE in terminated.tobytes() or TRUE in truncated.tobytes()
        if ends and not self.settings.no_done_at_end:
            columns[TERMINATED][rows] = terminated
            columns[TRUNCATED][rows] = truncated
        if self.episodes.per_step:
            stepped = np.flatnonzero(~batch.is_first)
            self._call_step_callbacks(batch, slots[stepped], stepped, buffer.flat_rows(stepped))
        if first is not None:
            self._reset_by_stepping = True
            buffer.add_holes(first)
        if not ends:
            buffer.advance(slots)
        else:
            over = terminated | truncated
            ended = over.nonzero()[0]
            buffer.add_finals(buffer.flat_rows(ended), gather(obs, ended))
            buffer.advance(slots)
        if first is not None:
            self._start_episodes(first)
        if soft is not None:
            self._end_softly(slots, obs, slots[soft])
        return self._reset_ended(obs, ended, over) if ends else (slots, obs)

    def _reset_ended(self, obs: Tree, ended: np.ndarray, over: np.ndarray) -> tuple[np.ndarray, Tree]:
        self.episodes.finish(ended)
        started = perf_counter()
        batch = self.env.reset_slots(ended)
        self.timers.env_s += perf_counter() - started
        if batch is None:
            return (~over).nonzero()[0], obs
        if batch.failures:
            self._fail(batch.failures)
        if self.episodes.per_step:
            obs = map_tree(np.copy, obs)  # callbacks may have kept a row of it
        assign(obs, ended, self._filtered(batch.obs))
        self._start_episodes(ended)
        return self._slots, obs

    def _filtered(self, obs: Tree) -> Tree:
        return self.filter(obs, update=self.settings.update_filter) if self._filters else obs
