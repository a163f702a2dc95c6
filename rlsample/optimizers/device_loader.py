"""Threads that bring train batches to the devices while the learner computes."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlsample.errors import ConfigError
from rlsample.optimizers.background import BackgroundThreads, Timers
from rlsample.optimizers.batch_queue import BatchQueue, TrainBatch
from rlsample.sample_batch import SampleBatch

__all__ = ["DeviceLoader", "LoadTarget", "Slot", "SlotState"]


class SlotState(enum.Enum):
    """A slot's life: FREE -> FILLING -> READY -> IN_USE -> FREE."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    IN_USE = "in use"


@dataclass
class Slot:
    """Room for one train batch on the devices.

    Attributes:
        number: of the batch in it, as the queue counts; -1: none yet.
        batch: that batch; without its fragments, once these are copied.
    """

    index: int
    state: SlotState = SlotState.FREE
    number: int = -1
    batch: TrainBatch | None = None


class LoadTarget(Protocol):
    """What a loader loads into: a :class:`~rlsample.optimizers.device_group.DeviceGroup`."""

    def load(self, slot: int, batches: Sequence[SampleBatch]) -> int:
        """Copies the batches' rows into a slot."""

    def release(self, slot: int) -> None:
        """The slot's rows are not needed any more."""


class DeviceLoader:
    """Takes batches from the queue into slots, and gives the slots to the learner in the queue's order.

    A loader thread takes a **slot first** and then a batch, so that what is in flight is exactly the queue's capacity
    plus the number of slots, however many threads there are.

    Args:
        threads: the loader threads are started among these, their lock guards the slots.
        num_threads: loader threads; more than slots are of no use. 0: one per slot.
        timers: gets "slot_wait" and "batch_wait", over all threads.
    """

    def __init__(
        self,
        threads: BackgroundThreads,
        queue: BatchQueue,
        target: LoadTarget,
        num_slots: int,
        num_threads: int = 0,
        timers: Timers | None = None,
    ) -> None:
        if num_slots < 1 or num_threads < 0:
            raise ConfigError(
                f"num_data_loader_buffers must be at least 1 and num_data_load_threads at least 0, not {num_slots} and "
                f"{num_threads}"
            )
        self.slots = [Slot(i) for i in range(num_slots)]
        self._threads = threads
        self._queue = queue
        self._target = target
        self._timers = timers or Timers()
        self._next = 0  # number of the batch the learner gets next
        self._num_threads = num_threads or num_slots

    def start(self) -> None:
        """Starts the threads."""
        for i in range(self._num_threads):
            self._threads.start(f"loader {i}", self._work)

    def _work(self) -> None:
        while True:
            started = time.perf_counter()
            slot = self._take_free()
            waited = time.perf_counter()
            slot.number, slot.batch = self._queue.take()
            taken = time.perf_counter()
            self._timers.add("slot_wait", waited - started)
            self._timers.add("batch_wait", taken - waited)
            self._target.load(slot.index, slot.batch.fragments)
            slot.batch = dataclasses.replace(slot.batch, fragments=())  # copied: their memory can be used again
            self._set(slot, SlotState.READY)

    def _take_free(self) -> Slot:
        def free() -> list[Slot]:
            return [slot for slot in self.slots if slot.state is SlotState.FREE]

        with self._threads.lock:
            self._threads.wait_for(lambda: bool(free()))
            slot = free()[0]
            slot.state = SlotState.FILLING
            return slot

    def _set(self, slot: Slot, state: SlotState) -> None:
        with self._threads.lock:
            slot.state = state
            self._threads.notify_all()

    def ready(self) -> bool:
        """Whether :meth:`take` has something; to be asked with the lock held."""
        return self._find() is not None

    def _find(self) -> Slot | None:
        return next((s for s in self.slots if s.state is SlotState.READY and s.number == self._next), None)

    def take(self) -> Slot:
        """Waits for the slot with the next batch in the queue's order; it is IN_USE until :meth:`release`."""
        with self._threads.lock:
            self._threads.wait_for(self.ready)
            slot = self._find()
            assert slot is not None
            self._next += 1
            slot.state = SlotState.IN_USE
            return slot

    def release(self, slot: Slot) -> None:
        """Gives a slot back. To be called by the thread that used the rows."""
        self._target.release(slot.index)
        slot.batch = None
        self._set(slot, SlotState.FREE)
