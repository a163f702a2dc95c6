"""AsyncVectorEnv: any Python env, many of them, on worker processes."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np

from rlsample.env.base_env import EnvContext, StepBatch
from rlsample.env.env_settings import EnvSettings
from rlsample.env.pool.broken_off import BeginsAnew, whole
from rlsample.env.pool.env_plan import EnvPlan
from rlsample.env.pool.envpool_surface import EnvPoolSurface
from rlsample.env.pool.placement import in_groups
from rlsample.env.pool.pool_settings import PoolSettings
from rlsample.env.pool.row_reader import reorder
from rlsample.env.pool.shared_block import NEED, RESET, STEP
from rlsample.env.pool.slot_requests import Lives, SlotRequests
from rlsample.env.pool.wakeups import fence
from rlsample.env.pool.worker_death import Death
from rlsample.env.pool.worker_team import WorkerTeam
from rlsample.env.slot_states import NEW, SlotStates
from rlsample.env.spaces import ActionCodec
from rlsample.errors import ConfigError, EnvClosedError, EnvError, EnvFailedError
from rlsample.tree import Tree

__all__ = ["AsyncVectorEnv"]

log = logging.getLogger(__name__)

_WATCH_EVERY_S = 0.25
_NOBODY: list[int] = []


class AsyncVectorEnv(EnvPoolSurface, BeginsAnew):
    """``num_envs`` gymnasium envs on worker processes, behind the polled interface and EnvPool's.

        with AsyncVectorEnv(lambda ctx: MyEnv(), 16, pool={"batch_size": 8}) as env:
            batch = env.poll()                               # the 8 slots or more that came first
            env.send_actions(batch.env_ids, actions)

    Ordered (the default): poll waits for every slot that owes a row and gives them in order, bit for bit as the inline
    loop does. First come, first served (``batch_size`` below ``num_envs``, or ``ordered=False``): poll waits for
    ``batch_size`` rows, or all that are owed if these are fewer, and gives whatever is there by then.

    Each worker holds a stretch of the slots. Observations, actions, rewards and flags are in memory that all share; a
    pipe carries infos (only those that are not empty) and errors. An env whose episode ended is reset ahead, so that
    try_reset need not ask its worker. Ordered, try_reset returns the first observations; else they come with a poll.

    A failure of a slot, be it an exception, a dead process or one that hung, takes the place of the row it owes. A
    worker's death fails each of its slots: those that owe a row now, the others when they are asked for one.

    Ctrl-C while a call only waits changes nothing. Had it broken into one elsewhere, the next call replaces all workers
    and every slot is new: poll and the EnvPool form's reset bring first observations, of other episodes than before.

    Args:
        make: builds the env of one slot; called in the worker, once per slot and incarnation.
        num_envs: slots.
        settings: ``env_config``, ``allow_nonfinite``, ``max_restarts`` and ``restart_backoff_s`` are obeyed here.
        pool: see :class:`~rlsample.env.pool.pool_settings.PoolSettings`; a mapping of its fields will do.
        seed, worker_index: as in :class:`~rlsample.env.gym_envs.GymEnvs`: the slots' trajectories are the same.

    Attributes:
        ordered: whether polls are.
        batch_size: rows that a poll waits for.

    Raises:
        ConfigError: options that cannot work together; a factory that cannot be sent; a fork that would not be safe.
        EnvFailedError: a constructor raised, or a worker died or took too long. Nothing is left running.
        SpaceError: a space without fixed size, or slots that differ in their spaces.
    """

    def __init__(
        self,
        make: Callable[[EnvContext], gymnasium.Env[Any, Any]],
        num_envs: int,
        *,
        settings: EnvSettings | None = None,
        pool: PoolSettings | Mapping[str, Any] | None = None,
        seed: int | None = None,
        worker_index: int = 0,
    ) -> None:
        self._torn_down, self._owner = False, os.getpid()
        # a signal handler may close the pool in the thread that polls it, hence the R
        self._lock, self._polling = threading.RLock(), threading.RLock()
        settings = settings or EnvSettings()
        if num_envs < 1:
            raise ConfigError(f"num_envs must be at least 1, got {num_envs!r}")
        self.num_envs = num_envs
        self.pool = pool = PoolSettings.of(pool or {})
        self.ordered = pool.is_ordered(num_envs)
        self.batch_size = num_envs if self.ordered else pool.batch_size or 1
        self.steps_ahead = not self.ordered or pool.groups > 1
        self._states = SlotStates(num_envs)
        self.all_ids = self._states.all_ids
        self._turn, self._next_watch = 0, 0.0
        self._spin_s = pool.spin_for(num_envs) * 1e-6
        config = (settings.env_config, settings.allow_nonfinite, tuple(pool.info_keys))
        self._lives = Lives([0] * num_envs, [0] * num_envs)
        self._settings, self._plan = settings, EnvPlan(make, num_envs, seed, worker_index, *config)
        try:
            self._begin()
            self._codec = ActionCodec(self.action_space, any_size=True)
        except BaseException:
            self.close()
            raise
        self._groups = in_groups(self._team.slots, pool.groups) if pool.groups > 1 else []

    def _begin(self) -> None:
        self._team = WorkerTeam(self._plan, self.pool)
        self.observation_space, self.action_space = self._team.start()
        self._requests = SlotRequests(self._team, self._states, self._settings, self._lives, self.pool.reset_ahead)

    def _begin_anew(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed
            self._team.ring_pool()  # a thread that waits gives up
        with self._polling, self._lock:
            if self.closing or not self._broke_off:
                return
            log.warning("a call into the pool was broken off: its workers are replaced, and every slot is new")
            self._states.code[:] = NEW
            self._lives.incarnation[:] = [number + 1 for number in self._lives.incarnation]
            self._plan = dataclasses.replace(self._plan, incarnations=tuple(self._lives.incarnation))
            self._end(self.pool.close_timeout_s)
            self._begin()
            self._turn, self._broke_off = 0, False

    def _end(self, wait_s: float) -> None:
        self.__dict__.pop("_requests", None)  # it looks into the shared memory
        self._team.close(wait_s)

    @property
    def num_workers(self) -> int:
        """Worker processes."""
        return len(self._team.slots)

    @property
    def worker_pids(self) -> list[int]:
        """Their process ids; a worker that died keeps its last one until it is replaced."""
        return list(self._team.pids)

    # ------------------------------------------------------------------ the polled interface

    @whole
    def poll(self, timeout_s: float | None = None) -> StepBatch:
        if timeout_s is None and self.ordered and not self._groups:
            batch = self._receive_everyone()
            if batch is not None:
                return batch
        return self._receive(self.batch_size, None, timeout_s)

    @whole
    def send_actions(self, env_ids: np.ndarray, actions: Tree) -> None:
        with self._lock:
            self._require_open()
            ids = self._states.require_waiting(env_ids)
            self._requests.ask(ids, STEP, self._codec.checked_copy(actions, ids))

    @whole
    def try_reset(self, env_ids: np.ndarray) -> StepBatch | None:
        with self._lock:
            self._require_open()
            ids = self._states.require_resettable(env_ids)
            if not len(ids):
                return None
            if self.ordered and (first := self._requests.first_ones(ids)) is not None:
                return first
            self._requests.begin_resets(ids)
        return self._wait_for(ids) if self.ordered else None

    @whole
    def begin_resets(self, env_ids: np.ndarray) -> None:
        """As :meth:`try_reset`, but the first observations come with a later poll in the ordered mode too."""
        with self._lock:
            self._require_open()
            self._requests.begin_resets(self._states.require_resettable(env_ids))

    @whole
    def try_restart(self, env_ids: np.ndarray) -> None:
        with self._lock:
            self._require_open()
            self._requests.restart(self._states.require_failed(env_ids).tolist())

    def close(self) -> None:
        self.closing = True
        if self._torn_down or not hasattr(self, "_team") or os.getpid() != self._owner:
            return  # a child that was forked off has only a copy of this object
        with contextlib.suppress(OSError, ValueError):  # another thread may be faster
            self._team.ring_pool()
        with self._polling, self._lock:
            self._end(self.pool.close_timeout_s)
            self._torn_down = True

    def __del__(self) -> None:
        self.close()

    # ------------------------------------------------------------------ receiving

    def _receive_everyone(self) -> StepBatch | None:
        """The usual ordered poll, in few instructions: every slot owes a step; None if that is not so (any more)."""
        with self._polling:
            try:
                while True:
                    with self._lock:
                        self._require_open()
                        requests, now = self._requests, time.monotonic()
                        if now >= self._next_watch:
                            self._watch()
                        if not requests.everyone_steps():
                            return None
                        if requests.all_published():
                            return requests.take_everyone()
                    self._sleep(self.num_envs, 0, None)
            except Exception:
                self._raise_if_torn_down()
                raise

    def _receive(self, least: int, most: int | None, timeout_s: float | None, raises_final: bool = False) -> StepBatch:
        """At least ``least`` rows (or all that are owed), at most ``most``; fewer when the time is over.

        With ``raises_final`` failures that no restart mends are raised, and the rows stay to be taken.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._polling:
            try:
                while True:
                    with self._lock:
                        requests = self._look_around()
                        if not requests.owed:
                            self._start_or_refuse()
                        unpublished, group = requests.num_unpublished(), self._group_in_turn()
                        enough = requests.enough_for(group) if group else self._enough(least)
                        over = deadline is not None and time.monotonic() >= deadline
                        there = enough == 0 if group else requests.num_published() >= enough
                        if there or (over and not self.ordered):
                            if raises_final:
                                requests.raise_final_failures()
                            return self._take(group, most)
                        if over:
                            return requests.empty()
                    self._sleep(enough, unpublished, deadline)
            except Exception:
                self._raise_if_torn_down()
                raise

    def _wait_for(self, ids: np.ndarray) -> StepBatch:
        """The rows of exactly these slots, in this order."""
        slots = ids.tolist()
        with self._polling:
            try:
                while True:
                    with self._lock:
                        requests = self._look_around()
                        unpublished, enough = requests.num_unpublished(), requests.enough_for(slots)
                        if enough == 0:
                            batch = requests.take(slots)
                            order = {slot: k for k, slot in enumerate(slots)}
                            return reorder(batch, np.argsort([order[slot] for slot in batch.env_ids.tolist()]))
                    self._sleep(enough, unpublished, None)
            except Exception:
                self._raise_if_torn_down()
                raise

    def _raise_if_torn_down(self) -> None:
        """Whatever a pool stumbles over that was closed meanwhile is an EnvClosedError."""
        if self._torn_down:
            raise EnvClosedError("the env was closed while it was polled") from None

    def _look_around(self) -> SlotRequests:
        """Notices closing, dead and hung workers, and restarts that are due."""
        self._require_open()
        requests = self._requests
        if time.monotonic() >= self._next_watch:
            self._watch()
        if requests.delayed:
            requests.begin_due_restarts()
        return requests

    def _start_or_refuse(self) -> None:
        """Asks for the first observations, if nothing was asked yet; else there is nothing to wait for."""
        new = np.flatnonzero(self._states.code == NEW)
        if len(new):
            self._requests.ask(self.all_ids if len(new) == self.num_envs else new, RESET)
        elif not self._requests.delayed:
            raise self._states.nothing_pending()

    def _enough(self, least: int) -> int:
        """How many published rows there must be before some can be given out."""
        requests = self._requests
        if not requests.owed:
            return self.num_envs + 1  # there are only restarts that are not due yet
        return min(least, requests.owed) - requests.num_unpublished()

    def _group_in_turn(self) -> list[int]:
        """What the next group that owes something owes; empty without groups, or if nothing is owed."""
        requests = self._requests
        if not self._groups or not requests.owed:
            return []
        while not (owing := requests.owing(self._groups[self._turn])):
            self._turn = (self._turn + 1) % len(self._groups)
        return owing

    def _take(self, group: list[int], most: int | None) -> StepBatch:
        if not group:
            return self._requests.take_some(most)
        self._turn = (self._turn + 1) % len(self._groups)
        return self._requests.take(group)

    # ------------------------------------------------------------------ waiting and watching

    def _sleep(self, enough: int, unpublished: int, deadline: float | None) -> None:
        """Until ``enough`` rows are published, something happens to a worker, or it is time to look around.

        Not at all if there is more by now than the ``unpublished`` results that ``enough`` was reckoned with.
        """
        team, requests = self._team, self._requests
        now = time.monotonic()
        until = min([now + _WATCH_EVERY_S, *requests.delayed.values()]) if requests.delayed else now + _WATCH_EVERY_S
        if deadline is not None:
            until = min(until, deadline)
        if self._spin_s:
            while time.monotonic() < now + self._spin_s:
                if requests.num_published() >= enough:
                    return
        common, heard = team.common, _NOBODY
        common[NEED] = enough if enough > 0 else 1
        fence()
        if requests.num_published() < enough and requests.num_unpublished() == unpublished and not self.closing:
            self.idle_in = threading.get_ident()
            heard = team.waiter.wait(until - now)
            self.idle_in = None
        common[NEED] = 0
        if heard:
            with self._lock:
                for w in heard:
                    self._hear(w)

    def _hear(self, w: int) -> None:
        """Takes what a worker's pipe has: a message, or its end."""
        team = self._team
        if team.has_message(w):
            team.listen(w)
        elif team.is_up(w) and team.is_dead(w):
            self._requests.worker_died(team.bury(w))

    def _watch(self) -> None:
        """Looks for workers that died or hung: a pool that never sleeps would not hear of them."""
        now = time.monotonic()
        self._next_watch = now + _WATCH_EVERY_S
        for w in self._team.waiter.wait(0.0):
            self._hear(w)
        for w in self._team.hung(now):
            self._requests.worker_died(self._team.bury_hung(w))

    def _require_open(self) -> None:
        if self.closing:
            raise EnvClosedError("the env is closed")
        if self._broke_off:
            raise EnvError("another thread's call into this pool was broken off; the next call replaces its workers")

    # ------------------------------------------------------------------ the envs themselves

    @whole
    def call(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """``env.<name>(*args, **kwargs)`` of every env, or its attribute of that name, by slot; wrappers are searched.

        Raises:
            EnvFailedError: an env raised, or its worker is dead.
            EnvClosedError: the env is closed, or was closed meanwhile.
        """
        with self._lock:
            self._require_open()
            workers = range(self.num_workers)
            return [value for w in workers for value in self._ask(w, "call", name, args, kwargs)]

    @whole
    def set_attr(self, name: str, values: list[Any]) -> None:
        """Sets an attribute of every env; ``values`` has one per slot."""
        with self._lock:
            self._require_open()
            for w, slots in enumerate(self._team.slots):
                self._ask(w, "set_attr", name, [values[slot] for slot in slots])

    @whole
    def reset_with(
        self, env_ids: np.ndarray, seeds: list[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> StepBatch:
        """Resets slots that are new, wait for an action or have ended, now, with seeds and options for the envs.

        Returns:
            The first observations, in the order asked; a reset that raised, or whose worker died, is in ``failures``.
        """
        with self._lock:
            self._require_open()
            ids = self._states.require_startable(env_ids)
            slots = ids.tolist()
            for w, mine in enumerate(self._team.slots):
                at = [k for k, slot in enumerate(slots) if slot in mine]
                if not at or not self._team.is_up(w):
                    continue
                rows = [slots[k] - mine.start for k in at]
                try:
                    self._ask(w, "reset", rows, None if seeds is None else [seeds[k] for k in at], options)
                except EnvFailedError:
                    if self._team.is_up(w):
                        raise
            failures = self._requests.fail_lost(ids)
            living = np.array([slot for slot in slots if slot not in failures], np.int64)
            batch = self._requests.reread(living)
            return batch._replace(failures={**batch.failures, **failures}) if failures else batch

    def _ask(self, w: int, *message: Any) -> Any:
        """What a worker answers; an EnvFailedError, and its slots have failed, if it is dead."""
        try:
            answer = self._team.ask(w, self, *message)
        except Exception:
            self._raise_if_torn_down()
            raise
        if isinstance(answer, Death):
            self._requests.worker_died(answer)
            raise answer.failure(max(answer.slot, self._team.slots[w].start), None)
        return answer
