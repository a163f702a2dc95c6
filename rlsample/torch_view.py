"""Arrays as torch tensors without a copy, and devices by name. Loads torch, as no other module of the top level does:
import it late."""

from __future__ import annotations

import numpy as np
import torch

from rlsample.errors import ConfigError

__all__ = ["as_tensor", "check_device", "device_named"]


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor over the array's memory; a copy if the array is read-only, has negative strides or foreign byte order.

    Raises:
        ConfigError: a dtype that torch has not (str, object, datetime).
    """
    if not (array.flags.writeable and array.dtype.isnative and min(array.strides, default=0) >= 0):
        array = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise ConfigError(f"torch has no dtype for {array.dtype}; leave the column out by columns=[...]") from error


def device_named(name: str) -> torch.device:
    """The device of that name, whether it is here or not.

    Raises:
        ConfigError: torch knows no such kind of device.
    """
    try:
        return torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"torch knows no device {name!r}; use cpu, cuda, or cuda:0, cuda:1, ...") from error


def check_device(name: str) -> torch.device:
    """As :func:`device_named`, of a device that can be used.

    Raises:
        ConfigError: torch knows no such kind of device, or sees none of that number here.
    """
    device = device_named(name)
    if device.type == "cuda":
        number = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= number:
            raise ConfigError(f"torch sees {number} CUDA devices here, so that {name!r} cannot be used; use cpu")
    return device
