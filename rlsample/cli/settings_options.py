"""Command-line options made from the settings dataclasses: one per field, under its section's heading."""

from __future__ import annotations

import dataclasses
from typing import Any

import click
from click.core import ParameterSource

from rlsample.algorithms.option_values import describe, parse_text
from rlsample.algorithms.presets import ALGORITHMS
from rlsample.algorithms.run_config import option_types, sections_of
from rlsample.errors import ConfigError
from rlsample.settings import option_help

__all__ = ["SettingsCommand", "given_options", "shown_default"]

_GIVEN = "rlsample.given_options"


class SettingsCommand(click.Command):
    """A command with an option for each field of each section, over all algorithms.

    The options are no arguments of the callback: :func:`given_options` has those that were on the command line.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += _all_options()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the options under the headings of their sections."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(param, "section", "command"), []).append(record)
        for section, records in sections.items():
            with formatter.section(section.capitalize()):
                formatter.write_dl(records)


def given_options(ctx: click.Context) -> dict[str, Any]:
    """Option name -> value, for what the user wrote on the command line and nothing else."""
    return dict(ctx.meta.get(_GIVEN, {}))


def shown_default(field: dataclasses.Field[Any]) -> str:
    """A field's default as one would write it on the command line."""
    default = field.default
    if default is dataclasses.MISSING:
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else None
    if default is None or isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, (tuple, list)):
        return ",".join(map(str, default))
    return str(default)


class _SettingType(click.ParamType):
    """Reads one field's value by its annotated type."""

    def __init__(self, hint: Any) -> None:
        self.hint = hint
        words = describe(hint)
        self.name = (
            "N" if "whole number" in words else "X" if "number" in words else "TEXT" if "text" in words else "VALUE"
        )

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return parse_text(param.name or "" if param else "", value, self.hint)
        except ConfigError as error:
            return self.fail(str(error), param, ctx)


class _SettingOption(click.Option):
    def __init__(self, section: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, expose_value=False, callback=_collect, **kwargs)
        self.section = section


def _collect(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if param.name and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE:
        ctx.meta.setdefault(_GIVEN, {})[param.name] = value


def _all_options() -> list[click.Parameter]:
    owners: dict[str, list[str]] = {}
    found: dict[str, tuple[str, dataclasses.Field[Any], Any]] = {}
    for algo in ALGORITHMS:
        settings = sections_of(algo)
        for section, types in option_types(algo).items():
            for field in dataclasses.fields(settings[section]):
                if field.name in types:
                    found.setdefault(field.name, (section, field, types[field.name]))
                    owners.setdefault(field.name, []).append(algo)
    only = {
        name: "" if len(algos) == len(ALGORITHMS) else f" ({', '.join(algos)} only)" for name, algos in owners.items()
    }
    return [_make_option(section, field, hint, only[name]) for name, (section, field, hint) in found.items()]


def _make_option(section: str, field: dataclasses.Field[Any], hint: Any, only: str) -> _SettingOption:
    flag = field.name.replace("_", "-")
    help_text = f"{option_help(field)}{only}  [{shown_default(field)}]"
    if hint is bool:
        return _SettingOption(section, [f"--{flag}/--no-{flag}"], default=None, help=help_text)
    return _SettingOption(section, [f"--{flag}"], type=_SettingType(hint), default=None, help=help_text)
