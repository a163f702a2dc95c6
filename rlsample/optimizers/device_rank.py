"""What runs in the process of a further device."""

from __future__ import annotations

import contextlib
import functools
import pickle
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from rlsample.optimizers.collective import Collective
from rlsample.optimizers.device_rows import DeviceRows
from rlsample.optimizers.device_trainer import DeviceTrainer
from rlsample.optimizers.multi_device_support import MultiDeviceSupport
from rlsample.optimizers.row_memory import Layout, MinibatchIndex, open_shared

__all__ = ["DeviceRank", "make_rank"]

Plan = list[tuple[MinibatchIndex | None, int]]


def make_rank(support: bytes, devices: tuple[str, ...], precision: str, num_slots: int, index: int, _: int) -> Any:
    """An engine's factory; the worker with index i has the device i + 1."""
    torch.set_num_threads(1)
    return DeviceRank(support, devices, index + 1, precision, num_slots)


class DeviceRank:
    """Copies its share of rows to its device while a thread computes on earlier ones. Driven by a DeviceGroup.

    Every method raises what the computing thread raised, if that has ended.

    Args:
        support: a pickled MultiDeviceSupport.
    """

    def __init__(self, support: bytes, devices: tuple[str, ...], rank: int, precision: str, num_slots: int) -> None:
        self._device = torch.device(devices[rank])
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._support: MultiDeviceSupport = pickle.loads(support).to(devices[rank])
        self._rank, self._size = rank, len(devices)
        self._precision = precision
        self._slots = [DeviceRows(self._device) for _ in range(num_slots)]
        self._memory: list[torch.Tensor | None] = [None] * num_slots
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._collective: Collective | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def join(self, path: str) -> None:
        """Enters the group; returns when all have."""
        self._collective = Collective(path, self._rank, self._size, self._device)
        self._thread = threading.Thread(target=self._compute, name="rlsample device", daemon=True)
        self._thread.start()

    def upload(self, slot: int, address: tuple[str, int] | None, layout: Layout) -> None:
        """Starts the copy of a slot's rows; ``address`` says where they are, if that has changed."""
        self.check()
        if address is not None:
            self._memory[slot] = open_shared(address)
            if self._device.type == "cuda":
                self._pin(self._memory[slot])
        memory = self._memory[slot]
        assert memory is not None
        self._slots[slot].upload(memory, layout)

    def _pin(self, memory: Any) -> None:
        """Page-locks the shared memory; without it copies still work, but wait for each other."""
        with contextlib.suppress(RuntimeError):
            torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)

    def train(self, slot: int, plan: Plan, progress: Any) -> None:
        """Has the thread take one update per minibatch; returns at once."""
        self.check()
        self._jobs.put(functools.partial(self._train, slot, plan, progress))

    def renew(self, support: bytes) -> None:
        """Has the thread go on with another support, pickled: weights, optimizer's state and all."""
        self.check()
        self._jobs.put(functools.partial(self._adopt, support))

    def check(self) -> None:
        """Raises what ended the computing thread."""
        if self._error is not None:
            raise self._error

    def weights(self) -> dict[str, Any]:
        """Copies of the module's parameters, once all plans are done."""
        done = threading.Event()
        self._jobs.put(done.set)
        while not done.wait(0.05):
            self.check()
        return {name: p.detach().cpu().numpy().copy() for name, p in self._support.module.named_parameters()}

    def _compute(self) -> None:
        assert self._collective is not None
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            self._make_trainer()
            while (job := self._jobs.get()) is not None:
                job()
        except BaseException as error:
            self._error = error
            self._collective.close()  # the others would wait for this one's gradients

    def _make_trainer(self) -> None:
        assert self._collective is not None
        self._trainer = DeviceTrainer(self._support, self._device, self._precision, self._collective.sum_)

    def _train(self, slot: int, plan: Plan, progress: Any) -> None:
        if progress is not None:
            self._support.set_progress(progress)  # type: ignore[attr-defined]
        for index, total_rows in plan:
            self._trainer.train(self._slots[slot].rows(index), total_rows)
        self._slots[slot].release()

    def _adopt(self, support: bytes) -> None:
        self._support = pickle.loads(support).to(str(self._device))
        self._make_trainer()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        if self._collective is not None:
            self._collective.close()
        self._jobs.put(None)
        if self._thread is not None and self._error is None:
            self._thread.join(1.0)
