"""A stand-in for ale-py's vector env whose games follow a script, and games on it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pytest

from rlsample.env.atari import AtariEnv
from rlsample.env.atari_settings import AtariSettings


@dataclass(frozen=True)
class Plan:
    """One game: at which of its steps a life is lost, and at which it is over. Step k gives (-1)^k k points."""

    lives: int = 3
    lost_at: tuple[int, ...] = ()
    over_at: int | None = None


class ScriptedVector:
    """Steps and resets like AtariVectorEnv (both modes); observations [1, 1, 4] are slot, game, step, last action."""

    def __init__(self, size, settings, same_step, plan, first_slot=0):
        self.size, self.settings, self.same_step, self.plan = size, settings, same_step, plan
        self.slots = np.arange(first_slot, first_slot + size)
        self.game, self.steps = np.full(size, -1), np.zeros(size, np.int64)
        self.lives = np.zeros(size, np.int32)
        self.over, self.truncated = np.zeros(size, bool), np.zeros(size, bool)
        self.last_action, self.points = np.zeros(size, np.int64), np.zeros(size, np.int32)
        self.seeds, self.actions, self.resets = [], [], []
        self.gate = threading.Event()  # recv waits for it
        self.gate.set()
        self.error = None
        self.sent = None

    def reset(self, *, seed=None, options=None):
        mask = np.ones(self.size, bool) if options is None else options["reset_mask"]
        self.seeds.append(None if seed is None else list(seed))
        self.resets.append(np.flatnonzero(mask).tolist())
        for k in np.flatnonzero(mask):
            self._begin(k)
        return self._obs(), self._info()

    def _begin(self, k):
        self.game[k] += 1
        self.steps[k] = self.last_action[k] = self.points[k] = 0
        self.over[k] = self.truncated[k] = False
        self.lives[k] = self.plan(int(self.slots[k]), int(self.game[k])).lives

    def send(self, actions):
        assert self.sent is None, "two batches in flight"
        assert actions.shape == (self.size,)
        assert ((actions >= 0) & (actions < 4)).all(), "ale-py would hang now"
        self.sent = actions.copy()
        self.actions.append(actions.tolist())

    def recv(self):
        assert self.gate.wait(30), "nobody opened the gate"
        if self.error is not None:
            raise self.error
        actions, self.sent = self.sent, None
        final = np.full((self.size, 1, 1, 4), 255, np.uint8)  # rows of running games are no observation
        flags = np.zeros((2, self.size), bool)
        for k in range(self.size):
            if self.over[k] or self.truncated[k]:
                self._begin(k)
                continue
            self._step(k, int(actions[k]))
            flags[:, k] = self.over[k], self.truncated[k]
        info, points = self._info(), self.points.copy()
        if self.same_step and flags.any():
            ended = flags.any(0)
            final[ended] = self._obs()[ended]
            for k in np.flatnonzero(ended):
                self._begin(k)
            info = {**self._info(), "final_obs": final}
        return self._obs(), points, flags[0], flags[1], info

    def _step(self, k, action):
        plan = self.plan(int(self.slots[k]), int(self.game[k]))
        self.steps[k] += 1
        step = int(self.steps[k])
        self.points[k], self.last_action[k] = (-1) ** step * step, action
        self.lives[k] -= step in plan.lost_at
        self.over[k] = step == plan.over_at
        if self.over[k]:
            self.lives[k] = 0
        self.truncated[k] = step >= self.settings.max_episode_steps and not self.over[k]

    def _obs(self):
        return np.stack([self.slots, self.game, self.steps, self.last_action], 1).astype(np.uint8)[:, None, None]

    def _info(self):
        return {"env_id": np.arange(self.size, dtype=np.int32), "lives": self.lives.copy()}


class ScriptedAnyGames(ScriptedVector):
    """Steps like AtariVectorEnv with a batch_size, next step mode: first in, first out, but for slots in ``late``."""

    def __init__(self, size, settings, same_step, plan, batch_size):
        super().__init__(size, settings, same_step, plan)
        self.batch_size, self.work, self.late, self.last = batch_size, [], set(), []

    def reset(self, *, seed=None, options=None):
        assert options is None, "ale-py resets all or none in this mode"
        self.seeds.append(None if seed is None else list(seed))
        self.over[:] = True  # the next step of each begins a game
        self.work = [(k, 0) for k in range(self.size)]
        obs, _, _, _, info = self.recv()
        return obs, info

    def send(self, actions):
        assert self.last, "ale-py would step the games of the batch before once more"
        assert actions.shape == (self.batch_size,)
        assert ((actions >= 0) & (actions < 4)).all(), "ale-py would hang now"
        self.work += zip(self.last, actions.tolist(), strict=True)
        self.actions.append(actions.tolist())
        self.last = []

    def recv(self):
        assert self.gate.wait(30), "nobody opened the gate"
        if self.error is not None:
            raise self.error
        assert not self.last, "ale-py could take no actions for these any more"
        now = [item for item in self.work if item[0] not in self.late][: self.batch_size]
        assert len(now) == self.batch_size, "ale-py would wait for ever"
        flags = np.zeros((2, self.size), bool)
        for item in now:
            self.work.remove(item)
            k, action = item
            if self.over[k] or self.truncated[k]:
                self._begin(k)
                continue
            self._step(k, action)
            flags[:, k] = self.over[k], self.truncated[k]
        self.last = ids = [k for k, _ in now]
        info = {"env_id": np.array(ids, np.int32), "lives": self.lives[ids]}
        return self._obs()[ids], self.points[ids], flags[0, ids], flags[1, ids], info


class Scripted:
    """Makes envs on scripted games; ``vectors`` has the stand-ins of the last one, by group."""

    def __init__(self):
        self.vectors = []

    def __call__(self, num_envs, plan, *, seeds=None, **options):
        self.vectors = []

        def open_vector(game, size, settings, *, same_step, num_threads, first_core, batch_size=0):
            first = sum(v.size for v in self.vectors)
            vector = (
                ScriptedAnyGames(size, settings, same_step, plan, batch_size)
                if batch_size
                else ScriptedVector(size, settings, same_step, plan, first)
            )
            vector.opened = {"same_step": same_step, "num_threads": num_threads, "first_core": first_core}
            vector.opened["batch_size"] = batch_size
            self.vectors.append(vector)
            return vector

        settings = AtariSettings.of({"stack_num": 1, "img_height": 1, "img_width": 4, **options})
        return AtariEnv("breakout", num_envs, settings, seeds, open_vector)


@pytest.fixture
def scripted():
    """``scripted(num_envs, plan, **options)``: an AtariEnv on scripted games; ``plan(slot, game) -> Plan``."""
    return Scripted()


@pytest.fixture
def plan_of():
    """The class Plan."""
    return Plan
