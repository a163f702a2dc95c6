"""EnvPool's interface as version 1.2.5 behaves, on games that count: a stand-in for where envpool is not installed.

Checked against the real one by the tests that use both.
"""

from __future__ import annotations

import threading
import warnings

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete


class FakeEnvPool:
    """Slot s counts to its limit and ends, terminated (even slots) or truncated (odd ones).

    Observation k float32[2] is (slot, step), the reward 10 * slot + step. Async: rows come in an order of its own.
    """

    _limits = (4, 3, 5, 6, 7)
    spec = None

    def __init__(self, num_envs, batch_size=None, *, seed=0, dict_obs=False, atari=False, config=None):
        batch_size = batch_size or num_envs
        self._config = {
            "num_envs": num_envs, "batch_size": batch_size, "num_threads": 0, "max_num_players": 1, "seed": seed,
            "gym_reset_return_info": True, **(config or {}),
        }  # fmt: skip
        self.dict_obs, self.atari = dict_obs, atari
        box = Box(-1e6, 1e6, (2,), np.float32)
        self.observation_space = Dict({"at": box, "on": Discrete(3)}) if dict_obs else box
        self.action_space = Discrete(3)
        self._all_env_ids = np.arange(num_envs, dtype=np.int32)
        self.step_of, self.done = np.zeros(num_envs, np.int32), np.ones(num_envs, bool)
        self.trunc = np.zeros(num_envs, bool)
        self.sends, self.resets, self.closes = [], [], 0
        self.nan_at = None
        self._rng = np.random.default_rng(seed)
        self._rows = []  # owed: (slot, reset, action)
        self._gate = threading.Event()
        self._gate.set()

    config = property(lambda self: dict(self._config))
    num_envs = property(lambda self: self._config["num_envs"])
    all_env_ids = property(lambda self: self._all_env_ids)
    is_async = property(lambda self: self._config["num_envs"] != self._config["batch_size"])

    def seed(self, seed=None):
        warnings.warn("The `seed` function in envpool is abandoned.", stacklevel=2)

    def async_reset(self):
        self._reset(self.all_env_ids)

    def _reset(self, env_id):
        assert env_id.dtype == np.int32
        self.resets.append(env_id.tolist())
        self._add([(int(s), True, None) for s in env_id])

    def send(self, action, env_id=None):
        env_id = self.all_env_ids if env_id is None else env_id.astype(np.int32)
        action = action.astype(np.int32)
        assert len(action) == len(env_id)
        assert ((action >= 0) & (action < 3)).all(), "EnvPool would read past its table"
        self.sends.append(dict(zip(env_id.tolist(), action.tolist(), strict=True)))
        self._add([(int(s), bool(self.done[s]), int(a)) for s, a in zip(env_id, action, strict=True)])

    def _add(self, rows):
        if not self.is_async and self._rows:  # the second batch is written over the first
            self._rows[: len(rows)] = rows
            return
        self._rows += rows

    def recv(self, reset=False, return_info=True):
        assert self._gate.wait(30), "nobody opened the gate"
        count = self._config["batch_size"] if self.is_async else len(self._rows)
        assert 0 < count <= len(self._rows), "EnvPool would wait for ever"
        chosen = self._rng.permutation(len(self._rows))[:count] if self.is_async else np.arange(count)
        rows = [self._rows[k] for k in chosen]
        self._rows = [row for k, row in enumerate(self._rows) if k not in chosen]
        obs, rewards = np.zeros((count, 2), np.float32), np.zeros(count, np.float32)
        for k, (slot, begins, _) in enumerate(rows):
            self.step_of[slot] = 0 if begins else self.step_of[slot] + 1
            limit = self._limits[slot % len(self._limits)]
            self.done[slot] = self.step_of[slot] == limit
            self.trunc[slot] = self.done[slot] and slot % 2 == 1
            obs[k] = slot, self.step_of[slot]
            rewards[k] = 0 if begins else 10 * slot + self.step_of[slot]
            if self.nan_at == (slot, int(self.step_of[slot])):
                obs[k, 1] = np.nan
        ids = np.array([slot for slot, _, _ in rows], np.int32)
        info = {"env_id": ids, "players": {"env_id": ids.copy()}, "elapsed_step": self.step_of[ids]}
        if self.atari:
            info["terminated"] = self.done[ids].astype(np.int32)
        done, trunc = self.done[ids], self.trunc[ids]
        whole = {"at": obs, "on": self.step_of[ids] % 3} if self.dict_obs else obs
        return (whole, info) if reset else (whole, rewards, done & ~trunc, trunc, info)

    def step(self, action, env_id=None):
        self.send(action, env_id)
        return self.recv()

    def reset(self, env_id=None):
        self._reset(self.all_env_ids if env_id is None else env_id)
        return self.recv(reset=True)

    def close(self):
        self.closes += 1
