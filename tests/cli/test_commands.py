"""train, eval and bench as a user meets them: outputs, exit codes, messages."""

import json
import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from rlsample.cli import main
from rlsample.env.catalog import EnvRecord

SMALL = "--num-envs 4 --rollout-fragment-length 8 --minibatch-size 16 --num-sgd-iter 1 --max-steps 64".split()  # noqa: SIM905
BROKEN = """
import gymnasium, numpy as np

class Broken(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self, how="step"):
        self.how = how
        if how == "init":
            raise OSError("no licence")
    def reset(self, *, seed=None, options=None):
        self.k = 0
        if self.how == "reset":
            raise OSError("no level")
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.k += 1
        bad = self.k == 5
        if bad and self.how == "step":
            raise KeyError("real-cause")
        obs = np.zeros(3 if bad and self.how == "shape" else 2, np.float32)
        if bad and self.how == "nan":
            obs[1] = np.nan
        return obs, np.ones(2) if bad and self.how == "reward" else 1.0, False, False, {}

gymnasium.register("rlsample-tests/Broken-v0", Broken)
"""


def call(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


def test_train_json_and_its_folder(tmp_path):
    done = call("train", *SMALL, "--seed", 5, "--algo", "a2c", "--out", tmp_path / "run", "--json")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert len(lines) == 1
    result = json.loads(lines[0])
    assert list(result) == ["env_steps", "seconds", "return_mean", "episodes", "algo", "env", "seed"]
    assert (result["env_steps"], result["algo"], result["env"], result["seed"]) == (64, "a2c", "CartPole-v1", 5)
    assert "steps 64  fps" in done.stderr
    assert (tmp_path / "run" / "checkpoints" / "step_000000000064").is_dir()


def test_train_says_where_files_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call("train", *SMALL)
    assert done.exit_code == 0, done.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("ppo-CartPole-v1-seed0-")
    assert f"files in runs/{folder.name}" in done.stdout
    assert "ppo on CartPole-v1: max_steps reached; mean return" in done.stdout


def test_no_data_is_null(tmp_path):
    done = call("train", "--env", "Pendulum-v1", *SMALL, "--out", tmp_path, "--json")
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["return_mean"], result["episodes"]) == (None, 0)


def test_config_file_and_flags(tmp_path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"seed": 6, "policy": {"gamma": 0.5}, "model": {"hidden": [16]}}))
    done = call(
        *("train", *SMALL, "--config", file, "--gamma", "0.75", "--activation", "relu", "--clip-rewards", "true"),
        *("--vf-clip", "none", "--no-tensorboard", "--out", tmp_path / "run", "--json"),
    )
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "run" / "config.json").read_text())
    assert document["train"]["seed"] == 6
    assert document["policy"]["gamma"] == 0.75
    assert document["policy"]["vf_clip"] is None
    assert document["model"]["hidden"] == [16]
    assert document["model"]["activation"] == "relu"
    assert document["sampler"]["clip_rewards"] is True
    assert document["output"]["tensorboard"] is False


def test_resume_and_overwrite(tmp_path):
    run = tmp_path / "run"
    assert call("train", *SMALL, "--out", run).exit_code == 0
    refused = call("train", *SMALL, "--out", run)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"error: {run} already holds a run; go on with --resume {run}")
    assert call("train", *SMALL, "--out", run, "--overwrite").exit_code == 0
    done = call("train", "--resume", run, "--max-steps", 128, "--json")
    assert json.loads(done.stdout.splitlines()[-1])["env_steps"] == 128, done.output
    clash = call("train", "--resume", run, "--out", tmp_path / "x", "--overwrite", "--config", "c.json")
    assert clash.exit_code == 2
    assert "leave out --config, --overwrite, --out" in clash.stderr


BAD_INPUT = [
    (["--algo", "pp0"], "error: unknown algo 'pp0'; did you mean 'ppo'?"),
    (["--env", "CartPole-v11"], "did you mean 'CartPole-v1'?"),
    (["--gama", "0.9"], "No such option '--gama'. Did you mean '--gamma'?"),
    (["--gamma", "high"], "option 'gamma' must be a number, not 'high'"),
    (["--num-envs", "0"], "error: num_envs must be at least 1, not 0"),
    (["--algo", "a2c", "--clip-range", "0.1"], "error: unknown option 'clip_range'"),
    (["--config", "absent.json"], "error: cannot read config absent.json: No such file"),
    (["--vectorize", "nativ"], "did you mean 'native'?"),
    (["--env", "Blackjack-v1", "--observation-filter", "MeanStd"], "did you mean 'MeanStdFilter'?"),
]


@pytest.mark.parametrize(("words", "message"), BAD_INPUT, ids=lambda value: str(value)[:30])
def test_bad_input_is_a_short_error(tmp_path, words, message):
    done = call("train", *SMALL, "--out", tmp_path / "run", *words)
    assert done.exit_code == 2, done.output
    assert message in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.output
    assert len(done.stderr.splitlines()) <= 4
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(
    ("how", "parts"),
    [
        ("init", ["slot 0", "no licence"]),
        ("reset", ["slot 0", "no level"]),
        ("step", ["slot 0", "episode step 5", "real-cause"]),
        ("shape", ["slot 0", "episode step 5", "(3,)"]),
        ("nan", ["slot 0", "episode step 5", "nan"]),
        ("reward", ["slot 0", "episode step 5", "reward", "(2,)"]),
    ],
)
def test_a_broken_env_is_named(tmp_path, monkeypatch, how, parts):
    (tmp_path / f"broken_{how}.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    env = f"broken_{how}:rlsample-tests/Broken-v0"
    words = ["train", *SMALL, "--env", env, "--env-config", json.dumps({"how": how}), "--out", tmp_path / "run"]
    done = call(*words)
    assert done.exit_code == 1, done.output
    assert "Traceback" not in done.output
    errors = [line for line in done.stderr.splitlines() if not line.startswith("steps ")]
    assert errors[0].startswith("error: ")
    assert len(errors) <= 3
    for part in parts:
        assert part in "\n".join(errors), errors
    assert call(*words, "--debug", "--overwrite").exception.__traceback__ is not None


def test_resume_without_a_run(tmp_path):
    done = call("train", "--resume", tmp_path / "absent")
    assert done.exit_code == 2
    assert "absent is no run: it has no config.json" in done.stderr


def test_eval(tmp_path):
    assert call("train", *SMALL, "--out", tmp_path, "--seed", 2).exit_code == 0
    done = call("eval", tmp_path, "--episodes", 3, "--seed", 9, "--json")
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["episodes"], result["seed"], result["trained_env_steps"], result["algo"]) == (3, 9, 64, "ppo")
    assert 8 <= result["return_min"] <= result["return_mean"] <= result["return_max"] <= 500
    words = call("eval", tmp_path, "--episodes", 3, "--seed", 9)
    assert f"ppo on CartPole-v1 after 64 steps, 3 episodes: return {result['return_mean']:.1f} ±" in words.stdout
    drawn = [json.loads(call("eval", tmp_path, "--stochastic", "--seed", s, "--json").stdout) for s in (9, 9, 10)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert call("eval", tmp_path / "absent").exit_code == 2


def test_eval_refuses_a_damaged_checkpoint(tmp_path):
    assert call("train", *SMALL, "--out", tmp_path, "--checkpoint-interval-iterations", 1).exit_code == 0
    state = tmp_path / "checkpoints" / "step_000000000064" / "state.json"
    state.write_text(state.read_text() + " ")
    done = call("eval", tmp_path)
    assert done.exit_code == 1
    assert "state.json has" in done.stderr
    good = tmp_path / "checkpoints" / "step_000000000032"
    assert f"the last good one is {good}" in done.stderr
    assert call("eval", good, "--episodes", 1).exit_code == 0


def test_bench_sampling():
    done = call("bench", "sampling", "--num-envs", 4, "--seconds", 0.05, "--vectorize", "loop", "--json")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rows"] % 2048 == 0
    assert found["polls"] * 4 == found["rows"]
    assert found["actions_per_s"] == pytest.approx(found["rows"] / found["seconds"])
    per_poll = sum(found[f"{part}_us"] for part in ("env", "infer", "processing", "other"))
    assert per_poll == pytest.approx(found["seconds"] / found["polls"] * 1e6)
    assert min(found["env_us"], found["infer_us"], found["processing_us"]) > 0
    assert "actions/s" in call("bench", "sampling", "--num-envs", 2, "--seconds", 0.01).stdout
    assert call("bench", "sampling", "--seconds", 0).exit_code == 2


def test_bench_sampling_with_workers():
    done = call("bench", "sampling", "--num-envs", 4, "--num-workers", 2, "--seconds", 0.05, "--json")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["num_workers"] == 2
    assert found["rows"] % 2048 == 0
    assert found["rows"] > 0
    assert found["polls"] * 4 == found["rows"]  # what was counted before the clock started is not in either
    assert found["actions_per_s"] == pytest.approx(found["rows"] / found["seconds"])
    per_poll = sum(found[f"{part}_us"] for part in ("env", "infer", "processing", "other"))
    assert per_poll == pytest.approx(2 * found["seconds"] / found["polls"] * 1e6)
    assert found["driver_busy_share"] > 0


def test_bench_train_counts_what_it_measured(monkeypatch):
    from rlsample.algorithms import bench_train as module

    monkeypatch.setattr(module, "_WARM_S", 0.0)
    words = ["--algo", "a2c", "--num-envs", 4, "--rollout-fragment-length", 8, "--hidden", "8"]
    done = call("bench", "train", *words, "--seconds", 0.2, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["algo"], found["num_envs"], found["num_workers"]) == ("a2c", 4, 0)
    rows = found["sampled_steps_per_s"] * found["seconds"]
    assert rows == pytest.approx(round(rows))
    assert round(rows) % 32 == 0
    assert found["trained_steps_per_s"] == pytest.approx(found["sampled_steps_per_s"])  # each row once
    assert found["updates_per_s"] * 32 == pytest.approx(found["sampled_steps_per_s"])
    assert found["seconds"] >= 0.2
    assert found["policy_lag_mean"] is None  # not counted where nothing samples ahead
    assert call("bench", "train", "--seconds", 0).exit_code == 2
    assert "train" in call("bench", "--help").stdout


def test_bench_train_with_a_learner_thread(monkeypatch):
    from rlsample.algorithms import bench_train as module

    monkeypatch.setattr(module, "_WARM_S", 0.0)
    words = ["--algo", "impala", "--num-envs", 2, "--num-workers", 1, "--rollout-fragment-length", 8]
    done = call("bench", "train", *words, "--train-batch-size", 32, "--hidden", "8", "--seconds", 0.2, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    trained = found["trained_steps_per_s"] * found["seconds"]
    assert trained == pytest.approx(round(trained))
    assert round(trained) % 32 == 0
    assert trained > 0
    assert found["policy_lag_mean"] >= 0
    assert 0 <= found["learner_wait_share"] <= 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_ends(tmp_path, number, code):
    words = [sys.executable, "-m", "rlsample.cli", "train", "--max-steps", "100000000", "--log-interval-s", "0"]
    words += ["--out", str(tmp_path), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("steps "):
                break
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "a checkpoint is saved" in err
    assert "Traceback" not in err
    result = json.loads(out.splitlines()[-1])
    assert (tmp_path / "checkpoints" / f"step_{result['env_steps']:012d}").is_dir()
    assert (tmp_path / "learning_curve.png").exists()
    resumed = call("train", "--resume", tmp_path, "--max-steps", result["env_steps"] + 1, "--json")
    assert json.loads(resumed.stdout.splitlines()[-1])["env_steps"] > result["env_steps"], resumed.output


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (("pool", "--num-envs", 4, "--num-workers", 1), {"steps_per_s", "frames_per_s"}),
        (("straggler", "--num-envs", 2, "--mean-ms", 1), {"steps_per_s"}),
        (("learner", "--train-batch-size", 50), {"rows_per_s", "wait_share"}),
        (("serving", "--clients", 2), {"actions_per_s", "p50_ms", "p99_ms"}),
    ],
)
def test_other_measurements(words, keys):
    done = call("bench", *words, "--seconds", 0.1, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert keys <= found.keys()
    assert all(found[key] >= 0 for key in keys)
    assert found.get("steps_per_s", 1) > 0


def test_envs_lists_what_can_be_made():
    found = json.loads(call("envs", "--json").stdout)
    by_id = {record["id"]: record for record in found}
    assert by_id["CartPole-v1"]["installed"]
    assert by_id["CartPole-v1"]["vector"]
    assert by_id["CartPole-v1"]["max_episode_steps"] == 500
    assert [r["id"] for r in json.loads(call("envs", "mountaincar", "--json").stdout)] == [
        "MountainCar-v0",
        "MountainCarContinuous-v0",
    ]
    assert "Pendulum-v1" in call("envs", "pendulum").stdout


def test_envs_prints_ids_and_commands_whole_also_into_a_pipe(monkeypatch):
    long = EnvRecord("ALE/" + "Cannonball" * 9 + "-v5", "ALE", True, "", 9, True)
    extra = EnvRecord("Ant-v5", "mujoco", False, "pip install 'gymnasium[mujoco]'", None, False)
    monkeypatch.setattr("rlsample.env.catalog.list_all_envs", lambda: [long, extra])
    lines = call("envs", "--all").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["env", long.id, "Ant-v5"]
    assert lines[2].endswith("pip install 'gymnasium[mujoco]'")
    assert call("envs").stdout.splitlines()[-1] == "1 more need packages that are not installed: rlsample envs --all"


def test_nobody_minds_a_reader_that_has_seen_enough():
    code = "from rlsample.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "envs"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 1


def test_tune_names_a_layout_and_why():
    found = json.loads(call("tune", "--env", "CartPole-v1", "--num-envs", 2, "--seconds", 0.05, "--json").stdout)
    assert found["best"] in found["trials"]
    assert found["trials"][0]["steps_per_s"] == max(trial["steps_per_s"] for trial in found["trials"])
    assert found["costs"]["step_us"] > 0
    assert found["reason"]
