"""IMPALA and APPO through the train loop: presets, devices, checkpoints."""

import shutil

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlsample.algorithms import Trainer, configure, train
from rlsample.algorithms.progress_log import read_csv
from rlsample.optimizers import AsyncSamplesOptimizer

SMALL = {"env": "CartPole-v1", "num_workers": 1, "num_envs": 2, "hidden": (16,), "seed": 5}


@pytest.fixture(scope="module")
def impala(tmp_path_factory):
    """The folder of a run, and its result; nobody may change it."""
    folder = tmp_path_factory.mktemp("impala") / "run"
    return folder, train(algo="impala", max_steps=1500, out=str(folder), **SMALL)


def test_impala_goes_on_from_its_checkpoint(impala, tmp_path):
    folder, first = impala
    assert first.env_steps >= 1500
    out = shutil.copytree(folder, tmp_path / "run")
    with Trainer.resume(out, max_steps=3000) as trainer:
        assert isinstance(trainer.optimizer, AsyncSamplesOptimizer)
        assert trainer.env_steps == first.env_steps
        updates = trainer.evaluator.policy.version
        assert updates > 1
        result = trainer.step()
        assert result["train/n_updates"] > updates
        assert trainer.run().env_steps >= 3000


def test_what_the_optimizer_says_of_itself_is_logged(impala):
    out, _ = impala
    rows = read_csv(out / "progress.csv")
    for name in ("policy_lag_mean", "learner_queue_size_mean", "num_dropped_rows", "learner_wait_share", "compute_s"):
        assert rows[-1][f"optimizer/{name}"] is not None, name
    assert [row["optimizer/num_steps_sampled"] for row in rows] == [row["time/total_timesteps"] for row in rows]
    events = EventAccumulator(str(out)).Reload()
    logged = [event.value for event in events.Scalars("optimizer/policy_lag_mean")]
    assert logged == pytest.approx([row["optimizer/policy_lag_mean"] for row in rows])


def test_time_shares_of_an_asynchronous_run_are_fractions(impala):
    rows = [row for row in read_csv(impala[0] / "progress.csv") if row["time/env_share"] is not None]
    assert rows
    for row in rows:
        shares = [row[f"time/{name}_share"] for name in ("env", "infer", "process", "other")]
        assert all(0 <= share <= 1 for share in shares)
        assert sum(shares) == pytest.approx(1)


@pytest.mark.parametrize("devices", [pytest.param(("cpu",), marks=pytest.mark.slow), ("cpu", "cpu")])
def test_appo_with_loaders(devices):
    result = train(algo="appo", max_steps=1000, num_data_loader_buffers=2, devices=devices, **SMALL)
    assert result.stopped_by == "max_steps"


def test_the_learner_has_the_devices_and_samplers_the_cpu():
    from rlsample.algorithms.build import _build_numbered

    config = configure(algo="impala", devices=("meta",), num_data_loader_buffers=1, device="cpu", **SMALL)
    with _build_numbered(config, None, 1) as sampler:
        assert sampler.policy.settings.device == "cpu"
    with pytest.raises(Exception, match="meta"):  # torch has no numbers there: that device was asked for
        _build_numbered(config, None, 0)
