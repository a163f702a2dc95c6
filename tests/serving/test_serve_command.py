"""``rlsample serve`` as a user meets it: training over HTTP, ending by a signal, serving what was trained."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import types

import numpy as np
import pytest
from click.testing import CliRunner
from gymnasium.spaces import Box, Discrete

from rlsample.algorithms.served_runs import (
    ServedSpaces,
    is_served,
    new_evaluator,
    resume_served,
    served_evaluator,
    spaces_of,
    spaces_of_run,
    train_served,
)
from rlsample.cli import main
from rlsample.errors import ConfigError, SpaceError
from rlsample.serving import HttpSettings, PolicyServer
from tests.serving.http_rig import LIMIT_S, Background, await_true, callers

SMALL = {"num_envs": 1, "rollout_fragment_length": 8, "minibatch_size": 8, "num_sgd_iter": 1, "tensorboard": False}
FLAGS = [
    word
    for name, value in SMALL.items()
    for word in ([f"--no-{name}"] if value is False else [f"--{name.replace('_', '-')}", str(value)])
]


@contextlib.contextmanager
def serving(*arguments):
    """The command in a process; gives it and where it listens."""
    command = [sys.executable, "-m", "rlsample.cli", "serve", "--port", "0", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            process.stdout.readline()
            found = re.match(r"http://(127\.0\.0\.1):(\d+)/", process.stdout.readline())
            assert found, process.communicate(timeout=LIMIT_S)
            yield process, types.SimpleNamespace(address=(found[1], int(found[2])))
        finally:
            process.kill()


def play(call, episode, steps, until=lambda: False):
    for step in range(steps):
        answer = call("action", episode, obs=[0.01 * step, 0, 0, 0], reward=1.0)
        assert answer.status == 200, answer.raw
        if until():
            return


def test_train_over_http_end_by_a_signal_then_serve(tmp_path):
    run = tmp_path / "run"
    with serving("--env-spaces", "CartPole-v1", "--train", "--out", run, *FLAGS) as (process, server):
        with callers(server, 2) as (call, other):
            episode = call.start()
            play(call, episode, 2000, lambda: other.get("/v1/stats").value["trained_steps"] >= 8)
            stats = other.get("/v1/stats").value
            assert stats["training"] is True
            assert stats["trained_steps"] >= 8
            assert stats["policy_version"] > 0
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(OSError):
                await_true(lambda: call("action", episode, obs=[0, 0, 0, 0], reward=1.0).status == 503)
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM, process.stderr.read()
    assert list((run / "checkpoints").glob("step_*"))
    assert json.loads((run / "spaces.json").read_text())["env"] == "CartPole-v1"
    assert is_served(run)
    with serving(run) as (process, server), callers(server) as call:
        play(call, call.start(), 3)
        assert call.get("/v1/stats").value["training"] is False
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 128 + signal.SIGINT


def trained(trainer, steps=40):
    """Plays over HTTP while the trainer makes one iteration; returns its weights."""
    with (
        trainer,
        PolicyServer(trainer.evaluator, HttpSettings(port=0), sample=False) as server,
        callers(server) as call,
    ):
        iteration = Background(trainer.step)
        episode = call.start()
        for step in range(steps):
            call("action", episode, obs=[0.1 * step, 1], reward=1.0)
        iteration.result()
        trainer.save()
        return trainer.evaluator.get_weights(), trainer.env_steps


SPACES = ServedSpaces(Box(-9, 9, (2,), np.float32), Discrete(3), None)


def test_a_served_run_goes_on_where_it_ended(tmp_path):
    run = tmp_path / "run"
    options = {**SMALL, "algo": "ppo", "out": str(run)}
    weights, steps = trained(train_served(SPACES, SPACES.make_env(4), options))
    assert spaces_of_run(run) == SPACES
    again = resume_served(run, spaces_of_run(run).make_env(4), {})
    with again:
        assert again.env_steps == steps
        for name, value in again.evaluator.get_weights().items():
            np.testing.assert_array_equal(value, weights[name])
    evaluator = served_evaluator(run, SPACES.make_env(4), explore=False)
    with evaluator:
        for name, value in evaluator.get_weights().items():
            np.testing.assert_array_equal(value, weights[name])
        assert evaluator.settings.explore is False
    other = train_served(SPACES, SPACES.make_env(4), {**SMALL, "out": str(tmp_path / "other")}, start=str(run))
    with other:
        assert other.env_steps == 0
        for name, value in other.evaluator.get_weights().items():
            np.testing.assert_array_equal(value, weights[name])


def test_an_untrained_policy_is_served_without_rows():
    evaluator = new_evaluator("ppo", SPACES.make_env(4), False, {})
    with PolicyServer(evaluator, HttpSettings(port=0)) as server, callers(server) as call:
        episode = call.start()
        first = call("action", episode, obs=[1, 1]).value["action"]
        assert all(call("action", episode, obs=[1, 1], reward=1.0).value["action"] == first for _ in range(20))
        call("end", episode, obs=[1, 1], reward=1.0)
        stats = call.get("/v1/stats").value
        assert (stats["returns"], stats["sampled_steps"]) == ([21.0], 0)
        weights = call.get("/v1/weights")
        assert weights.value["version"] == 0
        assert sum(np.asarray(w).size for w in weights.value["weights"].values()) > 4000
        assert call.get("/v1/weights?have=0").status == 304


def test_spaces_from_a_file(tmp_path):
    path = tmp_path / "spaces.json"
    box = {"type": "Box", "shape": [2], "low": -9, "high": 9}
    path.write_text(json.dumps({"observation_space": box, "action_space": {"type": "Discrete", "n": 3}}))
    assert spaces_of(str(path)) == SPACES
    path.write_text(json.dumps({"observation_space": {"type": "Sphere"}, "action_space": {"type": "Discrete", "n": 3}}))
    with pytest.raises(SpaceError, match="Sphere"):
        spaces_of(str(path))
    path.write_text("{}")
    with pytest.raises(ConfigError, match="observation_space"):
        spaces_of(str(path))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--env-spaces"),
        (["runs/x", "--env-spaces", "CartPole-v1"], "--env-spaces"),
        (["runs/there-is-none"], "no run"),
        (["--env-spaces", "CartPole-v1", "--host", "0.0.0.0"], "token"),
        (["--env-spaces", "CartPole-v1", "--token-file", "/no/such/file"], "/no/such/file"),
        (["--env-spaces", "NoSuchEnv-v7"], "NoSuchEnv-v7"),
        (["--env-spaces", "missing.json"], "missing.json"),
        (["--env-spaces", "CartPole-v1", "--env", "CartPole-v1"], "--env-spaces"),
    ],
)
def test_what_cannot_be_served(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLSAMPLE_TOKEN", raising=False)
    result = CliRunner().invoke(main, ["serve", "--port", "0", *arguments])
    assert result.exit_code == 2, result.output
    assert words in result.output
    assert list(tmp_path.iterdir()) == []


def test_the_token_comes_from_a_file_or_the_environment(tmp_path, monkeypatch):
    from rlsample.cli.serve_command import _token

    monkeypatch.setenv("RLSAMPLE_TOKEN", "from-env")
    assert _token(None) == "from-env"
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert _token(str(file)) == "from-file"
    monkeypatch.delenv("RLSAMPLE_TOKEN")
    assert _token(None) is None
