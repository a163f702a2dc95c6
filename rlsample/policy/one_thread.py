"""One thread for work that is too small to be shared.

The libraries under torch split a matrix product among all cores from some ten thousand multiplications on, and their
threads spin from one product to the next: on a small net that is several times the CPU time, and on busy cores many
times the time. The limit here is that of the calling thread alone. ``torch.set_num_threads`` would be the process's:
a thread that first used torch meanwhile would keep it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["one_thread"]


class _Limits(NamedTuple):
    openmp: Callable[[int], None]
    mkl: Callable[[int], int] | None


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Has torch compute on the CPU in the calling thread only; what was set before holds again at the end.

    Does nothing where torch was built without OpenMP.
    """
    before = torch.get_num_threads()
    limits = _limits() if before > 1 else None
    if limits is None:
        yield
        return
    limits.openmp(1)
    mkl_before = limits.mkl(1) if limits.mkl is not None else 0
    try:
        yield
    finally:
        limits.openmp(before)
        if limits.mkl is not None:
            limits.mkl(mkl_before)


@functools.cache
def _limits() -> _Limits | None:
    """The setters of torch's own copies of these libraries."""
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
        openmp = library.omp_set_num_threads
    except (OSError, AttributeError):
        return None
    openmp.argtypes, openmp.restype = [ctypes.c_int], None
    mkl = getattr(library, "MKL_Set_Num_Threads_Local", None)
    if mkl is not None:
        mkl.argtypes, mkl.restype = [ctypes.c_int], ctypes.c_int
    return _Limits(openmp, mkl)
