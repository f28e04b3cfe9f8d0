"""How much memory there is for an engine: of the GPU, or of the machine and of the container that this runs in."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

PLATFORMS = ("cpu", "gpu")


@dataclass(frozen=True)
class Memory:
    """What weights, pool and programs may take together. Bytes."""

    platform: str
    """"cpu" or "gpu": whose defaults and whose programs."""
    available_bytes: int | None
    """None where nobody says: then nothing is refused."""
    source: str
    """Where that number comes from, for people."""
    host_bytes: int | None = None
    """What the host has for a pool of its own beside a GPU; None if it is not known, and on a CPU."""


def memory_for(platform: str | None, memory_bytes: int | None, gpu_memory_utilization: float) -> Memory:
    """The memory of this machine, or of one that is only planned for.

    Args:
      platform: "cpu", "gpu" or None, which is "gpu" with `memory_bytes` and else what JAX runs on here.
      memory_bytes: the whole memory of a card, of which JAX takes its share, or the free memory of a machine without.

    Raises ValueError for another platform, for `memory_bytes` that is no count, and for a "gpu" that is not here
    without `memory_bytes`.
    """
    if platform not in (None, *PLATFORMS):
        raise ValueError(f"platform must be one of {', '.join(PLATFORMS)} or None, got {platform!r}")
    is_count = isinstance(memory_bytes, int) and not isinstance(memory_bytes, bool) and memory_bytes >= 1
    if memory_bytes is not None and not is_count:
        raise ValueError(f"memory_bytes must be a positive int or None, got {memory_bytes!r}")
    here = "cpu" if jax.default_backend() == "cpu" else "gpu"
    platform = platform or (here if memory_bytes is None else "gpu")
    if platform == "cpu":
        return Memory("cpu", *((memory_bytes, "as given") if memory_bytes is not None else host_memory()))
    if memory_bytes is not None:
        return _card(memory_bytes, gpu_memory_utilization)
    if here == "cpu":
        raise ValueError("platform='gpu': there is none here; say what memory the card has (memory_bytes)")
    return _device(jax.devices()[0].memory_stats(), gpu_memory_utilization)


def _card(memory_bytes: int, gpu_memory_utilization: float) -> Memory:
    jax_share = jax_share_of_gpu()
    source = f"{gpu_memory_utilization:.0%} of the {jax_share:.0%} that JAX takes of {memory_bytes / 2**30:.1f} GiB"
    return Memory("gpu", int(memory_bytes * jax_share * gpu_memory_utilization), source)


def _device(stats: dict[str, Any] | None, gpu_memory_utilization: float) -> Memory:
    host_bytes, _ = host_memory()
    if not stats or "bytes_limit" not in stats:
        return Memory("gpu", None, "the device does not say", host_bytes)
    limit, used = stats["bytes_limit"], stats.get("bytes_in_use", 0)
    source = f"{gpu_memory_utilization:.0%} of {limit / 2**30:.1f} GiB less {used / 2**30:.1f} GiB in use"
    return Memory("gpu", max(0, int(limit * gpu_memory_utilization) - used), source, host_bytes)


def jax_share_of_gpu() -> float:
    """The share of a GPU's memory that JAX takes when it starts."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    return float(next((os.environ[name] for name in names if os.environ.get(name)), 0.75))


def host_memory(root: Path = Path("/")) -> tuple[int | None, str]:
    """Bytes that a process here can still take, and who says so: the kernel, or the limit of this container.

    None where neither is known. `root` is where /proc and /sys are found.
    """
    rooms = [(room, "left to this container") for room in _cgroup_rooms(root)]
    if (free := _mem_available(root)) is not None:
        rooms.append((free, "free on this machine"))
    return min(rooms, default=(None, "the system does not say"))


def _mem_available(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # no Linux: what the machine has is all that it says
        names = getattr(os, "sysconf_names", {})
        known = "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else None
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(values["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in values else None


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """What each control group above this process leaves it, of version 2 and of version 1: the limit less what is in
    use, where files in the page cache do not count, as they give way."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            top, names, cache = "sys/fs/cgroup", ("memory.max", "memory.current"), "inactive_file"
        elif "memory" in controllers.split(","):
            top, names = "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            cache = "total_inactive_file"
        else:
            continue
        # In a container the path may be that of the host, and not be there: its own group is then the top.
        group = root / top / path.lstrip("/")
        for folder in (group, *group.parents):
            if (room := _room_in(folder, *names, cache)) is not None:
                yield room
            if folder == root / top:
                break


def _room_in(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        most, used = ((folder / name).read_text().strip() for name in (limit, usage))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return None if most == "max" else max(0, int(most) - int(used) + int(stat.get(cache, 0)))
