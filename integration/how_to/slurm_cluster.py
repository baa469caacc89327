"""A Slurm cluster of one node in a directory: its daemons without systemd, as this user."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from how_to_pages import wait_until

from resumekit.testing.launchers import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")

# cred_expire: a requeued job waits until its former credential has expired, 120 s by default.
CONFIGURATION = """
ClusterName=howto
SlurmctldHost={host}
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
MailProg=/bin/true
NodeName={host} CPUs=4 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class Cluster:
    """Daemons that run until ``stop``.

    Args:
        folder: new; the path is short enough for a socket.
    """

    folder: Path
    _daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @staticmethod
    def missing() -> list[str]:
        """The programs that this machine lacks."""
        path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
        return [name for name in PROGRAMS if shutil.which(name, path=path) is None]

    def environment(self, path: str = os.environ["PATH"]) -> dict[str, str]:
        """With which the commands of Slurm find this cluster."""
        configuration = str(self.folder / "slurm.conf")
        return {"SLURM_CONF": configuration, "PATH": os.pathsep.join([path, "/usr/sbin"])}

    def start(self) -> None:
        """Starts the daemons and waits until the node takes jobs."""
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        host = socket.gethostname().partition(".")[0]
        names = {
            "host": host,
            "user": subprocess.check_output(["id", "-un"], text=True).strip(),
            "controller_port": free_port(),
            "node_port": free_port(),
            "folder": self.folder,
        }
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**names))
        munge = ("socket", "pid-file", "log-file", "seed-file")
        files = [f"--{name}={self.folder}/munge.{name.partition('-')[0]}" for name in munge]
        self._start("munged", "--foreground", "--force", f"--key-file={key}", *files)
        wait_until((self.folder / "munge.socket").exists, 30)
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D", "-N", host)
        wait_until(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%T"), 60)

    def _start(self, *command: str) -> None:
        log = self.folder / f"{command[0]}.out"
        with log.open("wb") as file:
            environment = {**os.environ, **self.environment()}
            self._daemons.append(
                subprocess.Popen(command, env=environment, stdout=file, stderr=file)
            )

    def ask(self, *command: str) -> str:
        """What a command of Slurm prints."""
        environment = {**os.environ, **self.environment()}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def submit(self, directory: Path, *words: str, **environment: str) -> str:
        """Submits a batch script from its directory, by words of sbatch; the number of the job."""
        done = subprocess.run(
            ["sbatch", "--parsable", *words],
            cwd=directory,
            env={**environment, **self.environment(environment["PATH"])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """The fields of a job, such as JobState, Restarts and ExitCode."""
        words = self.ask("scontrol", "-o", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_end(self, number: str, seconds: float = 300) -> dict[str, str]:
        """The fields of a job that is neither pending nor running any more."""
        pending = ("PENDING", "RUNNING", "COMPLETING", "REQUEUED")
        wait_until(lambda: self.job(number).get("JobState") not in (*pending, None), seconds)
        return self.job(number)

    def stop(self) -> None:
        """Ends the jobs and the daemons."""
        self.ask("scancel", "--full", "--signal=KILL", "--name=a")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=10)
            daemon.kill()
            daemon.wait()
        time.sleep(0.1)
