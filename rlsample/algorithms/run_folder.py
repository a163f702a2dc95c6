"""The files of a run: where they are, and who writes them.

DIR/config.json  progress.csv  events.out.tfevents.*  checkpoints/step_*/  learning_curve.png  video.mp4 (or .gif)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsample.algorithms.checkpoint import CheckpointStore
from rlsample.algorithms.learning_curve import draw_learning_curve
from rlsample.algorithms.progress_log import CsvLog, TensorBoardLog, read_csv
from rlsample.algorithms.run_config import RunConfig, configure, env_name, read_options, to_document
from rlsample.errors import CheckpointError, ConfigError

__all__ = ["RunFolder", "find_run", "load_state", "read_config"]

_OURS = ("config.json", "progress.csv", "learning_curve.png", "video.mp4", "video.gif", "events.out.tfevents.*")


class RunFolder:
    """Writes one run's files; without a folder, nothing.

    Args:
        config: ``config.output`` says what to write and where.
        overwrite: remove the files of an earlier run in the folder.
        resumed: (iterations, env steps) of the checkpoint that the run goes on from, or None for a new run.

    Raises:
        ConfigError: the folder holds another run, or cannot be made. Nothing was changed.
    """

    def __init__(self, config: RunConfig, overwrite: bool = False, resumed: tuple[int, int] | None = None) -> None:
        self._config = config
        output = config.output
        self.path = None if output.out is None else Path(output.out)
        self.checkpoints: CheckpointStore | None = None
        iterations, env_steps = resumed or (0, 0)
        if self.path is None:
            self._csv, self._tensorboard = CsvLog(None), TensorBoardLog(None)
            return
        document = to_document(config)
        if resumed is None:
            _start_folder(self.path, overwrite)
        (self.path / "config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        self.checkpoints = CheckpointStore(self.path / "checkpoints", output.keep_checkpoints)
        self._csv = CsvLog(self.path / "progress.csv", iterations)
        self._tensorboard = TensorBoardLog(self.path if output.tensorboard else None, env_steps)

    def write(self, result: Mapping[str, Any]) -> None:
        """Logs one result."""
        self._csv.write(result)
        self._tensorboard.write(result)

    def draw(self) -> None:
        """Draws the learning curve of all that was logged so far."""
        if self.path is not None:
            train = self._config.train
            title = f"{train.algo} on {env_name(train.env)}, seed {train.seed}"
            rows = read_csv(self.path / "progress.csv")
            draw_learning_curve(rows, self.path / "learning_curve.png", title, train.stop_return)

    def close(self) -> None:
        """Flushes and closes the logs. Idempotent."""
        self._csv.close()
        self._tensorboard.close()


def find_run(path: str | Path) -> tuple[Path, Path | None]:
    """The run's folder, and the checkpoint if the path is one (``DIR/checkpoints/step_…``) and not ``DIR``.

    Raises:
        ConfigError: there is no run.
    """
    path = Path(path)
    for folder, checkpoint in ((path, None), (path.parent.parent, path)):
        if (folder / "config.json").is_file() and (checkpoint is None or checkpoint.parent.name == "checkpoints"):
            return folder, checkpoint
    raise ConfigError(f"{path} is no run: it has no config.json; give the folder that train --out wrote")


def read_config(folder: Path, changes: Mapping[str, Any]) -> RunConfig:
    """The config of a run, with some options changed; ``out`` is the folder, wherever it was moved.

    With another ``max_steps``, schedules that ended with the run still do.

    Raises:
        ConfigError: a change that no option takes; or the run's env was an object and ``changes`` has no ``env``.
    """
    document = read_options(folder / "config.json")
    options = {"out": str(folder), **changes}
    if document["policy"].get("schedule_steps") == document["train"]["max_steps"] and "max_steps" in changes:
        options.setdefault("schedule_steps", changes["max_steps"])
    config = configure(document, **options)
    if isinstance(config.train.env, str) and config.train.env.startswith("<"):
        raise ConfigError(f"this run's env was a Python object, {config.train.env}: pass it again as env=...")
    return config


def _start_folder(path: Path, overwrite: bool) -> None:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"out {path} is a file; give a folder")
    holds_run = (path / "config.json").exists()
    if holds_run and not overwrite:
        raise ConfigError(
            f"{path} already holds a run; go on with --resume {path}, or use --overwrite or another --out"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        for old in [old for pattern in _OURS for old in path.glob(pattern)] if holds_run else []:
            old.unlink()
        if holds_run and (path / "checkpoints").is_dir():
            shutil.rmtree(path / "checkpoints")
    except OSError as error:
        raise ConfigError(f"cannot use out {path}: {error.strerror}") from error


def load_state(folder: Path, checkpoint: Path | None) -> dict[str, Any]:
    """The state of a run's newest checkpoint, or of a given one.

    Raises:
        CheckpointError: none there, damaged (the last good one is named), or none of a training run.
    """
    state = CheckpointStore(folder / "checkpoints").load(checkpoint)
    if "evaluator" not in state:
        raise CheckpointError(f"{checkpoint or folder} holds no training state")
    return state
