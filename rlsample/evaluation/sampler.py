"""The sampling loop: poll, filter, one forward pass, write rows in place, send actions.

    act on waiting slots -> send_actions -> poll -> outcome of those rows, episode ends, resets -> waiting slots -> ...

A call stops right after a poll, so that nothing is stepped beyond what it returns and the next call's first row is
chosen by the newest weights. Each observation the env delivers passes the filter once.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np

from rlsample.env.base_env import BaseEnv, StepBatch
from rlsample.env.spaces import empty_columns
from rlsample.evaluation.callbacks import Callbacks
from rlsample.evaluation.clipping import action_mapping, reward_clipping
from rlsample.evaluation.episode_tracker import EpisodeTracker
from rlsample.evaluation.filters import make_filter
from rlsample.evaluation.fragment_buffer import FragmentBuffer, Rows
from rlsample.evaluation.metrics import Timers
from rlsample.evaluation.sampler_settings import SamplerSettings
from rlsample.evaluation.starting_over import reset_all_slots
from rlsample.policy.policy import Policy
from rlsample.sample_batch import ACTIONS, OBS, POLICY_VERSION, REWARDS, TERMINATED, TRUNCATED, SampleBatch
from rlsample.tree import Tree, assign, concat, gather, map_tree

__all__ = ["TRUE", "Sampler"]

_WORKER_SHIFT = 40
TRUE = b"\x01"  # ``TRUE in flags.tobytes()`` is ``flags.any()`` at a tenth of its cost on the few bytes of a poll


class Sampler:
    """Drives an env with a policy and returns batches of rows.

    Truncating, with an env that is stepped inside poll: one block ``[slots, rollout_fragment_length]`` per call, handed
    out without a copy. Otherwise (whole episodes; envs that work ahead) each lane's finished piece is copied out once.

    Args:
        env: the polled env; the caller closes it.
        policy: acts and gives values; used only inside :meth:`sample`.
        settings: see :class:`SamplerSettings`.
        worker_index: goes into episode and fragment ids.
        callbacks: episode callbacks, or None.
    """

    def __init__(
        self,
        env: BaseEnv,
        policy: Policy,
        settings: SamplerSettings,
        worker_index: int = 0,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.env, self.policy, self.settings = env, policy, settings
        self.filter = make_filter(settings.observation_filter, env.observation_space)
        self.timers = Timers()
        self.rows_lost = 0
        self._slots = env.all_ids
        self.episodes = EpisodeTracker(self._slots, worker_index, callbacks)
        self._next_fragment_id = worker_index << _WORKER_SHIFT
        self._in_blocks = settings.batch_mode == "truncate_episodes" and not env.steps_ahead
        self._pieces: collections.deque[SampleBatch] = collections.deque()
        self._buffer = self._new_buffer()
        self._filters = settings.observation_filter != "NoFilter"
        self._action_mapping = action_mapping(env.action_space, settings)
        self._clip = reward_clipping(settings.clip_rewards)
        self._plain = isinstance(self._buffer.columns[OBS], np.ndarray) and isinstance(
            self._buffer.columns[ACTIONS], np.ndarray
        )
        self._nobody = (self._slots[:0], gather(self._buffer.columns[OBS], slice(0, 0)))
        self._waiting: tuple[np.ndarray, Tree] = self._nobody  # slots that wait for an action, and what they see
        self._held: list[tuple[np.ndarray, Tree]] = []  # the same, of slots whose lane is full
        self._broke_off = False  # the last call of sample

    def sample(self) -> SampleBatch:
        """Steps the env until a batch is full.

        Returns:
            ``truncate_episodes``: rollout_fragment_length rows per slot (fewer for a slot of a lock-step env that can
            only reset by stepping). ``complete_episodes``: whole episodes, at least that many rows in total.

        Raises:
            EnvFailedError: a sub-env failed and may not be restarted. Rows collected before are kept for the next call,
                but for a vector env: when that fails, all its slots do, and there is no next call to keep them for.
            KeyboardInterrupt: what this call collected is lost, and the next begins with a new episode in every slot.
        """
        if self._broke_off:
            self._start_over()
        try:
            return self._sample_block() if self._in_blocks else self._sample_pieces()
        except BaseException as e:
            self._broke_off = not isinstance(e, Exception)
            raise

    def _start_over(self) -> None:
        """Rows and env may be out of step: episodes are abandoned, and begun anew."""
        self._held, self._waiting = [], self._nobody
        self._pieces.clear()
        for slot in self._slots.tolist():
            self.episodes.abandon(slot)
        self._buffer, first = self._new_buffer(), reset_all_slots(self.env)
        self._broke_off = False
        if first is not None:
            self._waiting = self._receive(first._replace(failures={}))
            if first.failures:
                self._fail(first.failures)

    def to_env(self, actions: Tree) -> Tree:
        """The policy's actions [K, ...] as the env gets them: clipped or mapped to the bounds, if so set."""
        return actions if self._action_mapping is None else self._action_mapping(actions)

    # ------------------------------------------------------------------ collecting

    def _sample_block(self) -> SampleBatch:
        buffer = self._buffer
        buffer.mark_start(self._slots, self.episodes.eps_id.copy(), self.episodes.lengths(self._slots))
        while True:
            self._turn()
            if not buffer.any_full():
                continue
            full = buffer.full()
            if self.env.lockstep or full.all():
                break
            ids, obs = self._waiting
            mine = full[ids]
            if mine.any():
                self._held.append((ids[mine], gather(obs, mine)))
                self._waiting = ids[~mine], gather(obs, ~mine)
        if self._held:
            self._release_held()
        batch = buffer.build(*self._waiting, self._fragment_ids(len(self._slots)))
        self._buffer = self._new_buffer()
        return batch

    def _release_held(self) -> None:
        parts = [*self._held, self._waiting]
        self._held = []
        ids, obs = np.concatenate([p[0] for p in parts]), concat([p[1] for p in parts])
        order = np.argsort(ids)
        self._waiting = (self._slots if len(ids) == len(self._slots) else ids[order]), gather(obs, order)

    def _sample_pieces(self) -> SampleBatch:
        target = self.settings.rollout_fragment_length * len(self._slots)
        while sum(piece.count for piece in self._pieces) < target:
            self._turn()
            if self.settings.batch_mode == "truncate_episodes":
                self._take_full_lanes(*self._waiting)
            elif self._buffer.any_full():
                self._buffer.grow()
        pieces, count = [], 0
        while count < target:
            pieces.append(self._pieces.popleft())
            count += pieces[-1].count
        return SampleBatch.concat(pieces)

    def _take_full_lanes(self, ids: np.ndarray, obs: Tree) -> None:
        for lane in np.flatnonzero(self._buffer.full()).tolist():
            at = np.flatnonzero(ids == lane)  # empty: its episode ended, the reset is under way
            cut = gather(obs, at) if len(at) else None
            self._pieces.append(self._buffer.take(lane, cut, self._fragment_ids(1)))
            self._mark_running(np.array([lane]))

    def _mark_running(self, lanes: np.ndarray) -> None:
        self._buffer.mark_start(lanes, self.episodes.eps_id[lanes], self.episodes.lengths(lanes))

    # ------------------------------------------------------------------ one turn

    def _turn(self) -> None:
        """Acts for the waiting slots (there may be none), polls, and notes which slots wait now."""
        started = perf_counter()
        env, timers = self.env, self.timers
        ids, obs = self._waiting
        if len(ids):
            out = self.policy.act(obs, self.settings.explore)
            acted = perf_counter()
            timers.inference_s += acted - started
            self._write_choice(ids, obs, out.actions, out.extras)
            actions = self.to_env(out.actions)
            started = perf_counter()
            timers.processing_s += started - acted
            env.send_actions(ids, actions)
            self._waiting = self._nobody
        batch = env.poll()
        polled = perf_counter()
        timers.env_s += polled - started
        timers.polls += 1
        before = timers.env_s
        if len(batch.env_ids):
            self._waiting = self._receive(batch)
        if batch.failures:
            self._fail(batch.failures)
        timers.processing_s += perf_counter() - polled - (timers.env_s - before)

    def _write_choice(self, ids: np.ndarray, obs: Tree, actions: Tree, extras: Any) -> None:
        rows, columns = self._buffer.rows(ids), self._buffer.columns
        if self._plain:
            columns[OBS][rows] = obs
            columns[ACTIONS][rows] = actions
        else:
            assign(columns[OBS], rows, obs)
            assign(columns[ACTIONS], rows, actions)
        for name, values in extras.items():
            columns[name][rows] = values
        columns[POLICY_VERSION][rows] = self.policy.version

    def _receive(self, batch: StepBatch) -> tuple[np.ndarray, Tree]:
        """Books what a poll brought; returns the slots that now wait for an action, and what they see."""
        every, obs = batch.env_ids, batch.obs
        if every is not self._slots:
            every = self._canonical(every)
        if self._filters:
            obs = self.filter(obs, update=self.settings.update_filter)
        if TRUE in batch.is_first.tobytes():
            self._start_episodes(every[batch.is_first])
            stepped = (~batch.is_first).nonzero()[0]
            if not len(stepped):
                return every, obs
            outcome = every[stepped], batch.rewards[stepped], batch.terminated[stepped], batch.truncated[stepped]
            return self._book(batch, every, obs, stepped, *outcome)
        return self._book(batch, every, obs, None, every, batch.rewards, batch.terminated, batch.truncated)

    def _book(
        self,
        batch: StepBatch,
        every: np.ndarray,
        obs: Tree,
        stepped: np.ndarray | None,
        ids: np.ndarray,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
    ) -> tuple[np.ndarray, Tree]:
        """Books the transitions of a poll: slots ``ids``, at rows ``stepped`` of it (None: all its rows)."""
        buffer, soft = self._buffer, None
        self.episodes.add(ids, rewards)
        if self.settings.horizon is not None:
            truncated, soft = self._apply_horizon(ids, terminated, truncated)
        rows, columns = buffer.rows(ids), buffer.columns
        columns[REWARDS][rows] = rewards if self._clip is None else self._clip(rewards)
        ends = TRUE in terminated.tobytes() or TRUE in truncated.tobytes()
        # both columns of a block hold False until set; a lane's stretch that is used again holds what was there
        if (ends or not self._in_blocks) and not self.settings.no_done_at_end:
            columns[TERMINATED][rows] = terminated
            columns[TRUNCATED][rows] = truncated
        if self.episodes.per_step:
            self._call_step_callbacks(batch, ids, stepped, rows)
        if not ends:
            buffer.advance(ids)
            if soft is not None:
                self._end_softly(every, obs, ids[soft])
            return every, obs
        ended = (terminated | truncated).nonzero()[0]
        slots, at = ids[ended], ended if stepped is None else stepped[ended]
        buffer.add_finals(buffer.flat_rows(slots), gather(obs, at))
        buffer.advance(ids)
        if soft is not None:
            self._end_softly(every, obs, ids[soft])
        return self._end_episodes(every, obs, slots, at)

    def _canonical(self, ids: np.ndarray) -> np.ndarray:
        """The canonical array if ``ids`` is every slot in order."""
        return self._slots if len(ids) == len(self._slots) and (ids == self._slots).all() else ids

    # ------------------------------------------------------------------ episodes

    def _start_episodes(self, slots: np.ndarray) -> None:
        eps_ids = self.episodes.start(slots)
        self._buffer.mark_start(slots, eps_ids, np.zeros(len(slots), np.int64))

    def _end_episodes(self, ids: np.ndarray, obs: Tree, slots: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, Tree]:
        """Resets ``slots``, which stand at rows ``at`` of ``obs``; returns who waits now."""
        self.episodes.finish(slots)
        if self.settings.batch_mode == "complete_episodes":
            for lane in slots.tolist():
                self._pieces.append(self._buffer.take(lane, None, self._fragment_ids(1)))
        started = perf_counter()
        first = self.env.try_reset(slots)
        self.timers.env_s += perf_counter() - started
        if first is not None and not first.failures:
            first_obs = self.filter(first.obs, update=self.settings.update_filter) if self._filters else first.obs
            if self.episodes.per_step:
                obs = map_tree(np.copy, obs)  # callbacks may have kept a row of it
            assign(obs, at, first_obs)
            self._start_episodes(slots)
            return ids, obs
        waits = np.ones(len(ids), bool)
        waits[at] = False
        ids, obs = ids[waits], gather(obs, waits)
        if first is not None:
            if len(first.env_ids):
                more, more_obs = self._receive(first._replace(failures={}))
                ids, obs = np.concatenate([ids, more]), concat([obs, more_obs])
            self._fail(first.failures)
        return ids, obs

    def _end_softly(self, ids: np.ndarray, obs: Tree, slots: np.ndarray) -> None:
        """New episode ids for slots whose env goes on."""
        self.episodes.finish(slots)
        if self.settings.batch_mode == "complete_episodes":
            for lane in slots.tolist():
                cut_obs = gather(obs, np.flatnonzero(ids == lane))
                self._pieces.append(self._buffer.take(lane, cut_obs, self._fragment_ids(1)))
        self._start_episodes(slots)

    def _apply_horizon(
        self, ids: np.ndarray, terminated: np.ndarray, truncated: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The truncated flags with horizon cuts, and a mask of rows that end an episode softly (None: no row)."""
        hit = (self.episodes.lengths(ids) >= self.settings.horizon) & ~terminated & ~truncated
        if not hit.any():
            return truncated, None
        return (truncated, hit) if self.settings.soft_horizon else (truncated | hit, None)

    def _fail(self, failures: Mapping[int, BaseException]) -> None:
        """Ends the failed slots' episodes as cuts and asks for new envs.

        Raises:
            EnvFailedError: a slot may not be restarted.
        """
        whole = self.settings.batch_mode == "complete_episodes"
        for slot, failure in failures.items():
            lane = np.array([slot])
            in_step = getattr(failure, "episode_step", None) is not None
            self.rows_lost += int(in_step)
            if whole:
                self.rows_lost += self._buffer.drop(slot)
            elif in_step and self.episodes.lengths(lane)[0] > 0:
                row = self._buffer.flat_rows(lane)  # of the step that failed: its observation follows the row before
                if row[0] > slot * self._buffer.length:
                    self._buffer.add_finals(row - 1, self._buffer.obs_at(row))
            self.episodes.abandon(slot)
        self.env.try_restart(np.array(list(failures)))

    def _call_step_callbacks(self, batch: StepBatch, ids: np.ndarray, stepped: np.ndarray | None, rows: Rows) -> None:
        at = range(len(ids)) if stepped is None else stepped.tolist()
        actions = gather(self._buffer.columns[ACTIONS], rows)
        self.episodes.step_callbacks(
            ids,
            [gather(batch.obs, k) for k in at],
            [gather(actions, k) for k in range(len(ids))],
            [batch.infos.get(k, {}) for k in at],
        )

    # ------------------------------------------------------------------ state and storage

    def get_state(self) -> dict[str, Any] | None:
        """Everything the next :meth:`sample` starts from, or None where that cannot be had.

        It can for truncated batches from envs that give their state (gymnasium envs in this process that pickle).
        """
        env_state = self.env.get_state() if self._in_blocks else None
        if env_state is None:
            return None
        ids, obs = self._waiting
        return {
            "env": env_state,
            "waiting_ids": ids.copy(),
            "waiting_obs": map_tree(np.copy, obs),
            "episodes": self.episodes.get_state(),
            "next_fragment_id": self._next_fragment_id,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from :meth:`get_state`."""
        self.env.set_state(state["env"])
        self._waiting = self._canonical(state["waiting_ids"]), map_tree(np.copy, state["waiting_obs"])
        self.episodes.set_state(state["episodes"])
        self._next_fragment_id = int(state["next_fragment_id"])
        self._buffer = self._new_buffer()

    def _new_buffer(self) -> FragmentBuffer:
        return FragmentBuffer(self._allocate, self._slots, self.settings.rollout_fragment_length)

    def _allocate(self, rows: int) -> dict[str, Tree]:
        obs = empty_columns(self.env.observation_space, (rows,))
        if self.settings.observation_filter != "NoFilter":
            obs = map_tree(lambda x: x.astype(np.float32) if x.dtype.kind == "f" else x, obs)
        columns: dict[str, Tree] = {
            OBS: obs,
            ACTIONS: empty_columns(self.env.action_space, (rows,)),
            REWARDS: np.empty(rows, np.float32),
            TERMINATED: np.zeros(rows, bool),
            TRUNCATED: np.zeros(rows, bool),
            POLICY_VERSION: np.empty(rows, np.int64),
        }
        for name, (shape, dtype) in self.policy.extra_columns.items():
            columns[name] = np.empty((rows, *shape), dtype)
        return columns

    def _fragment_ids(self, count: int) -> int:
        first = self._next_fragment_id
        self._next_fragment_id += count
        return first
