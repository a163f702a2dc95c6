"""``train(output=DIR)`` writes what is sampled, ``train(input=DIR)`` learns from it and steps no env."""

from __future__ import annotations

import csv
import json
import logging
import shutil

import gymnasium
import numpy as np
import pytest
from click.testing import CliRunner

from rlsample.algorithms.build import _build_numbered, build_evaluator
from rlsample.algorithms.run_config import configure, to_document
from rlsample.algorithms.trainer import Trainer, train
from rlsample.cli import main
from rlsample.errors import ConfigError
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.offline import EpisodeAssembler, LogReader, LogWriter
from rlsample.policy import DQNPolicy, PPOPolicy, RandomPolicy
from rlsample.sample_batch import SampleBatch
from rlsample.testing.same_batch import assert_same_batch

RAW = ["obs", "actions", "rewards", "terminated", "truncated", "action_logp", "eps_id", "t", "env_id", "next_obs"]
SMALL = {"env": "CartPole-v1", "torch_threads": 1, "hidden": (8,)}
PPO = {**SMALL, "algo": "ppo", "num_envs": 2, "rollout_fragment_length": 16, "minibatch_size": 16, "num_sgd_iter": 1}
DQN = {**SMALL, "algo": "dqn", "learning_starts": 20, "train_batch_size": 8, "updates_per_step": 2}


class Untouched(gymnasium.Env):
    """CartPole's spaces, and nobody may step it."""

    observation_space = gymnasium.make("CartPole-v1").observation_space
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        raise AssertionError("reset")

    def step(self, action):
        raise AssertionError("step")


@pytest.fixture
def logs(tmp_path):
    """The folder of 8 fragments of 32 rows, by a random policy."""
    folder = tmp_path / "logs"
    with (
        LogWriter(folder) as writer,
        CommonPolicyEvaluator("CartPole-v1", RandomPolicy, num_envs=2, rollout_fragment_length=16, seed=5) as evaluator,
    ):
        for _ in range(8):
            writer.write(evaluator.sample())
    return folder


# ---------------------------------------------------------------------- recording


@pytest.mark.parametrize("policy", [PPOPolicy, DQNPolicy])
def test_recorded_rows_are_the_sampled_ones_before_postprocessing(tmp_path, policy):
    """DQN's postprocess moves next_obs n steps on, PPO's adds advantages: the log has neither."""
    options = {"num_envs": 2, "rollout_fragment_length": 12, "seed": 3}
    make = policy if policy is PPOPolicy else lambda *a, **k: DQNPolicy(*a, settings=None, **k)
    with CommonPolicyEvaluator("CartPole-v1", make, postprocess=False, **options) as plain:
        expected = [plain.sample() for _ in range(3)]
    with CommonPolicyEvaluator("CartPole-v1", make, **options) as evaluator:
        evaluator.record_to(LogWriter(tmp_path))
        for _ in range(3):
            evaluator.sample()
    with LogReader(tmp_path) as reader:
        for got, batch in zip(reader, expected, strict=True):
            assert_same_batch(got, batch)


def test_a_run_records_every_row_it_samples(tmp_path):
    result = train(PPO, max_steps=96, output=str(tmp_path / "logs"), output_format="parquet", output_max_file_size=1)
    assert len(list((tmp_path / "logs").glob("*.parquet"))) == 3
    with LogReader(tmp_path / "logs") as reader:
        batches = list(reader)
    assert sum(batch.count for batch in batches) == result.env_steps == 96
    assert "advantages" not in batches[0]
    assert set(RAW) <= {*batches[0], "next_obs"}


def test_process_workers_record_each_to_its_own_file(tmp_path):
    result = train(PPO, num_workers=2, max_steps=128, output=str(tmp_path / "logs"))
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert [name[:13] for name in names] == ["worker-00001-", "worker-00002-"]
    assert all(name.endswith("-00000.jsonl") for name in names), "finished when the run was"
    with LogReader(tmp_path / "logs") as reader:
        rows = [(int(e), int(t)) for batch in reader for e, t in zip(batch["eps_id"], batch["t"], strict=True)]
    assert len(rows) == len(set(rows)) == result.env_steps == 128


# ---------------------------------------------------------------------- learning from logs


def test_dqn_learns_from_logs_and_steps_no_env(logs):
    with Trainer(configure(DQN, env=Untouched, input=str(logs), max_steps=160, n_step=1)) as trainer:
        assert trainer.evaluator.env.num_envs == 1
        before = trainer.evaluator.get_weights()
        trainer.run()
        after = trainer.evaluator.get_weights()
        assert trainer.env_steps == 160
        assert trainer.episodes == 0
        assert trainer.optimizer.stats()["replay_rows"] == 160
    assert any((before[name] != after[name]).any() for name in before)


def test_ppo_learns_from_logs_with_values_of_its_own(logs, caplog):
    """Behaviour's logp as logged, values anew: GAE needs those of the weights that learn."""
    config = configure(PPO, env=Untouched, input=str(logs), max_steps=64)
    with caplog.at_level(logging.WARNING), Trainer(config) as trainer:
        batch = trainer.evaluator.sample()
        values = trainer.evaluator.policy.values(batch["obs"])
        assert batch["values"].tobytes() == values.tobytes()
        assert batch["action_logp"].tolist() == pytest.approx([float(np.log(0.5))] * 32)
        assert np.isfinite(batch["advantages"]).all()
        trainer.run()
    assert "ppo learns from rows of its own policy" in caplog.text


def test_workers_share_the_logs(logs):
    """Each of two workers reads its own fragments; the replacement of one that died reads that one's."""
    config = configure(PPO, num_workers=2, input=str(logs))
    seen = []
    for worker_index in (1, 2, 2 + 4096):
        with _build_numbered(config, None, worker_index) as evaluator:
            batches = [evaluator.sample() for _ in range(8)]  # more than one pass
        seen.append({(int(e), int(t)) for b in batches for e, t in zip(b["eps_id"], b["t"], strict=True)})
    assert len(seen[0]) + len(seen[1]) == 8 * 32
    assert not seen[0] & seen[1]
    assert seen[1] == seen[2]
    with _build_numbered(config, None, 0) as local:
        assert local._source is None


def test_logs_and_fresh_samples_mix(logs, tmp_path):
    with Trainer(
        configure(PPO, input=f"{logs}=0.5,sampler=0.5", output=str(tmp_path / "fresh"), max_steps=320)
    ) as trainer:
        with LogReader(logs) as reader:
            logged = {batch["obs"].tobytes() for batch in reader}
        own = sum(trainer.evaluator.sample()["obs"].tobytes() not in logged for _ in range(20))
    assert 3 <= own <= 17
    with LogReader(tmp_path / "fresh") as reader:
        assert len(list(reader)) == own, "what was read is not recorded again"


def test_a_resumed_run_goes_on_in_the_logs(logs, tmp_path):
    options = {**DQN, "input": str(logs), "store_buffer_in_checkpoints": True, "input_shuffle_window": 3}
    with Trainer(configure(options, max_steps=320)) as trainer:
        trainer.run()
        expected = trainer.evaluator.get_weights()
    train(options, max_steps=128, out=str(tmp_path / "run"))
    with Trainer.resume(tmp_path / "run", max_steps=320) as trainer:
        trainer.run()
        got = trainer.evaluator.get_weights()
    for name, value in expected.items():
        assert got[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("shares", ["{}=0.5,{}=0.5", "{1}"])
def test_a_run_that_is_resumed_with_other_logs_begins_them(logs, tmp_path, caplog, shares):
    train(DQN, input=str(logs), max_steps=128, out=str(tmp_path / "run"))
    other = tmp_path / "other"
    shutil.copytree(logs, other)
    with Trainer.resume(tmp_path / "run", input=shares.format(logs, other), max_steps=192) as trainer:
        source = trainer.evaluator.get_state()["source"]
        assert [s["given"] for s in source.get("sources", [source])] == [0] * (1 + shares.count(","))
        trainer.run()
    assert "begins with its input" in caplog.text


def test_estimates_are_in_the_runs_log(logs, tmp_path):
    train(
        DQN,
        input=str(logs),
        input_evaluation=("is", "wis"),
        input_evaluation_interval=2,
        max_steps=160,
        out=str(tmp_path / "run"),
    )
    with (tmp_path / "run" / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    assembler = EpisodeAssembler()
    with LogReader(logs) as reader:
        whole = [episode for batch in reader for episode in assembler.add(batch)]
    gamma = configure(DQN).policy.gamma
    logged = np.mean([float(e["rewards"] @ gamma ** np.arange(e.count)) for e in whole])
    for row in rows:
        assert float(row["input/logged_return"]) == pytest.approx(logged, rel=1e-5)
        assert float(row["input/is_error"]) >= 0
        assert 0 < float(row["input/wis_ess"]) <= len(whole)
    values = [row["input/wis_return"] for row in rows]
    assert values[1] == values[2]  # iterations 2 and 3
    assert len(set(values)) > 1


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"input": "no/such/folder"}, "no logs in no/such/folder"),
        ({"input": "a=0.5,b=0.4"}, "the shares must be positive and sum to 1; they sum to 0.9"),
        ({"input": "a=half,b=0.5"}, "'a=half': expected SOURCE=SHARE"),
        ({"input": "x", "output": "y"}, "nothing is sampled; leave one out"),
        ({"input": "x", "stop_return": 10.0}, "stop_return needs sampled episodes"),
        ({"output": "y", "observation_filter": "MeanStdFilter"}, "use NoFilter with input and output"),
        ({"output": "y", "output_format": "json"}, "did you mean 'jsonl'"),
        ({"input_evaluation": ("wis",)}, "input_evaluation estimates from logs: set input"),
        ({"input": "x", "input_evaluation": ("dr",)}, "unknown input_evaluation 'dr'"),
    ],
)
def test_settings_that_cannot_work(options, words):
    with pytest.raises(ConfigError, match=words):
        Trainer(configure(DQN, max_steps=10, **options)).close()


def test_a_run_skips_fragments_that_are_too_large_by_its_own_option(tmp_path, caplog):
    folder = write_one(tmp_path / "logs")
    small = configure(DQN, input=folder, max_steps=10, input_max_fragment_size=100)
    with Trainer(small) as trainer, pytest.raises(ConfigError, match="there is no readable fragment in"):
        trainer.step()
    assert "its arrays have more than 100 bytes" in caplog.text
    with pytest.raises(ConfigError, match="fewer than two whole episodes"):
        Trainer(configure(DQN, input=folder, max_steps=10, input_evaluation=("is",), input_max_fragment_size=100))
    with pytest.raises(ConfigError, match="input_max_fragment_size must be at least 1, not 0"):
        configure(DQN, input=folder, input_max_fragment_size=0)


def write_one(folder, **changes) -> str:
    columns = {
        "obs": np.zeros((4, 4), np.float32),
        "actions": np.zeros(4, np.int64),
        "rewards": np.ones(4, np.float32),
        "terminated": np.zeros(4, bool),
        "truncated": np.zeros(4, bool),
        "next_obs": np.zeros((4, 4), np.float32),
        "eps_id": np.zeros(4, np.int64),
        "action_logp": np.full(4, -0.5, np.float32),
        **changes,
    }
    with LogWriter(folder) as writer:
        writer.write(SampleBatch({name: column for name, column in columns.items() if column is not None}))
    return str(folder)


@pytest.mark.parametrize(
    ("algo", "changes", "words"),
    [
        ("dqn", {"obs": np.zeros((4, 3), np.float32), "next_obs": None}, "lack next_obs, which DQNPolicy learns from"),
        ("dqn", {"obs": np.zeros((4, 3), np.float32)}, r"'obs' .* does not fit the env: .*\(3,\).*\(4,\)"),
        ("dqn", {"actions": np.zeros(4, np.int32)}, "'actions' .*int32.*int64"),
        ("dqn", {"next_obs": np.zeros((4, 4), np.float64)}, "'next_obs' .*float64.*float32"),
        ("dqn", {"next_obs": {"a": np.zeros((4, 4), np.float32)}}, "'next_obs' .*'a'"),
        ("ppo", {"action_logp": None}, "lack action_logp, which PPOPolicy"),
        ("ppo", {"action_logp": np.full(4, np.nan, np.float32)}, "action_logp is not finite in some rows"),
        (
            "ppo",
            {"action_logp": np.array([-0.5, np.inf, -0.5, -0.5], np.float32)},
            "action_logp is not finite in some rows",
        ),
    ],
)
def test_logs_that_do_not_fit_are_refused_by_column(tmp_path, algo, changes, words):
    folder = write_one(tmp_path / "logs", **changes)
    base = DQN if algo == "dqn" else PPO
    with Trainer(configure(base, input=folder, max_steps=10)) as trainer, pytest.raises(ConfigError, match=words):
        trainer.step()


def test_other_evaluators_of_a_run_read_and_write_no_logs(logs, tmp_path):
    """``rlsample eval`` builds its evaluator from the same config."""
    config = configure(DQN, input=str(logs))
    with build_evaluator(config) as evaluator:
        assert evaluator._source is evaluator._sink is None


# ---------------------------------------------------------------------- the command line


def test_the_option_output_and_the_section_output_live_side_by_side(tmp_path):
    config = configure({"output": {"keep_checkpoints": 2}}, output="logs")
    assert (config.offline.output, config.output.keep_checkpoints) == ("logs", 2)
    assert configure({"output": "logs"}).offline.output == "logs"
    assert configure({"offline": {"output": "logs"}}).offline.output == "logs"
    assert configure(to_document(config)) == config


def test_record_learn_and_play_by_commands(tmp_path):
    folder = tmp_path / "logs"

    def command(*words: str) -> dict:
        result = CliRunner().invoke(main, [*words, "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.output.splitlines()[-1])

    small = ("--env", "CartPole-v1", "--hidden", "8", "--no-tensorboard")
    first = command(
        "train", "--algo", "ppo", *small, "--max-steps", "1024", "--output", str(folder), "--out", str(tmp_path / "a")
    )
    with LogReader(folder) as reader:
        assert sum(batch.count for batch in reader) == first["env_steps"] >= 1024
    second = command(
        *(
            "train",
            "--algo",
            "dqn",
            *small,
            "--max-steps",
            "2048",
            "--input",
            str(folder),
            "--input-evaluation",
            "is,wis",
        ),
        *("--updates-per-step", "2", "--learning-starts", "100", "--out", str(tmp_path / "b")),
    )
    assert second["env_steps"] >= 2048
    assert second["episodes"] == 0
    played = command("eval", str(tmp_path / "b"), "--episodes", "3")
    assert played["trained_env_steps"] == second["env_steps"]
    assert played["return_mean"] > 0
