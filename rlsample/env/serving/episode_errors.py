"""What a call on a served episode is told when it cannot be had."""

from __future__ import annotations

from typing import Protocol

from rlsample.env.serving.served_episode import Refusal
from rlsample.errors import ServingError

__all__ = ["gone", "in_use", "no_answer", "question_stands", "refused"]


class _Named(Protocol):
    id: str
    closed: str | None


def in_use(episode: _Named) -> ServingError:
    """Another call on it is not over."""
    return ServingError(f"episode {episode.id!r} is in use by another thread: its calls have to follow each other")


def question_stands(episode: _Named) -> ServingError:
    """It asked for an action and has not taken it."""
    return ServingError(
        f"episode {episode.id!r} waits for the answer to another get_action: ask again with the same observation, or "
        "end the episode"
    )


def gone(episode: _Named) -> ServingError:
    """It takes no more calls."""
    return ServingError(f"episode {episode.id!r} {episode.closed}")


def no_answer(episode: _Named, timeout_s: float) -> ServingError:
    """The time was up; the question stands."""
    return ServingError(
        f"get_action: no answer for episode {episode.id!r} in {timeout_s} s; is sample() being called? The "
        "question stands: ask again with the same observation, or end the episode"
    )


def refused(episode: _Named, answer: Refusal) -> ServingError:
    """It got an error for an answer, which becomes the cause."""
    error = ServingError(f"get_action: episode {episode.id!r}: {answer.error}")
    error.__cause__ = answer.error
    return error
