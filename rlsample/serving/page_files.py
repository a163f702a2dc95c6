"""The pages of ``rlsample serve``: a fixed table of files, read from the package, with the headers they go out with.

Nothing of a request is joined to a path: what is not in the table does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

__all__ = ["PAGE_PATHS", "PageFile", "page_file"]

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_SCRIPTS = ("live", "demo", "server", "status_bar", "stats_poll", "numbers", "chart", "cartpole", "drawing", "player")
_FILES = {
    "/": "index.html",
    "/demo": "demo.html",
    "/static/style.css": "style.css",
    "/static/icon.svg": "icon.svg",
    **{f"/static/{name}.js": f"{name}.js" for name in _SCRIPTS},
}
# Scripts, styles and calls of this server only; no inline code, no frame around the page that could catch clicks.
_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"

PAGE_PATHS = tuple(_FILES)  # of URLs, all answered by GET and HEAD; they hold no data and need no token


@dataclass(frozen=True)
class PageFile:
    """A file as it is answered: its bytes, and its headers in the form ASGI sends them."""

    body: bytes
    headers: tuple[tuple[bytes, bytes], ...]


def page_file(path: str) -> PageFile | None:
    """The file at a URL path, such as ``/demo``; None where there is none. Paths compare as they are, byte for byte.

    Raises:
        FileNotFoundError: the installed package lacks a file of the table.
    """
    name = _FILES.get(path)
    return None if name is None else _read(name)


@cache
def _read(name: str) -> PageFile:
    body = (files("rlsample.serving") / "page" / name).read_bytes()
    headers = {
        "content-type": _TYPES[name.rpartition(".")[2]],
        "content-length": str(len(body)),
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return PageFile(body, tuple((key.encode(), value.encode()) for key, value in headers.items()))
