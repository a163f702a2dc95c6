"""Options from presets, files and single words become one config; what cannot be is refused by name."""

import dataclasses
import json

import gymnasium
import pytest

from rlsample.algorithms.option_values import field_types
from rlsample.algorithms.presets import ALGORITHMS
from rlsample.algorithms.run_config import configure, option_types, read_options, sections_of, to_document
from rlsample.algorithms.train_settings import TrainSettings
from rlsample.errors import ConfigError
from rlsample.settings import option_help


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_an_options_name_is_unique_and_has_help(algo):
    seen = {}
    for section, types in option_types(algo).items():
        fields = {field.name: field for field in dataclasses.fields(sections_of(algo)[section])}
        for name in types:
            assert name not in seen, f"{name} in {section} and {seen[name]}"
            seen[name] = section
            assert option_help(fields[name]), f"{section}.{name} has no help"


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_presets_name_real_options_and_none_of_the_runs_own(algo):
    algorithm = ALGORITHMS[algo]
    own = set(field_types(TrainSettings))
    for env, options in {"Other-v0": {}, **algorithm.tuned}.items():
        assert not own & set({**algorithm.defaults, **options}), "TrainSettings' defaults hold for every env"
        configure(algo=algo, env=env)


def test_later_ones_win(tmp_path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"gamma": 0.5, "sampler": {"rollout_fragment_length": 7}, "seed": 3}))
    preset = configure(algo="ppo", env="CartPole-v1")
    config = configure(read_options(file), seed=4)
    assert config.policy.gamma == 0.5
    assert config.sampler.rollout_fragment_length == 7
    assert config.train.seed == 4
    assert config.learning == preset.learning
    assert dataclasses.replace(config.policy, gamma=preset.policy.gamma) == preset.policy


def test_tuned_options_are_for_their_env():
    tuned = ALGORITHMS["ppo"].tuned["CartPole-v1"]
    name, value = next((n, v) for n, v in tuned.items() if v != ALGORITHMS["ppo"].defaults.get(n))
    section = next(s for s, c in sections_of("ppo").items() if name in field_types(c))
    assert getattr(getattr(configure(env="CartPole-v1"), section), name) == value
    assert getattr(getattr(configure(env="Acrobot-v1x"), section), name) != value


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "Other-v0"])
def test_a_document_gives_the_same_config(algo, env):
    config = configure(algo=algo, env=env, stop_return=1.5, out="runs/x", seed=9)
    assert configure(json.loads(json.dumps(to_document(config)))) == config


def test_toml(tmp_path):
    pytest.importorskip("tomllib")
    file = tmp_path / "c.toml"
    file.write_text('algo = "a2c"\n[policy]\ngamma = 0.75\n[output]\nkeep_checkpoints = 2\n')
    config = configure(read_options(file))
    assert config.train.algo == "a2c"
    assert config.policy.gamma == 0.75
    assert config.output.keep_checkpoints == 2


REFUSED = [
    ({"gama": 0.9}, "unknown option 'gama'; did you mean 'gamma'?"),
    ({"policy": {"gama": 0.9}}, "unknown option 'gama'; did you mean 'gamma'?"),
    ({"policy": {"num_envs": 2}}, "option 'num_envs' belongs to section 'train', not 'policy'"),
    ({"policy": 3}, "section 'policy' must be a table of options, not 3"),
    ({"algo": "pp0"}, "unknown algo 'pp0'; did you mean 'ppo'?"),
    ({"algo": 7}, "unknown algo '7'; known: a2c, a3c, apex, appo, dqn, impala, ppo"),
    ({"num_envs": "8"}, "option 'num_envs' must be a whole number, not '8'"),
    ({"num_envs": 0}, "num_envs must be at least 1, not 0"),
    ({"num_workers": -1}, "num_workers must be from 0 to 4095, not -1"),
    ({"max_evaluator_restarts": -1}, "max_evaluator_restarts must be at least 0, not -1"),
    ({"start_method": "vfork"}, "start_method 'vfork': must be one of forkserver, spawn, fork"),
    ({"stop_return": float("nan")}, "stop_return is NaN"),
    ({"video": True}, "video needs a folder"),
    ({"checkpoint_interval_iterations": 0}, "checkpoint_interval_iterations must be at least 1 or none, not 0"),
    ({"checkpoint_interval_s": -1.0}, "checkpoint_interval_s must be 0 or more or none, not -1.0"),
    ({"keep_checkpoints": 0}, "keep_checkpoints must be at least 1, not 0"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ConfigError) as caught:
        configure(options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.json", "{", "cannot read config .*c.json: .*line 1"),
        ("c.json", "[1]", "holds a list; it must be a table"),
        ("c.yaml", "a: 1", "the suffix is '.yaml'; write .json or .toml"),
        ("absent.json", None, "cannot read config .*absent.json: No such file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_options(tmp_path / name)


class OwnEnv(gymnasium.Env):
    def __deepcopy__(self, memo):
        raise AssertionError("an env is not to be copied")


def test_an_env_object_is_described_only():
    assert to_document(configure(env=OwnEnv()))["train"]["env"] == "<OwnEnv>"
    assert to_document(configure(env=OwnEnv))["train"]["env"] == "<OwnEnv>"


def test_what_json_cannot_hold_is_named():
    with pytest.raises(ConfigError, match=r"option 'env_config' cannot be kept in config\.json: .*set"):
        to_document(configure(env_config={"a": {1}}))
