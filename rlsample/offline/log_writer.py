"""Writes batches into a folder that other writers write into too."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from rlsample.errors import ConfigError, unknown_name
from rlsample.offline.array_codec import MAX_FRAGMENT_SIZE
from rlsample.offline.log_files import FragmentFile, JsonLinesFile, ParquetFile
from rlsample.offline.parquet_tables import import_pyarrow
from rlsample.sample_batch import SampleBatch

__all__ = ["FORMATS", "LogWriter"]

log = logging.getLogger(__name__)

FORMATS = ("jsonl", "parquet")


class LogWriter:
    """Writes each batch as one fragment. A context manager.

        with LogWriter("logs") as writer:
            writer.write(evaluator.sample())

    Files are named ``worker-<index>-<8 random hex digits>-<number>.<format>``: any number of writers share a folder,
    also over runs. While a file is written it has ``.part`` after its name; its own name comes with its last byte.
    JSONL can be read before that, and after a crash: see docs/offline.md.

    Args:
        folder: made if it does not exist, with the first batch.
        format: "jsonl" or "parquet" (needs ``rlsample[offline]``).
        worker_index: goes into the file names.
        max_file_size: bytes after which a file is finished and the next one begun.

    Raises:
        ConfigError: an unknown format, a size below 1, or a folder that is a file.
    """

    def __init__(
        self, folder: str | Path, format: str = "jsonl", worker_index: int = 0, max_file_size: int = 64 << 20
    ) -> None:
        if format not in FORMATS:
            raise unknown_name("format", format, FORMATS)
        if max_file_size < 1:
            raise ConfigError(f"max_file_size must be at least 1 byte, not {max_file_size}")
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"cannot write logs to {self.folder}: it is a file; give a folder")
        if format == "parquet":
            import_pyarrow()
        self.format, self.max_file_size = format, max_file_size
        self._name = f"worker-{worker_index:05d}-{secrets.token_hex(4)}"
        self._number = 0
        self._file: FragmentFile | None = None
        self._closed = self._warned = False

    def write(self, batch: SampleBatch) -> None:
        """Adds one fragment. JSONL: it has reached the system when this returns, and outlives this process.

        Raises:
            ConfigError: a column that the format cannot hold, or the writer is closed.
            OSError: the disk failed. What was written before is as it was.
        """
        if self._closed:
            raise ConfigError(f"the writer to {self.folder} is closed")
        if batch.nbytes > MAX_FRAGMENT_SIZE and not self._warned:
            self._warned = True
            log.warning(
                "a batch of %d bytes is written to %s as one fragment: readers skip what is above %d unless their "
                "max_fragment_size (input_max_fragment_size) is raised",
                batch.nbytes,
                self.folder,
                MAX_FRAGMENT_SIZE,
            )
        if self._file is not None and not self._file.fits(batch):
            self._finish()
        if self._file is None:
            self._file = self._next_file(batch)
        self._file.write(batch)
        if self._file.size >= self.max_file_size:
            self._finish()

    def close(self) -> None:
        """Finishes the running file. Idempotent."""
        self._closed = True
        self._finish()

    def _next_file(self, batch: SampleBatch) -> FragmentFile:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write logs to {self.folder}: {error.strerror}") from error
        path = self.folder / f"{self._name}-{self._number:05d}.{self.format}"
        self._number += 1
        return JsonLinesFile(path) if self.format == "jsonl" else ParquetFile(path, batch)

    def _finish(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.finish()
            folder = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
