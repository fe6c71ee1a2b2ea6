"""What the rows of `device_use.jsonl` say: shares of the time, by device and role. Pure."""

from collections.abc import Sequence

from replug.cluster.device_use import ROLES


def devices_in(rows: Sequence[dict]) -> list[str]:
    """By node and number."""
    names = {name for row in rows for name in row["busy"]}
    return sorted(names, key=lambda name: (name.rpartition(":")[0], name.rpartition(":")[2].zfill(9)))


def share_of(row: dict, device: str, role: str) -> float:
    """Of the time of a row's steps; above 1 where several processes of a role share the device."""
    busy: float = row["busy"].get(device, {}).get(role, 0.0)
    return busy / row["seconds"]


def totals(rows: Sequence[dict]) -> dict[str, dict[str, float]]:
    """Shares of the time of all steps, by device and role; `idle` is what they leave of it, at least."""
    seconds = sum(row["seconds"] for row in rows)
    found: dict[str, dict[str, float]] = {}
    for device in devices_in(rows):
        busy = {role: sum(row["busy"].get(device, {}).get(role, 0.0) for row in rows) for role in ROLES}
        shares = {role: busy[role] / seconds for role in ROLES}
        found[device] = {**shares, "idle": max(0.0, 1.0 - sum(shares.values()))}
    return found
