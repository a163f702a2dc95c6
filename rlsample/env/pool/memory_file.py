"""Anonymous memory that several processes share: mapped, or written and read like a file."""

from __future__ import annotations

import mmap
import os
import tempfile

__all__ = ["MemoryFile"]


class MemoryFile:
    """Anonymous memory behind a descriptor; ``MemoryFile(fd)`` opens what another process made.

    Attributes:
        fd: the descriptor.
    """

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            if hasattr(os, "memfd_create"):
                fd = os.memfd_create("rlsample-pool", os.MFD_CLOEXEC)
            else:
                with tempfile.TemporaryFile() as file:  # has no name either
                    fd = os.dup(file.fileno())
        self.fd = fd
        self._open = True

    def extend(self, size: int) -> int:
        """Adds ``size`` zeroed bytes at the next page; returns where they start."""
        end = os.fstat(self.fd).st_size
        start = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self.fd, start + size)
        return start

    def append(self, data: bytes) -> tuple[int, int]:
        """Writes ``data`` at the end; returns (offset, size) for :meth:`read`."""
        start = self.extend(len(data))
        self.write(start, data)
        return start, len(data)

    def write(self, offset: int, data: bytes) -> None:
        """Writes ``data`` there."""
        written = 0
        while written < len(data):
            written += os.pwrite(self.fd, data[written:], offset + written)

    def read(self, offset: int, size: int) -> bytes:
        """What was written there."""
        parts = []
        while size and (part := os.pread(self.fd, size, offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)

    def map(self, offset: int, size: int) -> mmap.mmap:
        """These bytes as shared memory."""
        return mmap.mmap(self.fd, size, offset=offset)

    def close(self) -> None:
        """Closes the descriptor; mappings live on. Idempotent."""
        if self._open:
            self._open = False
            os.close(self.fd)
