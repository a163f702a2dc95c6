"""Writes ``docs/config.md`` from the settings dataclasses: ``python -m rlsample.cli.config_docs``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsample.algorithms.option_values import describe
from rlsample.algorithms.presets import ALGORITHMS
from rlsample.algorithms.run_config import option_types, sections_of
from rlsample.cli.settings_options import shown_default
from rlsample.settings import option_help

__all__ = ["config_reference"]

_HEAD = """# Every option

Made by `make docs` from the settings dataclasses; edit those.

An option is a flag of `rlsample train` (`--num-envs 8`), a keyword of `rlsample.train(num_envs=8)`, and a key of a
`--config` file (JSON or TOML), alone or in its section: `{"num_envs": 8}` or `{"train": {"num_envs": 8}}`. A run writes
all of them to `config.json`, which `--config` takes again. Later ones win: the defaults below, the algorithm's preset,
its preset for the env, the config file, the flags.
"""


def config_reference() -> str:
    """The whole page, as Markdown."""
    parts = [_HEAD]
    for section in sections_of("ppo"):
        owners: dict[type, list[str]] = {}
        for algo in ALGORITHMS:
            owners.setdefault(sections_of(algo)[section], []).append(algo)
        for algos in owners.values():
            heading = f"## {section}" if len(owners) == 1 else f"## {section}, {', '.join(algos)}"
            parts.append(_section(heading, algos[0], section))
    parts.append("## Presets\n")
    for algo, algorithm in ALGORITHMS.items():
        parts.append(_preset(f"### {algo}", algorithm.defaults))
        for env, options in algorithm.tuned.items():
            parts.append(_preset(f"### {algo} on {env}, on top of that", options))
    return "\n".join(parts)


def _section(heading: str, algo: str, section: str) -> str:
    types = option_types(algo)[section]
    rows = [
        f"| `{field.name}` | {describe(types[field.name])} | `{shown_default(field)}` | {_cell(option_help(field))} |"
        for field in dataclasses.fields(sections_of(algo)[section])
        if field.name in types
    ]
    return "\n".join([heading, "", "| option | takes | default | meaning |", "|---|---|---|---|", *rows, ""])


def _preset(heading: str, options: Mapping[str, Any]) -> str:
    rows = [f"| `{name}` | `{value}` |" for name, value in options.items()]
    return "\n".join([heading, "", "| option | value |", "|---|---|", *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    Path("docs/config.md").write_text(config_reference(), encoding="utf-8")
