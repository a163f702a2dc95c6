"""EnvPool's own envs behind the polled interface."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from abc import ABC
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rlsample.env.base_env import BaseEnv, StepBatch
from rlsample.env.blocking_calls import BlockingCalls
from rlsample.env.env_settings import EnvSettings
from rlsample.env.pool.broken_off import BeginsAnew, whole
from rlsample.env.slot_states import BUSY, ENDED, FAILED, NEW, RESETTING, WAITING, SlotStates
from rlsample.env.spaces import ActionCodec, ObsWriter, nonfinite_rows, zeros_columns
from rlsample.errors import ConfigError, EnvClosedError, EnvError, EnvFailedError, EnvProtocolError
from rlsample.tree import Tree, assign, gather

__all__ = ["ColumnInfos", "EnvPoolAdapter", "EnvPoolLike"]

_log = logging.getLogger("rlsample")
_CLOSE_WAIT_S = 0.4
_NOT_INFO = ("env_id", "players")


class EnvPoolLike(ABC):  # noqa: B024  (it has a shape, not methods)
    """``isinstance(env, EnvPoolLike)``: an object that ``envpool.make`` returned, or one with the same methods."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        names = ("async_reset", "send", "recv", "config", "all_env_ids")
        return cls is EnvPoolLike and all(hasattr(other, name) for name in names)


class ColumnInfos(Mapping[int, dict[str, Any]]):
    """Infos kept as columns; a row's dict is made when somebody asks for it.

    Args:
        columns: name -> array [K, ...].
        num_rows: K.
    """

    def __init__(self, columns: Mapping[str, np.ndarray], num_rows: int) -> None:
        self._columns, self._num_rows = columns, num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < self._num_rows:
            raise KeyError(row)
        return {k: v[row].item() if v[row].ndim == 0 else v[row].copy() for k, v in self._columns.items()}

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._num_rows))

    def __len__(self) -> int:
        return self._num_rows


class EnvPoolAdapter(BeginsAnew, BaseEnv):
    """An object of ``envpool.make_gymnasium``, sync or async.

    Sync (``batch_size == num_envs``): any slots may be stepped; resets are immediate. What was sent goes to EnvPool in
    one call, since of two sends before a recv it loses rows. Async: the ``batch_size`` rows that come first; poll
    raises while fewer than that are under way, since EnvPool would wait for ever.

    Actions are checked: EnvPool reads past its tables for one outside the space. ``terminated`` is also true where the
    time limit and the end of an Atari game coincide. Infos are EnvPool's, without ``env_id`` and ``players``. Seeds are
    those the env was made with.

    After a call that Ctrl-C broke off nobody knows which rows EnvPool still owes, and for others it waits without end:
    every later call but :meth:`close` is an EnvError.

    Args:
        env: stepped and closed by this adapter from now on.
        settings: ``allow_nonfinite`` is obeyed here.
        seed, worker_index: not used: EnvPool takes seeds only when it is made.

    Raises:
        ConfigError: several players.
        SpaceError: a space of no fixed size.
    """

    def __init__(
        self, env: Any, *, settings: EnvSettings | None = None, seed: int | None = None, worker_index: int = 0
    ) -> None:
        config = env.config
        if config.get("max_num_players", 1) > 1:
            raise ConfigError(
                f"EnvPool envs of several players (max_num_players={config['max_num_players']}) are not supported"
            )
        if seed:
            _log.info("EnvPool seeds its envs when they are made: seed=%s has no effect on them", seed)
        self.env = env
        self.num_envs = int(config["num_envs"])
        self.batch_size = int(config["batch_size"]) or self.num_envs
        self.sync = self.batch_size == self.num_envs
        self.steps_ahead = not self.sync
        self.lockstep = self.steps_ahead and self.batch_size > 1
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self._writer, self._codec = ObsWriter(self.observation_space), ActionCodec(self.action_space)
        self._allow_nonfinite = (settings or EnvSettings()).allow_nonfinite
        self._states = SlotStates(self.num_envs)
        self.all_ids = self._states.all_ids
        self._actions = zeros_columns(self.action_space, (self.num_envs,))
        self._lengths = np.zeros(self.num_envs, np.int64)
        self._failures: dict[int, EnvFailedError] = {}
        self._under_way = 0  # rows that EnvPool owes us
        self._outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls = BlockingCalls("envpool", self._outcomes)
        self._in_background = self._freed = False
        # _waiting is held by the one thread that waits for rows, _lock while anything changes; taken in this order
        self._waiting, self._lock = threading.Lock(), threading.RLock()

    # ------------------------------------------------------------------ the polled interface

    @whole
    def poll(self, timeout_s: float | None = None) -> StepBatch:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._turn():
            with self._lock:
                self._require_open()
                self._launch()
            received = self._receive(deadline)
            with self._lock:
                self._require_open()
                return self._empty() if received is None else self._rows(*received)

    @whole
    def send_actions(self, env_ids: np.ndarray, actions: Tree) -> None:
        with self._lock:
            self._require_open()
            ids = self._states.require_waiting(env_ids)
            batch = self._codec.checked_copy(actions, ids)
            if not len(ids):
                return
            if self.sync:
                assign(self._actions, ids, batch)
            else:
                self.env.send(batch, ids.astype(np.int32))
                self._under_way += len(ids)
            self._states.code[ids] = BUSY

    @whole
    def try_reset(self, env_ids: np.ndarray) -> StepBatch | None:
        with self._turn(), self._lock:
            self._require_open()
            ids = self._states.require_resettable(env_ids)
            if not len(ids):
                return None
            if self.sync and self._under_way:
                raise EnvProtocolError("a poll ran out of time, and its rows are still under way; poll again first")
            self._states.code[ids] = RESETTING
            if not self.sync:
                self.env._reset(ids.astype(np.int32))  # what async_reset does for all
                self._under_way += len(ids)
                return None
            obs, info = self.env.reset(env_id=ids.astype(np.int32))
            no = np.zeros(len(ids), bool)
            return self._rows(obs, np.zeros(len(ids), np.float32), no, no.copy(), info)

    @whole
    def try_restart(self, env_ids: np.ndarray) -> None:
        with self._lock:
            self._require_open()
            for slot in self._states.require_failed(env_ids).tolist():
                failure = self._failures[slot]
                raise EnvFailedError(
                    f"{failure} (EnvPool cannot replace an env)", slot=slot, episode_step=failure.episode_step
                ) from failure

    def close(self) -> None:
        self.closing = True
        self._outcomes.put(None)
        if self._waiting.acquire(timeout=_CLOSE_WAIT_S):
            try:
                self._free()
            finally:
                self._waiting.release()
        # else a poll has been inside EnvPool for that long: it closes the env when it comes out

    # ------------------------------------------------------------------ inside

    def _begin_anew(self) -> None:
        self._require_open()
        raise EnvError("a call into EnvPool was broken off, and the rows it still owes are not known: make a new env")

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One thread at a time waits for rows; if the env was closed meanwhile, it cleans up."""
        with self._waiting:
            try:
                yield
            finally:
                if self.closing:
                    self._free()

    def _launch(self) -> None:
        """Starts the first episodes, or sends what waits to be sent; EnvPool owes rows then.

        Raises:
            EnvProtocolError: it would owe too few.
        """
        code = self._states.code
        if NEW in code.tobytes():
            self.env.async_reset()
            code.fill(RESETTING)
            self._under_way = self.num_envs
        elif self.sync and not self._under_way:
            busy = np.flatnonzero(code == BUSY)
            if len(busy) == self.num_envs:
                busy = self.all_ids
            if len(busy):
                self.env.send(gather(self._actions, busy), busy.astype(np.int32))
                self._under_way = len(busy)
        if not self._under_way:
            raise self._states.nothing_pending()
        if not self.sync and self._under_way < self.batch_size:
            raise EnvProtocolError(
                f"EnvPool hands out {self.batch_size} rows at a time, and {self._under_way} are under way: "
                f"{self._states.describe()}"
            )

    def _receive(self, deadline: float | None) -> Any:
        """What ``recv`` returned; None: the time is over."""
        if deadline is None and not self._in_background:
            return self.env.recv()
        if not self._in_background:
            self._in_background = True
            self._calls.begin(0, self.env.recv)
        while True:
            try:
                wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                outcome = self._outcomes.get(timeout=wait_s)
            except queue.Empty:
                return None
            self._require_open()
            self._in_background = False
            if outcome.error is not None:
                raise outcome.error
            return outcome.value

    def _rows(self, obs: Any, rewards: Any, terminated: Any, truncated: Any, info: Mapping[str, Any]) -> StepBatch:
        """The batch of a recv; moves its slots on."""
        ids = np.asarray(info["env_id"]).astype(np.int64)
        count = len(ids)
        if count == self.num_envs and (ids == self.all_ids).all():
            ids = self.all_ids
        self._under_way = max(0, self._under_way - count)
        code = self._states.code
        first = code[ids] == RESETTING
        rewards, terminated, truncated = (
            np.array(rewards, np.float32),
            np.array(terminated, bool),
            np.array(truncated, bool),
        )
        if "terminated" in info:  # Atari: the game is over, which EnvPool's own flag leaves out at the time limit
            terminated |= truncated & np.asarray(info["terminated"], bool)
        rewards[first], terminated[first], truncated[first] = 0, False, False
        self._lengths[ids] += 1
        self._lengths[ids[first]] = 0
        code[ids] = np.where(terminated | truncated, ENDED, WAITING)
        infos = ColumnInfos({k: v for k, v in info.items() if k not in _NOT_INFO and hasattr(v, "shape")}, count)
        batch = StepBatch(
            ids, self._writer.copy_batch(obs, count, copy=False), rewards, terminated, truncated, first, infos
        )
        return batch if self._allow_nonfinite else self._without_nonfinite(batch)

    def _without_nonfinite(self, batch: StepBatch) -> StepBatch:
        failures: dict[int, BaseException] = {}
        what = "mend the env, or set allow_nonfinite=True"
        for name, column in (("observation", batch.obs), ("reward", batch.rewards)):
            for row, path, value in nonfinite_rows(column):
                slot = int(batch.env_ids[row])
                step = None if batch.is_first[row] else int(self._lengths[slot])
                at = f"slot {slot}" + ("" if step is None else f", episode step {step}")
                where = f" at {path}" if path else ""
                failure = EnvFailedError(f"{at}: {name}{where} holds {value}; {what}", slot=slot, episode_step=step)
                failures.setdefault(slot, failure)
        if not failures:
            return batch
        self._failures.update(failures)  # type: ignore[arg-type]
        self._states.code[list(failures)] = FAILED
        good = np.flatnonzero(self._states.code[batch.env_ids] != FAILED)
        infos = {new: batch.infos[old] for new, old in enumerate(good.tolist())}
        ids, obs, rewards, terminated, truncated, first = (gather(column, good) for column in batch[:6])
        return StepBatch(ids, obs, rewards, terminated, truncated, first, infos, failures)

    def _empty(self) -> StepBatch:
        no = np.zeros(0, bool)
        obs = zeros_columns(self.observation_space, (0,))
        return StepBatch(self.all_ids[:0], obs, np.zeros(0, np.float32), no, no.copy(), no.copy())

    def _require_open(self) -> None:
        if self.closing:
            raise EnvClosedError("the env is closed")

    def _free(self) -> None:
        """Ends the thread and closes the env; the caller holds ``_waiting``."""
        with self._lock:
            freed, self._freed = self._freed, True
        if not freed:
            self._calls.end()
            if self._calls.join(_CLOSE_WAIT_S):  # else a call that hangs still uses the env
                self.env.close()
