"""Turns exceptions into a few lines on stderr and an exit code; ``--debug`` shows the traceback instead."""

from __future__ import annotations

import functools
import select
import sys
from collections.abc import Callable
from typing import Any

import click

from rlsample.errors import ConfigError, EnvFailedError, RlsampleError, SpaceError

__all__ = ["short_errors"]

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


def short_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``--debug`` to a command and keeps tracebacks from the user without it.

    Exit codes: 2 for what the user can fix in the command or config, 1 for what failed later, 130 for Ctrl-C.
    """

    @click.option("--debug", is_flag=True, help="Show the full traceback of an error.")
    @functools.wraps(command)
    def wrapped(*args: Any, debug: bool, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except KeyboardInterrupt:
            click.echo("stopped at once; nothing more was saved", err=True)
            sys.exit(INTERRUPTED)
        except Exception as error:
            if debug or _reader_is_gone(error):  # which click takes for a quiet end
                raise
            click.echo(_in_words(error), err=True)
            sys.exit(BAD_INPUT if isinstance(error, (ConfigError, SpaceError)) else FAILED)

    return wrapped


def _reader_is_gone(error: Exception) -> bool:
    """Whether it is about stdout, which nobody reads any more, as in ``rlsample envs | head -1``."""
    if not isinstance(error, BrokenPipeError):
        return False
    poller = select.poll()
    poller.register(1, 0)
    return any(event & select.POLLERR for _, event in poller.poll(0))


def _in_words(error: Exception) -> str:
    if not isinstance(error, RlsampleError):
        return f"error: {type(error).__name__}: {error}\n(--debug shows where)"
    text = f"error: {error}"
    cause = error.__cause__
    if cause is not None and str(cause) not in text:
        text += f"\ncause: {type(cause).__name__}: {cause}"
    if isinstance(error, EnvFailedError):
        text += "\n(--debug shows where in the env)"
    return text
