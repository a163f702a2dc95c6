"""What each slot was asked for and still owes, through failures, deaths and restarts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rlsample.env.base_env import StepBatch
from rlsample.env.env_settings import EnvSettings
from rlsample.env.pool.pickled_values import ObjectLeaves
from rlsample.env.pool.row_reader import RowReader, merge_batches
from rlsample.env.pool.shared_block import IS_FAILED, RESET, RESTART, STEP
from rlsample.env.pool.worker_death import Death
from rlsample.env.pool.worker_team import WorkerTeam
from rlsample.env.slot_states import BUSY, ENDED, FAILED, RESETTING, SlotStates
from rlsample.errors import EnvFailedError, RlsampleError, and_more
from rlsample.tree import Tree, assign, gather

__all__ = ["Lives", "SlotRequests"]


class Lives(NamedTuple):
    """Of each slot which incarnation its env is, and how many restarts of the budget are used up. Written to."""

    incarnation: list[int]
    restarts: list[int]


class SlotRequests:
    """Writes requests for the workers and knows which are open.

    A slot owes a row from its request until it is taken, whatever happens to its worker: a failure takes the row's
    place. When a worker dies, slots that owe something fail now; the others fail when they are asked for something.

    Attributes:
        owed: rows asked for and not taken yet, failures included, restarts that are not due yet excluded.
        failed_now: slot -> failure, to be given out instead of a row.
        delayed: slot -> when its restart is due, in seconds of the monotonic clock.
        last_failure: slot -> the latest failure given out.
    """

    def __init__(
        self, team: WorkerTeam, states: SlotStates, settings: EnvSettings, lives: Lives, reset_ahead: bool
    ) -> None:
        self._team, self._states, self._settings, self._reset_ahead = team, states, settings, reset_ahead
        self._incarnation, self._restarts = lives
        self._block = team.block
        self._all_ids, self._has_objects = states.all_ids, bool(ObjectLeaves(team.block.actions))
        self.worker_of = np.repeat(np.arange(len(team.slots)), [len(mine) for mine in team.slots])
        self._everyone = range(len(team.slots))
        self._lost: dict[int, Death] = {}  # slots of dead workers that owe nothing
        self._firsts: set[int] = set()  # ended slots that were asked to start, and have been reset ahead
        self._awaited: set[int] = set()  # the same, while their worker is still at it
        self._last_taken = -1
        self.owed = 0
        self.failed_now: dict[int, EnvFailedError] = {}
        self.delayed: dict[int, float] = {}
        self.last_failure: dict[int, EnvFailedError] = {}
        self._rows = RowReader(team, self.worker_of, states, team.info_keys)

    # ------------------------------------------------------------------ asking

    def ask(self, ids: np.ndarray, command: int, actions: Tree = None) -> None:
        """Asks checked slots for a step (with checked actions), a reset or a restart, and wakes their workers."""
        if command == STEP and self._has_objects:
            self._team.action_file.write(ids, actions)
        if self._lost:
            ids, actions = self._without_lost(ids, command, actions)
        if not len(ids):
            return
        block, everyone = self._block, ids is self._all_ids
        where: Any = slice(None) if everyone else ids
        if command == STEP:
            assign(block.actions, where, actions)
            self._states.code[where] = BUSY
        else:
            block.command[where] = command
            self._states.code[where] = RESETTING
        block.request[where] += 1
        self.owed += len(ids)
        self._team.wake(self._everyone if everyone else set(self.worker_of[ids].tolist()))

    def _without_lost(self, ids: np.ndarray, command: int, actions: Tree) -> tuple[np.ndarray, Tree]:
        """The slots whose worker lives, with their actions. The others fail; a successor must not see a request."""
        lost = self._those_lost(ids)
        if not lost:
            return ids, actions
        for slot in lost:
            step = int(self._block.steps[slot]) + 1 if command == STEP else None
            self.failed_now[slot] = self._lost.pop(slot).failure(slot, step)
        self._states.code[lost] = BUSY if command == STEP else RESETTING
        self.owed += len(lost)
        keep = ~np.isin(ids, lost)
        return ids[keep], None if actions is None else gather(actions, keep)

    def begin_resets(self, ids: np.ndarray) -> None:
        """Asks checked slots, waiting or ended, for a new episode."""
        block, code = self._block, self._states.code
        ended = code[ids] == ENDED
        if not self._reset_ahead or not ended.all():
            self.ask(ids[~ended] if self._reset_ahead else ids, RESET)
            if not self._reset_ahead:
                return
            ids = ids[ended]
        code[ids] = RESETTING
        self.owed += len(ids)
        lost = self._those_lost(ids)
        for slot in lost:
            self.failed_now[slot] = self._lost.pop(slot).failure(slot, None)
        ready = block.ahead[ids] == block.request[ids]
        self._firsts.update(slot for slot in ids[ready].tolist() if slot not in lost)
        if not ready.all():
            late = ids[~ready]
            block.wanted[late] = True
            self._awaited.update(slot for slot in late.tolist() if slot not in lost)

    def restart(self, ids: Iterable[int]) -> None:
        """Has failed slots restarted when their back-off is over.

        Raises:
            EnvFailedError: the budget of some is used up; nothing was changed.
        """
        ids, now = list(ids), time.monotonic()
        final = [slot for slot in ids if self._is_used_up(slot)]
        if final:
            raise self._no_restart_left(final)
        for slot in ids:
            self.delayed[slot] = now + self._settings.back_off_s(self._restarts[slot])
            self._incarnation[slot] += 1
            self._restarts[slot] += 1
            self._states.code[slot] = RESETTING
            self._lost.pop(slot, None)

    def _is_used_up(self, slot: int) -> bool:
        return self._restarts[slot] >= self._settings.max_restarts

    def _no_restart_left(self, slots: list[int]) -> EnvFailedError:
        """One error for failed slots whose budget is used up, made of their last failures; for the caller to raise."""
        slot, failure = slots[0], self.last_failure[slots[0]]
        where = "" if "worker " in str(failure) else f"in worker {self.worker_of[slot]}; "
        error = EnvFailedError(
            f"{failure} ({where}no restart left: max_restarts={self._settings.max_restarts})"
            + and_more([str(self.last_failure[other]) for other in slots[1:]]),
            slot=slot,
            episode_step=failure.episode_step,
            remote_traceback=failure.remote_traceback,
        )
        error.__cause__ = failure
        return error

    def raise_final_failures(self) -> None:
        """Takes the failures that no restart mends, if there are any by now, and raises them as one. Rows stay.

        Raises:
            EnvFailedError: chained to the failure of the lowest such slot; the message names the others.
        """
        block = self._block
        in_step, in_first = block.step.flags & IS_FAILED, block.first.flags & IS_FAILED
        if not (self.failed_now or in_step.any() or in_first.any()):
            return
        flags = {slot: in_first if slot in self._firsts else in_step for slot in self.ready()}
        failed = [slot for slot, bits in flags.items() if slot in self.failed_now or bits[slot]]
        final = sorted(slot for slot in failed if self._is_used_up(slot))
        if final:
            self.take(final)
            raise self._no_restart_left(final)

    def restart_or_put_back(self, failures: Mapping[int, BaseException]) -> dict[int, BaseException]:
        """Has those of these failures that were taken restarted whose budget allows it, and returns them.

        The others are there to be taken again: they came between :meth:`raise_final_failures` and the taking.
        """
        mended = {slot: failure for slot, failure in failures.items() if not self._is_used_up(slot)}
        self.restart(mended)
        for slot in failures.keys() - mended.keys():
            self.failed_now[slot] = self.last_failure[slot]
            self._states.code[slot] = BUSY
            self.owed += 1
        return mended

    def begin_due_restarts(self) -> None:
        """Asks for the restarts whose time has come, with a new process where the old one is dead."""
        now = time.monotonic()
        for slot in [s for s, due in self.delayed.items() if due <= now]:
            del self.delayed[slot]
            w = int(self.worker_of[slot])
            self._block.incarnation[slot] = self._incarnation[slot]
            self.ask(np.array([slot]), RESTART)
            if self._team.is_up(w):
                continue
            try:
                self._team.relaunch(w)
            except (OSError, RlsampleError) as e:
                failure = EnvFailedError(f"slot {slot}: worker {w} cannot be started again: {e}", slot=slot)
                failure.__cause__ = e
                self._void(slot)
                self.failed_now[slot] = failure

    def worker_died(self, death: Death) -> None:
        """Turns what the worker's slots owe into failures."""
        block, code = self._block, self._states.code
        self._look_at_awaited()
        for slot in self._team.slots[death.worker]:
            if code[slot] == FAILED or slot in self.delayed or slot in self.failed_now:
                continue
            if slot in self._awaited:
                self._awaited.discard(slot)
                block.wanted[slot] = False
                self.failed_now[slot] = death.failure(slot, None)
            elif block.done[slot] != block.request[slot]:
                step = int(block.steps[slot]) + 1 if code[slot] == BUSY else None
                self._void(slot)
                self.failed_now[slot] = death.failure(slot, step)
            else:
                self._lost[slot] = death

    def fail_lost(self, ids: np.ndarray) -> dict[int, EnvFailedError]:
        """The failures of those of these slots, which owe nothing, whose worker is dead; they have failed now."""
        failures = {slot: self._lost.pop(slot).failure(slot, None) for slot in self._those_lost(ids)}
        self._states.code[list(failures)] = FAILED
        self.last_failure.update(failures)
        return failures

    def _those_lost(self, ids: np.ndarray) -> list[int]:
        return [slot for slot in ids.tolist() if slot in self._lost] if self._lost else []

    def _void(self, slot: int) -> None:
        """Takes back what a slot of a dead worker was asked."""
        block = self._block
        block.done[slot] = block.taken[slot] = block.request[slot]
        block.command[slot] = STEP

    # ------------------------------------------------------------------ what is there

    def num_published(self) -> int:
        """Rows the workers have published that are not taken yet."""
        return int(np.count_nonzero(self._block.done != self._block.taken))

    def num_unpublished(self) -> int:
        """Failures, and first observations that were reset ahead, that could be taken now as well."""
        if self._awaited:
            self._look_at_awaited()
        return len(self.failed_now) + len(self._firsts)

    def ready(self) -> set[int]:
        """The slots whose row or failure could be taken now."""
        published = np.flatnonzero(self._block.done != self._block.taken).tolist()
        self._look_at_awaited()
        return {*published, *self.failed_now, *self._firsts}

    def enough_for(self, slots: list[int]) -> int:
        """How many published rows there have to be before these slots can all be taken; 0: they can be now."""
        published = np.flatnonzero(self._block.done != self._block.taken).tolist()
        self._look_at_awaited()
        missing = set(slots).difference(published, self.failed_now, self._firsts)
        return len(published) + len(missing) if missing else 0

    def owing(self, slots: Iterable[int]) -> list[int]:
        """Those of these slots that owe a row, or have one to be taken."""
        code = self._states.code
        return [s for s in slots if code[s] in (BUSY, RESETTING) and s not in self.delayed]

    def first_ones(self, ids: np.ndarray) -> StepBatch | None:
        """The first observations of slots that all have ended and been reset ahead by now; None if one was not."""
        block = self._block
        if not self._reset_ahead or self._lost or set(self._states.code[ids].tobytes()) != {ENDED}:
            return None
        if block.ahead[ids].tobytes() != block.request[ids].tobytes():
            return None
        return self._noted(self._rows.take_firsts(ids))

    def everyone_steps(self) -> bool:
        """Whether each slot owes a row and nothing is out of the ordinary."""
        return self.owed == len(self._all_ids) and not (
            self.failed_now or self._firsts or self._awaited or self.delayed
        )

    def all_published(self) -> bool:
        """Whether every request is answered."""
        return self._block.done.tobytes() == self._block.request.tobytes()

    def take_everyone(self) -> StepBatch:
        """Every slot's row, all being there."""
        self.owed = 0
        batch = self._rows.take(self._all_ids)
        return self._noted(batch) if batch.failures else batch

    def take_some(self, most: int | None) -> StepBatch:
        """Everything that is ready, or ``most`` of it: each slot has its turn, however fast others are."""
        if self.failed_now or most is not None:
            return self.take(self._next_in_turn(sorted(self.ready()), most))
        fresh = (self._block.done != self._block.taken).nonzero()[0]
        self.owed -= len(fresh) + len(self._firsts)
        batch = self._rows.take(self._all_ids if len(fresh) == len(self._all_ids) else fresh)
        if self._firsts:
            firsts = self._rows.take_firsts(np.array(sorted(self._firsts)))
            self._firsts.clear()
            batch = merge_batches(batch, firsts) if len(fresh) else firsts
        return self._noted(batch)

    def take(self, slots: Iterable[int]) -> StepBatch:
        """The rows or failures of slots that are ready, by rising slot."""
        slots = sorted(slots)
        self.owed -= len(slots)
        failed = {s: self.failed_now.pop(s) for s in slots if s in self.failed_now}
        firsts = [s for s in slots if s in self._firsts]
        self._firsts.difference_update(firsts)
        plain = [s for s in slots if s not in failed and s not in firsts]
        batch = self._rows.take(self._all_ids if len(plain) == len(self._all_ids) else np.array(plain, np.int64))
        if firsts:
            batch = merge_batches(batch, self._rows.take_firsts(np.array(firsts)))
        if failed:
            self._states.code[list(failed)] = FAILED
            batch = batch._replace(failures={**batch.failures, **failed})
        return self._noted(batch)

    def reread(self, ids: np.ndarray) -> StepBatch:
        """The rows of slots that were reset without a request."""
        return self._noted(self._rows.take(ids))

    def empty(self) -> StepBatch:
        """A batch of no rows."""
        return self._rows.empty()

    def _next_in_turn(self, slots: list[int], most: int | None) -> list[int]:
        if most is None:
            return slots
        after = self._last_taken
        chosen = ([s for s in slots if s > after] + [s for s in slots if s <= after])[:most]
        if chosen:
            self._last_taken = chosen[-1]
        return chosen

    def _look_at_awaited(self) -> None:
        """Moves slots whose reset has been done meanwhile to the first ones that are there."""
        if self._awaited:
            block = self._block
            now = [s for s in self._awaited if block.ahead[s] == block.request[s]]
            block.wanted[now] = False
            self._firsts.update(now)
            self._awaited.difference_update(now)

    def _noted(self, batch: StepBatch) -> StepBatch:
        if batch.failures:
            self.last_failure.update(batch.failures)  # type: ignore[arg-type]
        return batch
