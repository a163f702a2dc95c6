"""Checkpoints: folders that are complete or not there at all, and that show when they were damaged.

    checkpoints/step_000000012288/
        state.json       the state but for its arrays (state_codec)
        arrays.npz       the arrays, without pickle
        manifest.json    {"format": 1, "files": {name: {"bytes": n, "sha256": hex}}}

A checkpoint is written under a hidden name, flushed to the disk, then renamed:
a crash leaves the older ones as they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlsample.algorithms.state_codec import decode, encode
from rlsample.errors import CheckpointError, ConfigError

__all__ = ["CheckpointStore", "find_damage"]

_FORMAT = 1
_NAME = re.compile(r"step_(\d{12})")


class CheckpointStore:
    """The checkpoints of one run, in one folder that one process writes to.

    Args:
        folder: made by the first :meth:`save`.
        keep: how many of the newest stay; older ones are removed after each save.
    """

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError(f"keep_checkpoints must be at least 1, not {keep}")
        self.folder = Path(folder)
        self.keep = keep

    def paths(self) -> list[Path]:
        """The checkpoints there are, oldest first, unchecked."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))

    def save(self, state: Mapping[str, Any], env_steps: int) -> Path:
        """Writes a checkpoint and returns its folder.

        One of the same step is replaced. Those of later steps go: a run resumed from an earlier one left them behind.

        Raises:
            CheckpointError: a value that cannot be stored, or a failing disk. The older checkpoints are as before.
        """
        document, arrays = encode(state)
        final = self.folder / f"step_{env_steps:012d}"
        hidden = self.folder / f".writing-{uuid.uuid4().hex}"
        try:
            self._clear_leftovers()
            hidden.mkdir(parents=True)
            _write(hidden, document, arrays)
            if final.exists():
                final.rename(self.folder / f".removing-{uuid.uuid4().hex}")
            hidden.rename(final)
            _flush_folder(self.folder)
            valid = [path for path in self.paths() if path.name <= final.name][-self.keep :]
            for old in set(self.paths()) - set(valid):
                old.rename(self.folder / f".removing-{uuid.uuid4().hex}")
            self._clear_leftovers()
        except OSError as error:
            shutil.rmtree(hidden, ignore_errors=True)
            raise CheckpointError(f"cannot write checkpoint {final}: {error}") from error
        return final

    def load(self, path: str | Path | None = None) -> dict[str, Any]:
        """The state of one checkpoint, the newest by default. Nothing in it is unpickled here.

        Raises:
            CheckpointError: there is none; or it is damaged: the message names the file and the last good checkpoint.
        """
        if path is None:
            paths = self.paths()
            if not paths:
                raise CheckpointError(f"no checkpoint in {self.folder}")
            path = paths[-1]
        path = Path(path)
        damage = find_damage(path)
        if damage is not None:
            good = [p for p in self.paths() if p != path and find_damage(p) is None]
            hint = f"the last good one is {good[-1]}" if good else "there is no good one beside it"
            raise CheckpointError(f"checkpoint {path} is damaged: {damage}; {hint}")
        return _read(path)

    def _clear_leftovers(self) -> None:
        """Removes what a crash left half written or half removed."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.name.startswith((".writing-", ".removing-")):
                    shutil.rmtree(path, ignore_errors=True)


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, in words that name the file; None if every byte is as it was written."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
        written_as = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"manifest.json is missing or unreadable ({type(error).__name__}: {error})"
    if written_as != _FORMAT:
        return f"manifest.json names format {written_as!r}, this version reads {_FORMAT}"
    for name in ("state.json", "arrays.npz"):
        if name not in files:
            return f"manifest.json does not list {name}"
        try:
            content = (path / name).read_bytes()
        except OSError as error:
            return f"{name} cannot be read ({error})"
        size, digest = files[name]
        if len(content) != size:
            return f"{name} has {len(content)} bytes, {size} were written"
        if hashlib.sha256(content).hexdigest() != digest:
            return f"{name} has changed since it was written (sha256 differs)"
    return None


def _write(folder: Path, document: Any, arrays: dict[str, np.ndarray]) -> None:
    with (folder / "arrays.npz").open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
        _flush(file)
    _write_json(folder / "state.json", document)
    files = {}
    for name in ("arrays.npz", "state.json"):
        content = (folder / name).read_bytes()
        files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    _write_json(folder / "manifest.json", {"format": _FORMAT, "files": files})
    _flush_folder(folder)


def _write_json(path: Path, document: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(document, file, allow_nan=False)
        _flush(file)


def _read(folder: Path) -> dict[str, Any]:
    document = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    with np.load(folder / "arrays.npz", allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    state: dict[str, Any] = decode(document, arrays)
    return state


def _flush(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not every system lets a folder be opened or synced
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
