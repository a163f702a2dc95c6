"""Which cores a worker may run on."""

from __future__ import annotations

from pathlib import Path

from rlsample.env.pool.pool_settings import PoolSettings, usable_cpus
from rlsample.errors import ConfigError

__all__ = ["in_groups", "numa_nodes", "parse_cpu_list", "worker_cpus"]

_NODES = Path("/sys/devices/system/node")


def worker_cpus(settings: PoolSettings, num_workers: int, nodes: Path = _NODES) -> list[list[int] | None]:
    """For each worker, the cores to pin it to, or None: not pinned. Never a core that this process may not use.

    ``thread_affinity_offset=k`` pins worker i to core ``(k + i) mod cores`` of those it may use; ``numa`` chooses
    these: all, those of one node, or those of node ``i mod nodes``. Memory follows, since a worker touches its rows
    first. Without an offset, a worker per core has each its own: the kernel would often queue two behind one another
    when they are woken together, and leave a core idle.

    Raises:
        ConfigError: a NUMA node that does not exist, or has no usable core.
    """
    usable = usable_cpus()
    offset, numa = settings.thread_affinity_offset, str(settings.numa)
    if offset is None:
        offset = 0 if numa == "off" and num_workers == len(usable) > 1 else -1
    if numa == "off":
        pools: list[list[int]] = [usable] * num_workers
    else:
        found = {node: sorted(set(cpus) & set(usable)) for node, cpus in numa_nodes(nodes).items()}
        found = {node: cpus for node, cpus in found.items() if cpus} or {0: usable}
        if numa == "spread":
            order = sorted(found)
            pools = [found[order[i % len(order)]] for i in range(num_workers)]
        elif int(numa) in found:
            pools = [found[int(numa)]] * num_workers
        else:
            raise ConfigError(f"numa={numa}: no such node with a usable core; there are {sorted(found)}")
    if offset < 0:
        return [None] * num_workers if numa == "off" else list(pools)
    return [[cpus[(offset + i) % len(cpus)]] for i, cpus in enumerate(pools)]


def numa_nodes(folder: Path = _NODES) -> dict[int, list[int]]:
    """Node number -> its cores; empty where the system does not say."""
    found = {}
    for path in sorted(folder.glob("node[0-9]*")):
        try:
            found[int(path.name[4:])] = parse_cpu_list((path / "cpulist").read_text())
        except OSError:
            continue
    return found


def parse_cpu_list(text: str) -> list[int]:
    """``"0-3,8"`` -> ``[0, 1, 2, 3, 8]``."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus += range(int(first), int(last or first) + 1)
    return cpus


def in_groups(slots: list[range], count: int) -> list[list[int]]:
    """The slots in groups that each have a share of every worker, as far as that goes."""
    groups: list[list[int]] = [[] for _ in range(count)]
    for w, mine in enumerate(slots):
        for k, slot in enumerate(mine):
            groups[(w + k) % count].append(slot)
    return [group for group in groups if group]
