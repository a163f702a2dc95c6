"""The block sampler, which keeps its books once per block, against the plain one, which keeps them in every turn."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsample.env.gymnasium_vector import GymnasiumVectorAdapter
from rlsample.errors import EnvFailedError
from rlsample.evaluation.callbacks import Callbacks
from rlsample.evaluation.lockstep_sampler import LockstepSampler
from rlsample.evaluation.sampler import Sampler
from rlsample.evaluation.sampler_settings import SamplerSettings
from rlsample.policy.policy import ActOutput
from rlsample.sample_batch import SampleBatch
from rlsample.testing.scripted_policy import ScriptedPolicy
from tests.evaluation.script_env import ScriptEnv

Box, Discrete = gymnasium.spaces.Box, gymnasium.spaces.Discrete


class ByObs(ScriptedPolicy):
    """Its answers depend on the observation alone, so that it matters not how many it was asked for at once."""

    def act(self, obs: Any, explore: bool = True) -> ActOutput:
        number = obs[:, 0] * 4
        return ActOutput(
            number.astype(np.int64) % 3, {"action_logp": -number.astype(np.float32), "values": obs[:, 0] / 2}
        )


class Stateful(GymnasiumVectorAdapter):
    """Pretends to save itself: it stands where the sampler's state was taken, and is put back there."""

    def get_state(self) -> bytes:
        return b"here"

    def set_state(self, state: bytes) -> None:
        assert state == b"here"


class Told(Callbacks):
    """Everything that the episode callbacks were told."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    def on_episode_start(self, episode: Any) -> None:
        self.log.append(("start", episode.env_id, episode.eps_id))

    def on_episode_step(self, episode: Any) -> None:
        seen = (float(episode.last_obs[0]), int(episode.last_action), episode.last_reward)
        self.log.append(("step", episode.env_id, episode.eps_id, episode.length, episode.episode_return, *seen))

    def on_episode_end(self, episode: Any) -> None:
        self.log.append(("end", episode.env_id, episode.eps_id, episode.length, episode.episode_return))


def make(
    kind: type[Sampler],
    scripts: list[Any],
    mode: AutoresetMode,
    callbacks: Any = None,
    fails_at: Any = None,
    **opts: Any,
) -> Sampler:
    fails = fails_at or [None] * len(scripts)
    envs = [functools.partial(ScriptEnv, i, s, f) for i, (s, f) in enumerate(zip(scripts, fails, strict=True))]
    env = Stateful(SyncVectorEnv(envs, autoreset_mode=mode), seed=0)
    return kind(env, ByObs(*SPACES), SamplerSettings(**opts), 2, callbacks)


SPACES = ScriptEnv.observation_space, ScriptEnv.action_space


def assert_same(got: SampleBatch, expected: SampleBatch) -> None:
    assert set(got) == set(expected)
    for name in [*expected, "next_obs"]:
        assert got[name].dtype == expected[name].dtype, name
        assert got[name].tolist() == expected[name].tolist(), name
    assert got.fragment_lengths.tolist() == expected.fragment_lengths.tolist()


def books(sampler: Sampler) -> dict[str, Any]:
    """The state of the running episodes as lists, and who waits."""
    state = sampler.get_state()
    running = {name: np.asarray(value).tolist() for name, value in state["episodes"].items()}
    return {**running, "waiting": state["waiting_ids"].tolist(), "fragment": state["next_fragment_id"]}


episodes = st.lists(st.tuples(st.integers(1, 7), st.sampled_from(["term", "trunc", "both"])), min_size=1, max_size=4)
MODES = list(AutoresetMode)


@settings(max_examples=150, deadline=None)
@given(
    scripts=st.lists(episodes, min_size=1, max_size=4),
    mode=st.sampled_from(MODES),
    length=st.integers(1, 9),
    horizon=st.sampled_from([None, None, 1, 3, 5]),
    soft=st.booleans(),
    clip=st.sampled_from([False, 15.0]),
    no_done=st.booleans(),
    told=st.booleans(),
    saved_after=st.integers(0, 4),
)
def test_block_books_are_those_of_the_plain_sampler(
    scripts, mode, length, horizon, soft, clip, no_done, told, saved_after
):
    options = {
        "rollout_fragment_length": length,
        "horizon": horizon,
        "soft_horizon": soft and horizon is not None,
        "clip_rewards": clip,
        "no_done_at_end": no_done,
    }
    logs = [Told(), Told()] if told else [None, None]
    plain = make(Sampler, scripts, mode, logs[0], **options)
    block = make(LockstepSampler, scripts, mode, logs[1], **options)
    with plain.env, block.env:
        for call in range(5):
            assert_same(block.sample(), plain.sample())
            assert books(block) == books(plain)
            if call == saved_after:
                block.set_state(block.get_state())
            if call != 2:  # once, the metrics of two calls are asked for together
                assert block.episodes.drain() == plain.episodes.drain()
    if told:
        assert logs[1].log == logs[0].log
        assert {entry[0] for entry in logs[0].log} >= {"start", "step"}


def test_episodes_that_end_in_every_poll_have_their_numbers_in_order():
    scripts = [[(1, "term")], [(2, "trunc")], [(3, "both")]]
    sampler = make(LockstepSampler, scripts, AutoresetMode.NEXT_STEP, rollout_fragment_length=4)
    with sampler.env:
        batch = sampler.sample()  # five polls: the third slot has its fourth row in the fifth
    # slot 0: row, hole, row, hole, row; slot 1: two rows, hole, two rows; slot 2: three rows, hole, row
    first = 2 << 40
    assert batch.fragment_lengths.tolist() == [3, 4, 4]
    assert (batch["eps_id"] - first).tolist() == [0, 3, 5, 1, 1, 4, 4, 2, 2, 2, 6]
    assert batch["t"].tolist() == [0, 0, 0, 0, 1, 0, 1, 0, 1, 2, 0]
    told = [(e.env_id, e.eps_id - first, e.length) for e in sampler.episodes.drain()]
    assert told == [(0, 0, 1), (1, 1, 2), (0, 3, 1), (2, 2, 3), (0, 5, 1), (1, 4, 2)]
    assert batch["next_obs"][:, 0].tolist() == [1, 1001, 2001, 1.25, 2.25, 1001.25, 1002.25, 1.5, 2.5, 3.5, 1001.5]


@pytest.mark.parametrize("mode", MODES)
def test_a_failure_within_a_block_keeps_the_metrics_of_episodes_that_had_ended(mode):
    told = []
    for kind in (Sampler, LockstepSampler):
        sampler = make(kind, [[(2, "term")], [(9, "term")]], mode, fails_at=[None, 7], rollout_fragment_length=50)
        with sampler.env, pytest.raises(EnvFailedError, match="slot 1"):
            sampler.sample()
        told.append((sampler.episodes.drain(), sampler.rows_lost))
    assert told[1] == told[0]
    assert [e.length for e in told[0][0]] == [2, 2] if mode is AutoresetMode.NEXT_STEP else [2, 2, 2]


def test_an_action_outside_the_space_steps_nothing_and_the_block_goes_on():
    plain = make(Sampler, [[(3, "term")]] * 2, AutoresetMode.NEXT_STEP, rollout_fragment_length=6)
    block = make(LockstepSampler, [[(3, "term")]] * 2, AutoresetMode.NEXT_STEP, rollout_fragment_length=6)
    turn, calls = block.env.turn, []

    def wrong_once(actions, reset=False):
        calls.append(len(calls))
        return turn(actions + 7 if len(calls) == 3 else actions, reset)

    block.env.turn = wrong_once
    with plain.env, block.env:
        with pytest.raises(Exception, match="outside the space"):
            block.sample()
        assert_same(block.sample(), plain.sample())
        assert block.episodes.drain() == plain.episodes.drain()
