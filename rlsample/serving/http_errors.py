"""What a refused request is told."""

from __future__ import annotations

__all__ = ["STATUS", "HttpError"]

STATUS = {
    "bad_value": 400,
    "unauthorized": 401,
    "wrong_host": 403,
    "unknown_episode": 404,
    "not_found": 404,
    "method": 405,
    "conflict": 409,
    "too_large": 413,
    "media_type": 415,
    "key_reused": 422,
    "rate_limited": 429,
    "policy_failed": 500,
    "busy": 503,
    "closed": 503,
}
_RETRY_AFTER_S = {"rate_limited": 1, "busy": 1, "closed": 5}


class HttpError(Exception):
    """A request is refused.

    Attributes:
        code: one of :data:`STATUS`, which gives the HTTP status.
        message: cause, value and fix, for the client.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.code]

    @property
    def retry_after_s(self) -> int | None:
        """Seconds after which the same request may succeed, if it may."""
        return _RETRY_AFTER_S.get(self.code)
