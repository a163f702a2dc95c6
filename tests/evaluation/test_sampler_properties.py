"""The sampler against a naive loop, on random scripts; and envs whose resets and rows arrive out of step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsample.env.base_env import BaseEnv, StepBatch
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.testing.scripted_policy import ScriptedPolicy
from tests.evaluation.script_env import ScriptEnv


def naive(slot: int, episodes: list[tuple[int, str]], num_rows: int, horizon: int | None, actions: Any):
    """One slot's rows, one by one: (obs, action, reward, terminated, truncated, next_obs, t, episode number)."""
    env = ScriptEnv(slot, episodes)
    obs, _ = env.reset()
    rows, t, episode = [], 0, 0
    for n in range(num_rows):
        action = actions(n)
        nxt, reward, terminated, truncated, _ = env.step(action)
        truncated = truncated or (horizon is not None and t + 1 == horizon and not terminated)
        rows.append((obs[0], action, np.float32(reward), terminated, truncated, nxt[0], t, episode))
        t += 1
        obs = nxt
        if terminated or truncated:
            obs, _ = env.reset()
            t, episode = 0, episode + 1
    return rows


class SlowStart(BaseEnv):
    """Wraps script envs; every reset's observation and, by a script of bits, every step's row arrives polls later."""

    def __init__(self, envs: list[ScriptEnv], delays: list[int], steps_ahead: bool = False):
        self.num_envs, self._envs, self._delays = len(envs), envs, delays
        self.observation_space, self.action_space = ScriptEnv.observation_space, ScriptEnv.action_space
        self.steps_ahead = steps_ahead
        self._pending: dict[int, list[Any]] = {i: [0, "reset", None] for i in range(len(envs))}
        self._waiting: set[int] = set()
        self._polls = 0

    def poll(self, timeout_s: float | None = None) -> StepBatch:
        assert self._pending, "nothing pending"
        while True:
            self._polls += 1
            due = [i for i, p in self._pending.items() if p[0] <= 0]
            for p in self._pending.values():
                p[0] -= 1
            if due:
                break
        rows = []
        for i in sorted(due):
            _, kind, action = self._pending.pop(i)
            if kind == "reset":
                rows.append((i, self._envs[i].reset()[0], 0.0, False, False, True))
            else:
                rows.append((i, *self._envs[i].step(action)[:4], False))
            if not (rows[-1][3] or rows[-1][4]):
                self._waiting.add(i)
        ids, obs, rewards, terminated, truncated, first = zip(*rows, strict=True)
        return StepBatch(
            np.array(ids), np.stack(obs), np.array(rewards, np.float32), *map(np.array, (terminated, truncated, first))
        )

    def _delay(self) -> int:
        self._delays.append(self._delays.pop(0))
        return self._delays[-1]

    def send_actions(self, env_ids, actions) -> None:
        for i, a in zip(env_ids.tolist(), actions.tolist(), strict=True):
            assert i in self._waiting, f"slot {i} takes no action"
            self._waiting.remove(i)
            self._pending[i] = [self._delay(), "step", a]

    def try_reset(self, env_ids) -> None:
        for i in env_ids.tolist():
            self._waiting.discard(i)
            self._pending[i] = [self._delay(), "reset", None]

    def try_restart(self, env_ids) -> None:
        raise NotImplementedError

    def close(self) -> None:
        return


episodes = st.lists(st.tuples(st.integers(1, 6), st.sampled_from(["term", "trunc", "both"])), min_size=1, max_size=4)


def check_rows(batches: list[Any], scripts: list[Any], horizon: int | None) -> None:
    """Each slot's rows, over all batches in order, are the naive loop's, and its ids are consistent."""
    for slot, script in enumerate(scripts):
        got = []
        for batch in batches:
            at = np.flatnonzero(batch["env_id"] == slot)
            columns = [batch[c][at].reshape(len(at)) for c in ("obs", "actions", "rewards", "terminated", "truncated")]
            columns += [batch["next_obs"][at].reshape(len(at)), batch["t"][at], batch["eps_id"][at]]
            got += list(zip(*[c.tolist() for c in columns], strict=True))
        want = naive(slot, script, len(got), horizon, lambda n: 1)
        assert [row[:7] for row in got] == [row[:7] for row in want]
        names: dict[int, int] = {}
        assert all(names.setdefault(w[7], g[7]) == g[7] for g, w in zip(got, want, strict=True))
        assert len(set(names.values())) == len(names)


@settings(max_examples=60, deadline=None)
@given(
    scripts=st.lists(episodes, min_size=1, max_size=4),
    length=st.integers(1, 9),
    horizon=st.none() | st.integers(1, 5),
)
def test_inline_rows_are_the_naive_loops(scripts, length, horizon):
    make = lambda ctx: ScriptEnv(ctx.slot_index, scripts[ctx.slot_index])  # noqa: E731
    policy = lambda o, a, seed: ScriptedPolicy(o, a, actions=[1])  # noqa: E731
    with CommonPolicyEvaluator(make, policy, len(scripts), rollout_fragment_length=length, horizon=horizon) as ev:
        batches = [ev.sample() for _ in range(3)]
        assert [b.count for b in batches] == [length * len(scripts)] * 3
        assert batches[2].fragment_lengths.tolist() == [length] * len(scripts)
        check_rows(batches, scripts, horizon)
        metrics = ev.get_metrics()
    ended = sum(int((b["terminated"] | b["truncated"]).sum()) for b in batches)
    assert len(metrics) == ended


@settings(max_examples=60, deadline=None)
@given(
    scripts=st.lists(episodes, min_size=1, max_size=4),
    length=st.integers(1, 7),
    delays=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    steps_ahead=st.booleans(),
    whole=st.booleans(),
)
def test_rows_that_come_out_of_step_are_the_naive_loops(scripts, length, delays, steps_ahead, whole):
    env = SlowStart([ScriptEnv(i, s) for i, s in enumerate(scripts)], list(delays), steps_ahead)
    policy = lambda o, a, seed: ScriptedPolicy(o, a, actions=[1])  # noqa: E731
    mode = "complete_episodes" if whole else "truncate_episodes"
    with CommonPolicyEvaluator(env, policy, len(scripts), rollout_fragment_length=length, batch_mode=mode) as ev:
        batches = [ev.sample() for _ in range(3)]
    target = length * len(scripts)
    for batch in batches:
        assert batch.count >= target if whole else batch.count == target
        assert int(batch.fragment_lengths.sum()) == batch.count
    # a lane's fragments of one batch are in order, and so are the batches
    check_rows(batches, scripts, None)


def test_case_6_twenty_five_slots_whose_resets_come_later():
    scripts = [[(2, "term")]] * 25
    env = SlowStart([ScriptEnv(i, s) for i, s in enumerate(scripts)], [1, 0, 2, 0, 3])
    with CommonPolicyEvaluator(env, ScriptedPolicy, 25, rollout_fragment_length=6) as ev:
        batch = ev.sample()
        metrics = ev.get_metrics()
    firsts = batch["obs"][batch["t"] == 0] % 1000
    assert firsts.reshape(-1).tolist() == [slot / 4 for slot in range(25) for _ in range(3)]
    for slot in range(25):
        mine = [m for m in metrics if m.env_id == slot]
        assert [m.length for m in mine] == [2, 2, 2]
        assert [m.episode_return for m in mine] == [30 + 2 * slot] * 3


@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
def test_batches_share_no_memory_with_the_sampler(batch_mode):
    make = lambda ctx: ScriptEnv(0, [(3, "term")])  # noqa: E731
    with CommonPolicyEvaluator(make, ScriptedPolicy, 2, rollout_fragment_length=4, batch_mode=batch_mode) as ev:
        first = ev.sample()
        kept = {name: np.copy(first[name]) for name in [*first.keys(), "next_obs"]}
        ev.sample()
    for name, column in kept.items():
        np.testing.assert_array_equal(first[name], column)
