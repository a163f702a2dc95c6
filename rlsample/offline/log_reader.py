"""Reads fragments back: from files that are shared among readers, in several passes, shuffled if wanted."""

from __future__ import annotations

import glob
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlsample.errors import ConfigError
from rlsample.offline.array_codec import MAX_FRAGMENT_SIZE
from rlsample.offline.log_files import PART, finished, read_json_lines, read_parquet
from rlsample.offline.minari_datasets import find_minari, read_minari
from rlsample.sample_batch import SampleBatch

__all__ = ["LogReader", "find_logs", "shuffled"]

log = logging.getLogger(__name__)

_READERS = {".jsonl": read_json_lines, ".parquet": read_parquet}


class LogReader:
    """An iterator over logged fragments. A context manager: it holds the file it reads open.

        with LogReader("logs") as reader:
            for batch in reader: ...

    A line or row group that cannot be read is skipped with a warning that names file and place; a cut last line, one
    that is too large and a file that is deleted meanwhile, too.
    The folder is listed at the beginning of each pass. Unfinished JSONL files are read as far as they go.

    Readers of the same logs with ``index`` 0 to n - 1 and ``num_readers`` n share them without overlap: which fragment
    is whose depends on its file's name and its place in it alone, so that no reader need know what the others see.
    The same arguments and files give the same fragments in the same order.

    Args:
        source: a folder, a file, a glob pattern, ``minari:ID`` or the folder of a Minari dataset; or several of them.
        index, num_readers: of the sharing.
        repeat: passes; None: without end.
        shuffle_window: 0: files in the order of their names. Else files in random order, and each fragment drawn from
            that many that were read ahead.
        seed: of the shuffling; each pass has an order of its own.
        max_fragment_size: bytes that the arrays of a fragment may have, unpacked: a small file may hold what fills the
            memory.

    Attributes:
        num_skipped: fragments, and files as a whole, skipped so far.
        pass_number: the pass of the last fragment, from 0.
        samples: False: for the evaluator, no env is stepped for it.

    Raises:
        ConfigError: nothing there to read, or numbers that cannot work. From ``next``: an endless reader's pass had no
            fragment.
        MissingExtraError: Parquet or Minari without ``rlsample[offline]``.
    """

    samples = False

    def __init__(
        self,
        source: str | Path | Sequence[str | Path],
        index: int = 0,
        num_readers: int = 1,
        repeat: int | None = 1,
        shuffle_window: int = 0,
        seed: int = 0,
        max_fragment_size: int = MAX_FRAGMENT_SIZE,
    ) -> None:
        if not 0 <= index < num_readers:
            raise ConfigError(f"reader index {index} of {num_readers}: it counts from 0 to {num_readers - 1}")
        if shuffle_window < 0 or (repeat is not None and repeat < 1):
            raise ConfigError(
                f"shuffle_window must be 0 or more, repeat 1 or more or None; not {shuffle_window}, {repeat}"
            )
        if max_fragment_size < 1:
            raise ConfigError(f"max_fragment_size must be at least 1 byte, not {max_fragment_size}")
        self.source = [source] if isinstance(source, (str, Path)) else list(source)
        self.index, self.num_readers, self.repeat = index, num_readers, repeat
        self.shuffle_window, self.seed = shuffle_window, seed
        self.max_fragment_size = max_fragment_size
        self.num_skipped = 0
        self._warned: set[str] = set()
        self.pass_number = self._given = 0
        self._skip = 0  # fragments of the next pass that were given before
        self._pass: Iterator[SampleBatch] | None = None
        find_logs(self.source)

    def __iter__(self) -> LogReader:
        return self

    def __next__(self) -> SampleBatch:
        while self.repeat is None or self.pass_number < self.repeat:
            if self._pass is None:
                self._pass = self._one_pass(np.random.default_rng([self.seed, self.pass_number]))
                for _ in range(self._skip):
                    next(self._pass, None)
                self._skip = 0
            batch = next(self._pass, None)
            if batch is not None:
                self._given += 1
                return batch
            if not self._given and self.repeat is None:
                share = f"reader {self.index} of {self.num_readers} found" if self.num_readers > 1 else "there is"
                raise ConfigError(f"{share} no readable fragment in {self._names()}")
            self._pass, self._given = None, 0
            self.pass_number += 1
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        """Where this reader is."""
        return {"source": self._own_source(), "pass": self.pass_number, "given": self._given}

    def set_state(self, state: dict[str, Any] | None) -> None:
        """Goes on from :meth:`get_state` of a reader with the same arguments and files: reads up to there again.

        Of a reader of another source: begins with its own, and warns.
        """
        self.close()
        if not state or "pass" not in state or state.get("source", self._own_source()) != self._own_source():
            log.warning("the state is one of other logs than %s: this reader begins with its input", self._names())
            return
        self.pass_number, self._given = int(state["pass"]), int(state["given"])
        self._skip = self._given

    def close(self) -> None:
        """Closes the file that is being read; the next ``next`` begins a pass. Idempotent."""
        running, self._pass, self._given, self._skip = self._pass, None, 0, 0
        if running is not None:
            running.close()  # type: ignore[attr-defined]

    def _one_pass(self, rng: np.random.Generator) -> Iterator[SampleBatch]:
        files = find_logs(self.source)
        if not self.shuffle_window:
            yield from self._fragments(files)
        else:
            order = rng.permutation(len(files))
            yield from shuffled(self._fragments([files[i] for i in order]), self.shuffle_window, rng)

    def _fragments(self, files: list[Path]) -> Iterator[SampleBatch]:
        for path in files:
            name = path.name.removesuffix(PART)
            offset = zlib.crc32(name.encode())

            def mine(number: int, offset: int = offset) -> bool:
                return (offset + number) % self.num_readers == self.index

            def damage(what: str, path: Path = path) -> None:
                self._skipped(f"{path}: {what}; skipped")

            read = _READERS.get(Path(name).suffix)
            if read is None or path.is_dir():
                yield from read_minari(path, mine, damage, self.max_fragment_size)
            else:
                yield from read(path, mine, damage, self.max_fragment_size)

    def _skipped(self, what: str) -> None:
        self.num_skipped += 1
        if what not in self._warned:
            self._warned.add(what)
            log.warning("%s", what)

    def _own_source(self) -> list[str]:
        return [str(one) for one in self.source]

    def _names(self) -> str:
        return ", ".join(map(str, self.source))

    def __enter__(self) -> LogReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def shuffled(fragments: Iterator[SampleBatch], window: int, rng: np.random.Generator) -> Iterator[SampleBatch]:
    """All of the fragments, each drawn from the ``window`` that were read ahead."""
    held: list[SampleBatch] = []
    for fragment in fragments:
        held.append(fragment)
        if len(held) > window:
            yield _take_one(held, rng)
    while held:
        yield _take_one(held, rng)


def _take_one(held: list[SampleBatch], rng: np.random.Generator) -> SampleBatch:
    at = int(rng.integers(len(held)))
    held[at], held[-1] = held[-1], held[at]
    return held.pop()


def find_logs(sources: Sequence[str | Path]) -> list[Path]:
    """Files of fragments and folders of Minari datasets, by name; a file in two sources comes once.

    Raises:
        ConfigError: a source that holds none.
    """
    found: dict[str, Path] = {}
    for source in sources:
        paths = _find(source)
        if not paths:
            raise ConfigError(f"no logs in {source}: expected *.jsonl or *.parquet files, or a Minari dataset")
        for path in paths:
            name = os.path.abspath(path).removesuffix(PART)
            if name not in found or not path.name.endswith(PART):
                found[name] = path
    return [found[name] for name in sorted(found)]


def _find(source: str | Path) -> list[Path]:
    minari = find_minari(source)
    if minari is not None:
        return [minari]
    path = Path(source)
    if path.is_dir():
        listed = list(path.iterdir())
    else:
        listed = [path] if path.exists() else [Path(name) for name in glob.glob(str(source))]
    for one in listed:
        if one.name.endswith(f".parquet{PART}"):
            log.warning("%s is unfinished: its writer is running or was killed; skipped", one)
    endings = (".jsonl", f".jsonl{PART}", ".parquet")
    return [one for one in listed if one.name.endswith(endings) and (one.is_file() or finished(one).is_file())]
