"""What processes hold of the system: open files, mappings and memory, read from /proc."""

import resource
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_MAP_COUNT = Path("/proc/sys/vm/max_map_count")


@dataclass(frozen=True, slots=True)
class Held:
    """Open files and mappings of one process by what they are of: `corpus`, `index` or `other`; bytes in memory."""

    descriptors: Counter[str]
    mappings: Counter[str]
    resident: int


def held_by(pid: int, folders: dict[str, Path]) -> Held | None:
    """`folders` are those whose files are counted apart; None where the process has ended."""
    with suppress(OSError):
        proc = Path(f"/proc/{pid}")
        files = [_target(link) for link in (proc / "fd").iterdir()]
        maps = [line.split(maxsplit=5)[-1] for line in (proc / "maps").read_text().splitlines()]
        pages = int((proc / "statm").read_text().split()[1])
        return Held(_by_folder(files, folders), _by_folder(maps, folders), pages * resource.getpagesize())
    return None


@dataclass(frozen=True, slots=True)
class Limits:
    """How many open files and mappings one process may hold."""

    descriptors: int
    mappings: int


def limits_of(pid: int) -> Limits | None:
    """None where the process has ended."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
        soft = next(line for line in lines if line.startswith("Max open files")).split()[3]
        return Limits(int(soft), int(MAX_MAP_COUNT.read_text()))
    return None


def _target(link: Path) -> str:
    with suppress(OSError):  # closed meanwhile
        return str(link.readlink())
    return ""


def _by_folder(paths: list[str], folders: dict[str, Path]) -> Counter[str]:
    names = (
        next((name for name, folder in folders.items() if path.startswith(f"{folder}/")), "other") for path in paths
    )
    return Counter(names)
