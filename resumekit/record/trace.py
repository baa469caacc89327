"""The trace: what a training process did, step by step, written when an environment variable asks.

``RESUMEKIT_TRACE=<directory>`` switches it on; each process then appends JSON lines to a file of
its own. ``resumekit.record.moments`` reads them, ``resumekit.prove.comparison`` judges them.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xxhash

from resumekit.errors import ConfigurationError

# The directory that a process writes its trace into.
TRACE_VARIABLE = "RESUMEKIT_TRACE"

# "step:7" or "checkpoint:8": the process kills itself right after it has traced that.
KILL_VARIABLE = "RESUMEKIT_TRACE_KILL"

# Relocates every run directory under this one, so that no test run touches those of the user.
RUN_ROOT_VARIABLE = "RESUMEKIT_RUN_ROOT"

# Component keys or slots that are deliberately not restored, separated by commas.
INJECT_VARIABLE = "RESUMEKIT_INJECT"

StateEvent = Literal["checkpoint", "resumed", "end"]

# More sample ids than this in one step are written as one digest.
_MAX_LISTED_SAMPLES = 4096


_PATTERN = re.compile(r"(step|checkpoint):(\d+)(?::(SIG[A-Z0-9]+))?", re.ASCII)


@dataclass(frozen=True)
class KillPoint:
    """Right after one record of a trace was written, at which a process is killed.

    Args:
        event: ``"step"``: the step was recorded, and nothing of it is saved yet; ``"checkpoint"``:
            the checkpoint of that step was committed a moment ago.
        number: the optimizer step.
        rank: the rank that dies first; None: the first rank that comes there.
        signal: ``"SIGKILL"``, or one that asks the run to leave: then the rank gets it there, and
            every rank must end with the exit status ``128 +`` its number.
    """

    event: str
    number: int
    rank: int | None = None
    signal: str = "SIGKILL"

    @classmethod
    def step(cls, number: int, *, rank: int | None = None, signal: str = "SIGKILL") -> KillPoint:
        """Right after a step, before anything that follows it."""
        return cls("step", number, rank, signal)

    @classmethod
    def checkpoint(
        cls, number: int, *, rank: int | None = None, signal: str = "SIGKILL"
    ) -> KillPoint:
        """Right after the checkpoint of a step was committed."""
        return cls("checkpoint", number, rank, signal)

    @classmethod
    def nowhere(cls, signal: str) -> KillPoint:
        """A kill point that is never reached, for a signal sent from outside."""
        return cls("step", -1, -1, signal)

    @classmethod
    def parse(cls, text: str, *, where: str) -> KillPoint:
        """The point that a text names, as ``str()`` gives it.

        Args:
            text: what the user wrote.
            where: the option or variable it was written in.

        Raises:
            ConfigurationError: it names no point.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ConfigurationError(
                where, found=repr(text), expected="'step:<n>' or 'checkpoint:<n>'"
            )
        return cls(match[1], int(match[2]), signal=match[3] or "SIGKILL")

    @property
    def exit_status(self) -> int:
        """What a process ends with: minus the signal that killed it, or the status it chose."""
        number = int(signal.Signals[self.signal])
        return -number if self.signal == "SIGKILL" else 128 + number

    def newest_save(self, save_every: int) -> int:
        """The newest step that is saved for certain when a run is killed here; 0 when none is."""
        done = self.number if self.event == "checkpoint" else self.number - 1
        return done // save_every * save_every

    def is_after_save(self, step: int) -> bool:
        """Whether a run that is killed here has the checkpoint of a step already."""
        return step <= self.newest_save(1)

    def __str__(self) -> str:
        point = f"{self.event}:{self.number}"
        return point if self.signal == "SIGKILL" else f"{point}:{self.signal}"


class Trace:
    """One process's trace: every record is one line, written by one ``write`` call.

    A process that is killed loses no record that was written: the data is in the page cache, which
    outlives the process. (A trace is evidence about a killed process, not about a power cut.)

    Args:
        directory: where the trace file goes; made if missing.
        rank: the rank of this process.
        kill: ``"step:7"`` or ``"checkpoint:8"``: SIGKILL this process right after that record was
            written, for tests that need a kill at a known point; ``"step:7:SIGTERM"`` sends it
            another signal.
    """

    def __init__(self, directory: Path, *, rank: int = 0, kill: str | None = None) -> None:
        self.directory = directory
        self.rank = rank
        self.pid = os.getpid()
        self._kill = KillPoint.parse(kill, where=KILL_VARIABLE) if kill else None
        directory.mkdir(parents=True, exist_ok=True)
        started = time.time_ns()
        path = directory / f"{started:020d}-{self.pid}-rank-{rank:05d}.jsonl"
        self._handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
        self.write({"kind": "start", "rank": rank, "pid": self.pid})

    @classmethod
    def from_environment(cls, rank: int | None = None) -> Trace | None:
        """This process's trace, or None unless ``RESUMEKIT_TRACE`` names a directory.

        Asked twice, it gives the same object: one process writes one file.

        Args:
            rank: the rank of this process; without it that of torch.distributed or ``RANK``.
        """
        named = os.environ.get(TRACE_VARIABLE)
        current = _process.trace
        if named:
            directory = Path(named)
            rank = _current_rank() if rank is None else rank
            if current is not None and current._is_for(directory, rank):
                return current
            _process.trace = cls(directory, rank=rank, kill=os.environ.get(KILL_VARIABLE))
        else:
            _process.trace = None
        if current is not None:
            current.close()
        return _process.trace

    def step(
        self,
        step: int,
        *,
        epoch: int | None = None,
        batch: int | None = None,
        values: Mapping[str, Any] | None = None,
        lr: Sequence[Any] | None = None,
        samples: Sequence[Any] | torch.Tensor | None = None,
        rng: Mapping[str, str] | None = None,
        components: Mapping[str, Any] | None = None,
        is_rest: bool = False,
    ) -> None:
        """Records one finished optimizer step.

        Args:
            step: the optimizer step, counted over the whole logical run.
            epoch: its epoch, from 0.
            batch: the index of its batch in the epoch.
            values: what the loop reports, e.g. the loss; numbers are kept to the bit.
            lr: the learning rate of every param group.
            samples: the ids of the samples used.
            rng: the digests of ``rng_digests()``.
            components: states by name, digested leaf by leaf.
            is_rest: ``samples`` are the last ones of the step; another process used the others.
        """
        record: dict[str, Any] = {"kind": "step", "step": step}
        optional = {
            "epoch": epoch,
            "batch": batch,
            "values": None if values is None else {k: _plain(v) for k, v in values.items()},
            "lr": None if lr is None else [_plain(value) for value in lr],
            "samples": None if samples is None else _plain_samples(samples),
            "rng": None if rng is None else dict(rng),
            "components": None if not components else _component_digests(components),
            "is_rest": is_rest or None,
        }
        record.update({name: value for name, value in optional.items() if value is not None})
        self.write(record)

    def state(
        self,
        event: StateEvent,
        step: int,
        components: Mapping[str, Any],
        *,
        micro_step: int | None = None,
        is_durable: bool = True,
    ) -> None:
        """Records the state of every component, leaf by leaf.

        Args:
            event: ``"checkpoint"`` after a save, ``"resumed"`` when all was restored and before
                the first fetch, ``"end"`` at the horizon.
            step: the optimizer step that the state belongs to.
            components: states (what ``state_dict()`` gives) by component key.
            micro_step: distinguishes several states of one step.
            is_durable: whether a checkpoint survives a kill here; if not, ``durable`` follows.
        """
        record = {"kind": event, "step": step, "components": _component_digests(components)}
        if not is_durable:
            record["is_durable"] = False
        self.write(record if micro_step is None else {**record, "micro_step": micro_step})

    def durable(self, step: int) -> None:
        """Records that the checkpoint of a step, saved in the background, is durable now."""
        self.write({"kind": "durable", "step": step})

    def close(self) -> None:
        """Closes the file. Nothing is buffered, so a process need not call it."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def write(self, record: dict[str, Any]) -> None:
        record["time_ns"] = time.time_ns()
        line = json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"
        rest = memoryview(line.encode())
        while rest:
            rest = rest[os.write(self._handle, rest) :]
        kill = self._kill
        if kill is not None and (kill.event, kill.number) == (record["kind"], record.get("step")):
            os.kill(self.pid, signal.Signals[kill.signal])

    def _is_for(self, directory: Path, rank: int) -> bool:
        # A forked child inherits the handle; it must not write into its parent's file.
        return self.directory == directory and self.rank == rank and self.pid == os.getpid()


class _ProcessTrace:
    """The trace of this process, once it is known whether there is one."""

    __slots__ = ("asked", "trace")

    def __init__(self) -> None:
        self.asked = False
        self.trace: Trace | None = None


# The one piece of module state: a script calls `resumekit.trace(...)` without holding an object, so
# the open file has to live somewhere, and "there is none" must be known without asking again.
_process = _ProcessTrace()


def trace(
    step: int,
    *,
    samples: Sequence[Any] | torch.Tensor | None = None,
    lr: Sequence[Any] | None = None,
    epoch: int | None = None,
    batch: int | None = None,
    **values: Any,
) -> None:
    """Records one optimizer step of a script that does not use resumekit otherwise.

    Without ``RESUMEKIT_TRACE`` it returns at once (well below a microsecond)::

        resumekit.trace(step, loss=loss, model=model, optimizer=optimizer, samples=ids)

    Args:
        step: the optimizer step, counted over the whole run, from 1.
        samples: the ids of the samples used in this step, or a tensor of its batch, digested.
        lr: learning rates; without it those of every given object with ``param_groups``.
        epoch: the epoch of this step.
        batch: the index of the batch in its epoch.
        **values: numbers and tensors, kept by value; objects with ``state_dict``, digested leaf by
            leaf at this call.
    """
    if _process.trace is None:
        if _process.asked:
            return
        _process.asked = True
    current = Trace.from_environment()
    if current is None:
        return
    states = {name: value for name, value in values.items() if hasattr(value, "state_dict")}
    if lr is None:
        lr = [
            group["lr"]
            for value in states.values()
            for group in getattr(value, "param_groups", ())
            if "lr" in group
        ]
    current.step(
        step,
        epoch=epoch,
        batch=batch,
        values={name: value for name, value in values.items() if name not in states},
        lr=lr,
        samples=samples,
        rng=rng_digests(),
        components={name: value.state_dict() for name, value in states.items()},
    )


def rng_digests() -> dict[str, str]:
    """Digests of the state of every global random number generator, by name.

    Names are ``python``, ``numpy``, ``torch`` and those of ``device_states``.
    """
    return {
        "python": _python_digest(),
        "numpy": _numpy_digest(),
        "torch": _digest(torch.get_rng_state().numpy().tobytes()),
        **{name: _digest(state) for name, state in device_states().items()},
    }


def device_states() -> dict[str, bytes]:
    """The RNG state of each device of the accelerator, as ``cuda:0`` or ``xpu:1``.

    Only for a process that uses it already; asking would otherwise start a context. The judge of a
    resume reads the states by code of its own, so that a mistake of the capture shows.
    """
    device = torch.accelerator.current_accelerator()
    module: Any = None if device is None else getattr(torch, device.type, None)
    if not hasattr(module, "get_rng_state") or not getattr(module, "is_initialized", _yes)():
        return {}
    states = (module.get_rng_state(index) for index in range(module.device_count()))
    return {f"{device}:{i}": state.numpy().tobytes() for i, state in enumerate(states)}


def _yes() -> bool:
    """Of a module that does not report whether it is in use, as that of MPS."""
    return True


def _python_digest() -> str:
    version, words, gauss = random.getstate()
    digest = xxhash.xxh3_64(struct.pack(f"{len(words)}I", *words))
    digest.update(f"{version},{gauss if gauss is None else gauss.hex()}".encode())
    return digest.hexdigest()


def _numpy_digest() -> str:
    state = np.random.get_state(legacy=False)
    key = state["state"].pop("key", None)  # MT19937's words; a bit generator the user set has none
    digest = xxhash.xxh3_64(b"" if key is None else key.tobytes())
    digest.update(repr(state).encode())
    return digest.hexdigest()


def _digest(data: bytes) -> str:
    return xxhash.xxh3_64(data).hexdigest()


def _current_rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    return int(os.environ.get("RANK", "0"))


def _plain(value: Any) -> Any:
    """A JSON value that is equal exactly when the value is equal to the bit."""
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        value = value.detach().item()
    elif isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value.hex()
    # Imported when needed: the codec is not part of a script that traces numbers alone.
    from resumekit.serialization.digests import state_digest

    return f"digest {state_digest(value)}"


def _plain_samples(samples: Any) -> Any:
    if isinstance(samples, (torch.Tensor, np.ndarray)):
        is_ids = samples.ndim == 1 and "int" in str(samples.dtype)
        if not is_ids or len(samples) > _MAX_LISTED_SAMPLES:
            return [_plain(samples)]
        return samples.tolist()
    return [
        _plain_samples(one) if isinstance(one, (list, tuple)) else _plain(one) for one in samples
    ]


def _component_digests(components: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    from resumekit.serialization.digests import leaf_digests  # see _plain

    return {key: dict(leaf_digests(state)) for key, state in components.items()}


def injected_components() -> frozenset[str]:
    """The components that a tool leaves out of a resume, to see whether a comparison notices."""
    return frozenset(filter(None, os.environ.get(INJECT_VARIABLE, "").split(",")))


def relocated(directory: Path) -> Path:
    """The run directory, or its replacement when a tool runs this program beside the real runs."""
    root = os.environ.get(RUN_ROOT_VARIABLE)
    if not root:
        return directory
    absolute = directory.absolute()
    return Path(root) / f"{absolute.name}-{xxhash.xxh3_64_hexdigest(str(absolute).encode())[:8]}"
