"""One batch of Atari games that ale-py steps together, on C++ threads."""

from __future__ import annotations

import functools
import queue
from typing import Any

import numpy as np

from rlsample.env.atari_books import Books, Rows
from rlsample.env.atari_settings import AtariSettings
from rlsample.env.blocking_calls import BlockingCalls, Outcome
from rlsample.env.slot_states import WAITING, SlotStates
from rlsample.errors import EnvProtocolError

__all__ = ["AtariGroup", "open_vector_env"]

_NOOP = 0  # the first action of every game


def open_vector_env(
    game: str,
    num_games: int,
    settings: AtariSettings,
    *,
    same_step: bool,
    num_threads: int,
    first_core: int,
    batch_size: int = 0,
) -> Any:
    """ale-py's vector env for these settings, with raw rewards; ordered, or ``batch_size`` rows of any games.

    It takes 0.1 s a game, during which no other Python thread runs: ale-py makes its palettes anew for each.
    """
    from gymnasium.vector import AutoresetMode

    return _games_class()(
        game=game,
        num_envs=num_games,
        batch_size=batch_size,
        num_threads=num_threads,
        thread_affinity_offset=first_core,
        max_num_frames_per_episode=settings.max_episode_steps * settings.frame_skip,
        repeat_action_probability=settings.repeat_action_probability,
        full_action_space=settings.full_action_space,
        autoreset_mode=AutoresetMode.SAME_STEP if same_step else AutoresetMode.NEXT_STEP,
        img_height=settings.img_height,
        img_width=settings.img_width,
        grayscale=settings.gray_scale,
        stack_num=settings.stack_num,
        frameskip=settings.frame_skip,
        noop_max=settings.noop_max,
        use_fire_reset=settings.use_fire_reset,
        episodic_life=False,  # it would reset the game
        life_loss_info=False,  # it would hide game overs; the lives tell the same
        reward_clipping=False,
    )


@functools.lru_cache(maxsize=1)
def _games_class() -> Any:
    """ale-py is imported with the first game."""
    from ale_py.vector_env import AtariVectorEnv

    class Games(AtariVectorEnv):
        def __init__(self, **options: Any) -> None:
            # Its constructor writes the autoreset mode into the dict it finds here, which all vector envs share.
            self.metadata = dict(type(self).metadata)
            super().__init__(**options)
            self._strength = np.ones(self.batch_size, np.float32)

        def send(self, actions: np.ndarray) -> None:
            """As the original's, for actions that were checked."""
            self.ale.send(actions, self._strength)

    return Games


class AtariGroup:
    """Games that are stepped together.

    Attributes:
        index: its place among the groups; outcomes are tagged with it.
        ids: int64[n], read-only, their slots.
        ids32: the same as int32[n].
        at: ``ids`` as an index into a column of all slots: a slice.
        members: int64[], the slots that fail if ale-py raises: ``ids``.
        books: see :class:`~rlsample.env.atari_books.Books`.
        actions: int64[n], the next actions.
        flying: whether a step or reset is under way.
        in_background: whether it comes back through the queue.
        outcome: what came back; whoever reads the queue puts it here.
        reset_rows: int64[k], the rows that the reset under way is for; None: it is a step.
        changes: whether each batch may be of other games, see :class:`~rlsample.env.atari_any_games.AnyGames`.
    """

    changes = False

    def __init__(
        self,
        index: int,
        ids: np.ndarray,
        vector: Any,
        books: Books,
        press: int,
        outcomes: queue.SimpleQueue[Any],
    ) -> None:
        self.index, self.ids, self.books = index, ids, books
        self.ids32 = ids.astype(np.int32)
        self.ids32.flags.writeable = False
        self._all_wait = bytes([WAITING]) * len(ids)
        self.at: slice | np.ndarray = slice(int(ids[0]), int(ids[-1]) + 1)
        self.members = ids
        self.actions = np.zeros(len(ids), np.int64)
        self.flying = self.in_background = False
        self.outcome: Outcome | None = None
        self.reset_rows: np.ndarray | None = None
        self._vector, self._press = vector, press
        self._calls = BlockingCalls(f"atari {ids[0]}-{ids[-1]}", outcomes)

    def all_wait(self, code: np.ndarray) -> bool:
        """Whether each of its slots waits for an action; ``code`` has the states of all slots of the env."""
        return code[self.at].tobytes() == self._all_wait

    def rows_of(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of these slots are here (bool[K]), and the rows of those (int64[])."""
        first = self.ids[0]
        mine = (ids >= first) & (ids < first + len(self.ids))
        return mine, ids[mine] - first

    def unanswered(self, states: SlotStates) -> EnvProtocolError:
        """The error of a receive that would wait for ever, since a game here has no action and no reset to do."""
        which = "all slots" if len(self.ids) == states.num_envs else f"the {len(self.ids)} slots of a group"
        return EnvProtocolError(
            f"{which} step together, so poll needs an action or a reset for each: {states.describe()}"
        )

    def begin_reset(self, rows: np.ndarray, seeds: np.ndarray | None) -> None:
        """Asks for new games in these rows, in the background; ``seeds`` has one for each, in order."""
        self.flying = self.in_background = True
        self.reset_rows = rows = np.sort(rows)
        options = None
        if len(rows) < len(self.ids):
            mask = np.zeros(len(self.ids), bool)
            mask[rows] = True
            options = {"reset_mask": mask}
        self._calls.begin(self.index, _reset, self._vector, seeds, options)

    def launch(self, in_background: bool) -> None:
        """Begins a step with ``actions``; games that are to be reset ignore theirs."""
        self.reset_rows = None
        if self.books.pressing is not None:
            self.actions[self.books.pressing] = self._press
        self._vector.send(self.actions)
        self.flying = True
        if in_background:
            self.begin_receive()

    def begin_receive(self) -> None:
        """Waits for the step in the background."""
        self.in_background = True
        self._calls.begin(self.index, self._vector.recv)

    def receive(self) -> None:
        """Waits for the step here and now."""
        try:
            self.outcome = Outcome(self.index, self._vector.recv())
        except Exception as e:
            self.outcome = Outcome(self.index, None, e)

    def land(self) -> Rows:
        """The rows of the outcome: those of a step, or of a reset (all n of them, see ``reset_rows``).

        Raises:
            Exception: what ale-py raised.
        """
        value = self._landed()
        return self.books.take(value) if self.reset_rows is None else self._reset_landed(*value)

    def _landed(self) -> Any:
        outcome, self.outcome = self.outcome, None
        self.flying = self.in_background = False
        if outcome is None:
            raise AssertionError("nothing came back")
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def _reset_landed(self, obs: np.ndarray, info: dict[str, Any]) -> Rows:
        assert self.reset_rows is not None
        self.books.begin(self.reset_rows, info["lives"])
        no, first = np.zeros(len(self.ids), bool), np.zeros(len(self.ids), bool)
        first[self.reset_rows] = True
        return Rows(obs, np.zeros(len(self.ids), np.float32), no, no.copy(), first, None, {})

    def end(self) -> None:
        """Lets go of ale-py; its threads end once no call is under way."""
        self._calls.end()
        self._vector = None

    def join(self, timeout_s: float) -> None:
        """Waits for a call that is under way, but no longer than that."""
        self._calls.join(timeout_s)


def _reset(vector: Any, seeds: np.ndarray | None, options: dict[str, Any] | None) -> Any:
    return vector.reset(seed=seeds, options=options)
