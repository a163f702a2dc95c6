"""One update on one device, alone or together with others."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from rlsample.errors import unknown_name
from rlsample.optimizers.multi_device_support import MultiDeviceSupport
from rlsample.policy.loaded_rows import LoadedRows

__all__ = ["PRECISIONS", "DeviceTrainer"]

PRECISIONS = ("float32", "bfloat16")


class DeviceTrainer:
    """Loss, gradients, their sum over devices, update.

    Args:
        precision: "bfloat16": the loss runs under autocast; weights, gradients and updates stay float32.
        sum_over_devices: adds a float32 tensor up over all devices, in place; None: there is only this one.
        updating: entered while the weights change.
    """

    def __init__(
        self,
        support: MultiDeviceSupport,
        device: torch.device,
        precision: str = "float32",
        sum_over_devices: Callable[[Tensor], None] | None = None,
        updating: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        if precision not in PRECISIONS:
            raise unknown_name("precision", precision, PRECISIONS)
        self._support = support
        self._device = device
        self._reduced = precision == "bfloat16"
        self._sum = sum_over_devices
        self._updating = updating
        self._parameters = [p for p in support.module.parameters() if p.requires_grad]

    def train(self, rows: LoadedRows, total_rows: int) -> dict[str, float]:
        """One update on the mean loss over ``total_rows`` rows, of which these are this device's.

        All devices must call it for the same minibatch; each then has the same gradients and takes the same step.

        Returns:
            The statistics, means over all devices weighted by their rows.

        Raises:
            FloatingPointError: a statistic is not finite (named); the weights are as before, on every device.
        """
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._reduced):
            loss, stats = self._support.loss(rows)
        share = rows.count / total_rows
        (loss * share).backward()
        numbers = torch.stack([stat.detach().float() for stat in stats.values()]) * share
        if self._sum is not None:
            numbers = self._sum_up(numbers, self._sum)
        result = dict(zip(stats, numbers.tolist(), strict=True))
        for name, number in result.items():
            if not math.isfinite(number):
                raise FloatingPointError(f"{name} is {number}; the weights were left as they were")
        with self._updating():
            self._support.update()
        return result

    def _sum_up(self, numbers: Tensor, sum_over_devices: Callable[[Tensor], None]) -> Tensor:
        """Adds up gradients and statistics in one go; puts the gradients back and returns the statistics."""
        for parameter in self._parameters:
            if parameter.grad is None:  # the loss did not touch it here, but may elsewhere
                parameter.grad = torch.zeros_like(parameter)
        grads = [p.grad for p in self._parameters if p.grad is not None]
        flat = torch.cat([*(grad.reshape(-1).float() for grad in grads), numbers])
        sum_over_devices(flat)
        start = 0
        for grad in grads:
            grad.copy_(flat[start : start + grad.numel()].view_as(grad))
            start += grad.numel()
        return flat[start:]
