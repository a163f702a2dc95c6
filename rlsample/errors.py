"""Every error that rlsample raises on purpose.

RlsampleError
├── ConfigError (ValueError)        a setting, name or combination that cannot work
│   └── MissingExtraError           an optional dependency is not installed; names the extra
├── SpaceError (ValueError)         a space we cannot batch, or a value outside its space
├── EnvError
│   ├── EnvProtocolError            poll/send_actions/try_reset used out of order; nothing was stepped
│   ├── EnvFailedError              a sub-env raised or returned nonsense: names slot, step and value
│   └── EnvClosedError              the env was closed, possibly while this call was waiting
├── SamplerError                    a sampling thread ended or failed; the cause is chained
├── WorkerDiedError                 an engine's worker ended without an answer; names index, exit code or signal
├── LearnerError                    a learner or loader thread failed; the cause is chained
├── ServingError                    a served episode was used out of order, or serving has ended
│   └── EpisodeLostError            the policy server has this episode no more: start a new one
└── CheckpointError                 a checkpoint is damaged or does not fit; names the last good one
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Sequence

__all__ = [
    "CheckpointError",
    "ConfigError",
    "EnvClosedError",
    "EnvError",
    "EnvFailedError",
    "EnvProtocolError",
    "EpisodeLostError",
    "LearnerError",
    "MissingExtraError",
    "RlsampleError",
    "SamplerError",
    "ServingError",
    "SpaceError",
    "WorkerDiedError",
    "and_more",
    "first_of",
    "unknown_name",
]

log = logging.getLogger(__name__)

_MOST_NAMED = 8


class RlsampleError(Exception):
    """Base of every deliberate error of this package."""


class ConfigError(RlsampleError, ValueError):
    """A setting, a name or a combination of them that cannot work."""


class MissingExtraError(ConfigError, ImportError):
    """An optional dependency is missing; the message names the pip extra that brings it."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs an optional package: pip install 'rlsample[{extra}]'")


class SpaceError(RlsampleError, ValueError):
    """A space of no fixed size, or a value outside its space."""


class EnvError(RlsampleError):
    """Base of errors about environments."""


class EnvProtocolError(EnvError):
    """The polled interface was used out of order. No env was stepped by the refused call."""


class EnvFailedError(EnvError):
    """A sub-env raised, or returned something that is no valid step.

    Attributes:
        slot: the sub-env's index in ``[0, num_envs)``.
        episode_step: steps taken in the running episode before the failing call; None in ``__init__``.
        remote_traceback: text of the traceback where it happened, if that was another process.
    """

    def __init__(
        self, message: str, *, slot: int, episode_step: int | None = None, remote_traceback: str | None = None
    ) -> None:
        super().__init__(message)
        self.slot = slot
        self.episode_step = episode_step
        self.remote_traceback = remote_traceback


class EnvClosedError(EnvError):
    """The env is closed, or was closed by another thread while this call waited."""


class SamplerError(RlsampleError):
    """A background sampler ended or failed; the original error is the ``__cause__``."""


class WorkerDiedError(RlsampleError):
    """An engine's worker ended before it answered."""


class LearnerError(RlsampleError):
    """A learner, loader or sampling thread of an optimizer failed; the original error is the ``__cause__``."""


class ServingError(RlsampleError):
    """A served episode was used out of order, or the serving thread has ended (its error is the ``__cause__``)."""


class EpisodeLostError(ServingError):
    """A client's open episode is gone on the policy server, which was restarted, or closed it. Start a new one.

    What was sampled of it before stays sampled; its last action has no outcome there.
    """


class CheckpointError(RlsampleError):
    """A checkpoint cannot be used."""


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> ConfigError:
    """An error that names the nearest valid spelling. It is returned, for the caller to raise."""
    known = sorted(valid)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return ConfigError(f"unknown {kind} {name!r}; {hint}")


def and_more(others: Sequence[str]) -> str:
    """What an error's message adds for others that failed as well: ``; and 2 more: ...; ...``, or nothing for none."""
    if not others:
        return ""
    rest = [f"and {len(others) - _MOST_NAMED} not named here"] if len(others) > _MOST_NAMED else []
    return f"; and {len(others)} more: " + "; ".join([*others[:_MOST_NAMED], *rest])


def first_of(failed: Sequence[tuple[str, Exception]]) -> Exception:
    """The first of several errors, each with who raised it, with the others named in its message. For the caller to
    raise.

        ValueError: bad reward; and 2 more: worker 2: ValueError: bad reward; worker 3: OSError: no space left

    An exception that makes its own message keeps it; the others are a note then (logged before Python 3.11).
    """
    error = failed[0][1]
    text = and_more([f"{who}: {type(other).__name__}: {other}" for who, other in failed[1:]])
    before = str(error)
    if not text or before.endswith(text):  # an engine may raise the same object again
        return error
    if error.args == (before,):
        error.args = (before + text,)
    if str(error) == before:
        if hasattr(error, "add_note"):
            error.add_note(text[2:])
        else:
            log.warning("%s: %s%s", type(error).__name__, before, text)
    return error
