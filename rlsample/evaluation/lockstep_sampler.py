"""The sampler for vector envs, whose slots all step in each turn, some of them only to be reset.

Every slot is written in every turn, as one strided slice per column, and no turn asks whose episode a row belongs to:
:class:`LockstepBlock` works that out for a whole block. Only a horizon and episode callbacks need to know at once.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from rlsample.env.base_env import BaseEnv, StepBatch
from rlsample.env.lockstep import LockstepEnv
from rlsample.evaluation.callbacks import Callbacks
from rlsample.evaluation.episode_tracker import EpisodeTracker
from rlsample.evaluation.lockstep_block import BlockBooks, LockstepBlock
from rlsample.evaluation.sampler import TRUE, Sampler
from rlsample.evaluation.sampler_settings import SamplerSettings
from rlsample.policy.policy import Policy
from rlsample.sample_batch import SampleBatch
from rlsample.tree import Tree, assign, gather, map_tree

__all__ = ["LockstepSampler", "make_sampler"]


def make_sampler(
    env: BaseEnv,
    policy: Policy,
    settings: SamplerSettings,
    worker_index: int = 0,
    callbacks: Callbacks | None = None,
) -> Sampler:
    """The sampler that suits the env; arguments as for :class:`Sampler`."""
    if isinstance(env, LockstepEnv) and settings.batch_mode == "truncate_episodes":
        return LockstepSampler(env, policy, settings, worker_index, callbacks)
    return Sampler(env, policy, settings, worker_index, callbacks)


class _BlockTracker(EpisodeTracker):
    """A tracker that can be told of a whole block."""

    @property
    def calls_back(self) -> bool:
        """Whether callbacks want to hear of episodes."""
        return self._objects

    def book(self, books: BlockBooks) -> None:
        """Records what finished and goes on from what runs. Not for a tracker that calls back."""
        if len(books.finished[0]):
            self._finished.append((*books.finished, None))
        self.set_state(books.running)


class LockstepSampler(Sampler):
    """Samples truncated fragments of a :class:`LockstepEnv`; otherwise as :class:`Sampler`.

    Attributes:
        env: moved by ``turn``, which spares the look-up of each slot's state.

    ``_waiting`` holds the slots that wait for an action, and what *all* slots see. ``episodes`` is up to date between
    calls of :meth:`sample`, or at any time if ``_at_once``.
    """

    env: LockstepEnv
    episodes: _BlockTracker
    _buffer: LockstepBlock
    _reset_by_stepping = False  # as far as the last block has shown

    def __init__(
        self,
        env: LockstepEnv,
        policy: Policy,
        settings: SamplerSettings,
        worker_index: int = 0,
        callbacks: Callbacks | None = None,
    ) -> None:
        super().__init__(env, policy, settings, worker_index, callbacks)
        self._elsewhere_s = 0.0  # of this call of sample: in the policy and in the env
        self.episodes = _BlockTracker(self._slots, worker_index, callbacks)
        self._at_once = settings.horizon is not None or self.episodes.calls_back
        # A horizon ends episodes of which the env knows nothing: those are to be reset one by one.
        self._turns_reset = env.resets_by_stepping and not self._at_once

    def _new_buffer(self) -> LockstepBlock:
        length = self.settings.rollout_fragment_length
        # Whether slots are reset by stepping shows with the first holes: that block grows.
        spare = length // 8 + 1 if self._reset_by_stepping else 0
        return LockstepBlock(self._allocate, self._slots, length, spare, self.episodes.get_state())

    def _sample_block(self) -> SampleBatch:
        started, self._elsewhere_s = perf_counter(), 0.0
        block = self._buffer
        while not block.target_reached():
            if block.any_full():
                block.grow()
            self._turn()
        runs = block.runs()
        if not self._at_once:
            self.episodes.book(block.books(runs))
        block.write_outcomes(self._clip, flags=not self.settings.no_done_at_end)
        batch = block.build_block(runs, self._waiting[1], self._fragment_ids(len(self._slots)))
        self._reset_by_stepping = batch.count < len(self._slots) * block.polls
        self._buffer = self._new_buffer()
        self.timers.processing_s += perf_counter() - started - self._elsewhere_s
        return batch

    # ------------------------------------------------------------------ one turn

    def _turn(self) -> None:
        ids, obs = self._waiting
        if not len(ids):
            self._await_first(obs)
            return
        started = perf_counter()
        out = self.policy.act(obs, self.settings.explore)
        acted = perf_counter()
        self._buffer.write_choice(obs, out.actions, out.extras, self.policy.version)
        actions = self.to_env(out.actions)
        sent = perf_counter()
        batch = self.env.turn(actions, self._turns_reset)
        self._spent(acted - started, perf_counter() - sent)
        self.timers.polls += 1
        if batch.failures:
            self._fail(batch.failures)  # raises: no slot of a vector env can be replaced
        self._waiting = self._receive(batch)

    def _await_first(self, obs: Tree) -> None:
        """Nobody can act, so every row of the next poll is a first one; ``obs``: what was seen last, if anything."""
        started = perf_counter()
        batch = self.env.poll()
        self._spent(0.0, perf_counter() - started)
        self.timers.polls += 1
        if batch.failures:
            self._fail(batch.failures)
        self._buffer.add_finals_before(self._slots, obs)
        self._start_episodes(self._slots)
        self._waiting = self._slots, self._filtered(batch.obs)

    def _receive(self, batch: StepBatch) -> tuple[np.ndarray, Tree]:
        obs, truncated = self._filtered(batch.obs), batch.truncated
        renewed = None
        if self._at_once:
            truncated, renewed = self._keep_up(batch)
        self._buffer.add(batch.rewards, batch.terminated, truncated, batch.is_first)
        if renewed is not None:
            self._end_softly(self._slots, obs, renewed)
        over = batch.terminated | truncated
        if TRUE not in over.tobytes():
            return self._slots, obs
        return ((~over).nonzero()[0], obs) if self._turns_reset else self._reset_ended(obs, over)

    def _keep_up(self, batch: StepBatch) -> tuple[np.ndarray, np.ndarray | None]:
        """Tells the tracker of a poll; returns the truncated flags, and the slots that end softly (None: no slot)."""
        slots, episodes, renewed = self._slots, self.episodes, None
        truncated = batch.truncated
        episodes.add(slots, batch.rewards)
        first = batch.is_first.nonzero()[0]
        if len(first):
            episodes.start(first)
        if self.settings.horizon is not None:
            truncated, hit = self._apply_horizon(slots, batch.terminated, truncated)
            renewed = None if hit is None else hit.nonzero()[0]
        if episodes.per_step:
            stepped = (~batch.is_first).nonzero()[0]
            self._call_step_callbacks(batch, stepped, stepped, self._buffer.flat_rows(stepped))
        return truncated, renewed

    def _reset_ended(self, obs: Tree, over: np.ndarray) -> tuple[np.ndarray, Tree]:
        """Resets the slots of the mask ``over``; returns who waits now, and what all slots see."""
        ended = over.nonzero()[0]
        if self._at_once:
            self.episodes.finish(ended)
        started = perf_counter()
        batch = self.env.reset_slots(ended)
        self._spent(0.0, perf_counter() - started)
        if batch is None:  # the next step will reset them
            return (~over).nonzero()[0], obs
        if batch.failures:
            self._fail(batch.failures)
        if self.episodes.per_step:
            obs = map_tree(np.copy, obs)  # callbacks may have kept a row of it
        self._buffer.add_finals_before(ended, gather(obs, ended))
        assign(obs, ended, self._filtered(batch.obs))
        self._start_episodes(ended)
        return self._slots, obs

    # ------------------------------------------------------------------ episodes

    def _start_episodes(self, slots: np.ndarray) -> None:
        self._buffer.begin(slots)
        if self._at_once:
            self.episodes.start(slots)

    def _fail(self, failures: Any) -> None:
        """Records what had finished, and gives up: a vector env that failed gives no more rows.

        Raises:
            EnvFailedError: always.
        """
        self._waiting = self._nobody
        block = self._buffer
        if not self._at_once:
            self.episodes.book(block.books(block.runs()))
        for slot, failure in failures.items():
            self.rows_lost += int(getattr(failure, "episode_step", None) is not None)
            self.episodes.abandon(slot)
        self._buffer = self._new_buffer()
        self.env.try_restart(np.array(list(failures)))

    def _spent(self, inference_s: float, env_s: float) -> None:
        """Time that is no processing. The timers may be drained at any moment, so the block keeps its own sum."""
        self.timers.inference_s += inference_s
        self.timers.env_s += env_s
        self._elsewhere_s += inference_s + env_s

    def _filtered(self, obs: Tree) -> Tree:
        return self.filter(obs, update=self.settings.update_filter) if self._filters else obs
