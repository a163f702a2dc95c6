"""Where a run's numbers go: ``progress.csv`` and TensorBoard events, both continued in place by a resumed run."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["CsvLog", "TensorBoardLog", "read_csv"]

ITERATION = "time/iterations"
STEPS = "time/total_timesteps"


def read_csv(path: Path) -> list[dict[str, float | None]]:
    """The rows of a ``progress.csv``: tag -> number, or None where there was no value. A cut last line is left out."""
    return [{tag: float(cell) if cell else None for tag, cell in row.items()} for row in _read_cells(path)]


class CsvLog:
    """One row per iteration; a tag that turns up later widens the table.

    Args:
        path: the file; None writes nothing.
        resume_after: rows of later iterations are dropped, since a resumed run will write them again; 0 starts anew.
    """

    def __init__(self, path: Path | None, resume_after: int = 0) -> None:
        self._path = path
        self._tags: list[str] = []
        self._file: Any = None
        if path is not None:
            kept = [row for row in _read_cells(path) if float(row[ITERATION]) <= resume_after] if resume_after else []
            self._tags = list(kept[0]) if kept else []
            self._rewrite(kept)

    def write(self, result: Mapping[str, Any]) -> None:
        """Appends the numbers of one result; the line is on its way to the disk when this returns."""
        if self._path is None:
            return
        new = [tag for tag in result if tag not in self._tags]
        if new:
            self._file.close()
            rows = _read_cells(self._path)
            self._tags += new
            self._rewrite(rows)
        self._line(result)
        self._file.flush()

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        assert self._path is not None
        aside = self._path.with_suffix(".csv.new")
        self._file = aside.open("w", newline="", encoding="utf-8")
        if self._tags:
            csv.writer(self._file, lineterminator="\n").writerow(self._tags)
        for row in rows:
            self._line(row)
        self._file.flush()
        os.replace(aside, self._path)

    def _line(self, row: Mapping[str, Any]) -> None:
        csv.writer(self._file, lineterminator="\n").writerow([_cell(row.get(tag)) for tag in self._tags])


class TensorBoardLog:
    """Scalars over env steps, one event per iteration.

    Args:
        folder: where the event file goes; None writes nothing.
        resume_steps: TensorBoard hides what an earlier file of the folder wrote at this step or later; 0: nothing.
    """

    def __init__(self, folder: Path | None, resume_steps: int = 0) -> None:
        self._writer: Any = None
        if folder is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))
        if resume_steps:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resume_steps + 1, session_log=start))

    def write(self, result: Mapping[str, Any]) -> None:
        """Adds the numbers of one result at its ``time/total_timesteps``."""
        if self._writer is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=tag, simple_value=float(value))
            for tag, value in result.items()
            if value is not None and tag != STEPS
        ]
        self._writer.add_event(Event(wall_time=time.time(), step=int(result[STEPS]), summary=Summary(value=values)))

    def close(self) -> None:
        """Flushes and ends the writer's thread. Idempotent."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _read_cells(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        text = file.read()
    return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return repr(int(value)) if isinstance(value, int) else repr(float(value))
