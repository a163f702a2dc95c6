"""The sampling loop for served episodes: lanes that come and go, actions chosen elsewhere, episodes nobody keeps."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np

from rlsample.env.base_env import StepBatch
from rlsample.env.serving import ServingEnvAdapter
from rlsample.env.serving.served_episode import ServingEnded
from rlsample.errors import ConfigError
from rlsample.evaluation.callbacks import Callbacks
from rlsample.evaluation.sampler import Sampler
from rlsample.evaluation.sampler_settings import SamplerSettings
from rlsample.evaluation.shared_episode_tracker import SharedEpisodeTracker
from rlsample.policy.policy import Policy
from rlsample.sample_batch import ACTION_LOGP, ACTIONS, AGENT_ID, ENV_ID, OBS, TRUNCATED, SampleBatch
from rlsample.tree import Tree, assign, concat, gather

__all__ = ["ServedSampler"]


class ServedSampler(Sampler):
    """Samples a :class:`~rlsample.env.serving.ServingEnvAdapter`.

    A batch is ``rollout_fragment_length * env.sample_lanes`` rows or a few more, whichever lanes they come from:
    ``truncate_episodes`` cuts all lanes then, ``complete_episodes`` waits for whole episodes.

    A row whose action was logged holds that action, its action_logp as given (NaN where not), and the policy's values.
    Episodes with ``training_enabled=False`` are answered and counted, and leave no rows.

    Raises:
        ConfigError: a horizon, which would have to reset a served episode (soft_horizon does not);
            any horizon, with several agents.
    """

    env: ServingEnvAdapter

    def __init__(
        self,
        env: ServingEnvAdapter,
        policy: Policy,
        settings: SamplerSettings,
        worker_index: int = 0,
        callbacks: Callbacks | None = None,
    ) -> None:
        if settings.horizon is not None and not settings.soft_horizon:
            raise ConfigError("only its client can end a served episode: use soft_horizon=True, or no horizon")
        super().__init__(env, policy, settings, worker_index, callbacks)
        if env.agents is not None:
            if settings.horizon is not None:
                raise ConfigError("a soft_horizon cannot cut episodes of several agents: leave out the horizon")
            self.episodes = SharedEpisodeTracker(env, worker_index, callbacks)
        self._target = settings.rollout_fragment_length * env.sample_lanes
        self._whole = settings.batch_mode == "complete_episodes"
        self._in_blocks = not self._whole  # flags are written into fresh columns only
        self._polls = 0  # since the buffer was new
        self._rows = 0  # complete rows in the buffer; not counted for whole episodes
        env.let_clients_work(self._turn_of_client)
        self._own: tuple[np.ndarray, Tree, np.ndarray] | None = None  # lanes that logged, their actions and logp

    def sample(self) -> SampleBatch:
        """Waits for clients until a batch is full.

        Raises:
            ServingEnded: ``run()`` has ended. If it returned, the rows so far (of whole episodes, if those are wanted)
                came out as one smaller batch before. If it raised, they are lost, and its error is the cause.
            EnvClosedError: the env is closed.
            Exception: what the policy raised; the clients it concerned were told, and their episodes closed.
        """
        while not self._enough():
            try:
                self._turn()
            except ServingEnded as e:
                if e.__cause__ is not None or not (self._rows or self._pieces):
                    raise
                break
            if self._whole:
                if self._buffer.any_full():
                    self._buffer.grow()
            elif self._lane_full():
                self._cut_all_lanes()
        if self._rows:
            self._cut_all_lanes()
        pieces, rows = [], 0
        while self._pieces and rows < self._target:
            pieces.append(self._pieces.popleft())
            rows += pieces[-1].count
        batch = SampleBatch.concat(pieces) if len(pieces) > 1 else pieces[0]
        if self.env.agents is not None:
            batch[ENV_ID], batch[AGENT_ID] = np.divmod(batch[ENV_ID], self.env.lanes_per_episode)
        return batch

    def _enough(self) -> bool:
        return self._rows + (sum(piece.count for piece in self._pieces) if self._pieces else 0) >= self._target

    def _lane_full(self) -> bool:
        return self._polls >= self._buffer.length and self._buffer.any_full()  # a poll brings a lane one row at most

    def _cut_all_lanes(self) -> None:
        """All complete rows become a piece; actions whose outcome is open move on to the next buffer."""
        old, new = self._buffer, self._new_buffer()
        waiting, obs = self._waiting
        open_lanes = self.env.acted_lanes()
        at, to = old.flat_rows(open_lanes), new.flat_rows(open_lanes)
        for name, column in old.columns.items():
            assign(new.columns[name], to, gather(column, at))
        cuts = np.concatenate([waiting, open_lanes])
        seen = concat([obs, gather(old.columns[OBS], at)])
        self._pieces.append(old.build(cuts, seen, self._fragment_ids(len(self._slots))))
        self._buffer, self._rows, self._polls = new, 0, 0
        self._mark_running(self._slots.copy())

    # ------------------------------------------------------------------ one turn

    def _turn(self) -> None:
        self._answer()
        started = perf_counter()
        batch = self.env.poll()
        self.timers.env_s += perf_counter() - started
        self._take(batch)

    def _turn_of_client(self) -> None:
        """A turn in a client's thread, while the thread of :meth:`sample` is in :meth:`_turn` and polls."""
        self._take(self.env.poll(timeout_s=0.0))
        if not (self._enough() or self._whole or self._lane_full()):
            self._answer()

    def _answer(self) -> None:
        """Acts for those who wait."""
        ids, obs = self._waiting
        if not len(ids):
            return
        started = perf_counter()
        try:
            if self.env.agents is None:
                out = self.policy.act(obs, self.settings.explore)
            else:
                out = self.policy.act_for(ids % self.env.lanes_per_episode, obs, self.settings.explore)
            acted = perf_counter()
            self._write_choice(ids, obs, out.actions, out.extras)
            self.env.send_actions(ids, self.to_env(out.actions))
        except Exception as e:
            assign(self._buffer.columns[OBS], self._buffer.flat_rows(ids), obs)
            self._waiting, self._own = self._nobody, None
            self.env.refuse(ids, e)
            raise
        self._waiting = self._nobody
        self.timers.inference_s += acted - started
        self.timers.processing_s += perf_counter() - acted

    def _take(self, batch: StepBatch) -> None:
        """Books what a poll brought."""
        started = perf_counter()
        if len(batch.env_ids):
            self._waiting = self._receive(batch)
        if batch.failures:
            self._fail(batch.failures)
        self._polls += 1
        self.timers.polls += 1
        self.timers.processing_s += perf_counter() - started

    def _write_choice(self, ids: np.ndarray, obs: Tree, actions: Tree, extras: Any) -> None:
        super()._write_choice(ids, obs, actions, extras)
        if self._own is not None:
            lanes, own_actions, logp = self._own
            rows = self._buffer.flat_rows(lanes)
            assign(self._buffer.columns[ACTIONS], rows, own_actions)
            if ACTION_LOGP in self._buffer.columns:
                self._buffer.columns[ACTION_LOGP][rows] = logp
            self._own = None

    def _receive(self, batch: StepBatch) -> tuple[np.ndarray, Tree]:
        logged = batch.off_policy_actions
        if logged is not None:
            at = np.flatnonzero(logged.mask)
            self._own = batch.env_ids[at], gather(logged.actions, at), logged.logp[at]
        return super()._receive(batch)

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
        unrecorded = self.env.unrecorded[ids] if self.env.num_unrecorded else None
        if unrecorded is None or not unrecorded.any():
            self._rows += 0 if self._whole else len(ids)
            return super()._book(batch, every, obs, stepped, ids, rewards, terminated, truncated)
        at = np.arange(len(ids)) if stepped is None else stepped
        kept = np.flatnonzero(~unrecorded)
        if len(kept):
            self._rows += 0 if self._whole else len(kept)
            of_kept = at[kept], ids[kept], rewards[kept], terminated[kept], truncated[kept]
            every, obs = super()._book(batch, every, obs, *of_kept)
        ids, at, ended = ids[unrecorded], at[unrecorded], (terminated | truncated)[unrecorded]
        self.episodes.add(ids, rewards[unrecorded])
        if self.episodes.per_step:
            self._call_step_callbacks(batch, ids, at, self._buffer.flat_rows(ids))
        if ended.any():
            self.episodes.finish(ids[ended])
            self.env.try_reset(ids[ended])
            waits = ~np.isin(every, ids[ended])
            every, obs = every[waits], gather(obs, waits)
        return every, obs

    # ------------------------------------------------------------------ episodes

    def _start_episodes(self, slots: np.ndarray) -> None:
        eps_ids = self.episodes.start(slots)
        if self.env.num_unrecorded:  # a mark goes with the rows it marks: without rows it would stay for ever
            kept = ~self.env.unrecorded[slots]
            slots, eps_ids = slots[kept], eps_ids[kept]
        if len(slots):
            self._buffer.mark_start(slots, eps_ids, np.zeros(len(slots), np.int64))

    def _fail(self, failures: Mapping[int, BaseException]) -> None:
        """Ends episodes that broke off, truncated, at the observation of the action whose outcome never came."""
        for slot in failures:
            lane = np.array([slot])
            recorded = not self.env.unrecorded[slot]
            row = self._buffer.flat_rows(lane)
            steps = int(self.episodes.lengths(lane)[0])
            self.rows_lost += int(recorded)
            if recorded and steps and row[0] > slot * self._buffer.length:
                self._buffer.add_finals(row - 1, self._buffer.obs_at(row))
                if not self.settings.no_done_at_end:
                    self._buffer.columns[TRUNCATED][row - 1] = True
            if not steps:
                self.episodes.abandon(slot)
                self._buffer.unmark(slot)
                continue
            self.episodes.finish(lane)
            if recorded and self._whole:
                self._pieces.append(self._buffer.take(slot, None, self._fragment_ids(1)))
        self.env.try_restart(np.array(list(failures)))
