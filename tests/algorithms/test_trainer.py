"""The train loop: bit-equal resumes, exact counts, honest stops, files that are there."""

import json
import math

import gymnasium
import numpy as np
import pytest
import torch

from rlsample.algorithms import Trainer, TrainSettings, configure, train
from rlsample.algorithms.progress_log import read_csv
from rlsample.algorithms.train_result import time_shares
from rlsample.env.base_env import BaseEnv
from rlsample.env.gym_envs import GymEnvs
from rlsample.errors import CheckpointError, ConfigError
from rlsample.evaluation import Callbacks

WALL_CLOCK = ("time/", "sampler/")  # tags that no seed decides


class CountEnv(gymnasium.Env):
    """Rewards 1, 2, 3, then terminated: every return is 6."""

    observation_space = gymnasium.spaces.Box(0, 1e6, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.k = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.k += 1
        return np.full(1, self.k, np.float32), float(self.k), self.k == 3, False, {}


def small(**options):
    """Four updates per iteration of 32 rows."""
    base = {"rollout_fragment_length": 8, "num_envs": 4, "minibatch_size": 16, "num_sgd_iter": 2, "seed": 3}
    return configure({**base, "checkpoint_interval_s": None, **options})


def decided(result):
    """The part of a result that the seed decides; all numbers compare by their bits."""
    return {
        tag: None if value is None else np.float64(value).tobytes()
        for tag, value in result.items()
        if not tag.startswith(WALL_CLOCK) and not (tag.startswith("optimizer/") and tag.endswith("_s"))  # seconds
    }


def iterate(trainer, times):
    return [decided(trainer.step()) for _ in range(times)]


@pytest.mark.parametrize(
    "options",
    [
        {"algo": "ppo", "num_envs": 4},
        pytest.param(
            {"algo": "ppo", "num_envs": 8, "vectorize": "native"},
        ),
        {"algo": "a2c", "env": "Pendulum-v1", "observation_filter": "MeanStdFilter"},
    ],
    ids=["ppo", "native", "a2c, filter, Box"],
)
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(tmp_path, options):
    with Trainer(small(max_steps=5_000, out=str(tmp_path / "a"), **options)) as whole:
        expected = iterate(whole, 6)
        weights = whole.evaluator.get_weights()
        counts = (whole.iteration, whole.env_steps, whole.episodes, whole.optimizer.num_steps_trained)
    with Trainer(small(max_steps=5_000, out=str(tmp_path / "b"), **options)) as first:
        assert iterate(first, 3) == expected[:3]
        first.save()
        iterate(first, 1)  # is lost, as by a crash: not in the checkpoint
    with Trainer.resume(tmp_path / "b") as second:
        assert second.iteration == 3
        assert iterate(second, 3) == expected[3:]
        resumed = second.evaluator.get_weights()
        assert (second.iteration, second.env_steps, second.episodes, second.optimizer.num_steps_trained) == counts
    assert resumed.keys() == weights.keys()
    assert all(resumed[name].tobytes() == weights[name].tobytes() for name in weights)
    assert [row["time/iterations"] for row in read_csv(tmp_path / "b" / "progress.csv")] == [1, 2, 3, 4, 5, 6]
    assert len({tuple(result.items()) for result in expected}) == 6, "six equal results would prove nothing"


def test_saving_changes_nothing(tmp_path):
    with Trainer(small()) as plain, Trainer(small(out=str(tmp_path), checkpoint_interval_iterations=1)) as saving:
        assert iterate(plain, 4) == iterate(saving, 4)
        assert len(list((tmp_path / "checkpoints").iterdir())) == 3


def test_another_seed_is_another_run():
    with Trainer(small(seed=3)) as a, Trainer(small(seed=4)) as b, Trainer(small(seed=3)) as c:
        one, other, same = (iterate(trainer, 1) for trainer in (a, b, c))
    assert one == same
    assert one != other


def test_checkpoints_come_by_iterations(tmp_path):
    with Trainer(small(env=CountEnv, max_steps=32 * 5, out=str(tmp_path), checkpoint_interval_iterations=2)) as t:
        t.run()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"step_{32 * i:012d}" for i in (2, 4, 5)]


def test_checkpoints_come_by_time(tmp_path):
    with Trainer(small(env=CountEnv, max_steps=96, out=str(tmp_path), checkpoint_interval_s=0.0)) as t:
        t.run()
    assert sorted(p.name[-2:] for p in (tmp_path / "checkpoints").iterdir()) == ["32", "64", "96"]


def test_the_result_counts_rows_and_episodes(tmp_path):
    result = train(
        vars(TrainSettings(env=CountEnv, num_envs=4, max_steps=90)), rollout_fragment_length=8, out=str(tmp_path)
    )
    # 4 slots x 24 steps, whole episodes of 3 steps
    assert result.to_json() == {
        "env_steps": 96,
        "seconds": result.seconds,
        "return_mean": 6.0,
        "episodes": 32,
        "algo": "ppo",
        "env": "<CountEnv>",
        "seed": 0,
    }
    assert result.stopped_by == "max_steps"
    assert result.seconds > 0
    assert result.checkpoint == tmp_path / "checkpoints" / "step_000000000096"
    names = {path.name.split(".out")[0] for path in tmp_path.iterdir()}
    assert names == {"config.json", "progress.csv", "events", "checkpoints", "learning_curve.png"}
    rows = read_csv(tmp_path / "progress.csv")
    assert [row["rollout/episodes"] for row in rows] == [8, 20, 32]
    assert [row["time/total_timesteps"] for row in rows] == [32, 64, 96]
    assert {row["rollout/ep_len_mean"] for row in rows} == {3.0}


def test_no_data_is_none_and_not_zero():
    with Trainer(small(env=CountEnv, rollout_fragment_length=2)) as trainer:
        result = trainer.step()
        assert result["rollout/ep_rew_mean"] is None
        assert trainer.summary("max_steps").return_mean is None
        assert trainer.summary("max_steps").episodes == 0


@pytest.mark.parametrize(("goal", "stopped_by"), [(6.0, "stop_return"), (6.5, "max_steps")])
def test_the_goal_needs_a_hundred_episodes(goal, stopped_by):
    with Trainer(small(env=CountEnv, stop_return=goal, max_steps=320)) as trainer:
        result = trainer.run()
    assert result.stopped_by == stopped_by
    # 32 rows an iteration; 100 episodes have ended when each of 4 slots took 75 steps: in iteration 10
    assert result.env_steps == 320
    with Trainer(small(env=CountEnv, stop_return=goal, max_steps=400)) as trainer:
        assert trainer.run().env_steps == (320 if stopped_by == "stop_return" else 416)


def test_request_stop_ends_after_the_iteration_and_saves(tmp_path):
    with Trainer(small(env=CountEnv, max_steps=10_000, out=str(tmp_path))) as trainer:
        result = trainer.run(on_result=lambda r: trainer.request_stop() if r["time/iterations"] == 2 else None)
    assert (result.stopped_by, result.env_steps) == ("request", 64)
    assert result.checkpoint is not None
    assert result.checkpoint.name == "step_000000000064"


def test_callbacks_see_and_add_to_results(tmp_path):
    class Own(Callbacks):
        def on_train_result(self, trainer, result):
            result["own/double"] = 2 * trainer.iteration

        def on_episode_end(self, episode):
            episode.custom_metrics["last"] = float(episode.length)

    with Trainer(small(env=CountEnv, out=str(tmp_path)), callbacks=Own()) as trainer:
        assert trainer.step()["own/double"] == 2
        assert trainer.step()["rollout/custom/last_mean"] == 3.0
    assert [row["own/double"] for row in read_csv(tmp_path / "progress.csv")] == [2, 4]


def test_tags_are_the_fields_usual_ones():
    with Trainer(small(algo="ppo")) as trainer:
        result = trainer.step()
    usual = (
        "rollout/ep_rew_mean rollout/ep_len_mean time/fps time/iterations time/time_elapsed time/total_timesteps "
        "train/loss train/policy_gradient_loss train/value_loss train/entropy_loss train/approx_kl train/clip_fraction "
        "train/explained_variance train/learning_rate train/n_updates sampler/env_ms sampler/infer_ms"
    )
    assert set(usual.split()) <= set(result)
    assert result["train/n_updates"] == 4
    assert all(value is None or math.isfinite(value) for value in result.values())
    assert 0.99 < sum(v for tag, v in result.items() if tag.endswith("_share")) < 1.01


def test_time_shares():
    timers = {"sampler/polls": 10, "sampler/env_ms": 20.0, "sampler/infer_ms": 5.0, "sampler/processing_ms": 1.0}
    shares = time_shares(timers, seconds=0.5)
    assert shares == pytest.approx(
        {"time/env_share": 0.4, "time/infer_share": 0.1, "time/process_share": 0.02, "time/learn_share": 0.48}
    )
    assert time_shares({**timers, "sampler/polls": 0}, 0.5) == {}


def test_with_workers_time_shares_are_of_the_workers_own_time():
    """What came in during one short iteration may be the work of many."""
    timers = {"sampler/polls": 10, "sampler/env_ms": 20.0, "sampler/infer_ms": 5.0, "sampler/processing_ms": 1.0}
    shares = time_shares({**timers, "sampler/elapsed_ms": 40.0}, seconds=0.001, num_workers=2)
    assert shares == pytest.approx(
        {"time/env_share": 0.5, "time/infer_share": 0.125, "time/process_share": 0.025, "time/other_share": 0.35}
    )
    shares = time_shares({**timers, "sampler/elapsed_ms": 20.0}, seconds=0.001, num_workers=2)  # one poll began before
    assert shares == pytest.approx(
        {"time/env_share": 20 / 26, "time/infer_share": 5 / 26, "time/process_share": 1 / 26, "time/other_share": 0}
    )


def test_torch_threads_come_back():
    before = torch.get_num_threads()
    with Trainer(small(env=CountEnv, torch_threads=before + 1)):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(ConfigError, match="unknown vectorize"):
        Trainer(small(env=CountEnv, torch_threads=before + 1, vectorize="lop"))
    assert torch.get_num_threads() == before


def test_global_random_state_is_untouched():
    numpy_before, torch_before = np.random.get_state()[1].copy(), torch.get_rng_state()
    with Trainer(small()) as trainer:
        trainer.step()
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    assert torch.equal(torch.get_rng_state(), torch_before)


# ---------------------------------------------------------------- folders


def run_once(folder, **options):
    with Trainer(small(env=CountEnv, max_steps=32, out=str(folder), **options)) as trainer:
        return trainer.run()


def test_a_folder_with_a_run_is_not_written_over(tmp_path):
    run_once(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(ConfigError, match=r"already holds a run; go on with --resume .*, or use --overwrite"):
        Trainer(small(env=CountEnv, out=str(tmp_path)))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_overwrite_replaces_the_run_and_leaves_strangers(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    run_once(tmp_path)
    with Trainer(small(env=CountEnv, max_steps=64, out=str(tmp_path)), overwrite=True) as trainer:
        assert list((tmp_path / "checkpoints").glob("*")) == []
        trainer.run()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000000000064"]
    assert len(list(tmp_path.glob("events*"))) == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_without_a_run_keeps_its_files(tmp_path):
    (tmp_path / "progress.csv").write_text("mine")
    (tmp_path / "video.mp4").write_text("mine")
    run_once(tmp_path, tensorboard=False)
    assert (tmp_path / "video.mp4").read_text() == "mine"
    assert list(tmp_path.glob("events*")) == []


def test_config_json_is_the_whole_config(tmp_path):
    run_once(tmp_path, gamma=0.625)
    document = json.loads((tmp_path / "config.json").read_text())
    assert document["policy"]["gamma"] == 0.625
    assert configure(document) == small(env="<CountEnv>", gamma=0.625, max_steps=32, out=str(tmp_path))


def test_out_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; give a folder"):
        Trainer(small(env=CountEnv, out=str(tmp_path / "file")))
    with pytest.raises(ConfigError, match=r"cannot use out .*: Not a directory"):
        Trainer(small(env=CountEnv, out=str(tmp_path / "file" / "run")))


@pytest.mark.parametrize("fails", [False, True])
def test_each_env_is_closed_once(tmp_path, monkeypatch, fails):
    closed = []
    monkeypatch.setattr(CountEnv, "close", lambda env: closed.append(id(env)))
    run_once(tmp_path)
    closed.clear()
    if fails:
        with pytest.raises(ConfigError, match="already holds a run"):
            Trainer(small(env=CountEnv, out=str(tmp_path)))
    else:
        trainer = Trainer(small(env=CountEnv))
        trainer.close()
        trainer.close()
    assert len(closed) == len(set(closed)) == 4


def test_saving_without_a_folder_is_refused():
    with Trainer(small(env=CountEnv)) as trainer, pytest.raises(ConfigError, match="no folder to save to: set out"):
        trainer.save()


# ---------------------------------------------------------------- resuming


def test_an_env_without_state_is_said_and_starts_anew(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(BaseEnv, "get_state", lambda env: None)
    monkeypatch.setattr(GymEnvs, "get_state", lambda env: None)
    run_once(tmp_path)
    with Trainer.resume(tmp_path, env=CountEnv, max_steps=64) as trainer:
        assert "episodes start anew" in caplog.text
        assert trainer.run().env_steps == 64


def test_resume_goes_on_to_new_goals(tmp_path):
    run_once(tmp_path)
    with Trainer.resume(tmp_path, env=CountEnv, max_steps=96) as trainer:
        assert trainer.config.train.max_steps == 96
        assert trainer.run().env_steps == 96
    assert json.loads((tmp_path / "config.json").read_text())["train"]["max_steps"] == 96


def test_resume_from_an_older_checkpoint(tmp_path):
    with Trainer(small(env=CountEnv, max_steps=96, out=str(tmp_path), checkpoint_interval_iterations=1)) as trainer:
        trainer.run()
    older = tmp_path / "checkpoints" / "step_000000000032"
    with Trainer.resume(older, env=CountEnv) as trainer:
        assert trainer.iteration == 1
        trainer.step()
        assert [row["time/iterations"] for row in read_csv(tmp_path / "progress.csv")] == [1, 2]
        trainer.save()
    assert sorted(p.name[-2:] for p in (tmp_path / "checkpoints").iterdir()) == ["32", "64"]


def test_a_damaged_checkpoint_is_refused_before_anything_is_written(tmp_path):
    with Trainer(small(env=CountEnv, max_steps=64, out=str(tmp_path), checkpoint_interval_iterations=1)) as trainer:
        trainer.run()
    arrays = tmp_path / "checkpoints" / "step_000000000064" / "arrays.npz"
    arrays.write_bytes(arrays.read_bytes()[:-1] + b"x")
    csv_before = (tmp_path / "progress.csv").read_text()
    with pytest.raises(CheckpointError, match=r"arrays\.npz has changed .*; the last good one is .*step_000000000032"):
        Trainer.resume(tmp_path, env=CountEnv)
    assert (tmp_path / "progress.csv").read_text() == csv_before


def test_resume_needs_a_run_and_the_env_object(tmp_path):
    with pytest.raises(ConfigError, match=r"is no run: it has no config\.json"):
        Trainer.resume(tmp_path)
    run_once(tmp_path)
    with pytest.raises(ConfigError, match="env was a Python object, <CountEnv>: pass it again"):
        Trainer.resume(tmp_path)
    with pytest.raises(ConfigError, match="unknown option 'max_step'; did you mean 'max_steps'"):
        Trainer.resume(tmp_path, env=CountEnv, max_step=3)


def test_a_stretched_run_stretches_its_schedules(tmp_path):
    options = {"env": CountEnv, "lr_schedule": "linear", "learning_rate": 1.0, "out": str(tmp_path)}
    with Trainer(small(max_steps=64, **options)) as trainer:
        rates = []
        trainer.run(on_result=lambda result: rates.append(result["train/learning_rate"]))
    assert rates == [0.5, 0.0]
    with Trainer.resume(tmp_path, env=CountEnv, max_steps=128) as trainer:
        assert trainer.step()["train/learning_rate"] == 0.25
        assert trainer.config.policy.schedule_steps == 128
