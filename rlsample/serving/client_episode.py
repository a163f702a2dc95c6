"""An open episode as its client sees it: which call comes next, and what went without an answer."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from rlsample.env.serving.lane_rows import MAX_REWARD, checked_reward
from rlsample.errors import ServingError

__all__ = ["ASK", "LOG", "OTHER", "ClientEpisode", "SentCall"]

ASK, LOG, OTHER = "get_action", "log_action", "other"


class SentCall(NamedTuple):
    """A call on its way: its kind, and what tells it from others of that kind."""

    kind: str
    which: Any = None


class ClientEpisode:
    """State of one episode; whoever holds ``in_use`` may change it.

    A call whose answer was lost may be made again: it has the same number and the same reward in it. When it was a
    question, the episode waits until it is asked again or ended, as a ServingEnv's does.

    Args:
        number: of the episode in its client. Keys have it, as an id may be used again.

    Attributes:
        calls: how many calls the server has answered; the next one's key is made of it.
        t: actions the server has, as far as it has said so.
        reward: logged and not yet sent.
        sent: the reward that the unanswered call took along.
        unanswered: the call that is on its way, or the last one that went without an answer.
        tried: all of those since the last answer. The server may have done one of them, and refuses the others.
        acted: there is an action to which a reward can belong.
    """

    __slots__ = ("acted", "calls", "id", "in_use", "number", "reward", "sent", "t", "tried", "unanswered")

    def __init__(self, episode_id: str, number: int) -> None:
        self.id, self.number = episode_id, number
        self.calls = self.t = 0
        self.reward = self.sent = 0.0
        self.unanswered: SentCall | None = None
        self.tried: list[SentCall] = []
        self.acted = False
        self.in_use = threading.Lock()

    def add_reward(self, reward: Any) -> None:
        """Credits the last action; before the first one there is none.

        Raises:
            ServingError: no finite number, or the sum is none.
        """
        total = self.reward + checked_reward(reward)
        if not -MAX_REWARD <= total <= MAX_REWARD:
            raise ServingError(f"log_returns: a reward of {reward} makes {total}, which is no finite float32")
        if self.acted:
            self.reward = total

    @property
    def asked(self) -> bool:
        """A get_action went without an answer: whether the server chose an action is not known."""
        return self.unanswered is not None and self.unanswered.kind == ASK

    def require_no_question(self, but: SentCall | None = None) -> None:
        """Raises ServingError if a get_action, other than this one, went without an answer."""
        if self.asked and self.unanswered != but:
            raise ServingError(
                f"episode {self.id!r}: its last get_action went without an answer; make the same call again, or end "
                "the episode, which then ends truncated at that observation"
            )

    def send(self, call: SentCall) -> SentCall | None:
        """Notes that a call goes out, with ``sent`` in it. Follow with :meth:`settle` or :meth:`take_back`, or with
        nothing if no answer comes.

        Returns:
            The unanswered call in whose place it goes.
        """
        before, self.unanswered = self.unanswered, call
        if before is None:
            self.sent, self.reward = self.reward, 0.0
        if call not in self.tried:
            self.tried.append(call)
        return before

    def take_back(self, before: SentCall | None) -> None:
        """The call of :meth:`send` did not go out, or tells nothing of the one before it."""
        self.unanswered = before
        if before is None:
            self.reward, self.sent = self.reward + self.sent, 0.0
            self.tried.clear()

    def done_instead(self, call: SentCall) -> str | None:
        """The kind of the call that the server has done, as it refuses this one in its place; None: this one, asked
        about another observation."""
        other = next((one for one in self.tried if one != call), None)
        if other is not None:
            return other.kind
        return None if call.kind == ASK else call.kind

    def settle(self, done: bool, kind: str) -> None:
        """The server has done the unanswered call, of this kind; or has refused it, and nothing was done."""
        if not done:
            self.reward += self.sent
        elif kind != OTHER:
            self.acted = True
            self.t += 1
        self.calls += 1
        self.sent, self.unanswered = 0.0, None
        self.tried.clear()
