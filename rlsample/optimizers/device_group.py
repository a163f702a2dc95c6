"""The devices that train one module together: the first in this process, each further one in a process of its own."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import torch

from rlsample.engine.engine import Engine, Future, Handle
from rlsample.errors import ConfigError, LearnerError, unknown_name
from rlsample.optimizers.background import Timers
from rlsample.optimizers.collective import Collective, CollectiveError
from rlsample.optimizers.device_rank import Plan, make_rank
from rlsample.optimizers.device_rows import DeviceRows
from rlsample.optimizers.device_trainer import PRECISIONS, DeviceTrainer
from rlsample.optimizers.multi_device_support import MultiDeviceSupport
from rlsample.optimizers.row_memory import HostRows, Memory, MinibatchIndex, SharedMemory
from rlsample.optimizers.shards import fragment_minibatches, row_minibatches, split_fragments, split_rows
from rlsample.sample_batch import SampleBatch
from rlsample.settings import option
from rlsample.torch_view import device_named

__all__ = ["DeviceGroup", "DeviceSettings"]

_JOIN_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class DeviceSettings:
    """Where a module is trained, and how."""

    devices: tuple[str, ...] = option(("cpu",), "torch devices; the first is the learner's own, such as cuda:0,cuda:1")
    precision: str = option("float32", "'float32', or 'bfloat16': the loss under autocast")

    def __post_init__(self) -> None:
        if not self.devices:
            raise ConfigError("devices is empty; name at least one, such as cpu or cuda:0")
        if self.precision not in PRECISIONS:
            raise unknown_name("precision", self.precision, PRECISIONS)
        kinds = {device_named(device).type for device in self.devices}
        if len(kinds) > 1:
            raise ConfigError(f"devices {', '.join(self.devices)} are of different kinds; use CPUs only or GPUs only")


class DeviceGroup:
    """Loads rows into slots and trains on them. A context manager.

    With one device everything happens in the caller's threads: one may load while another trains, on different slots.

    Args:
        support: what is trained; its module is on the first device.
        num_slots: slots, each with room for one batch.
        updating: entered while the weights change.
        timers: gets "fill" and "copy" (start of the copy; on CUDA, what it took on the device).

    Attributes:
        num_dropped_rows: rows left out because devices get equally many.
        num_rows_loaded: rows that went to slots.
    """

    def __init__(
        self,
        support: MultiDeviceSupport,
        settings: DeviceSettings | None = None,
        num_slots: int = 1,
        updating: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        timers: Timers | None = None,
    ) -> None:
        self.settings = settings = settings or DeviceSettings()
        device = _checked_device(support, settings.devices[0])
        self.num_dropped_rows = self.num_rows_loaded = 0
        self._support = support
        self._timers = timers or Timers()
        self._count_lock = threading.Lock()  # several loaders load at once
        self._copies = [DeviceRows(device) for _ in range(num_slots)]
        memories: list[Callable[[], Memory]] = [functools.partial(Memory, device.type == "cuda")]
        memories += [SharedMemory] * (len(settings.devices) - 1)
        self._hosts = [
            [HostRows(support.columns, support.whole_fragments, make()) for make in memories] for _ in range(num_slots)
        ]
        self._ranks = _Ranks(support, settings, num_slots, device) if len(settings.devices) > 1 else None
        add_up = None if self._ranks is None else self._ranks.sum_
        self._trainer = DeviceTrainer(support, device, settings.precision, add_up, updating)

    @property
    def num_devices(self) -> int:
        """Devices."""
        return len(self.settings.devices)

    def load(self, slot: int, batches: Sequence[SampleBatch]) -> int:
        """Copies the batches' rows into a slot that nobody uses, and starts the copy to the devices.

        Returns:
            Rows that are in the slot.

        Raises:
            ConfigError: see :meth:`HostRows.fill` and :mod:`rlsample.optimizers.shards`.
        """
        started = time.perf_counter()
        num = self.num_devices
        if num == 1:
            shards, dropped = [list(batches)], 0
        elif self._support.whole_fragments:
            shards, dropped = split_fragments(batches, num), 0
        else:
            shards, dropped = split_rows(batches, num)
        hosts = self._hosts[slot]
        self._copies[slot].wait_for_copy()
        for host, shard in zip(hosts, shards, strict=True):
            host.fill(shard)
        filled = time.perf_counter()
        self._timers.add("fill", filled - started)
        self._copies[slot].upload(hosts[0].memory.tensor, hosts[0].layout)
        if self._ranks is not None:
            self._ranks.upload(slot, hosts[1:])
        self._timers.add("copy", time.perf_counter() - filled + self._copies[slot].drain_copy_s())
        count = sum(host.layout.count for host in hosts)
        with self._count_lock:
            self.num_dropped_rows += dropped
            self.num_rows_loaded += count
        return count

    def train_pass(
        self, slot: int, minibatch_size: int = 0, rng: np.random.Generator | None = None
    ) -> tuple[list[dict[str, float]], int]:
        """One pass over a slot's rows, each in one minibatch; one update per minibatch.

        Args:
            minibatch_size: rows over all devices; 0, or more than there are: all of them in one update.
            rng: draws the order.

        Returns:
            Each update's statistics, and the rows the loss was computed on.
        """
        plans, totals = self._plan(slot, minibatch_size, rng)
        results = []
        try:
            if self._ranks is not None:
                self._ranks.train(slot, [list(zip(plan, totals, strict=True)) for plan in plans[1:]])
            for index, total_rows in zip(plans[0], totals, strict=True):
                results.append(self._trainer.train(self._copies[slot].rows(index), total_rows))
        except BaseException as error:
            if self._ranks is not None:
                self._ranks.give_up(error)
            raise
        if self._ranks is not None:
            self._ranks.remember_weights()
        return results, sum(totals)

    def _plan(
        self, slot: int, minibatch_size: int, rng: np.random.Generator | None
    ) -> tuple[list[list[MinibatchIndex | None]], list[int]]:
        """Device -> minibatch -> its rows there (None: all); and each minibatch's rows over all devices."""
        hosts = self._hosts[slot]
        total = sum(host.layout.count for host in hosts)
        if minibatch_size == 0 or minibatch_size >= total:
            return [[None] for _ in hosts], [total]
        rng = rng or np.random.default_rng(0)
        if self._support.whole_fragments:
            by_part = fragment_minibatches([host.fragments for host in hosts], minibatch_size, rng)
            parts = [[host.minibatch(chosen[d]) for chosen in by_part] for d, host in enumerate(hosts)]
        else:
            by_part = row_minibatches(hosts[0].layout.count, len(hosts), minibatch_size, rng)
            parts = [[MinibatchIndex(chosen[d]) for chosen in by_part] for d in range(len(hosts))]
        totals = [sum(len(part[i].rows) for part in parts) for i in range(len(by_part))]
        return [list(part) for part in parts], totals

    def release(self, slot: int) -> None:
        """The slot's rows are not needed any more; to be called by the thread that trained."""
        self._copies[slot].release()

    def num_bytes_copied(self) -> tuple[int, int]:
        """Bytes copied so far: from fragments to host memory, and from there to the first device."""
        filled = sum(host.bytes_filled for hosts in self._hosts for host in hosts)
        return filled, sum(copy.bytes_copied for copy in self._copies)

    def check(self) -> None:
        """Raises LearnerError if the process of a device ended or failed."""
        if self._ranks is not None:
            self._ranks.check()

    def weights_by_device(self) -> list[dict[str, np.ndarray]]:
        """Copies of the parameters on each device: equal, bit for bit, unless something is wrong."""
        mine = {n: p.detach().cpu().numpy().copy() for n, p in self._support.module.named_parameters()}
        return [mine, *(self._ranks.weights() if self._ranks is not None else [])]

    def close(self) -> None:
        """Ends the other processes. Idempotent, bounded in time."""
        if self._ranks is not None:
            self._ranks.close()
        for hosts in self._hosts:
            for host in hosts:
                host.memory.close()

    def __enter__(self) -> DeviceGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Ranks:
    """The further devices, seen from this process. Thread-safe."""

    def __init__(
        self, support: MultiDeviceSupport, settings: DeviceSettings, num_slots: int, device: torch.device
    ) -> None:
        from rlsample.engine.process_engine import ProcessEngine

        self._support = support
        self._lock = threading.Lock()
        self._known = [[0] * (len(settings.devices) - 1) for _ in range(num_slots)]
        self._calls: list[Future] = []
        self._failure: BaseException | None = None
        self._collective: Collective | None = None
        pickled = self._pickled()
        self._folder = tempfile.mkdtemp(prefix="rlsample-")
        self._engine: Engine = ProcessEngine()
        try:
            make = functools.partial(make_rank, pickled, settings.devices, settings.precision, num_slots)
            self._handles: list[Handle] = [self._engine.create(make) for _ in settings.devices[1:]]
            path = os.path.join(self._folder, "store")
            joins = [handle.call("join", path) for handle in self._handles]
            self._collective = Collective(path, 0, len(settings.devices), device, _JOIN_TIMEOUT_S, self._all_alive)
            for join in joins:
                join.result(_JOIN_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def _pickled(self) -> bytes:
        self.remember_weights()
        try:
            return cloudpickle.dumps(self._support, protocol=5)
        except Exception as error:
            raise ConfigError(f"several devices need a support that can be pickled: {error}") from error

    def remember_weights(self) -> None:
        """The weights of now are those that all devices have."""
        self._weights = self._flat_weights()

    def _flat_weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self._support.module.parameters()])

    def sum_(self, tensor: torch.Tensor) -> None:
        collective = self._collective
        if collective is None:
            raise CollectiveError("the device group is closed")
        collective.sum_(tensor)

    def upload(self, slot: int, hosts: Sequence[HostRows]) -> None:
        for i, (handle, host) in enumerate(zip(self._handles, hosts, strict=True)):
            memory = host.memory
            assert isinstance(memory, SharedMemory)
            moved = self._known[slot][i] != memory.version
            self._known[slot][i] = memory.version
            self._call(handle, "upload", slot, memory.address if moved else None, host.layout)

    def train(self, slot: int, plans: Sequence[Plan]) -> None:
        """Has the devices begin a pass, as the first one would: with its weights and its progress."""
        if not torch.equal(self._weights, self._flat_weights()):  # set from outside, such as from a checkpoint
            pickled = self._pickled()
            for handle in self._handles:
                self._call(handle, "renew", pickled)
        get_progress = getattr(self._support, "get_progress", None)
        progress = None if get_progress is None else get_progress()
        for handle, plan in zip(self._handles, plans, strict=True):
            self._call(handle, "train", slot, plan, progress)

    def _call(self, handle: Handle, name: str, *args: Any) -> None:
        with self._lock:
            self._calls.append(handle.call(name, *args))
        self.check()

    def check(self) -> None:
        if self._failure is not None:
            what = f"{type(self._failure).__name__}: {self._failure}"
            raise LearnerError(f"an update failed before, and the devices go apart: {what}") from self._failure
        with self._lock:
            done = [call for call in self._calls if call.done()]
            self._calls = [call for call in self._calls if call not in done]
        for call in done:
            try:
                call.result()
            except Exception as error:
                raise LearnerError(f"the process of device {call.handle.index + 1} failed: {error}") from error
        for handle in self._handles:
            if not handle.alive():
                raise LearnerError(f"the process of device {handle.index + 1} ended")

    def _all_alive(self) -> bool:
        return all(handle.alive() for handle in self._handles)

    def give_up(self, error: BaseException) -> None:
        """Leaves the group for good: the others may wait for a sum that never comes, and must not take a later one for
        it.

        Raises:
            LearnerError: one of the processes says what made the sum fail.
        """
        self._failure = error
        self._leave()
        if isinstance(error, CollectiveError):
            for handle in self._handles:
                try:
                    handle.call("check").result(5.0)
                except Exception as cause:
                    raise LearnerError(f"the process of device {handle.index + 1} failed: {cause}") from cause

    def _leave(self) -> None:
        if self._collective is not None:
            self._collective.close()
            self._collective = None

    def weights(self) -> list[dict[str, np.ndarray]]:
        return [handle.call("weights").result(_JOIN_TIMEOUT_S) for handle in self._handles]

    def close(self) -> None:
        self._leave()
        try:
            self._engine.close()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


def _checked_device(support: MultiDeviceSupport, name: str) -> torch.device:
    """The first device, if the module's parameters are there."""
    wanted = device_named(name)
    parameter = next(iter(support.module.parameters()), None)
    if parameter is None:
        raise ConfigError("the module has no parameters to train")
    found = parameter.device
    if found.type != wanted.type or (wanted.index is not None and found.index not in (None, wanted.index)):
        raise ConfigError(f"devices begin with {name}, but the module is on {found}; set the policy's device to {name}")
    return found
