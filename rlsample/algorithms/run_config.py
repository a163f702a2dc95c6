"""Everything that decides a run, gathered from presets, a file and single options.

Later ones win: settings' own defaults < the algorithm's < its tuned ones for the env < what is given. What is given may
be flat (``{"gamma": 0.98}``) or by section, as in a run's ``config.json`` (``{"policy": {"gamma": 0.98}}``).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlsample.algorithms.option_values import check_value, field_types
from rlsample.algorithms.presets import find_algorithm
from rlsample.algorithms.train_settings import OutputSettings, TrainSettings
from rlsample.engine.process_engine import ProcessSettings
from rlsample.env.env_settings import EnvSettings
from rlsample.errors import ConfigError, unknown_name
from rlsample.evaluation.evaluator_set import EvaluatorSetSettings
from rlsample.evaluation.sampler_settings import SamplerSettings
from rlsample.offline.offline_settings import OfflineSettings
from rlsample.policy import ModelSettings
from rlsample.settings import from_options, to_dict

__all__ = ["RunConfig", "configure", "env_name", "option_types", "read_options", "sections_of", "to_document"]


@dataclass(frozen=True)
class RunConfig:
    """The settings of one run, complete. :func:`configure` makes it.

    Attributes:
        train: what, and until when.
        output: what is written, and how often.
        envs: how the env is built and checked.
        sampler: how rows are collected.
        offline: logs that are written, and read in place of sampling.
        policy: the algorithm's own settings, such as PPOSettings; its ``model`` is a section of its own in documents.
        learning: how batches become updates: the settings of the algorithm's optimizer.
        workers: what becomes of remote evaluators that die.
        engine: how their processes are run.
    """

    train: TrainSettings
    output: OutputSettings
    envs: EnvSettings
    sampler: SamplerSettings
    offline: OfflineSettings
    policy: Any
    learning: Any
    workers: EvaluatorSetSettings
    engine: ProcessSettings


def sections_of(algo: str) -> dict[str, type]:
    """Section name -> settings class, for one algorithm."""
    return {
        "train": TrainSettings,
        "output": OutputSettings,
        "envs": EnvSettings,
        "sampler": SamplerSettings,
        "offline": OfflineSettings,
        "policy": find_algorithm(algo).policy_settings,
        "model": ModelSettings,
        "learning": find_algorithm(algo).optimizer_settings,
        "workers": EvaluatorSetSettings,
        "engine": ProcessSettings,
    }


def option_types(algo: str) -> dict[str, dict[str, Any]]:
    """Section name -> option name -> type. The policy's ``model`` is no option but the section of that name."""
    types = {section: field_types(settings_class) for section, settings_class in sections_of(algo).items()}
    types["policy"].pop("model", None)
    return types


def configure(options: Mapping[str, Any] | None = None, /, **more: Any) -> RunConfig:
    """Completes options to a config; ``more`` wins over ``options``.

    Raises:
        ConfigError: an unknown option, section or algo (the nearest name is given), a value of the wrong type, or one
            that its settings refuse.
    """
    given = {**_by_name(options or {}), **_by_name(more)}
    train = TrainSettings()
    algorithm = find_algorithm(given["algo"][1] if "algo" in given else train.algo)
    env = given["env"][1] if "env" in given else train.env
    merged = {**{name: (None, value) for name, value in algorithm.options_for(env).items()}, **given}
    if merged.get("num_workers", (None, None))[1] is None:
        merged["num_workers"] = (None, algorithm.num_workers)
    if any(merged.get(name, (None, None))[1] == "linear" for name in _SCHEDULES):
        merged.setdefault("schedule_steps", merged.get("max_steps", (None, train.max_steps)))
    sections, types = sections_of(algorithm.name), option_types(algorithm.name)
    owner = {name: section for section, fields in types.items() for name in fields}
    split: dict[str, dict[str, Any]] = {section: {} for section in sections}
    for name, (section, value) in merged.items():
        if name not in owner:
            raise unknown_name("option", name, owner)
        if section not in (None, owner[name]):
            raise ConfigError(f"option {name!r} belongs to section {owner[name]!r}, not {section!r}")
        split[owner[name]][name] = check_value(name, value, types[owner[name]][name])
    split["policy"]["model"] = from_options(ModelSettings, split.pop("model"))
    del sections["model"]
    return RunConfig(**{section: from_options(sections[section], split[section]) for section in sections})


def read_options(path: str | Path) -> dict[str, Any]:
    """Reads a JSON or TOML file of options.

    Raises:
        ConfigError: no such file, another suffix, or a text that does not parse: the line is named.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        document = _parse(path, text)
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"cannot read config {path}: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"config {path} holds a {type(document).__name__}; it must be a table of options")
    return document


def to_document(config: RunConfig) -> dict[str, dict[str, Any]]:
    """The config by section, ready for JSON; :func:`configure` takes it back.

    An env that is no id is only described, as ``<ClassName>``: it has to be given again when the run is resumed.

    Raises:
        ConfigError: an option that JSON cannot hold.
    """
    described = dataclasses.replace(config, train=dataclasses.replace(config.train, env=env_name(config.train.env)))
    document: dict[str, dict[str, Any]] = {
        field.name: to_dict(getattr(described, field.name)) for field in dataclasses.fields(described)
    }
    document["model"] = document["policy"].pop("model")
    for section in document.values():
        for name, value in section.items():
            try:
                json.dumps(value)
            except TypeError as error:
                raise ConfigError(f"option {name!r} cannot be kept in config.json: {error}") from error
    return document


def env_name(env: Any) -> str:
    """The id, or ``<ClassName>`` of an env object, class or factory."""
    return env if isinstance(env, str) else f"<{getattr(env, '__name__', type(env).__name__)}>"


def _by_name(options: Mapping[str, Any]) -> dict[str, tuple[str | None, Any]]:
    """Option name -> (the section it was given in, or None, and its value)."""
    found: dict[str, tuple[str | None, Any]] = {}
    for name, value in options.items():
        if name in _SECTION_NAMES and isinstance(value, Mapping):
            found.update({option: (name, inner) for option, inner in value.items()})
        elif name not in _SECTION_NAMES or name == "output":  # which is an option too
            found[name] = (None, value)
        else:
            raise ConfigError(f"section {name!r} must be a table of options, not {value!r}")
    return found


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".json":
        return json.loads(text)
    if path.suffix != ".toml":
        raise ValueError(f"the suffix is {path.suffix!r}; write .json or .toml")
    try:
        import tomllib
    except ImportError:
        raise ValueError("TOML needs Python 3.11 or later; write it as .json") from None
    return tomllib.loads(text)


_SECTION_NAMES = ("train", "output", "envs", "sampler", "offline", "policy", "model", "learning", "workers", "engine")
_SCHEDULES = ("lr_schedule", "clip_range_schedule")
