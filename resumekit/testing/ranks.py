"""What a launcher tells the ranks of a job about one another."""

from __future__ import annotations

import socket
from typing import Any


def distributed_environment(rank: int, world_size: int, port: int) -> dict[str, Any]:
    """What torchrun would set; nothing for a single process."""
    if world_size == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
