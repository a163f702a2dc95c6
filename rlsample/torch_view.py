"""Arrays as torch tensors without a copy. The only module of the top level that loads torch: import it late."""

from __future__ import annotations

import numpy as np
import torch

from rlsample.errors import ConfigError

__all__ = ["as_tensor"]


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
