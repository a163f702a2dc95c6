"""One slot's rows on one device: copied there beside the computing, and kept as long as they are used."""

from __future__ import annotations

import torch
from torch import Tensor

from rlsample.optimizers.row_memory import Layout, MinibatchIndex, loaded_rows
from rlsample.policy.loaded_rows import LoadedRows

__all__ = ["DeviceRows"]


class DeviceRows:
    """On CUDA: memory of its own, a stream for the copies, and events both ways. On the CPU: the host memory itself.

    The order that makes it safe: the copy waits for the event "used" of the rows before, the computing waits for the
    event "copied", and the host memory is filled again only after "copied" has happened.

    Attributes:
        bytes_copied: from host to device so far; 0 on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.bytes_copied = 0
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._layout = Layout(0, {}, None, 0)
        self._copy_ms = 0.0
        self._timed = False
        if self._on_cuda:
            self._stream = torch.cuda.Stream(device)
            self._begun, self._copied = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._used = torch.cuda.Event()

    def upload(self, host: Tensor, layout: Layout) -> None:
        """Starts the copy of ``layout.num_bytes`` of pinned memory; returns before it is done."""
        self._layout = layout
        if not self._on_cuda:
            self._memory = host
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._used)
            if len(self._memory) < layout.num_bytes:
                self._memory = torch.empty(len(host), dtype=torch.uint8, device=self._device)
            self._begun.record(self._stream)
            self._memory[: layout.num_bytes].copy_(host[: layout.num_bytes], non_blocking=True)
            self._copied.record(self._stream)
        self._timed = True
        self.bytes_copied += layout.num_bytes

    def wait_for_copy(self) -> None:
        """Returns once the host memory may be written again."""
        if self._timed:
            self._copied.synchronize()
            self._copy_ms += self._begun.elapsed_time(self._copied)
            self._timed = False

    def rows(self, index: MinibatchIndex | None = None) -> LoadedRows:
        """The rows, or those of a minibatch; the device's current stream waits for them, the caller does not."""
        if self._on_cuda:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
        return loaded_rows(self._memory, self._layout, index)

    def release(self) -> None:
        """The work queued so far on the current stream is the last that reads the rows."""
        if self._on_cuda:
            self._used.record(torch.cuda.current_stream(self._device))

    def drain_copy_s(self) -> float:
        """Seconds that copies took on the device since the last call; of those whose memory was asked for again."""
        seconds, self._copy_ms = self._copy_ms / 1000, 0.0
        return seconds
