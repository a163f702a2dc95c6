"""Evaluation: whole episodes, as many as asked, one share per slot; nothing is learned or unpickled."""

import json
import pickle

import gymnasium
import numpy as np
import pytest

from rlsample.algorithms import Trainer, configure, evaluate
from rlsample.algorithms.evaluate import load_policy, play
from rlsample.errors import ConfigError, EnvFailedError


class SlotEnv(gymnasium.Env):
    """Slot i's episodes last i + 1 steps, each with reward 10 ** i; the observation is the slot."""

    observation_space = gymnasium.spaces.Box(0, 1e6, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    fail_at = None

    def __init__(self, ctx):
        self.slot = ctx.slot_index

    def reset(self, *, seed=None, options=None):
        self.k = 0
        return np.full(1, self.slot, np.float32), {}

    def step(self, action):
        self.k += 1
        if self.k == self.fail_at:
            raise RuntimeError("seventh seal")
        return np.full(1, self.slot, np.float32), 10.0**self.slot, False, self.k > self.slot, {}


def make(ctx):
    return SlotEnv(ctx)


@pytest.fixture
def run(tmp_path):
    options = {"num_envs": 2, "rollout_fragment_length": 8, "max_steps": 16, "observation_filter": "MeanStdFilter"}
    with Trainer(configure(env=make, out=str(tmp_path), tensorboard=False, **options)) as trainer:
        trainer.run()
    return tmp_path


def test_a_run_from_a_device_that_is_not_here_is_played_on_the_cpu(run, caplog):
    path = run / "config.json"
    document = json.loads(path.read_text())
    document["policy"]["device"] = "cuda:99"
    path.write_text(json.dumps(document))
    assert evaluate(run, 3, env=make).lengths.tolist() == [1, 2, 3]
    assert ["'cuda:99'" in record.message and "CPU" in record.message for record in caplog.records] == [True]


def test_each_slot_plays_its_share(run):
    result = evaluate(run, 5, env=make)  # five slots, one episode each
    assert result.returns.tolist() == [1.0, 20.0, 300.0, 4000.0, 50000.0]
    assert result.lengths.tolist() == [1, 2, 3, 4, 5]
    assert result.env_steps == 16
    assert result.to_json()["return_mean"] == pytest.approx(54321 / 5)
    evaluator, *_ = load_policy(run, num_envs=3, env=make)
    with evaluator:
        returns, lengths = play(evaluator, 7)  # shares 3, 2, 2
    assert lengths.tolist() == [1, 1, 1, 2, 2, 3, 3]
    assert returns.tolist() == [1, 1, 1, 20, 20, 300, 300]


def test_the_filter_is_used_and_stays(run):
    evaluator, *_ = load_policy(run, num_envs=2, env=make)
    with evaluator:
        before = evaluator.filter.get_state()
        assert evaluator.filter.count > 0
        seen = []
        act = evaluator.policy.act
        evaluator.policy.act = lambda obs, explore: (seen.append((obs.copy(), explore)), act(obs, explore))[1]
        play(evaluator, 2)
        raw = np.array([[0.0], [1.0]], np.float32)
        assert np.array_equal(seen[0][0], evaluator.filtered(raw))
        assert not np.array_equal(seen[0][0], raw)
        assert {explore for _, explore in seen} == {False}
        after = evaluator.filter.get_state()
    assert repr(before) == repr(after)


def test_horizon_ends_an_episode_here_too(tmp_path):
    options = {"num_envs": 1, "rollout_fragment_length": 8, "max_steps": 8, "horizon": 3}
    with Trainer(configure(env=make, out=str(tmp_path), tensorboard=False, **options)) as trainer:
        trainer.run()
    assert evaluate(tmp_path, 5, env=make).lengths.tolist() == [1, 2, 3, 3, 3]


def test_nothing_is_unpickled(run, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a checkpoint was unpickled")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    assert len(evaluate(run, 2, env=make).returns) == 2


def test_same_seed_same_episodes_and_another_one_others(tmp_path):
    options = {"num_envs": 8, "rollout_fragment_length": 16, "max_steps": 128, "tensorboard": False}
    with Trainer(configure(env="CartPole-v1", out=str(tmp_path), **options)) as trainer:
        trainer.run()
    one, again, other = (evaluate(tmp_path, 6, seed=seed, deterministic=False) for seed in (1, 1, 2))
    assert one.returns.tolist() == again.returns.tolist()
    assert one.returns.tolist() != other.returns.tolist()
    derived = evaluate(tmp_path, 6)
    assert derived.seed not in (0, 1, 2)
    assert evaluate(tmp_path, 6).returns.tolist() == derived.returns.tolist()


def test_a_failing_env_is_named(run, monkeypatch):
    monkeypatch.setattr(SlotEnv, "fail_at", 2)
    with pytest.raises(EnvFailedError, match=r"slot 1.*seventh seal"):
        evaluate(run, 3, env=make)


def test_bad_requests(run, tmp_path_factory):
    with pytest.raises(ConfigError, match="is no run"):
        evaluate(tmp_path_factory.mktemp("empty"))
    with pytest.raises(ConfigError, match="episodes must be at least 1, not 0"):
        evaluate(run, 0, env=make)
    with pytest.raises(ConfigError, match="env was a Python object"):
        evaluate(run)
