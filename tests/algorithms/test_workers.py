"""Training with evaluators in processes: num_workers decides, checkpoints hold them, a killed one is replaced."""

import json
import os
import shutil
import signal

import numpy as np
import pytest
from click.testing import CliRunner

from rlsample.algorithms import Trainer, configure
from rlsample.cli.train_command import train
from rlsample.evaluation import Callbacks
from rlsample.optimizers import AsyncGradientsOptimizer, SyncSamplesOptimizer

SMALL = {
    "env": "CartPole-v1",
    "num_envs": 2,
    "rollout_fragment_length": 10,
    "hidden": (8,),
    "checkpoint_interval_s": None,
}


def test_the_number_of_workers_is_the_algorithms_unless_it_is_named():
    assert [configure(algo=algo).train.num_workers for algo in ("ppo", "a2c", "a3c")] == [0, 0, 2]
    assert configure(algo="a3c", num_workers=5).train.num_workers == 5
    assert configure({"train": {"num_workers": None}}, algo="a3c").train.num_workers == 2


def test_workers_sample_for_the_local_evaluator_and_a_killed_one_is_replaced():
    class Marks(Callbacks):
        def on_episode_end(self, episode):
            episode.custom_metrics["pid"] = os.getpid()

    with Trainer(configure(algo="a2c", num_workers=2, **SMALL), callbacks=Marks()) as trainer:
        assert isinstance(trainer.optimizer, SyncSamplesOptimizer)
        results = [trainer.step() for _ in range(4)]
        assert [result["time/total_timesteps"] for result in results] == [40, 80, 120, 160]
        shares = {tag: value for tag, value in results[-1].items() if tag.endswith("_share")}
        assert sorted(shares) == ["time/env_share", "time/infer_share", "time/other_share", "time/process_share"]
        assert 0.99 < sum(shares.values()) < 1.01
        assert results[-1]["sampler/polls"] == 20
        pids = {episode.custom["pid"] for episode in trainer.window._episodes}
        assert pids == {handle.pid for handle in trainer.evaluators.remote}
        os.kill(trainer.evaluators.remote[1].pid, signal.SIGKILL)
        assert trainer.step()["time/total_timesteps"] == 200
        assert trainer.evaluators.num_restarts == 1


def test_a_resumed_run_goes_on_bit_for_bit_with_all_workers(tmp_path):
    def steps_until(trainer, iteration):
        while trainer.iteration < iteration:
            trainer.step()
        return trainer.evaluator.get_weights(), trainer.evaluator.filter.get_state()

    run, options = tmp_path / "run", {"seed": 4, "observation_filter": "MeanStdFilter", **SMALL}
    with Trainer(configure(algo="ppo", num_workers=2, out=str(run), **options)) as trainer:
        steps_until(trainer, 3)
        trainer.save()
        shutil.copytree(run, tmp_path / "saved")
        once, filter_once = steps_until(trainer, 6)
    with Trainer.resume(tmp_path / "saved") as trainer:
        assert trainer.iteration == 3
        twice, filter_twice = steps_until(trainer, 6)
    assert all((once[name] == twice[name]).all() for name in once)
    assert filter_once["count"] == filter_twice["count"] > 200
    np.testing.assert_array_equal(filter_once["mean"], filter_twice["mean"])


def test_a_checkpoint_of_other_workers_is_taken_without_their_episodes(tmp_path, caplog):
    with Trainer(configure(algo="a2c", out=str(tmp_path / "run"), **SMALL)) as trainer:
        trainer.step()
        trainer.save()
        before = trainer.evaluator.get_weights()
    with Trainer.resume(tmp_path / "run", num_workers=1) as trainer:
        assert all((before[name] == value).all() for name, value in trainer.evaluator.get_weights().items())
        assert "episodes start anew" in caplog.text
        assert trainer.step()["time/total_timesteps"] == 40


def test_a3c_on_the_command_line(tmp_path):
    flags = [
        "--algo",
        "a3c",
        "--num-workers",
        "1",
        "--num-envs",
        "2",
        "--rollout-fragment-length",
        "5",
        "--hidden",
        "8",
    ]
    more = ["--grads-per-step", "3", "--max-steps", "60", "--json", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(train, flags + more)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["env_steps"] == 60
    with Trainer.resume(tmp_path / "run", max_steps=90) as trainer:
        assert isinstance(trainer.optimizer, AsyncGradientsOptimizer)
        assert trainer.run().env_steps == 90


def test_a3c_without_workers_is_refused():
    from rlsample.errors import ConfigError

    with pytest.raises(ConfigError, match="num_workers"):
        Trainer(configure(algo="a3c", num_workers=0, **SMALL))
