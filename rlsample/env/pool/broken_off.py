"""What an env does about a call that Ctrl-C broke off in the middle of its books: it begins anew."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["BeginsAnew", "whole"]

Method = TypeVar("Method", bound=Callable[..., Any])


class BeginsAnew(ABC):
    """An object whose public methods are :func:`whole`.

    Attributes:
        idle_in: the thread that only waits just now, where an interrupt changes nothing; None: none does.
        closing: whether it was asked to close: waits end.
    """

    closing = False
    idle_in: int | None = None
    _broke_off = False

    @abstractmethod
    def _begin_anew(self) -> None:
        """Brings the object to where it was when it was new, whatever state it is in, and takes ``_broke_off`` back.

        Raises:
            EnvError: there is no way.
        """

    def begin_anew_if_broken_off(self) -> None:
        """To be called with no lock held."""
        if self._broke_off:
            self._begin_anew()


def whole(method: Method) -> Method:
    """Has the next call notice that this method was left by what is no Exception, KeyboardInterrupt as a rule."""

    @functools.wraps(method)
    def call(self: BeginsAnew, *args: Any, **kwargs: Any) -> Any:
        self.begin_anew_if_broken_off()
        if self.idle_in == threading.get_ident():
            self.idle_in = None  # it was interrupted there
        try:
            return method(self, *args, **kwargs)
        except Exception:
            raise
        except BaseException:
            self._broke_off = self._broke_off or self.idle_in != threading.get_ident()
            raise

    return call  # type: ignore[return-value]
