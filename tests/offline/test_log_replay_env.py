"""Logs played through a ServingEnv: the rows that come out are those that went in."""

from __future__ import annotations

import functools

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlsample.errors import SamplerError, SpaceError
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.offline import EpisodeAssembler, LogReader, LogReplayEnv, LogWriter
from rlsample.policy import DQNPolicy, DQNSettings, ModelSettings, RandomPolicy
from rlsample.sample_batch import NextObs, SampleBatch
from rlsample.testing.same_batch import assert_same_batch

SAME = ["obs", "actions", "rewards", "terminated", "truncated", "next_obs", "action_logp", "t"]
SPACES = spaces.Box(-1000, 1000, (1,), np.float32), spaces.Discrete(5)


class Maze(gymnasium.Env):
    """Dict observations, Tuple actions; values tell step and episode. Episodes of 1 to 5 steps, ends alternate."""

    observation_space = spaces.Dict(
        {"map": spaces.Box(0, 255, (2, 3), np.uint8), "at": spaces.Box(-1e6, 1e6, (), np.float32)}
    )
    action_space = spaces.Tuple([spaces.Discrete(3, start=1), spaces.Box(-1, 1, (2,), np.float32)])

    def __init__(self):
        self.episode = 0

    def _seen(self):
        value = 10 * self.episode + self.t
        return {"map": np.full((2, 3), value % 256, np.uint8), "at": np.float32(value)}

    def reset(self, *, seed=None, options=None):
        self.episode, self.t = self.episode + 1, 0
        return self._seen(), {}

    def step(self, action):
        self.t += 1
        over = self.t >= 1 + self.episode % 5
        return self._seen(), self.t / 3, over and self.episode % 2 == 0, over and self.episode % 2 == 1, {}


def record(folder, env, num_samples=6, **options) -> list[SampleBatch]:
    with CommonPolicyEvaluator(env, RandomPolicy, seed=1, clip_actions=False, **options) as evaluator:
        batches = [evaluator.sample() for _ in range(num_samples)]
    with LogWriter(folder) as writer:
        for batch in batches:
            writer.write(batch)
    return batches


def sampled(env, **options) -> list[SampleBatch]:
    """All batches until the logs have ended."""
    found = []
    with CommonPolicyEvaluator(env, RandomPolicy, seed=9, **options) as evaluator, pytest.raises(SamplerError) as error:
        found.extend(iter(evaluator.sample, None))
    assert "run() returned" in str(error.value)
    return found


def episodes(batches) -> list[SampleBatch]:
    assembler = EpisodeAssembler()
    return [episode for batch in batches for episode in assembler.add(batch)] + assembler.rest()


def ordered(batches) -> list[SampleBatch]:
    return sorted(
        episodes(batches), key=lambda e: (e["obs"]["at"] if isinstance(e["obs"], dict) else e["obs"])[0].tolist()
    )


@pytest.mark.parametrize("batch_mode", ["truncate_episodes", "complete_episodes"])
def test_replayed_rows_equal_the_logged_rows(tmp_path, batch_mode):
    """Three slots of a maze, cut into fragments of 7 rows; Box actions inside their bounds."""

    class Tame(Maze):
        action_space = spaces.Tuple([spaces.Discrete(3, start=1), spaces.Box(-np.inf, np.inf, (2,), np.float32)])

    logged = record(tmp_path, lambda ctx: Tame(), num_envs=1, rollout_fragment_length=7, batch_mode=batch_mode)
    env = LogReplayEnv(str(tmp_path), Tame.observation_space, Tame.action_space, num_lanes=3)
    replayed = sampled(env, rollout_fragment_length=7, batch_mode=batch_mode)
    assert sum(batch.count for batch in replayed) == sum(batch.count for batch in logged)
    expected, got = ordered(logged), ordered(replayed)
    assert len(got) == len(expected) > 5
    for one, other in zip(got, expected, strict=True):
        whole = bool(other["terminated"][-1] or other["truncated"][-1])
        if not whole:  # the log stops in it: replayed, it ends there
            other["truncated"] = other["truncated"].copy()
            other["truncated"][-1] = True
        assert_same_batch(one, other, SAME)
    assert not env.is_alive()


def test_cartpole_with_many_lanes(tmp_path):
    logged = record(tmp_path, "CartPole-v1", num_envs=4, rollout_fragment_length=25, batch_mode="complete_episodes")
    env = gymnasium.make("CartPole-v1")
    replay = LogReplayEnv(tmp_path, env.observation_space, env.action_space)
    env.close()
    replayed = sampled(replay, rollout_fragment_length=25)
    expected, got = ordered(logged), ordered(replayed)
    assert len(got) == len(expected) > 10
    for one, other in zip(got, expected, strict=True):
        assert_same_batch(one, other, SAME)


def plain(eps_id: int, start: int, obs, ends: str = "", **more) -> SampleBatch:
    count = len(obs) - 1
    last = np.arange(count) == count - 1
    index = np.arange(1, count + 1)
    index[-1] = -1
    seen = np.array(obs, np.float32)[:, None]
    columns = {
        "obs": seen[:-1],
        "actions": np.arange(count) % 5,
        "rewards": np.arange(count, dtype=np.float32) + 0.1,
        "terminated": last & ("term" in ends),
        "truncated": last & ("trunc" in ends),
        "eps_id": np.full(count, eps_id),
        "t": np.arange(start, start + count),
    }
    return SampleBatch({**columns, **more}, NextObs(index, seen[-1:]))


def test_pieces_come_together_and_what_is_cut_ends_there():
    logs = [
        plain(1, 0, [1, 2, 3]),
        plain(2, 4, [50, 51], "term"),  # its beginning is not in the logs
        plain(1, 2, [3, 4, 5], "term"),
        plain(3, 0, [70, 71]),  # its end is not
    ]
    got = ordered(sampled(LogReplayEnv(logs, *SPACES, num_lanes=2), rollout_fragment_length=3))
    assert [e["obs"][:, 0].tolist() for e in got] == [[1, 2, 3, 4], [50], [70]]
    assert [e["next_obs"][-1].tolist() for e in got] == [[5], [51], [71]]
    assert [(bool(e["terminated"][-1]), bool(e["truncated"][-1])) for e in got] == [
        (True, False),
        (True, False),
        (False, True),
    ]
    assert [e["t"].tolist() for e in got] == [[0, 1, 2, 3], [0], [0]]
    assert len({int(e["eps_id"][0]) for e in got}) == 3
    assert all(np.isnan(e["action_logp"]).all() for e in got), "the logs have none"


def test_logged_probabilities_stay_and_unknown_ones_are_nan():
    logp = np.array([-0.25, np.nan, -3.5], np.float32)
    (got,) = episodes(sampled(LogReplayEnv([plain(1, 0, [1, 2, 3, 4], "term", action_logp=logp)], *SPACES)))
    assert got["action_logp"].tobytes() == logp.tobytes()


def test_logs_repeat_as_often_as_their_reader_does(tmp_path):
    with LogWriter(tmp_path) as writer:
        writer.write(plain(1, 0, [1, 2, 3], "term"))
    reader = LogReader(tmp_path, repeat=4)
    batches = sampled(LogReplayEnv(reader, *SPACES, num_lanes=1), rollout_fragment_length=4)
    assert [row for batch in batches for row in batch["obs"][:, 0].tolist()] == [1, 2] * 4
    assert [batch.count for batch in batches] == [4, 4]


def test_what_is_not_whole_is_played_in_each_pass(tmp_path):
    """Kept for the end, it would fill the memory of an env whose logs repeat without end."""
    with LogWriter(tmp_path) as writer:
        writer.write(plain(1, 0, [1, 2, 3]))
        writer.write(plain(2, 0, [7, 8], "term"))
    reader = LogReader(tmp_path, repeat=3)
    batches = sampled(LogReplayEnv(reader, *SPACES, num_lanes=1), rollout_fragment_length=3)
    assert [batch["obs"][:, 0].tolist() for batch in batches] == [[7, 1, 2]] * 3
    assert [batch["truncated"].tolist() for batch in batches] == [[False, False, True]] * 3


def test_a_policy_learns_from_replay_and_closing_ends_it(tmp_path):
    """Endless logs: the thread waits for the learner, drops nothing, and ends when the evaluator is closed."""
    logged = record(tmp_path, "CartPole-v1", num_envs=2, rollout_fragment_length=50)
    env = gymnasium.make("CartPole-v1")
    replay = LogReplayEnv(LogReader(tmp_path, repeat=None), env.observation_space, env.action_space)
    env.close()
    small = functools.partial(DQNPolicy, settings=DQNSettings(model=ModelSettings(hidden=(8,))))
    with CommonPolicyEvaluator(replay, small, rollout_fragment_length=50, seed=0) as evaluator:
        for _ in range(8):
            batch = evaluator.sample()
            assert np.isfinite(evaluator.compute_apply(batch)["loss"])
        assert "sampler/rows_dropped" not in evaluator.get_timers()
    replay.join(10)
    assert not replay.is_alive()
    assert sum(batch.count for batch in logged) == 600


def test_a_row_outside_the_space_reaches_the_caller_by_its_value():
    odd = plain(1, 0, [1, 2, 3], "term")
    odd["actions"] = np.array([0, 7])
    env = LogReplayEnv([odd], *SPACES)
    with (
        CommonPolicyEvaluator(env, RandomPolicy, rollout_fragment_length=2) as evaluator,
        pytest.raises(SamplerError) as error,
    ):
        list(iter(evaluator.sample, None))
    causes, one = [], error.value
    while one is not None:
        causes.append(one)
        one = one.__cause__
    assert isinstance(causes[-1], SpaceError)
    assert "7" in str(causes[-1])
    assert "Discrete(5)" in str(causes[-1])
