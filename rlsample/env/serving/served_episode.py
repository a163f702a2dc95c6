"""One served episode, as its clients and the sampling thread see it, and what passes between them."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from rlsample.env.base_env import LoggedActions
from rlsample.errors import EnvFailedError, ServingError
from rlsample.tree import Tree

__all__ = [
    "ASKED",
    "LOGGED",
    "TERMINATED",
    "TRUNCATED",
    "EpisodeCutError",
    "LoggedActions",
    "QueuedRow",
    "Refusal",
    "ServedEpisode",
    "ServingEnded",
]

ASKED, LOGGED, TERMINATED, TRUNCATED = range(4)  # what a row is: wants an action, brings one, ends its episode


class ServingEnded(ServingError):
    """``run()`` has ended and all it queued was sampled. If it raised, its error is the ``__cause__``."""


class EpisodeCutError(EnvFailedError):
    """A served episode broke off after an action whose outcome never came: expired, given up or refused.

    That last action is no row. The row before ends the episode, truncated, at the observation that was asked about.
    """


class QueuedRow(NamedTuple):
    """A row that has to wait because the one before it is still to be sampled."""

    obs: Tree
    reward: float
    kind: int
    action: Tree
    logp: float
    info: dict[str, Any] | None


class Refusal(NamedTuple):
    """Given instead of an action: the error for the client that waits."""

    error: BaseException


class ServedEpisode:
    """State of one open episode. It forgets nothing but what was handed over, and is dropped as a whole.

    Who writes what: ``taken``, ``begun``, ``prompt``, ``dead`` and the idle clock: the polling thread. ``answer``:
    whoever removed the lane from the desk's ``asking``. All else: the client that holds ``mutex``.

    Attributes:
        id, lane, training_enabled: as started.
        mutex: held during each call, so that two threads cannot use one episode at once.
        answered: a lock that is freed when there is an answer; ``waiting``: a client is about to take it.
        on_answer: called instead, if set.
        standing: an action was asked for and not yet handed to the client.
        acted: some action was asked for or logged.
        closed: why it takes no more calls, or None.
        reward, info: since the last action.
        sent, taken: rows given to the sampler, and rows it took. Equal: nothing is on its way.
        in_place: number of the row that lies in the lane's arrays; the others, in order, in ``backlog``.
        begun: its first row was taken.
        prompt: it asks in time, so that a batch waits for it.
        dead: what is still on its way is thrown away.
        touched, idle_since: for the idle time-out.
    """

    __slots__ = (
        "acted",
        "answer",
        "answered",
        "backlog",
        "begun",
        "closed",
        "dead",
        "id",
        "idle_since",
        "in_place",
        "info",
        "lane",
        "mutex",
        "on_answer",
        "prompt",
        "reward",
        "sent",
        "standing",
        "taken",
        "touched",
        "training_enabled",
        "waiting",
    )

    def __init__(self, episode_id: str, lane: int, training_enabled: bool) -> None:
        self.id, self.lane, self.training_enabled = episode_id, lane, training_enabled
        self.mutex = threading.Lock()
        self.answered = threading.Lock()
        self.answered.acquire()
        self.on_answer: Callable[[Any], None] | None = None
        self.answer: Any = None
        self.waiting = self.standing = self.acted = self.begun = self.prompt = self.dead = False
        self.touched = True
        self.closed: str | None = None
        self.reward = 0.0
        self.info: dict[str, Any] | None = None
        self.sent = self.taken = 0
        self.in_place = -1
        self.backlog: collections.deque[QueuedRow] = collections.deque()
        self.idle_since = 0.0

    def hold(self, timeout_s: float) -> bool:
        """Keeps its client from sending; True: release ``mutex`` afterwards. False: it waits, and so sends nothing."""
        return not self.waiting and self.mutex.acquire(timeout=timeout_s)
