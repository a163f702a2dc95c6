"""``rlsample serve``."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from rlsample.cli.error_boundary import short_errors
from rlsample.cli.interrupts import on_interrupt
from rlsample.cli.settings_options import SettingsCommand, given_options
from rlsample.errors import ConfigError, EnvClosedError, LearnerError, SamplerError, ServingError

__all__ = ["serve"]

_STOPPING = b"\nstopping: clients are told, then it ends (again: stop at once)\n"
_TOKEN = "RLSAMPLE_TOKEN"


@click.command(
    cls=SettingsCommand,
    epilog="The options below --insecure are those of `rlsample train`; with --train they say how it learns.",
)
@click.argument("run", metavar="[DIR]", required=False)
@click.option("--train", is_flag=True, help="Learn from the episodes that are served.")
@click.option("--env-spaces", metavar="ID|FILE.json", help="Without DIR: an env id, or a file of spaces.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0: any free one.")
@click.option("--token-file", metavar="FILE", help=f"Holds the token clients send; or set {_TOKEN}.")
@click.option("--max-concurrent", type=click.IntRange(1), default=256, show_default=True, help="Most open episodes.")
@click.option("--idle-timeout-s", type=float, default=300.0, show_default=True, help="Silence that ends an episode.")
@click.option("--rate-limit", type=float, help="Requests per second and client address.  [no limit]")
@click.option("--insecure", is_flag=True, help="Allow an address that others reach without a token.")
@click.pass_context
@short_errors
def serve(
    ctx: click.Context,
    run: str | None,
    train: bool,
    env_spaces: str | None,
    token_file: str | None,
    max_concurrent: int,
    idle_timeout_s: float,
    **http: Any,
) -> None:
    """Serve a policy over HTTP: the one of the run in DIR, or a new one of --algo. See docs/serving.md."""
    from rlsample.env.serving import ServingSettings
    from rlsample.serving import HttpSettings

    options = given_options(ctx)
    if "env" in options:
        raise ConfigError("--env builds an env, and here the clients have it: give --env-spaces")
    settings = HttpSettings(token=_token(token_file), **http)
    if (run is None) == (env_spaces is None):
        raise ConfigError("give the folder of a run, or --env-spaces with an env id or a .json file of spaces")
    serving = ServingSettings(idle_timeout_s=idle_timeout_s, when_full="error")
    if train:
        status = _train(run, env_spaces, options, settings, (max_concurrent, serving))
    else:
        status = _serve(run, env_spaces, options, settings, (max_concurrent, serving))
    sys.exit(status)


def _token(path: str | None) -> str | None:
    if path is None:
        return os.environ.get(_TOKEN) or None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read the token file {path}: {e}") from e


@contextlib.contextmanager
def _stop_event() -> Iterator[tuple[threading.Event, list[int]]]:
    """An event that the first SIGINT or SIGTERM sets, and the signals that came."""
    stop = threading.Event()
    received: list[int] = []

    def request(number: int) -> None:
        received.append(number)
        os.write(2, _STOPPING)
        stop.set()

    with on_interrupt(request):
        yield stop, received


def _serve(run: str | None, env_spaces: str | None, options: dict[str, Any], settings: Any, env: Any) -> int:
    from rlsample.algorithms.served_runs import new_evaluator, served_evaluator, spaces_of, spaces_of_run
    from rlsample.serving import PolicyServer

    explore = bool(options.pop("explore", False))
    with _stop_event() as (stop, received):
        if run is not None:
            if options:
                raise ConfigError(f"without --train the run's own options hold: leave out {', '.join(sorted(options))}")
            evaluator = served_evaluator(run, spaces_of_run(run).make_env(*env), explore)
        else:
            assert env_spaces is not None
            algo = str(options.pop("algo", "ppo"))
            evaluator = new_evaluator(algo, spaces_of(env_spaces).make_env(*env), explore, options)
        with evaluator, PolicyServer(evaluator, settings) as server:
            what = run or f"an untrained {type(evaluator.policy).__name__}"
            _say(server.url, f"{what}, {'drawing actions' if explore else 'the likeliest action'}")
            stop.wait()
    return 128 + received[0] if received else 0


def _train(run: str | None, env_spaces: str | None, options: dict[str, Any], settings: Any, env: Any) -> int:
    from rlsample.algorithms import served_runs
    from rlsample.cli.progress_view import make_view
    from rlsample.serving import PolicyServer

    with _stop_event() as (stop, received):
        if run is not None and served_runs.is_served(run) and "out" not in options:
            trainer = served_runs.resume_served(run, served_runs.spaces_of_run(run).make_env(*env), options)
        else:
            spaces = served_runs.spaces_of_run(run) if run is not None else served_runs.spaces_of(env_spaces or "")
            options.setdefault("out", f"runs/served-{time.strftime('%Y%m%d-%H%M%S')}")
            trainer = served_runs.train_served(spaces, spaces.make_env(*env), options, run)
        with trainer:
            optimizer = trainer.optimizer

            def progress() -> dict[str, int]:
                return {"sampled_steps": optimizer.num_steps_sampled, "trained_steps": optimizer.num_steps_trained}

            server = PolicyServer(trainer.evaluator, settings, sample=False, progress=progress)
            with server, _ending(trainer, server, stop):
                config = trainer.config
                _say(server.url, f"{config.train.algo}, training; checkpoints in {trainer.folder.path}")
                view = make_view(f"{config.train.algo} served", config.train.max_steps, config.output.log_interval_s)
                try:
                    trainer.run(on_result=view.show)
                except (SamplerError, ServingError, EnvClosedError, LearnerError):
                    if not stop.is_set():
                        raise
                    if trainer.folder.path is not None:
                        trainer.save()
                finally:
                    view.close()
            steps, folder = trainer.env_steps, trainer.folder.path
    click.echo(f"{steps:,} steps learnt from; go on with: rlsample serve {folder} --train", err=True)
    return 128 + received[0] if received else 0


@contextlib.contextmanager
def _ending(trainer: Any, server: Any, stop: threading.Event) -> Iterator[None]:
    """When the event comes: clients are told, then sampling ends, which ends the run."""
    over = threading.Event()

    def watch() -> None:
        stop.wait()
        if not over.is_set():
            trainer.request_stop()
            server.close()
            trainer.evaluator.env.close()

    watcher = threading.Thread(target=watch, name="rlsample-stop", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        stop.set()
        watcher.join()


def _say(url: str, what: str) -> None:
    click.echo(f"serving {what}")
    click.echo(f"{url}/  live view   {url}/demo  in the browser   {url}/docs  the calls")
    sys.stdout.flush()
