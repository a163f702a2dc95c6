"""Ctrl-C at a chosen place."""

from __future__ import annotations

import selectors
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rlsample

__all__ = ["interrupted_at"]

_OURS = str(Path(rlsample.__file__).parent)
_PLACES = (_OURS, threading.__file__, selectors.__file__)
_GIVE_DESCRIPTORS = ("memfd_create", "recvmsg_into", "recvmsg", "socketpair", "pipe")


def interrupted_at(place: int, work: Callable[[], Any]) -> bool:
    """Runs ``work`` and raises KeyboardInterrupt in it where the interpreter would, at the ``place``-th such place.

    Those are, in CPython: where a function begins, and where a call into C has returned. Counted from 0 are the ones in
    this package, ``threading`` and ``selectors``, in this thread. Left out is where the kernel has just given a
    descriptor: Python code cannot keep it from being lost then.

    Returns:
        Whether it came so far; False: ``work`` was over before. Raised in a finalizer it is swallowed, as Ctrl-C is.
    """
    passed = 0

    def profile(frame: types.FrameType, event: str, called: Any) -> None:
        nonlocal passed
        if event == "c_return" and called.__name__ in _GIVE_DESCRIPTORS:
            return
        if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(_PLACES):
            return
        passed += 1
        if passed > place:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return passed > place
