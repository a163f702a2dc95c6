"""Minari datasets in and out: whole episodes of T rows with T + 1 observations."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rlsample.env.spaces import leaf_spec
from rlsample.errors import ConfigError, MissingExtraError
from rlsample.offline.array_codec import MAX_FRAGMENT_SIZE, ByteBudget
from rlsample.offline.declared_sizes import hdf5_size
from rlsample.offline.episode_assembler import EpisodeAssembler
from rlsample.sample_batch import (
    ACTIONS,
    ENV_ID,
    EPS_ID,
    FRAGMENT_ID,
    NEXT_OBS,
    OBS,
    REWARDS,
    TERMINATED,
    TRUNCATED,
    NextObs,
    SampleBatch,
    T,
)
from rlsample.tree import Tree, concat, gather, leaves, map_tree

__all__ = ["MinariWriter", "find_minari", "read_minari"]

log = logging.getLogger(__name__)

_PREFIX = "minari:"
_MORE_IN_A_ROW = 10  # bytes: a reward and two flags


class MinariWriter:
    """Writes the whole episodes among the batches it is given as one Minari dataset. A context manager.

        with MinariWriter("cartpole/mine-v0", env.observation_space, env.action_space) as writer:
            for batch in LogReader("logs"):
                writer.write(batch)
        minari.load_dataset("cartpole/mine-v0")

    Kept are obs, actions, rewards, terminated and truncated, images without loss; eps_id, logp and other columns have
    no place there. An episode that is not whole when this is closed ends there as truncated if its first row is there,
    and is left out with a warning if not. The dataset appears, whole, when this is closed.

    Args:
        dataset_id: as Minari names them: ``[namespace/][env/]name[-vN]``.
        folder: of the dataset; None: Minari's own place for this id.
        metadata: for Minari, such as ``{"author": {"me"}, "description": "..."}``.

    Raises:
        MissingExtraError: no Minari.
        ConfigError: the dataset exists.
    """

    def __init__(
        self,
        dataset_id: str,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        folder: str | Path | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        storage_class, self._buffer_class, get_path, version = _import_minari()
        self.folder = Path(get_path(dataset_id) if folder is None else folder)
        if self.folder.exists():
            raise ConfigError(f"there is a Minari dataset in {self.folder} already; take another id or folder")
        self._aside = self.folder.with_name(f"{self.folder.name}.{secrets.token_hex(4)}.part")
        self._spaces = observation_space, action_space
        self._specs = leaf_spec(observation_space), leaf_spec(action_space)
        self._assembler = EpisodeAssembler()
        self.num_episodes = 0
        self._closed = False
        (self._aside / "data").mkdir(parents=True)
        try:
            self._storage = storage_class.new(self._aside / "data", *self._spaces, jpeg_encoding=False)
            self._storage.update_metadata({**(metadata or {}), "dataset_id": dataset_id, "minari_version": version})
        except BaseException:
            shutil.rmtree(self._aside, ignore_errors=True)
            raise

    def write(self, batch: SampleBatch) -> None:
        """Takes a batch in; the episodes that became whole are written.

        Raises:
            ConfigError: a column that is missing or does not fit the spaces. Nothing of the batch was written.
        """
        if self._closed:
            raise ConfigError(f"the writer to {self.folder} is closed")
        for name, specs in ((OBS, self._specs[0]), (ACTIONS, self._specs[1])):
            _require_fit(batch, name, specs)
        for name in (REWARDS, NEXT_OBS):
            if name not in batch:
                raise ConfigError(f"a Minari dataset needs the column {name!r}; this batch has {', '.join(batch)}")
        self._write_episodes(self._assembler.add(batch))

    def close(self) -> None:
        """Writes what is left and puts the dataset in its place. Idempotent."""
        if self._closed:
            return
        self._closed = True
        rest = self._assembler.rest()
        begun = [episode for episode in rest if int(episode[T][0]) == 0]
        if len(begun) < len(rest):
            log.warning("%s: %d episodes without their first row are left out", self.folder, len(rest) - len(begun))
        self._write_episodes(begun)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self._aside, self.folder)

    def _write_episodes(self, episodes: list[SampleBatch]) -> None:
        for episode in episodes:
            self._storage.update_episodes([self._buffer(episode)])
            self.num_episodes += 1

    def _buffer(self, episode: SampleBatch) -> Any:
        terminated, truncated = episode[TERMINATED], episode[TRUNCATED]
        if not (terminated[-1] or truncated[-1]):
            truncated = truncated.copy()
            truncated[-1] = True
        last = episode.slice(episode.count - 1, episode.count)["next_obs"]
        return self._buffer_class(
            observations=concat([episode[OBS], last]),
            actions=episode[ACTIONS],
            rewards=episode[REWARDS],
            terminations=terminated,
            truncations=truncated,
            infos={},
        )

    def __enter__(self) -> MinariWriter:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        """After an error no dataset is left behind."""
        if kind is not None and not self._closed:
            self._closed = True
            shutil.rmtree(self._aside, ignore_errors=True)
        self.close()


def find_minari(source: str | Path) -> Path | None:
    """The folder of a Minari dataset's data, for ``minari:ID`` or a path; None if it is none."""
    if isinstance(source, str) and source.startswith(_PREFIX):
        folder = Path(_import_minari()[2](source.removeprefix(_PREFIX)))
        if not (folder / "data" / "metadata.json").is_file():
            raise ConfigError(f"no Minari dataset {source.removeprefix(_PREFIX)!r} in {folder}; download it first")
        return folder / "data"
    for folder in (Path(source), Path(source) / "data"):
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):  # a file of somebody else
            if "data_format" in json.loads((folder / "metadata.json").read_text(encoding="utf-8")):
                return folder
    return None


def read_minari(
    path: Path,
    mine: Callable[[int], bool],
    damage: Callable[[str], None],
    max_fragment_size: int = MAX_FRAGMENT_SIZE,
) -> Iterator[SampleBatch]:
    """A batch per episode whose number is ``mine``: obs, actions, rewards (float32), terminated, truncated, and eps_id,
    t, env_id, fragment_id made from its number. ``damage`` is told of episodes whose parts do not fit, or that have
    more than ``max_fragment_size`` bytes with their infos, which are read along; nothing of those is read."""
    minari_storage = _import_minari()[0]
    try:
        storage = minari_storage.read(path)
    except (OSError, ValueError) as error:
        damage(f"it was deleted after it was found, or is damaged: {error}")
        return
    for number in range(storage.total_episodes):
        if not mine(number):
            continue
        try:
            ByteBudget(max_fragment_size).spend(_size(storage, number))
            (episode,) = storage.get_episodes([number])
            batch = _batch(episode, number, storage.observation_space, storage.action_space)
        except (OSError, ValueError, KeyError, ConfigError) as error:
            damage(f"episode {number} is damaged: {error}")
        else:
            yield batch


def _size(storage: Any, number: int) -> int:
    """Bytes of an episode by what its file says; in formats other than HDF5 by its rows and the spaces."""
    row = sum(
        spec.dtype.itemsize * math.prod(spec.shape)
        for space in (storage.observation_space, storage.action_space)
        for spec in leaves(leaf_spec(space))
    )
    if storage.FORMAT == "hdf5":
        import h5py

        with h5py.File(storage.data_path / "main_data.hdf5", "r") as file:
            return hdf5_size(file[f"episode_{number}"], row)
    import pyarrow.dataset

    folder = storage.data_path / str(number)
    files = pyarrow.dataset.dataset(folder, format=storage.FORMAT, ignore_prefixes=["_", ".", "metadata.json"])
    return int(files.count_rows()) * (row + _MORE_IN_A_ROW)


def _batch(episode: dict[str, Any], number: int, observation_space: Any, action_space: Any) -> SampleBatch:
    count = len(episode["rewards"])
    seen = _ordered(episode["observations"], leaf_spec(observation_space))
    for leaf in leaves(seen):
        if len(leaf) != count + 1:
            raise ValueError(f"{len(leaf)} observations for {count} rows")
    columns = {
        OBS: gather(seen, slice(0, count)),
        ACTIONS: _ordered(episode["actions"], leaf_spec(action_space)),
        REWARDS: np.asarray(episode["rewards"], np.float32),
        TERMINATED: np.asarray(episode["terminations"], bool),
        TRUNCATED: np.asarray(episode["truncations"], bool),
        EPS_ID: np.full(count, number),
        T: np.arange(count),
        ENV_ID: np.zeros(count, np.int64),
        FRAGMENT_ID: np.full(count, number),
    }
    index = np.arange(1, count + 1)
    index[-1:] = -1
    return SampleBatch(columns, NextObs(index, gather(seen, slice(count, None))), np.array([count]))


def _ordered(tree: Tree, specs: Tree) -> Tree:
    """The tree with its Dicts in the order of the space, its leaves as arrays of the space's dtype."""
    if isinstance(specs, dict):
        return {key: _ordered(tree[key], part) for key, part in specs.items()}
    if isinstance(specs, tuple):
        return tuple(_ordered(part, spec) for part, spec in zip(tree, specs, strict=True))
    return np.asarray(tree, specs.dtype)


def _require_fit(batch: SampleBatch, name: str, specs: Tree) -> None:
    try:
        map_tree(_require_same, specs, batch[name])
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ConfigError(f"column {name!r} does not fit its space: {error}") from error


def _require_same(spec: Any, leaf: np.ndarray) -> None:
    if leaf.dtype != spec.dtype or leaf.shape[1:] != spec.shape:
        raise ValueError(f"{leaf.dtype}{list(leaf.shape[1:])} where the space has {spec.dtype}{list(spec.shape)}")


def _import_minari() -> tuple[Any, Any, Callable[[str], Any], str]:
    """MinariStorage, EpisodeBuffer, get_dataset_path and the version."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import h5py  # noqa: F401
            import minari
            from minari.data_collector import EpisodeBuffer
            from minari.dataset.minari_storage import MinariStorage
            from minari.storage import get_dataset_path
    except ImportError as error:
        raise MissingExtraError("Minari", "offline") from error
    return MinariStorage, EpisodeBuffer, get_dataset_path, minari.__version__
