"""Sums over the processes of a device group, by torch.distributed."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlsample.errors import ConfigError, RlsampleError

__all__ = ["Collective", "CollectiveError"]

_POLL_S = 50e-6
_LOOK_S = 0.5


class CollectiveError(RlsampleError):
    """A sum over devices failed, most often because another process of the group ended."""


class Collective:
    """One process's end of the group: NCCL between CUDA devices, gloo between CPU ones, on this machine.

    It has a process group of its own: the global default of ``torch.distributed`` stays as it is.

    Args:
        path: a file that all processes can open and that did not exist before; they meet there.
        rank, size: this process's number, and how many there are. The constructor returns once all have come.
        timeout_s: what a sum may take before the others are given up.
        others_live: asked while a sum between CUDA devices takes long; these do not notice by themselves that another
            process has ended. gloo does.
    """

    def __init__(
        self,
        path: str,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float = 60.0,
        others_live: Callable[[], bool] = lambda: True,
    ) -> None:
        self._on_cuda = device.type == "cuda"
        self._others_live = others_live
        timeout = datetime.timedelta(seconds=timeout_s)
        store = dist.FileStore(path, size)
        kinds: Any = dist  # the process groups' own constructors have no type hints
        if device.type == "cuda":
            options = kinds.ProcessGroupNCCL.Options()
            options._timeout = timeout
            with torch.cuda.device(device):
                self._group = kinds.ProcessGroupNCCL(store, rank, size, options)
        elif device.type == "cpu":
            options = kinds.ProcessGroupGloo._Options()
            options._devices = [kinds.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = timeout
            self._group = kinds.ProcessGroupGloo(store, rank, size, options)
        else:
            raise ConfigError(f"no sums over devices of the kind {device.type!r}; use cpu or cuda:0, cuda:1, ...")

    def sum_(self, tensor: Tensor) -> None:
        """Adds the tensor up over all processes, in place; every process then has the same bits.

        Raises:
            CollectiveError: it failed.
        """
        group = self._group
        if group is None:
            raise CollectiveError("the device group is closed")
        try:
            work = group.allreduce([tensor])
            if self._on_cuda:
                self._watch(work)
            work.wait()
        except RuntimeError as error:
            raise CollectiveError(f"a sum over devices failed: {error}") from error

    def _watch(self, work: Any) -> None:
        """Returns once the sum is done on the device; the update that follows needs its result on the host anyway."""
        looked = time.monotonic()
        while not work.is_completed():
            time.sleep(_POLL_S)
            if time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                if not self._others_live():
                    raise CollectiveError("the process of another device ended during a sum")

    def close(self) -> None:
        """Leaves the group; a sum the others are in fails. Idempotent."""
        group, self._group = self._group, None
        if group is not None and hasattr(group, "abort"):
            group.abort()
