"""Exceptions on their way from one process or thread to another."""

from __future__ import annotations

import pickle
import traceback
from typing import Any

from rlsample.errors import WorkerDiedError
from rlsample.nursery import killer

__all__ = ["RemoteTraceback", "describe_exit", "died", "pack_exception", "unpack_exception"]

_LONGEST_CHAIN = 8


class RemoteTraceback(Exception):
    """The last cause of an error that happened in another process; its text is the traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def pack_exception(error: BaseException) -> tuple[list[Any], str]:
    """An exception and its explicit causes as values that always unpickle, and the text of the traceback."""
    chain: list[Any] = []
    link: BaseException | None = error
    while link is not None and len(chain) < _LONGEST_CHAIN:
        chain.append(_portable(link))
        link = link.__cause__
    return chain, "".join(traceback.format_exception(type(error), error, error.__traceback__))


def _portable(error: BaseException) -> tuple[bytes | None, str]:
    """The pickled exception, or None if it does not survive, and ``Type: message``."""
    text = f"{type(error).__name__}: {error}"
    for form in (error, (type(error), error.args, error.__dict__)):  # the second spares __init__, which may want more
        try:
            data = pickle.dumps(form, protocol=5)
            _revive(data)
        except Exception:
            continue
        return data, text
    return None, text


def _revive(data: bytes) -> BaseException:
    form = pickle.loads(data)
    if isinstance(form, BaseException):
        return form
    kind, args, attributes = form
    error: BaseException = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    str(error)
    return error


def unpack_exception(packed: tuple[list[Any], str]) -> Exception:
    """The exception again, with its causes; the last cause is a :class:`RemoteTraceback`.

    A RuntimeError with the original's type and message stands in for one whose class does not pickle.
    """
    chain, text = packed
    cause: BaseException = RemoteTraceback(text)
    for data, message in reversed(chain):
        error: BaseException
        try:
            error = RuntimeError(message) if data is None else _revive(data)
        except Exception:  # its class cannot be loaded here
            error = RuntimeError(message)
        error.__cause__ = cause
        cause = error
    return cause if isinstance(cause, Exception) else RuntimeError(str(cause))


def describe_exit(code: int | None) -> str:
    """``was killed by SIGKILL``, ``ended with exit code 3``, or ``ended`` where nobody knows."""
    if code is None:
        return "ended"
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {killer(code)}"


def died(index: int, incarnation: int, how: str, name: str) -> WorkerDiedError:
    """The error of a call that will never be answered."""
    again = f" (incarnation {incarnation})" if incarnation else ""
    return WorkerDiedError(f"worker {index}{again} {how} before it answered {name!r}")
