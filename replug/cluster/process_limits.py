"""Bound what a process of our own may take, before it reads what others wrote."""

import resource


def limit_process(memory_bytes: int, seconds: int | None = None) -> None:
    """Limit this process's addresses and its processor time, and let it leave no core file; beyond them it fails."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if seconds is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
