"""``rlsample train``."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click

from rlsample.algorithms.run_config import RunConfig, configure, env_name, read_options
from rlsample.algorithms.train_result import TrainResult
from rlsample.algorithms.trainer import Trainer
from rlsample.cli.error_boundary import short_errors
from rlsample.cli.interrupts import on_interrupt
from rlsample.cli.progress_view import make_view
from rlsample.cli.settings_options import SettingsCommand, given_options
from rlsample.errors import ConfigError

__all__ = ["train"]

_STOPPING = "\nstopping: this iteration ends, then a checkpoint is saved (again: stop at once)\n"


@click.command(cls=SettingsCommand, epilog="In brackets: the default before an algorithm's preset; see docs/config.md.")
@click.option("--config", "config_file", metavar="FILE", help="JSON or TOML file of options; flags win over it.")
@click.option("--resume", metavar="DIR", help="Go on with the run in DIR, or with one checkpoint in it.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier run in the output folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object, the last line on stdout.")
@click.pass_context
@short_errors
def train(ctx: click.Context, config_file: str | None, resume: str | None, overwrite: bool, as_json: bool) -> None:
    """Train a policy on an env."""
    options = given_options(ctx)
    if resume is not None:
        trainer = _resume(resume, options, config_file, overwrite)
    else:
        trainer = Trainer(_configure(config_file, options), overwrite=overwrite)
    with trainer:
        result, signal_number = _run(trainer)
    _report(result, trainer.folder.path, as_json)
    if signal_number:
        sys.exit(128 + signal_number)


def _resume(path: str, options: dict[str, Any], config_file: str | None, overwrite: bool) -> Trainer:
    clash = [name for name, given in (("--config", config_file), ("--overwrite", overwrite)) if given]
    clash += ["--out"] if "out" in options else []
    if clash:
        raise ConfigError(f"--resume goes on in its own folder with its own config; leave out {', '.join(clash)}")
    return Trainer.resume(path, **options)


def _configure(config_file: str | None, options: dict[str, Any]) -> RunConfig:
    """The config, with a new folder under ``runs`` if none was named."""
    from_file = read_options(config_file) if config_file else {}
    section = from_file.get("output")  # of that name there is an option, too
    named = {**from_file, **(section if isinstance(section, dict) else {}), **options}.get("out")
    if named is not None:
        return configure(from_file, **options)
    config = configure(from_file, **{**options, "out": "runs"})
    return dataclasses.replace(config, output=dataclasses.replace(config.output, out=_new_folder(config)))


def _new_folder(config: RunConfig) -> str:
    env = env_name(config.train.env).replace("/", "-")
    return f"runs/{config.train.algo}-{env}-seed{config.train.seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def _run(trainer: Trainer) -> tuple[TrainResult, int]:
    """The result, and the signal that ended the run, or 0."""
    config = trainer.config
    received: list[int] = []

    def request(number: int) -> None:
        received.append(number)
        trainer.request_stop()
        # A print from here could meet the same stream in the middle of a write.
        os.write(2, _STOPPING.encode())

    title = f"{config.train.algo} on {env_name(config.train.env)}"
    view = make_view(title, config.train.max_steps, config.output.log_interval_s)
    try:
        with on_interrupt(request):
            result = trainer.run(on_result=view.show)
    finally:
        view.close()
    return result, received[0] if received else 0


def _report(result: TrainResult, folder: Path | None, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(result.to_json()))
        return
    score = "no episode ended" if result.return_mean is None else f"mean return {result.return_mean:.1f}"
    why = {"stop_return": "goal reached", "max_steps": "max_steps reached", "request": "stopped"}[result.stopped_by]
    click.echo(f"{result.algo} on {result.env}: {why}; {score}, {result.episodes:,} episodes")
    click.echo(f"{result.env_steps:,} steps in {result.seconds:.1f} s; files in {folder}")
    if result.stopped_by == "request":
        click.echo(f"checkpoint {result.checkpoint}; go on with: rlsample train --resume {folder}")
