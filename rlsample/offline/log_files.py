"""One file of fragments in each format: how it is appended to, finished and read."""

from __future__ import annotations

import contextlib
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rlsample.errors import ConfigError
from rlsample.offline.array_codec import MAX_FRAGMENT_SIZE, ByteBudget
from rlsample.offline.declared_sizes import require_page_sizes
from rlsample.offline.json_lines import decode_line, encode_line
from rlsample.offline.parquet_tables import from_table, import_pyarrow, size_of_rows, to_table, values_per_row
from rlsample.sample_batch import SampleBatch

__all__ = [
    "PART",
    "Damage",
    "FragmentFile",
    "JsonLinesFile",
    "ParquetFile",
    "finished",
    "read_json_lines",
    "read_parquet",
]

PART = ".part"  # the suffix of a file that is not finished
_MORE_IN_A_LINE = 1 << 16  # bytes beside its arrays, which base64 makes a third longer
_PIECE = 1 << 20

_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, StopIteration, ConfigError)

Mine = Callable[[int], bool]
Damage = Callable[[str], None]


class FragmentFile(ABC):
    """A file that fragments are added to. It bears the suffix ``.part`` until it is finished.

    Args:
        path: the finished file; neither it nor the unfinished one may exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unfinished = path.with_name(path.name + PART)
        self.size = 0

    @abstractmethod
    def fits(self, batch: SampleBatch) -> bool:
        """Whether the batch can go into this file, beside those that are in it."""

    @abstractmethod
    def write(self, batch: SampleBatch) -> None:
        """Adds a fragment."""

    @abstractmethod
    def close_unfinished(self) -> None:
        """Closes the file as it is."""

    def finish(self) -> Path:
        """Brings all to the disk, and gives the file its own name, in one step. Idempotent."""
        self.close_unfinished()
        if self.unfinished.exists():
            os.replace(self.unfinished, self.path)
        return self.path


class JsonLinesFile(FragmentFile):
    """A line per fragment, handed to the system in one piece: a writer that is killed loses at most the line it was
    writing. A write that fails leaves the file as it was."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file: int | None = os.open(self.unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)

    def fits(self, batch: SampleBatch) -> bool:
        return True

    def write(self, batch: SampleBatch) -> None:
        assert self._file is not None
        line = memoryview(encode_line(batch))
        try:
            while line:
                line = line[os.write(self._file, line) :]
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.size)
            raise
        self.size = os.fstat(self._file).st_size

    def close_unfinished(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            try:
                os.fsync(file)
            finally:
                os.close(file)


class ParquetFile(FragmentFile):
    """A row group per fragment. Only a finished file can be read: a writer that is killed loses the one it was on."""

    def __init__(self, path: Path, first: SampleBatch) -> None:
        super().__init__(path)
        _, pq = import_pyarrow()
        self._schema = to_table(first).schema
        self._table: tuple[SampleBatch | None, Any] = None, None  # the last one made
        self._file: Any = self.unfinished.open("xb")
        try:
            self._writer = pq.ParquetWriter(self._file, self._schema, compression="zstd", use_dictionary=False)
        except BaseException:
            self._file.close()
            raise

    def fits(self, batch: SampleBatch) -> bool:
        if self._table[0] is not batch:
            self._table = batch, to_table(batch)
        return bool(self._table[1].schema.equals(self._schema, check_metadata=True))

    def write(self, batch: SampleBatch) -> None:
        table = self._table[1] if self._table[0] is batch else to_table(batch)
        self._table = None, None
        self._writer.write_table(table, row_group_size=max(1, batch.count))
        self.size = self._file.tell()

    def close_unfinished(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            try:
                self._writer.close()
                file.flush()
                os.fsync(file.fileno())
            finally:
                file.close()


def read_json_lines(
    path: Path, mine: Mine, damage: Damage, max_fragment_size: int = MAX_FRAGMENT_SIZE
) -> Iterator[SampleBatch]:
    """The fragments of the lines whose number (from 0) is ``mine``. Others are not unpacked.

    Args:
        damage: is told of lines that cannot be read: their number (from 1) and why; and of a file that is gone.
        max_fragment_size: bytes that the arrays of a fragment may have. A line that unpacks to more is damaged, one
            that could hold nothing else is not even read into memory.
    """
    file = _opened(path, damage)
    if file is None:
        return
    longest = 2 * max_fragment_size + _MORE_IN_A_LINE
    with file:
        for number in itertools.count():
            line = file.readline(longest)
            if not line:
                return
            whole = line.endswith(b"\n")
            if len(line) == longest and not whole:
                whole = _skip_line(file)
                line = b""
            if mine(number):
                try:
                    if not line:
                        raise ValueError(f"it has more than {longest} bytes; see max_fragment_size")
                    batch = decode_line(line, max_fragment_size)
                except ValueError as error:
                    what = " is damaged" if whole else ", the last one, is cut"
                    damage(f"line {number + 1}{what}: {error}")
                else:
                    yield batch
            if not whole:  # its writer may just add the rest, which is no line of its own
                return


def _skip_line(file: BinaryIO) -> bool:
    """Goes to the end of the line; whether it has one."""
    while True:
        piece = file.readline(_PIECE)
        if not piece or piece.endswith(b"\n"):
            return bool(piece)


def read_parquet(
    path: Path, mine: Mine, damage: Damage, max_fragment_size: int = MAX_FRAGMENT_SIZE
) -> Iterator[SampleBatch]:
    """The fragments of the row groups whose number (from 0) is ``mine``; as :func:`read_json_lines`."""
    pa, pq = import_pyarrow()
    opened = _opened(path, damage)
    if opened is None:
        return
    with opened as source:
        try:
            file = pq.ParquetFile(source)
        except (pa.ArrowException, OSError) as error:
            damage(f"it is no Parquet file, or a damaged one: {error}")
            return
        with file:
            for number in range(file.num_row_groups):
                if not mine(number):
                    continue
                try:
                    group, schema = file.metadata.row_group(number), file.schema_arrow
                    ByteBudget(max_fragment_size).spend(size_of_rows(schema, group.num_rows))
                    longest = 2 * max_fragment_size + _MORE_IN_A_LINE
                    require_page_sizes(source, group, values_per_row(schema), longest)
                    batch = from_table(file.read_row_group(number))
                except (pa.ArrowException, *_DAMAGED) as error:
                    damage(f"row group {number + 1} is damaged: {error}")
                else:
                    yield batch


def finished(path: Path) -> Path:
    """What a file is called, or will be, when it is finished."""
    return path.with_name(path.name.removesuffix(PART))


def _opened(path: Path, damage: Damage) -> BinaryIO | None:
    """The file, also if its writer has finished it since the folder was listed. None: it is gone, or is not ours."""
    for name in (path, finished(path)):
        try:
            return name.open("rb")
        except FileNotFoundError:
            continue
        except OSError as error:
            damage(f"it cannot be opened: {error.strerror}")
            return None
    damage("it was deleted after the folder was listed")
    return None
