"""Drives a BaseEnv for tests: resets at ends and cuts, and keeps every row."""

import threading
import time

import numpy as np
import pytest

from rlsample.errors import EnvClosedError
from rlsample.tree import gather, map_tree


class Rollout:
    """Per slot, lists of what happened: obs, next_obs, rewards, terminated, truncated, t; and firsts, infos."""

    def __init__(self, env, num_rows, choose=None, horizon=None):
        self.env, self.choose, self.horizon = env, choose, horizon
        self.rows = {slot: [] for slot in range(env.num_envs)}
        self.firsts = {slot: [] for slot in range(env.num_envs)}
        self.infos = {slot: [] for slot in range(env.num_envs)}
        self.batches = []
        self.last = {}
        self._take(env.poll())
        while any(len(rows) < num_rows for rows in self.rows.values()):
            waiting = np.array(sorted(self.last))
            if len(waiting):
                action = {slot: self._act(slot) for slot in waiting.tolist()}
                actions = [action[slot] for slot in waiting.tolist()]
                env.send_actions(waiting, _stack(actions))
                self.sent = dict(zip(waiting.tolist(), actions, strict=True))
            self._take(env.poll())

    def _act(self, slot):
        return np.int64(0) if self.choose is None else self.choose(slot, len(self.rows[slot]))

    def _take(self, batch):
        assert not batch.failures, batch.failures
        self.batches.append((batch, map_tree(np.copy, batch[:6])))
        over = []
        for row, slot in enumerate(batch.env_ids.tolist()):
            obs = map_tree(np.copy, gather(batch.obs, row))
            if batch.infos.get(row):
                self.infos[slot].append((len(self.rows[slot]), batch.infos[row]))
            if batch.is_first[row]:
                assert batch.rewards[row] == 0
                self.firsts[slot].append(obs)
                self.last[slot] = (obs, 0)
                continue
            before, t = self.last.pop(slot)
            ended = bool(batch.terminated[row] | batch.truncated[row])
            cut = self.horizon is not None and t + 1 == self.horizon and not ended
            reward, term, trunc = float(batch.rewards[row]), bool(batch.terminated[row]), bool(batch.truncated[row])
            self.rows[slot].append((before, obs, reward, term, trunc or cut, t, self.sent[slot]))
            if ended or cut:
                over.append(slot)
            else:
                self.last[slot] = (obs, t + 1)
        if over:
            first = self.env.try_reset(np.array(over))
            if first is not None:
                assert first.is_first.all()
                assert first.env_ids.tolist() == over
                self._take(first)

    def column(self, slot, name, count=None):
        at = ("obs", "next_obs", "rewards", "terminated", "truncated", "t", "actions").index(name)
        values = [row[at] for row in self.rows[slot]][:count]
        return [v.item() if isinstance(v, np.ndarray) and v.size == 1 else v for v in values]

    def unchanged(self):
        """Whether every batch still holds what it held when it arrived (rule 6)."""
        same = []
        for batch, was in self.batches:
            for now, then in zip(batch[:6], was, strict=True):
                map_tree(lambda a, b: same.append(np.array_equal(a, b)), now, then)
        return bool(same) and all(same)


def _stack(actions):
    if isinstance(actions[0], dict):
        return {k: _stack([a[k] for a in actions]) for k in actions[0]}
    if isinstance(actions[0], tuple):
        return tuple(_stack([a[i] for a in actions]) for i in range(len(actions[0])))
    return np.stack(actions)


class PollInThread:
    """``env.poll(**options)`` in a thread of its own, which close() is to end.

    Attributes:
        ended_at: when EnvClosedError came out, on the monotonic clock; None before.
    """

    def __init__(self, env, **options):
        self._env, self._options, self.ended_at = env, options, None
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()

    def _poll(self):
        try:
            self._env.poll(**self._options)
        except EnvClosedError:
            self.ended_at = time.monotonic()

    def ended(self, limit_s=10.0):
        """Whether it ends with EnvClosedError within the limit."""
        self._thread.join(limit_s)
        return not self._thread.is_alive() and self.ended_at is not None


@pytest.fixture
def poll_in_thread():
    """The class PollInThread."""
    return PollInThread


@pytest.fixture
def rollout():
    """The class Rollout: ``rollout(env, num_rows)`` samples at least so many rows of each slot."""
    return Rollout
