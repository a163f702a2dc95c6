"""Runs whose env is elsewhere and asks: what to build so that a policy can be served, and trained meanwhile.

A served run's folder has one file more than others: ``spaces.json``, the spaces it was started with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium

from rlsample.algorithms.evaluate import load_policy
from rlsample.algorithms.presets import find_algorithm
from rlsample.algorithms.run_config import configure
from rlsample.algorithms.run_folder import find_run, load_state, read_config
from rlsample.algorithms.trainer import Trainer
from rlsample.env.convert import as_base_env
from rlsample.env.serving import ServingEnv, ServingSettings
from rlsample.errors import ConfigError, RlsampleError
from rlsample.evaluation import CommonPolicyEvaluator
from rlsample.serving.space_codec import describe_space, space_of

__all__ = [
    "ServedSpaces",
    "is_served",
    "new_evaluator",
    "resume_served",
    "served_evaluator",
    "spaces_of",
    "spaces_of_run",
    "train_served",
]

_FILE = "spaces.json"
_NO_END = 10**12  # env steps: a server has no last one, unless it is told
_NEVER_SERVED = {"horizon": None, "soft_horizon": False, "sample_async": None}  # only its client ends an episode


class ServedSpaces(NamedTuple):
    """The spaces of a served env, and the id of the env they were taken from, or None."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    env_id: str | None

    def make_env(self, max_concurrent: int, settings: ServingSettings | None = None) -> ServingEnv:
        """An env for one evaluator."""
        return ServingEnv(self.observation_space, self.action_space, max_concurrent, settings)

    def save(self, folder: Path) -> None:
        """Writes ``spaces.json`` into a run's folder."""
        document = {
            "observation_space": describe_space(self.observation_space),
            "action_space": describe_space(self.action_space),
            "env": self.env_id,
        }
        (folder / _FILE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def spaces_of(text: str) -> ServedSpaces:
    """The spaces of an env id, or of a JSON file with ``observation_space`` and ``action_space``.

    Raises:
        ConfigError: no such file or env.
        SpaceError: the file describes no spaces.
    """
    if text.endswith(".json"):
        return _read(Path(text))
    try:
        with as_base_env(text, 1, vectorize="loop") as env:
            return ServedSpaces(env.observation_space, env.action_space, text)
    except RlsampleError as e:
        raise ConfigError(f"--env-spaces {text} is no env that can be made, and no .json file: {e}") from e


def _read(path: Path) -> ServedSpaces:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        observation, action = document["observation_space"], document["action_space"]
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}") from e
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} has to hold observation_space and action_space: {type(e).__name__}: {e}") from e
    return ServedSpaces(space_of(observation), space_of(action), document.get("env"))


def spaces_of_run(path: str | Path) -> ServedSpaces:
    """The spaces of a run, served or not.

    Raises:
        ConfigError: there is no run, or its env was a Python object, of which only its name is known.
    """
    folder, _ = find_run(path)
    if (folder / _FILE).is_file():
        return _read(folder / _FILE)
    env = read_config(folder, {}).train.env
    return spaces_of(env)


def served_evaluator(path: str | Path, env: ServingEnv, explore: bool) -> CommonPolicyEvaluator:
    """An evaluator that answers with a run's newest checkpoint and does not learn. The caller closes it.

    Raises:
        ConfigError, CheckpointError: as :func:`~rlsample.algorithms.evaluate`.
    """
    options: dict[str, Any] = {**_NEVER_SERVED, "explore": explore, "update_filter": False, "postprocess": False}
    return load_policy(path, env=env, **options)[0]


def new_evaluator(algo: str, env: ServingEnv, explore: bool, options: Mapping[str, Any]) -> CommonPolicyEvaluator:
    """An evaluator with an untrained policy that does not learn. The caller closes it."""
    from rlsample.algorithms.build import build_evaluator

    config = configure({"num_workers": 0, **options, "algo": algo, "env": env})
    return build_evaluator(
        config, **{**_NEVER_SERVED, "explore": explore, "update_filter": False, "postprocess": False}
    )


def train_served(
    spaces: ServedSpaces, env: ServingEnv, options: Mapping[str, Any], start: str | None = None
) -> Trainer:
    """A new run that learns from served episodes; with the env's tuned preset, if its spaces came from one.

    Args:
        options: as for training; ``max_steps`` has no end here unless it is given.
        start: a run of any env with these spaces, whose newest policy and filter are where this one begins.

    Raises:
        ConfigError, CheckpointError: options that cannot work, or no run there.
    """
    algo = str(options.get("algo") or (_algo_of(start) if start else "ppo"))
    tuned = find_algorithm(algo).options_for(spaces.env_id)
    given = {**tuned, "num_workers": 0, "max_steps": _NO_END, **options, **_NEVER_SERVED, "algo": algo, "env": env}
    state = None
    if start is not None:
        folder, checkpoint = find_run(start)
        own = read_config(folder, {"env": env})
        given = {**_flat(own.policy), "model": vars(own.policy.model), **given} if own.train.algo == algo else given
        state = load_state(folder, checkpoint)
    trainer = Trainer(configure(given))
    try:
        if state is not None:
            trainer.evaluator.policy.set_weights(state["evaluator"]["policy"]["weights"])
            trainer.evaluator.filter.set_state(state["evaluator"]["filter"])
        if trainer.folder.path is not None:
            spaces.save(trainer.folder.path)
    except BaseException:
        trainer.close()
        raise
    return trainer


def _algo_of(run: str) -> str:
    return read_config(find_run(run)[0], {"env": "CartPole-v1"}).train.algo


def _flat(settings: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(settings).items() if name != "model"}


def resume_served(path: str | Path, env: ServingEnv, options: Mapping[str, Any]) -> Trainer:
    """Goes on with a served run, in its folder. Episodes that were open when it ended are lost."""
    return Trainer.resume(path, env=env, **options)


def is_served(path: str | Path) -> bool:
    """Whether a run was served: it can be gone on with, in its own folder."""
    return (find_run(path)[0] / _FILE).is_file()
