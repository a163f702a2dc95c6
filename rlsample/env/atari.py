"""Atari games at the speed of ale-py's C++ vector env, behind the polled interface and EnvPool's."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from rlsample.env.atari_books import Rows
from rlsample.env.atari_fleet import AtariFleet
from rlsample.env.atari_group import AtariGroup, open_vector_env
from rlsample.env.atari_opening import AtariOpening
from rlsample.env.atari_rows import chosen, merged, split
from rlsample.env.atari_seeds import game_seeds, next_seeds
from rlsample.env.atari_settings import AtariSettings, action_meanings, rom_id
from rlsample.env.atari_surface import AtariSurface
from rlsample.env.base_env import StepBatch
from rlsample.env.pool.broken_off import BeginsAnew, whole
from rlsample.env.slot_states import BUSY, ENDED, FAILED, NEW, RESETTING, WAITING, SlotStates
from rlsample.env.spaces import ActionCodec
from rlsample.errors import ConfigError, EnvClosedError, EnvError, EnvFailedError, EnvProtocolError
from rlsample.tree import Tree

__all__ = ["AtariEnv", "make_atari"]

log = logging.getLogger(__name__)

_CLOSE_WAIT_S = 0.4


def make_atari(
    task: str,
    num_envs: int = 1,
    *,
    seed: int | Sequence[int] | None = None,
    worker_index: int = 0,
    settings: AtariSettings | None = None,
    **options: Any,
) -> AtariEnv:
    """``num_envs`` games of one kind, on C++ threads.

        with make_atari("Pong-v5", num_envs=64, groups=2, seed=0) as env:
            batch = env.poll()                                    # the first 32 slots
            env.send_actions(batch.env_ids, actions)              # they step while the other 32 are acted on

    Args:
        task: ``"Pong-v5"`` (as in EnvPool), ``"ALE/Pong-v5"`` or ``"pong"``. All the same game and settings: sticky
            actions, which Gymnasium's ``ALE/`` ids have, are an option here.
        num_envs: slots.
        seed: each slot is seeded by :func:`~rlsample.env.base_env.slot_seed`; or one seed per slot. None: not
            reproducible.
        worker_index: the evaluator's index, for the seeds.
        settings: see :class:`~rlsample.env.atari_settings.AtariSettings`.
        options: single fields of it. EnvPool's other options are accepted at the value that is the only one here.

    Raises:
        ConfigError: an unknown game or option (the nearest is named), or values that cannot work.
    """
    if settings is not None and options:
        raise ConfigError(f"give settings or single options, not both (got {', '.join(options)})")
    if isinstance(num_envs, bool) or not isinstance(num_envs, (int, np.integer)) or num_envs < 1:
        raise ConfigError(f"num_envs must be an int of at least 1, got {num_envs!r}")
    settings = settings or AtariSettings.of(options)
    return AtariEnv(rom_id(task), int(num_envs), settings, game_seeds(seed, int(num_envs), worker_index))


class AtariEnv(AtariSurface, BeginsAnew):
    """Atari games in groups, each stepped together; made by :func:`make_atari`.

    A group is stepped as soon as each of its slots has an action or a reset to do, while other groups may wait:

    * one group (the default): poll brings all slots in order;
    * ``groups=2``: poll brings the groups in the order in which they were sent, so the result depends on no timing;
    * ``batch_size=b``: poll brings b rows, of the groups that were ready first.

    Under ``recv`` with a ``batch_size`` there are no groups: each batch has the rows that were ready first, of any
    games, and is to be answered before the next one is received; ``recv_ahead=True`` makes it groups, too.

    The env is used through the polled interface or through EnvPool's (``send`` and ``recv``): the first call decides,
    and the games are started by it. Polled, ``try_reset`` returns first observations at once. With ``episodic_life``
    and in EnvPool's interface a reset is a step of its own, whose row has the first observation.

    Rewards are the game's own, unclipped. ``infos`` has an entry where a life was lost (``life_lost``, ``lives``) and
    where a game ended (``game_over``: not truncated; ``game_return``, ``game_length`` in steps).

    If ale-py itself raises, every slot of the group fails and cannot be restarted.

    Ctrl-C while a call only waits for games in the background changes nothing. Had it broken into one elsewhere, the
    next call opens all games anew, with other seeds, and every slot is new.

    Args:
        game: the ROM's id.
        num_envs: slots.
        settings: see :class:`~rlsample.env.atari_settings.AtariSettings`.
        seeds: int64[num_envs] below 2**31, or None.
        open_vector: makes the vector env of one group; see :func:`~rlsample.env.atari_group.open_vector_env`.
    """

    def __init__(
        self,
        game: str,
        num_envs: int,
        settings: AtariSettings,
        seeds: np.ndarray | None = None,
        open_vector: Callable[..., Any] = open_vector_env,
    ) -> None:
        self.game, self.num_envs, self.settings = game, num_envs, settings
        self.action_meanings = action_meanings(game, settings.full_action_space)
        channels = () if settings.gray_scale else (3,)
        shape = (settings.stack_num, settings.img_height, settings.img_width, *channels)
        self._shape = shape
        self.observation_space = Box(0, 255, shape, np.uint8)
        self.action_space = Discrete(len(self.action_meanings))
        self._sizes = settings.group_sizes(num_envs)
        self.lockstep, self.steps_ahead = self._sizes[0] > 1, len(self._sizes) > 1
        self.batch_size = settings.batch_size or self._sizes[0]
        self._least = settings.batch_size or 1  # a group, whatever its size
        self._seeds, self._open_vector = seeds, open_vector
        self._codec = ActionCodec(self.action_space)
        self._states = SlotStates(num_envs)
        self.all_ids = self._states.all_ids
        self._no = np.zeros(num_envs, bool)
        self._no.flags.writeable = False
        self._lives, self._lengths = np.zeros(num_envs, np.int32), np.zeros(num_envs, np.int32)
        self._returns = np.zeros(num_envs)
        self._ready: collections.deque[StepBatch] = collections.deque()  # rows that are owed, and here
        self._failures: dict[int, EnvFailedError] = {}
        self._fleet: AtariFleet | None = None
        self._polled, self._same_step = True, True
        # _waiting is held by the one thread that waits for rows, _lock while anything changes; taken in this order
        self._waiting, self._lock = threading.Lock(), threading.RLock()

    # ------------------------------------------------------------------ the polled interface

    @whole
    def poll(self, timeout_s: float | None = None) -> StepBatch:
        if self.settings.reward_clip:
            raise ConfigError(
                "reward_clip is for recv; poll gives the game's own rewards. The sampler clips, and keeps the reported "
                "returns raw: clip_rewards=True instead"
            )
        with self._lock:
            self._open(polled=True)
        return self._receive(self._least, None, timeout_s)

    @whole
    def send_actions(self, env_ids: np.ndarray, actions: Tree) -> None:
        with self._lock:
            for group in self._groups:
                if env_ids is group.ids and group.all_wait(self._states.code):
                    self._launch_whole(group, actions)
                    return
            self._require_open()
            ids = self._states.require_waiting(env_ids)
            batch = self._codec.checked_copy(actions, ids)
            self._states.code[ids] = BUSY
            for group in self._groups:
                mine, rows = group.rows_of(ids)
                group.actions[rows] = batch[mine]
            self._launch_complete()

    @whole
    def try_reset(self, env_ids: np.ndarray) -> StepBatch | None:
        with self._waiting:
            try:
                with self._lock:
                    return self._reset(env_ids)
            finally:
                self._free_if_closed()

    @whole
    def try_restart(self, env_ids: np.ndarray) -> None:
        with self._lock:
            self._require_open()
            for slot in self._states.require_failed(env_ids).tolist():
                failure = self._failures[slot]
                raise EnvFailedError(f"{failure} (ale-py cannot replace a game)", slot=slot) from failure

    def close(self) -> None:
        self.closing = True
        self._end_waits()
        if self._waiting.acquire(timeout=_CLOSE_WAIT_S):
            try:
                self._free_if_closed()
            finally:
                self._waiting.release()
        # else a poll has been inside ale-py for that long: it frees the games when it comes out

    def _end_waits(self) -> None:
        fleet = self._fleet
        if fleet is not None:
            fleet.closed = True
            fleet.wake()

    # ------------------------------------------------------------------ starting and sending off

    def _begin_anew(self) -> None:
        self._end_waits()
        with self._waiting, self._lock:
            if self.closing or not self._broke_off:
                return
            log.warning("a call into these games was broken off: all are opened anew")
            self._free_fleet()
            self._states.code[:] = NEW
            self._ready.clear()
            self._failures.clear()
            for column in (self._lives, self._lengths, self._returns):
                column[:] = 0
            if self._seeds is not None:
                self._seeds = next_seeds(self._seeds)
            self._broke_off = False

    def _open(self, polled: bool) -> bool:
        self._require_open()
        if self._fleet is None:
            self._polled, self._same_step = polled, polled and not self.settings.episodic_life
            columns = (self._lives, self._lengths, self._returns)
            opening = AtariOpening(self.game, self.settings, self.all_ids, columns, self._shape, self._open_vector)
            any_games = (
                not polled and not self.settings.recv_ahead and 0 < (self.settings.batch_size or 0) < self.num_envs
            )
            self._fleet = opening.any_games() if any_games else opening.groups(self._same_step)
            for group in self._groups:
                self._states.code[group.members] = RESETTING
                seeds = None if self._seeds is None else self._seeds[group.members]
                self._fleet.begin_reset(group, np.arange(len(group.members)), seeds)
            return True
        if polled != self._polled:
            used, asked = ("poll", "recv") if self._polled else ("recv", "poll")
            raise EnvProtocolError(f"this env is used through {used}, so {asked} cannot be called; make another one")
        return False

    @property
    def _groups(self) -> list[AtariGroup]:
        return [] if self._fleet is None else self._fleet.groups

    def _launch_whole(self, group: AtariGroup, actions: Tree) -> None:
        """The usual case, at a third of the cost: each slot of a group waits and gets an action."""
        self._require_open()
        group.actions[:] = self._codec.checked_copy(actions, group.ids)
        self._states.code[group.at] = BUSY
        self._fleet.launch(group)  # type: ignore[union-attr]

    def _launch_complete(self) -> None:
        """Sends off each group whose slots all have something to do."""
        for group in self._groups:
            codes = self._states.code[group.at].tobytes()
            if not group.flying and not any(state in codes for state in (NEW, WAITING, ENDED, FAILED)):
                self._fleet.launch(group)  # type: ignore[union-attr]

    def _reset(self, env_ids: np.ndarray) -> StepBatch | None:
        self._require_open()
        ids = self._states.require_resettable(env_ids)
        if not len(ids):
            return None
        begun = self._begin_resets(ids)
        if not self._same_step:
            return None
        failures: dict[int, BaseException] = {}
        for group in begun:  # not those whose first reset is still under way: poll gives out their rows
            failures.update(self._finish_reset(group))
        if not failures:
            return self._first_rows(ids)
        asked = {slot: failures.pop(slot) for slot in ids.tolist() if slot in failures}
        if failures:
            self._ready.append(merged([], self._shape)._replace(failures=failures))
        good = self._first_rows(ids[[slot not in asked for slot in ids.tolist()]])
        return good._replace(failures=asked)

    def _begin_resets(self, ids: np.ndarray) -> list[AtariGroup]:
        """Resets of slots in mid-episode begin now, in the groups it returns; those that have ended are reset by
        ale-py, now or in a step."""
        ended = self._states.code[ids] == ENDED
        self._states.code[ids] = RESETTING
        running, begun = ids[~ended], []
        for group in self._groups if len(running) else []:
            rows = group.rows_of(running)[1]
            if len(rows):
                self._fleet.begin_reset(group, rows)  # type: ignore[union-attr]
                begun.append(group)
        if not self._same_step:
            self._launch_complete()
        return begun

    def _finish_reset(self, group: AtariGroup) -> Mapping[int, BaseException]:
        """Same step: puts first observations of slots in mid-episode beside those of slots that ended."""
        self._fleet.wait_for(group)  # type: ignore[union-attr]
        try:
            rows = group.land()
        except Exception as e:
            return self._failed(group, e).failures
        group.books.first_obs[group.reset_rows] = rows.obs[group.reset_rows]
        return {}

    # ------------------------------------------------------------------ receiving

    def _receive(self, least: int, most: int | None, timeout_s: float | None) -> StepBatch:
        """At least ``least`` rows, or all that can come; at most ``most``; fewer when the time is over."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._waiting:
            try:
                batch = merged(self._parts(least, deadline), self._shape)
            finally:
                self._free_if_closed()
            if most is not None and len(batch.env_ids) > most:
                batch, rest = split(batch, most)
                self._ready.appendleft(rest)
            return batch

    def _keep(self, batch: StepBatch) -> None:
        if len(batch.env_ids):
            self._ready.appendleft(batch)

    def _parts(self, least: int, deadline: float | None) -> list[StepBatch]:
        """At least ``least`` rows and failures, or what there is; none is taken before all are here (Ctrl-C)."""
        while sum(map(_count, self._ready)) < least and self._fetch(deadline):
            pass
        parts: list[StepBatch] = []
        while self._ready and sum(map(_count, parts)) < least:
            parts.append(self._ready.popleft())
        return parts

    def _fetch(self, deadline: float | None) -> bool:
        """Waits for the next group and has its rows ready; False: the time is over, or no more can come."""
        with self._lock:
            self._require_open()
            if not self._fleet.any_sent():  # type: ignore[union-attr]
                if self._ready:
                    return False
                raise self._nothing_pending()
        group = self._fleet.next(deadline, self)  # type: ignore[union-attr]
        if group is None:
            return False
        with self._lock:
            was_reset = group.reset_rows is not None
            self._ready.append(self._landed(group))
            if was_reset:  # its other slots may have got their actions meanwhile
                self._launch_complete()
        return True

    def _landed(self, group: AtariGroup) -> StepBatch:
        """The rows of a group that came back."""
        try:
            rows, reset_rows = group.land(), group.reset_rows
            if rows.over is not None and not group.changes:
                self._restart_games(group, rows.obs, rows.over)
        except Exception as e:
            self._require_open()
            return self._failed(group, e)
        self._require_open()
        code = self._states.code
        if reset_rows is not None:
            code[group.ids[reset_rows]] = WAITING
            return self._batch(group, rows, reset_rows)
        code[group.at] = WAITING
        if rows.infos:  # every row that ends an episode has one
            code[group.ids[rows.terminated | rows.truncated]] = ENDED
        if rows.over is None or not group.changes:
            return self._batch(group, rows, None)
        code[group.ids[rows.over]] = RESETTING  # the step that comes is their reset: no row for now
        batch = self._batch(group, rows, np.flatnonzero(~rows.over))
        self._launch_complete()
        return batch

    def _restart_games(self, group: AtariGroup, obs: np.ndarray, over: np.ndarray) -> None:
        """New games where pressing FIRE ended the old one; their first observations go into ``obs``."""
        self._fleet.begin_reset(group, np.flatnonzero(over))  # type: ignore[union-attr]
        self._fleet.wait_for(group)  # type: ignore[union-attr]
        obs[over] = group.land().obs[over]

    def _batch(self, group: AtariGroup, rows: Rows, some: np.ndarray | None) -> StepBatch:
        first = self._no[: len(group.ids)] if rows.is_first is None else rows.is_first
        batch = StepBatch(group.ids, rows.obs, rows.rewards, rows.terminated, rows.truncated, first, rows.infos)
        return batch if some is None or len(some) == len(group.ids) else chosen(batch, some)

    def _first_rows(self, ids: np.ndarray) -> StepBatch:
        """Same step: the first observations of these slots, which all have one."""
        obs = np.empty((len(ids), *self._shape), np.uint8)
        for group in self._groups:
            mine, rows = group.rows_of(ids)
            obs[mine] = group.books.first_obs[rows]
        self._states.code[ids] = WAITING
        no = np.zeros(len(ids), bool)
        return StepBatch(ids, obs, np.zeros(len(ids), np.float32), no, no.copy(), ~no)

    def _failed(self, group: AtariGroup, error: Exception) -> StepBatch:
        failures: dict[int, BaseException] = {}
        for slot in group.members.tolist():
            step = int(self._lengths[slot]) + 1 if group.reset_rows is None else None
            failure = EnvFailedError(f"slot {slot}: ale-py raised {error!r}", slot=slot, episode_step=step)
            failure.__cause__ = error
            failures[slot] = self._failures[slot] = failure
        self._states.code[group.members] = FAILED
        return merged([], self._shape)._replace(failures=failures)

    def _nothing_pending(self) -> EnvProtocolError:
        codes = self._states.code.tobytes()
        if BUSY not in codes and RESETTING not in codes:
            return self._states.nothing_pending()
        return self._groups[0].unanswered(self._states)

    def _require_open(self) -> None:
        if self.closing:
            raise EnvClosedError("the env is closed")
        if self._broke_off:
            raise EnvError("another thread's call into these games was broken off; the next call opens them anew")

    def _free_if_closed(self) -> None:
        """Ends the threads if the env was closed meanwhile; the caller holds ``_waiting``."""
        if self.closing:
            with self._lock:
                self._free_fleet()

    def _free_fleet(self) -> None:
        if self._fleet is not None:
            self._fleet.close(_CLOSE_WAIT_S)
            self._fleet = None


def _count(batch: StepBatch) -> int:
    return len(batch.env_ids) + len(batch.failures)
