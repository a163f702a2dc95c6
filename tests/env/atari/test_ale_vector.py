"""ale-py's own vector env given as input, on a stand-in of its modes and on real games."""

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from rlsample.env import as_base_env
from rlsample.env.ale_vector import AleVectorAdapter
from rlsample.env.atari import AtariEnv
from rlsample.env.gym_envs import GymEnvs
from rlsample.errors import ConfigError, EnvFailedError
from rlsample.testing import check_base_env


def ale(num_envs=2, mode=AutoresetMode.NEXT_STEP, **options):
    from ale_py.vector_env import AtariVectorEnv

    options = {"max_num_frames_per_episode": 32, "reward_clipping": False, **options}
    return AtariVectorEnv("breakout", num_envs, autoreset_mode=mode, **options)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_conformance(mode):
    told = check_base_env(lambda seed: as_base_env(ale(mode=mode), seed=seed), rounds=25)
    assert {rule: said for rule, said in told.items() if said != "ok"} == {
        3: "without a reference, only copies of the next first one are noticed",
        8: "no make_faulty was given",
    }


def test_each_keeps_its_mode_whatever_the_shared_metadata_says():
    """Same step: first observations at once; next step: with the next row. Final observations are alike."""
    finals, firsts = [], []
    one, two = ale(mode=AutoresetMode.SAME_STEP), ale(mode=AutoresetMode.NEXT_STEP)
    assert one.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP  # the trap
    for vector in (one, two):
        with as_base_env(vector, seed=0) as env:
            assert isinstance(env, AleVectorAdapter)
            batch = env.poll()
            for _ in range(8):
                env.send_actions(env.all_ids, np.array([2, 3]))
                batch = env.poll()
            assert batch.truncated.tolist() == [True, True]
            finals.append(batch.obs.tobytes())
            first = env.try_reset(env.all_ids)
            assert (first is None) == (vector is two)
            first = env.poll() if first is None else first
            assert first.is_first.all()
            firsts.append(first.obs.tobytes())
    assert finals[0] == finals[1]
    assert firsts[0] == firsts[1]


def test_a_reset_in_mid_episode():
    with as_base_env(ale(), seed=0) as env:
        batch = env.poll()
        for _ in range(3):
            env.send_actions(env.all_ids, np.array([2, 3]))
            batch = env.poll()
        first = env.try_reset(np.array([1]))
        assert first.is_first.tolist() == [True]
        assert first.obs[0].tobytes() != batch.obs[1].tobytes()
        for _ in range(5):
            env.send_actions(env.all_ids, np.array([2, 3]))
            batch = env.poll()
        assert batch.truncated.tolist() == [True, False]


def test_slots_have_seeds_of_their_own():
    with as_base_env(ale(3), seed=0) as one, as_base_env(ale(3), seed=0) as two, as_base_env(ale(3), seed=1) as other:
        a, b, c = (env.poll().obs for env in (one, two, other))
    assert a.tobytes() == b.tobytes()
    assert a.tobytes() != c.tobytes()


def test_a_batch_size_is_for_make_atari():
    with pytest.raises(ConfigError, match=r"use make_atari\(\.\.\., num_envs=2, batch_size=1\)"):
        as_base_env(ale(batch_size=1))


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_ends_that_do_not_reset_are_refused(mode):
    """life_loss_info: terminated, but the game goes on, and final_obs is whatever was in memory."""
    vector = ale(1, mode, life_loss_info=True, max_num_frames_per_episode=100_000, use_fire_reset=False)
    with as_base_env(vector, seed=0) as env:
        batch = env.poll()
        for k in range(200):
            if not (batch.terminated[0] and env.try_reset(env.all_ids) is None):
                env.send_actions(env.all_ids, np.array([k % 2]))
            batch = env.poll()
            if batch.failures:
                break
        assert isinstance(batch.failures[0], EnvFailedError)
        assert "life_loss_info=True" in str(batch.failures[0])


def test_in_wrappers():
    from gymnasium.wrappers.vector import RecordEpisodeStatistics

    with as_base_env(RecordEpisodeStatistics(ale(mode=AutoresetMode.SAME_STEP)), seed=0) as env:
        assert isinstance(env, AleVectorAdapter)
        env.poll()
        for _ in range(8):
            env.send_actions(env.all_ids, np.array([2, 3]))
            batch = env.poll()
        assert batch.infos[0]["episode"]["l"] == 8


def test_atari_ids():
    """A plain ALE id is Gymnasium's env; "atari:" and a finished env are the C++ one."""
    with as_base_env("ALE/Pong-v5", 1) as env:
        assert isinstance(env, GymEnvs)
        assert env.observation_space.shape == (210, 160, 3)
    config = {"groups": 2, "max_episode_steps": 9}
    with as_base_env("atari:Pong-v5", 2, seed=3, worker_index=1, env_config=config) as env:
        assert isinstance(env, AtariEnv)
        assert (env.num_envs, env.settings.groups, env.settings.max_episode_steps) == (2, 2, 9)
        assert as_base_env(env) is env
        assert as_base_env(env, 2) is env
        from rlsample.env.atari import make_atari

        with make_atari("Pong-v5", 2, seed=3, worker_index=1) as other:
            assert other._seeds.tolist() == env._seeds.tolist()
    with pytest.raises(ConfigError, match="'frame_skp'; did you mean 'frame_skip'"):
        as_base_env("atari:Pong-v5", env_config={"frame_skp": 3})
    for options in ({"backend": "process"}, {"vectorize": "loop"}):
        with pytest.raises(ConfigError, match="atari:Pong-v5 runs on C\\+\\+ threads of its own"):
            as_base_env("atari:Pong-v5", **options)


def test_native_ale_ids_use_the_adapter():
    gymnasium.register_envs(__import__("ale_py"))
    with as_base_env("ALE/Pong-v5", 1, vectorize="native") as env:
        assert isinstance(env, AleVectorAdapter)
