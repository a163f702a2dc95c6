"""Real games: the rules of a polled env, the same games as ale-py and Gymnasium play, ends and lives."""

import gymnasium
import numpy as np
import pytest

from rlsample.env.atari import make_atari
from rlsample.env.atari_group import open_vector_env
from rlsample.env.atari_settings import AtariSettings
from rlsample.env.base_env import slot_seed
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.policy.random_policy import RandomPolicy
from rlsample.testing import check_base_env

SHORT = 12  # steps per game


class OneGame(gymnasium.Env):
    """A game on ale-py's vector env in its other autoreset mode, reset by hand."""

    def __init__(self, game, **options):
        settings = AtariSettings(**options)
        self.vector = open_vector_env(game, 1, settings, same_step=False, num_threads=1, first_core=-1)
        self.observation_space = self.vector.single_observation_space
        self.action_space = self.vector.single_action_space

    def reset(self, *, seed=None, options=None):
        obs, _ = self.vector.reset(seed=None if seed is None else np.array([seed & 0x7FFFFFFF]))
        return obs[0], {}

    def step(self, action):
        obs, rewards, terminated, truncated, info = self.vector.step(np.array([action]))
        return obs[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), {"lives": int(info["lives"][0])}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


ANSWERED = [1, 2, 3, 6, 9, 10]  # by ale-py; what is refused before it is asked, the scripted games show


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        ({}, ANSWERED),
        *[slow(options, None) for options in ({}, {"groups": 2}, {"batch_size": 1}, {"episodic_life": True})],
    ],
)
def test_conformance(options, rules):
    """The same suite runs on scripted games, with larger groups; here it is ale-py that answers. Opening games takes
    a tenth of a second each, and each rule opens its own."""
    options = {"max_episode_steps": SHORT, **options}
    alone = len(options) == 1
    told = check_base_env(
        lambda seed: make_atari("Breakout-v5", 2, seed=seed, **options),
        rules,
        rounds=2 * SHORT,
        reference=(lambda slot: OneGame("breakout", **options)) if alone else None,
        make_other=lambda seed: make_atari("Breakout-v5", 2, seed=seed, num_threads=1, **options),
    )
    assert {rule: said for rule, said in told.items() if said != "ok"} == {
        **({} if alone else {3: "without a reference, only copies of the next first one are noticed"}),
        **({8: "no make_faulty was given"} if rules is None else {}),
    }


def play(env, num_rows, choose):
    """Per slot, every row: observation, reward, terminated, truncated, is_first."""
    rows = {slot: [] for slot in range(env.num_envs)}

    def take(batch):
        for k, slot in enumerate(batch.env_ids.tolist()):
            flags = [bool(c[k]) for c in (batch.terminated, batch.truncated, batch.is_first)]
            rows[slot].append((batch.obs[k].tobytes(), float(batch.rewards[k]), *flags))

    batch = env.poll()
    while any(len(r) < num_rows for r in rows.values()):
        take(batch)
        over = batch.terminated | batch.truncated
        waiting = batch.env_ids[~over]
        if over.any():
            first = env.try_reset(batch.env_ids[over])
            take(first)
            waiting = np.concatenate([waiting, first.env_ids])
        actions = [choose(slot, len(rows[slot])) for slot in waiting.tolist()]
        env.send_actions(waiting, np.array(actions))
        batch = env.poll()
    return {slot: r[:num_rows] for slot, r in rows.items()}


def random_action(slot, k):
    return int(np.random.default_rng([7, slot, k]).integers(4))


def test_every_way_of_stepping_plays_the_same_games():
    """One group, two in turn, first come: the same rows, bit for bit; and those of ale-py alone, ends included."""
    games = {}
    for name, options in (("all", {}), ("turns", {"groups": 2}), ("first", {"batch_size": 1})):
        with make_atari("Breakout-v5", 2, seed=3, max_episode_steps=25, **options) as env:
            games[name] = play(env, 80, random_action)
    for name in ("turns", "first"):
        wrong = [(slot, k) for slot in range(2) for k in range(80) if games[name][slot][k] != games["all"][slot][k]]
        assert not wrong, f"{name}: rows {wrong[:5]} differ"
    for slot in range(2):
        alone = OneGame("breakout", max_episode_steps=25)
        obs, _ = alone.reset(seed=slot_seed(3, 0, slot))
        want, k = [(obs.tobytes(), 0.0, False, False, True)], 1
        while len(want) < 80:
            obs, reward, terminated, truncated, _ = alone.step(random_action(slot, k))
            want.append((obs.tobytes(), reward, terminated, truncated, False))
            k += 1
            if terminated or truncated:
                want.append((alone.reset()[0].tobytes(), 0.0, False, False, True))
                k += 1
        wrong = [k for k in range(80) if games["all"][slot][k] != want[k]]
        assert not wrong, f"slot {slot}: rows {wrong[:5]} are not ale-py's"
        assert sum(row[3] for row in want) == 3  # it was truncated at its 25th step, three times


def test_other_seeds_and_workers_are_other_games():
    firsts = []
    for seed, worker in ((0, 0), (1, 0), (0, 1)):
        with make_atari("Breakout-v5", 2, seed=seed, worker_index=worker) as env:
            firsts += [row.tobytes() for row in env.poll().obs]
    assert len(set(firsts)) >= 4  # of 6; two games that begin with as many no-ops are alike


def test_gymnasiums_preprocessing_gives_the_same_observations():
    """AtariPreprocessing and FrameStackObservation, where the settings coincide: no no-ops, no FIRE, zero padding."""
    pytest.importorskip("cv2", reason="gymnasium's AtariPreprocessing needs opencv-python")
    import ale_py
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    gymnasium.register_envs(ale_py)
    theirs = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    theirs = FrameStackObservation(AtariPreprocessing(theirs, noop_max=0), 4, padding_type="zero")
    rng = np.random.default_rng(0)
    with make_atari("Pong-v5", noop_max=0, use_fire_reset=False) as ours:
        batch = ours.poll()
        np.testing.assert_array_equal(batch.obs[0], np.asarray(theirs.reset(seed=0)[0]))
        for _ in range(1000):
            action = rng.integers(6, size=1)
            ours.send_actions(batch.env_ids, action)
            batch = ours.poll()
            obs, reward, terminated, truncated, _ = theirs.step(int(action[0]))
            assert (reward, terminated, truncated) == (batch.rewards[0], batch.terminated[0], batch.truncated[0])
            np.testing.assert_array_equal(batch.obs[0], np.asarray(obs))
            if terminated:
                break
        assert batch.terminated[0]  # a game lasts 750 steps at least and is lost by then
        assert batch.infos[0]["game_return"] <= -15
        first = ours.try_reset(batch.env_ids)
        np.testing.assert_array_equal(first.obs[0], np.asarray(theirs.reset()[0]))
    theirs.close()


def test_lost_lives_are_those_of_ale():
    """ale-py's own signal (life_loss_info) sets terminated; ours is an info, and terminated is the game's end alone."""
    from ale_py.vector_env import AtariVectorEnv

    seeds = np.array([slot_seed(5, 0, slot) & 0x7FFFFFFF for slot in range(2)])
    theirs = AtariVectorEnv("breakout", 2, life_loss_info=True, reward_clipping=False, use_fire_reset=False)
    theirs.reset(seed=seeds)
    lost, ours_lost, overs = [], [], []
    with make_atari("Breakout-v5", 2, seed=5, use_fire_reset=False) as ours:
        batch = ours.poll()
        for k in range(400):
            actions = np.array([random_action(slot, k) for slot in range(2)])
            ours.send_actions(batch.env_ids, actions)
            batch = ours.poll()
            terminated, info = theirs.step(actions)[2], batch.infos
            lost += [(k, slot) for slot in range(2) if terminated[slot]]
            ours_lost += [(k, slot) for slot in info if info[slot].get("life_lost") or info[slot].get("game_over")]
            overs += [(k, slot) for slot in range(2) if batch.terminated[slot]]
            if batch.terminated.any():
                break
    assert ours_lost == lost
    assert len(lost) >= 5
    assert overs == [(k, slot) for k, slot in lost[-len(overs) :]]
    assert len(overs) < len(lost)


def test_the_returns_of_a_sampler_are_raw_where_its_rewards_are_clipped():
    """Space Invaders gives 5 to 30 points at a time."""
    env = make_atari("SpaceInvaders-v5", 1, seed=1, max_episode_steps=150)
    with CommonPolicyEvaluator(env, RandomPolicy, clip_rewards=True, rollout_fragment_length=160) as ev:
        batch = ev.sample()
        (episode,) = ev.get_metrics()
    assert set(batch["rewards"].tolist()) == {0.0, 1.0}
    assert episode.length == 150
    clipped = batch["rewards"][:150].sum()
    assert episode.episode_return >= 5 * clipped >= 5


def test_two_groups_under_a_sampler_give_whole_fragments():
    env = make_atari("Breakout-v5", 4, seed=1, groups=2, max_episode_steps=30)
    with CommonPolicyEvaluator(env, RandomPolicy, rollout_fragment_length=20) as ev:
        batches = [ev.sample() for _ in range(3)]
    for batch in batches:
        assert batch.count == 80
        assert sorted(batch["env_id"].tolist()) == [slot for slot in range(4) for _ in range(20)]


def test_two_envs_of_different_modes_keep_their_metadata():
    """ale-py writes the mode into a dict that all vector envs share."""
    from gymnasium.vector import AutoresetMode, VectorEnv

    before = dict(VectorEnv.metadata)
    settings = AtariSettings()
    one, two = (
        open_vector_env("pong", 1, settings, same_step=same, num_threads=1, first_core=-1) for same in (True, False)
    )
    assert one.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert two.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert VectorEnv.metadata == before
