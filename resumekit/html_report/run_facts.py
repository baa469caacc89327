"""What a run directory records, for a report. Reads only, also while the run is in progress.

Whatever cannot be read is listed in ``RunFacts.problems``, and the rest is read all the same.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from resumekit.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from resumekit.html_report.charts import Point
from resumekit.record.comparison import compared
from resumekit.record.conditions import COMMAND, Header, changed_values
from resumekit.record.journal import (
    BEGIN,
    DIRECTORY,
    END,
    SAVED,
    STEP,
    Attempt,
    Ending,
    Event,
    Has,
    find_attempts,
    latest_steps,
)
from resumekit.shared_files import shared_bytes
from resumekit.storage.directories import OWNER, StepName
from resumekit.storage.io.file_system import LocalFileSystem
from resumekit.storage.manifest import Manifest
from resumekit.storage.ownership import Owner, load_owner
from resumekit.storage.store import Store


@dataclass(frozen=True)
class CheckpointFacts:
    """A step directory.

    Args:
        name: of the directory.
        manifest: None when it cannot be used.
        problem: why it cannot be used; empty for one that can.
        num_bytes: of all files.
        num_shared_bytes: of files that an older checkpoint has, too.
    """

    name: str
    manifest: Manifest | None
    problem: str = ""
    num_bytes: int = 0
    num_shared_bytes: int = 0


@dataclass(frozen=True)
class AttemptFacts:
    """One launch of the run, as its first rank recorded it.

    Args:
        header: of its journal.
        first_step: the first step that it trained; None without one.
        last_step: the last step that it trained; None without one.
        losses: the loss by step.
        verdict: the comparison of the steps that it repeated; empty for a fresh start.
        is_different: whether a repeated step differs.
        began: when it recorded its first step, in Unix seconds; None where that is not recorded.
        last_written: when its journal was written last, in Unix seconds.
        has_closed: whether the process closed the run; None where that is not recorded.
        ending: why it ended, in words, as far as that is recorded.
        costs: what each save cost.
        num_lost_steps: the steps that the next attempt trained again; None for the newest attempt.
        lost_seconds: the time after the save that the next attempt resumed from; None where that is
            not recorded.
    """

    header: Header
    first_step: int | None
    last_step: int | None
    losses: tuple[Point, ...] = field(repr=False)
    verdict: str
    is_different: bool
    began: float | None
    last_written: float
    has_closed: bool | None
    costs: tuple[Event, ...] = ()
    num_lost_steps: int | None = None
    lost_seconds: float | None = None
    ending: str = ""

    @property
    def counted_seconds(self) -> float | None:
        """The time in steps that no later attempt repeats; None where that is not recorded."""
        if self.began is None or (self.num_lost_steps is not None and self.lost_seconds is None):
            return None
        seconds = self.last_written - (self.lost_seconds or 0.0) - self.began
        kept_until = self.began + seconds
        blocked = sum(each.blocked_seconds for each in self.costs if each.time <= kept_until)
        return max(seconds - blocked, 0.0)


@dataclass(frozen=True)
class RunFacts:
    """What a run directory records.

    Args:
        directory: the run directory, as it was given.
        checkpoints: all step directories, newest first.
        attempts: all launches with a journal, oldest first.
        quarantined: the names of damaged checkpoints that a resume has moved away.
        owner: the newest launch; None when it is not recorded.
        is_running: whether a process on this node uses the directory now.
        problems: what could not be read, and why.
    """

    directory: Path
    checkpoints: tuple[CheckpointFacts, ...]
    attempts: tuple[AttemptFacts, ...]
    quarantined: tuple[str, ...]
    owner: Owner | None
    is_running: bool
    problems: tuple[str, ...]

    @property
    def newest(self) -> CheckpointFacts | None:
        """The newest checkpoint that can be used."""
        return next((each for each in self.checkpoints if each.manifest), None)

    @property
    def finished(self) -> str | None:
        """Why the run is over, or None."""
        manifest = self.newest.manifest if self.newest else None
        return manifest.finished if manifest else None

    @property
    def is_empty(self) -> bool:
        """Whether the directory holds nothing of a run."""
        return not (self.checkpoints or self.attempts or self.quarantined or self.owner)

    @property
    def wall_seconds(self) -> float | None:
        """From the first step on record to the last one; None where the begin is not recorded."""
        began = self.attempts[0].began if self.attempts else None
        return None if began is None else max(self.attempts[-1].last_written - began, 0.0)

    @property
    def goodput(self) -> float | None:
        """The part of the time that was spent in steps that count; None if it is not recorded."""
        counted = [each.counted_seconds for each in self.attempts]
        known = [each for each in counted if each is not None]
        return sum(known) / self.wall_seconds if self.wall_seconds and known == counted else None


def read_run(directory: Path) -> RunFacts:
    """Everything that a run directory records.

    Raises:
        DirectoryError: the directory cannot be listed.
    """
    store = Store(directory)
    problems: list[str] = []
    checkpoints = tuple(_checkpoints(store))
    problems += [f"{each.name}: {each.problem}" for each in checkpoints if each.problem]
    owner = _owner(directory, problems)
    return RunFacts(
        directory=directory,
        checkpoints=checkpoints,
        attempts=of_all_ranks(_attempts(directory / DIRECTORY, problems), checkpoints),
        quarantined=tuple(store.quarantined()),
        owner=owner,
        is_running=_is_locked(directory / ".lock"),
        problems=tuple(problems),
    )


# ---------------------------------------------------------------- checkpoints


def _checkpoints(store: Store) -> list[CheckpointFacts]:
    found = list(filter(None, (_checkpoint(store, name) for name in store.step_names())))
    shared = shared_bytes(store.directory, (each.manifest for each in found if each.manifest))
    return [
        replace(each, num_shared_bytes=shared[each.manifest.name]) if each.manifest else each
        for each in found
    ]


def _checkpoint(store: Store, name: StepName) -> CheckpointFacts | None:
    try:
        manifest = store.open_step(name).manifest
    except CheckpointNotFoundError:
        return None  # the run has removed it since the directory was listed
    except CheckpointError as error:
        word = "damaged" if isinstance(error, CorruptCheckpointError) else "cannot be read"
        return CheckpointFacts(str(name), None, f"{word}: {error}")
    return CheckpointFacts(
        str(name), manifest, num_bytes=sum(entry.size for entry in manifest.files)
    )


# ---------------------------------------------------------------- attempts


def _attempts(directory: Path, problems: list[str]) -> tuple[AttemptFacts, ...]:
    try:
        files = find_attempts(directory)
        names = {path.name for path in directory.glob("*.journal")}
    except OSError as error:
        problems.append(f"{directory.name}/: {error.strerror}")
        return ()
    for name in sorted(names - {each.path.name for each in files}):
        problems.append(f"{directory.name}/{name}: no valid header")
    by_number: dict[int, Attempt] = {}
    for each in files:  # by attempt and rank, ascending
        by_number.setdefault(each.header.number, each)
    first_ranks = list(by_number.values())
    found: list[AttemptFacts] = []
    costs: tuple[Event, ...] = ()
    for index, attempt in enumerate(first_ranks):
        later = first_ranks[index + 1].header if index + 1 < len(first_ranks) else None
        try:
            facts = _attempt(attempt, first_ranks[:index], later)
            costs += facts.costs
            if later is not None:
                facts = replace(facts, lost_seconds=_lost_seconds(facts, later, costs))
        except OSError as error:
            problems.append(f"{directory.name}/{attempt.path.name}: {error.strerror}")
        else:
            found.append(facts)
    return tuple(found)


def of_all_ranks(
    attempts: Sequence[AttemptFacts], checkpoints: Sequence[CheckpointFacts]
) -> tuple[AttemptFacts, ...]:
    """The attempts, with the verdict of another rank where that is a difference.

    Args:
        attempts: as their first rank recorded them.
        checkpoints: newest first; their manifests have the worst verdict of all ranks.
    """
    words: dict[str, Mapping[str, Any]] = {}
    for manifest in (each.manifest for each in checkpoints):
        found = manifest.details.get("journal") if manifest else None
        if manifest and isinstance(found, Mapping):
            words.setdefault(manifest.attempt, found)
    return tuple(_with_verdict(each, words.get(each.header.attempt, {})) for each in attempts)


def _with_verdict(attempt: AttemptFacts, found: Mapping[str, Any]) -> AttemptFacts:
    if attempt.is_different or found.get("verdict") != "different":
        return attempt
    text = f"{found.get('num_steps')} repeated steps: different ({found.get('reason', '')})"
    return replace(attempt, verdict=text, is_different=True)


def _attempt(attempt: Attempt, earlier: list[Attempt], later: Header | None) -> AttemptFacts:
    records = attempt.records()
    steps = [record.step for record in records if record.kind == STEP]
    last = max(steps, default=None)
    verdict, is_different = "", False
    if attempt.header.resumed_step is not None:
        found = compared(attempt.header, earlier).add_all(records).verdict
        verdict, is_different = str(found), found.word == "different"
    events = attempt.events()
    latest = {each.kind: each for each in events}
    lost = None
    if later is not None:
        resumed = later.resumed_step or 0
        lost = max((last if last is not None else resumed) - resumed, 0)
    return AttemptFacts(
        header=attempt.header,
        first_step=min(steps, default=None),
        last_step=last,
        losses=tuple(
            (step, each.loss) for step, each in latest_steps(records).items() if each.has & Has.LOSS
        ),
        verdict=verdict,
        is_different=is_different,
        began=latest[BEGIN].time if BEGIN in latest else None,
        last_written=latest[END].time if END in latest else attempt.path.stat().st_mtime,
        has_closed=END in latest if BEGIN in latest else None,
        ending=_ending(latest),
        costs=tuple(each for each in events if each.kind == SAVED),
        num_lost_steps=lost,
    )


_ENDINGS: dict[int, str] = {
    Ending.UNKNOWN: "closed, the reason is not recorded",
    Ending.FINISHED: "finished",
    Ending.LEFT: "closed before the end",
    Ending.ERROR: "exception",
    **{number: number.name for number in signal.Signals},
}


def _ending(latest: Mapping[int, Event]) -> str:
    if END in latest:
        return _ENDINGS.get(latest[END].ending, f"signal {latest[END].ending}")
    return "not closed: killed, or crashed" if BEGIN in latest else "not recorded"


def _lost_seconds(stopped: AttemptFacts, later: Header, costs: Sequence[Event]) -> float | None:
    """The time from the save that an attempt resumed from to the end of the one before."""
    if later.resumed_step is None:
        since = stopped.began
    else:
        times = [each.time for each in costs if each.step == later.resumed_step]
        since = times[-1] if times else None
    return None if since is None else max(stopped.last_written - since, 0.0)


def changed_settings(then: Header, now: Header) -> list[str]:
    """What differs between the conditions of two attempts, as ``name: before -> after``."""
    found = []
    if then.world_size != now.world_size:
        found.append(f"ranks: {then.world_size} -> {now.world_size}")
    for before, after in ((then.environment, now.environment), (then.options, now.options)):
        found += [f"{name}: {old} -> {new}" for name, old, new in changed_values(before, after)]
    code = [name for name, _, _ in changed_values(then.code, now.code)]
    found += [name if name == COMMAND else f"source file {name}" for name in code]
    loaders = [name for name, _, _ in changed_values(then.geometry, now.geometry)]
    return found + [f"batch geometry of loader {name}" for name in loaders]


# ---------------------------------------------------------------- the process that uses it


def _owner(directory: Path, problems: list[str]) -> Owner | None:
    try:
        return load_owner(LocalFileSystem(), directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{OWNER}: {error.strerror}")
    except CheckpointError as error:
        problems.append(str(error))
    return None


# struct flock of 64-bit Linux: type, whence, start, length, process
_FLOCK = struct.Struct("hhqqi4x")


def _is_locked(path: Path) -> bool:
    """Whether a process on this node holds the lock; asks the kernel and takes nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # it may be a pipe
    except OSError:
        return False
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))[0]
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return bool(kind != fcntl.F_UNLCK)
