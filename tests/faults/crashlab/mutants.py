"""The protocol with one thing wrong. Product code stays as it is: a mutant stands between the
store and the disk, or is a store with one method replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from crashlab.interruptions import Passing
from crashlab.jobs import Wrap
from crashlab.recording import RUN
from resumekit.run.saving.payloads import FrozenLinks
from resumekit.serialization.writing import FrozenFiles
from resumekit.storage.commit import Staging
from resumekit.storage.directories import StepName
from resumekit.storage.files import FileEntry
from resumekit.storage.io.file_system import Entry, FileSystem, ReadHandle
from resumekit.storage.manifest import Manifest, StepReader
from resumekit.storage.parts import Part, Parts
from resumekit.storage.retention import Checkpoint, RetentionPolicy, select_deletions
from resumekit.storage.store import Store

_STAGED = re.compile(r"step-\d+(-r\d+)?-[0-9a-f]{32}-[0-9a-f]{12}")
_NONCE = re.compile(r"-?[0-9a-f]{12,}")
_STEP = re.compile(r"step-\d+(-r\d+)?")
_RANK = re.compile(r"rank-\d+")


class SyncLabels(Passing):
    """Gives every fsync a name that says what it is for; remembers the names, drops one of them.

    Args:
        inner: the file system below.
        labels: collects the names.
        dropped: the sync that is left out.
    """

    def __init__(self, inner: FileSystem, labels: set[str], dropped: str | None = None) -> None:
        super().__init__(inner)
        self._labels = labels
        self._dropped = dropped
        self._paths: dict[int, Path] = {}
        self._latest = "start"

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self._latest = f"mkdir {described(path)}"

    def create(self, path: Path) -> int:
        handle = super().create(path)
        self._paths[handle] = path
        return handle

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._latest = f"rename to {described(target)}"

    def fsync(self, handle: int) -> None:
        if self._is_made(f"fsync {described(self._paths[handle])}"):
            super().fsync(handle)

    def fsync_dir(self, path: Path) -> None:
        after = f" after {self._latest}" if path == RUN else ""
        if self._is_made(f"fsync_dir {described(path)}{after}"):
            super().fsync_dir(path)

    def _is_made(self, label: str) -> bool:
        self._labels.add(label)
        return label != self._dropped


def described(path: Path) -> str:
    """A path without nonces and numbers, relative to the run directory."""
    if path in RUN.parents:
        return "a parent of the run directory"
    if path == RUN:
        return "the run directory"
    text = _NONCE.sub("", str(path.relative_to(RUN)))
    return _RANK.sub("rank-N", _STEP.sub("step-N", text))


class WithoutMarks(Passing):
    """The mark of a save in place has a name that nothing looks for."""

    def create(self, path: Path) -> int:
        return super().create(_unmarked(path))

    def unlink(self, path: Path) -> None:
        super().unlink(_unmarked(path))


def _unmarked(path: Path) -> Path:
    return path.with_suffix(".other") if path.suffix == ".incomplete" else path


class RenamesBeforeFsync(Passing):
    """Commits first and syncs the files, the manifest and the directories afterwards."""

    def __init__(self, inner: FileSystem) -> None:
        super().__init__(inner)
        self._paths: dict[int, Path] = {}
        self._later: list[Callable[[], None]] = []

    def create(self, path: Path) -> int:
        handle = super().create(path)
        self._paths[handle] = path
        return handle

    def fsync(self, handle: int) -> None:
        if _is_staged(self._paths[handle]):
            self._later.append(lambda: self._inner.fsync(handle))
        else:
            super().fsync(handle)

    def close(self, handle: int | ReadHandle) -> None:
        if isinstance(handle, int) and _is_staged(self._paths[handle]):
            self._later.append(lambda: self._inner.close(handle))
        else:
            super().close(handle)

    def fsync_dir(self, path: Path) -> None:
        if not _is_staged(path):
            super().fsync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        if _is_staged(source) and target.parent == RUN:
            later, self._later = self._later, []
            for call in later:
                call()
            for entry in self._inner.list(target):
                if entry.kind == "directory":
                    self._inner.fsync_dir(target / entry.name)
            self._inner.fsync_dir(target)


def _is_staged(path: Path) -> bool:
    return any(_STAGED.fullmatch(part) for part in path.parts)


class RetriesAFailedSync(Passing):
    """Asks again when an fsync has failed, and believes the second answer."""

    def fsync(self, handle: int) -> None:
        try:
            super().fsync(handle)
        except OSError:
            super().fsync(handle)


class FixedTemporaryName(Passing):
    """Stages every checkpoint under one name, ``.staging/step``, instead of a unique one."""

    def mkdir(self, path: Path) -> None:
        super().mkdir(self._fixed(path))

    def create(self, path: Path) -> int:
        return super().create(self._fixed(path))

    def fsync_dir(self, path: Path) -> None:
        super().fsync_dir(self._fixed(path))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(self._fixed(source), target)

    def unlink(self, path: Path) -> None:
        super().unlink(self._fixed(path))

    def rmdir(self, path: Path) -> None:
        super().rmdir(self._fixed(path))

    def list(self, path: Path) -> list[Entry]:
        return super().list(self._fixed(path))

    def entry(self, path: Path) -> Entry:
        return super().entry(self._fixed(path))

    def _fixed(self, path: Path) -> Path:
        parts = ["step" if _STAGED.fullmatch(part) else part for part in path.parts]
        return Path(*parts)


class WritesInPlace(Passing):
    """Has no staging: a checkpoint is written where it will be read."""

    def __init__(self, inner: FileSystem) -> None:
        super().__init__(inner)
        self._in_making: set[Path] = set()

    def mkdir(self, path: Path) -> None:
        final = self._final(path)
        super().mkdir(final)
        if final != path:
            self._in_making.add(final)

    def create(self, path: Path) -> int:
        return super().create(self._final(path))

    def fsync_dir(self, path: Path) -> None:
        super().fsync_dir(self._final(path))

    def rename(self, source: Path, target: Path) -> None:
        if self._final(source) == target:
            self._in_making.discard(target)
        else:
            super().rename(source, target)

    def unlink(self, path: Path) -> None:
        super().unlink(self._final(path))

    def rmdir(self, path: Path) -> None:
        super().rmdir(self._final(path))

    def list(self, path: Path) -> list[Entry]:
        return super().list(self._final(path))

    def entry(self, path: Path) -> Entry:
        if path in self._in_making:  # the commit asks whether the target is there already
            raise FileNotFoundError(path)
        return super().entry(self._final(path))

    def _final(self, path: Path) -> Path:
        for depth, part in enumerate(path.parts):
            if _STAGED.fullmatch(part):
                step = part[: -len("-") * 2 - 32 - 12]
                return RUN.joinpath(step, *path.parts[depth + 1 :])
        return path


class OverwritesTheStep(Store):
    """Saves a step again by deleting the old directory first."""

    def next_name(self, step: int) -> StepName:
        name = StepName(step)
        if name in self.step_names():
            _delete(self, name)
        return name


class RetainsBeforeCommit(Store):
    """Makes room for a checkpoint before it is there."""

    policy = RetentionPolicy(keep_latest=1)

    def commit(self, staging: Staging, manifest: Manifest) -> Path:
        names = [Checkpoint(name) for name in self.step_names()]
        for name in select_deletions([*names, Checkpoint(staging.step)], self.policy):
            _delete(self, name)
        return super().commit(staging, manifest)


class PrunesTheNewest(Store):
    """Makes room by what the run would continue from."""

    def prune(self, policy: RetentionPolicy, *, latest: StepName) -> StepName | None:
        del policy
        if self.step_names()[:1] != [latest]:
            return None
        _delete(self, latest)
        return latest


class RetainsTwoBeforeCommit(RetainsBeforeCommit):
    """Deletes the source of a link before the link is durable."""

    policy = RetentionPolicy(keep_latest=2)


class MovesInsteadOfLinking(Passing):
    """Takes the file of the earlier checkpoint away."""

    def link(self, source: Path, target: Path) -> None:
        super().rename(source, target)


class LinksToTheNewest(FrozenLinks):
    """Links to the checkpoint before, so that all have one copy."""

    def _source(self, step: int, path: str) -> tuple[StepName, FileEntry] | None:
        if super()._source(step, path) is None:
            return None
        name, files = self._committed[-1]
        return name, files[path]


class LinksAcrossARepeatedStep(FrozenLinks):
    """Links to the checkpoint before the last, also when this save replaces the last."""

    def _source(self, step: int, path: str) -> tuple[StepName, FileEntry] | None:
        del step
        return super()._source(-1, path)


class LinksUncompared(FrozenFiles):
    """Links whatever the tensors are now."""

    def finish_comparing(self) -> None:
        self._source, source = None, self._source
        super().finish_comparing()
        self._source = source


class IgnoresMissingRanks(Parts):
    """Takes the parts that are there for all of them."""

    @property
    def missing(self) -> tuple[int, ...]:
        return ()


class IgnoresFailures(Parts):
    """Takes the part of a rank that has failed for that of one that has finished."""

    @property
    def failures(self) -> dict[int, str]:
        return {}


class AcceptsAnotherAttempt(Parts):
    """Takes parts of earlier process starts, and of other runs."""

    def _is_of_this_save(self, part: Part) -> bool:
        run_id, attempt, *_ = self._save
        return super()._is_of_this_save(replace(part, run_id=run_id, attempt=attempt))


class AcceptsAnotherStep(Parts):
    """Takes parts of other steps."""

    def _is_of_this_save(self, part: Part) -> bool:
        return super()._is_of_this_save(replace(part, step=self._save[2]))


class AcceptsAnotherSave(Parts):
    """Takes parts of earlier saves of the same step."""

    def _is_of_this_save(self, part: Part) -> bool:
        return super()._is_of_this_save(replace(part, save_number=self._save[3]))


class LeavesPartsInPlace(Passing):
    """Commits a staging directory with the parts in it."""

    def list(self, path: Path) -> list[Entry]:
        is_staged = _STAGED.fullmatch(path.name)
        return [entry for entry in super().list(path) if not (is_staged and entry.name == "parts")]

    def unlink(self, path: Path) -> None:
        if path.parent.name != "parts":
            super().unlink(path)

    def rmdir(self, path: Path) -> None:
        if path.name != "parts":
            super().rmdir(path)


class EmptiesTheTrashBeforeTheSync(Passing):
    """Removes the bytes of a deleted checkpoint as soon as it is renamed away."""

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        if target.name.startswith("trash-"):
            for path in _files_first(self._inner, target)[:-1]:
                with suppress(IsADirectoryError):
                    self._inner.unlink(path)


class DeletesPinnedCheckpoints(Store):
    """Does not care whether a checkpoint is being read."""

    def pin(self, name: StepName) -> None:
        del name

    def unpin(self, name: StepName) -> None:
        del name


def _delete(store: Store, name: StepName) -> None:
    file_system = store._file_system
    for path in _files_first(file_system, store.directory / str(name)):
        with suppress(IsADirectoryError):
            file_system.unlink(path)
            continue
        file_system.rmdir(path)
    file_system.fsync_dir(store.directory)


def _files_first(file_system: FileSystem, root: Path) -> list[Path]:
    paths = []
    for entry in file_system.list(root):
        path = root / entry.name
        paths += _files_first(file_system, path) if entry.kind == "directory" else [path]
    return [*paths, root]


class ReadsUnchecked(Store):
    """Believes the bytes of a file whatever the manifest says about them."""

    def open_step(self, name: StepName) -> StepReader:
        return _UncheckedStep(self._file_system, self.directory, name)


class _UncheckedStep(StepReader):
    def file(self, path: str) -> _UncheckedReader:  # type: ignore[override]
        return _UncheckedReader(self._file_system, self.path / path, self._entries[path])


class _UncheckedReader:
    def __init__(self, file_system: FileSystem, path: Path, entry: FileEntry) -> None:
        self._file_system = file_system
        self._handle = file_system.open(path)
        self.entry = entry

    def read(self) -> bytes:
        content = bytearray(self._handle.size)
        self._file_system.read_into(self._handle, 0, memoryview(content))
        return bytes(content)

    def __enter__(self) -> _UncheckedReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file_system.close(self._handle)


def dropping(label: str) -> Wrap:
    """A wrap that leaves this one sync out."""
    return lambda inner: SyncLabels(inner, set(), dropped=label)
