"""The commit: from files in staging to a step directory that is there whole or not at all.

Each step is durable before the next one begins, so that a power cut at any instant leaves the
rename undone, or done over complete content:

1. every rank has synced its own files (``FileWriter.finish``),
2. the manifest is written and synced,
3. every directory in staging is synced, then the staging directory itself,
4. the owner record still names this attempt, and the target is free,
5. one rename, and a sync of the run directory. The checkpoint exists from here on.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from resumekit.errors import ConfigurationError, SaveError
from resumekit.storage.failures import saving
from resumekit.storage.files import FileEntry, FileWriter
from resumekit.storage.io import FileSystem
from resumekit.storage.manifest import Manifest
from resumekit.storage.names import LATEST, MANIFEST, STAGING, directories_of
from resumekit.storage.owner import Owner, check_owner
from resumekit.storage.staging import Staging
from resumekit.storage.tree import find_difference


def commit(
    file_system: FileSystem, directory: Path, staging: Staging, manifest: Manifest, owner: Owner
) -> Path:
    """The step directory, durable.

    Args:
        file_system: the seam.
        directory: the run directory.
        staging: holds every file that the manifest lists, finished.
        manifest: of this attempt and of the staging's step.
        owner: this attempt.

    Raises:
        ConfigurationError: the manifest is of another run, attempt or step.
        UnsupportedValueError: the manifest holds a value that could not be read back.
        OwnershipLostError: another attempt has taken the directory over.
        SaveError: names the path and the cause. Only if the very last sync failed, the step
            directory is there, complete, and may not survive a power cut.
    """
    _check_identity(staging, manifest, owner)
    _prepare(file_system, staging, manifest)
    with saving(directory):
        check_owner(file_system, directory, owner)
    target = directory / str(staging.step)
    with saving(target):
        if any(entry.name == target.name for entry in file_system.list(directory)):
            raise SaveError(str(target), found="is there already", expected="a free name")
        file_system.rename(staging.path, target)
    with saving(directory):
        file_system.fsync_dir(directory)
    with saving(directory / STAGING):
        # The old name must be gone as durably as the new one is there: staging is swept.
        file_system.fsync_dir(directory / STAGING)
    _point_latest(file_system, directory, staging)
    return target


def _check_identity(staging: Staging, manifest: Manifest, owner: Owner) -> None:
    found = (manifest.run_id, manifest.attempt, manifest.name)
    expected = (owner.run_id, owner.attempt, staging.step)
    if found != expected:
        raise ConfigurationError(
            "manifest",
            found="run {}, attempt {}, {}".format(*found),
            expected="run {}, attempt {}, {}".format(*expected),
        )


def _prepare(file_system: FileSystem, staging: Staging, manifest: Manifest) -> None:
    """Completes the staging directory and makes all of it durable."""
    used = directories_of(entry.path for entry in manifest.files)
    for part in reversed([part for part in staging.directories if part not in used]):
        with saving(staging.path / part):
            file_system.rmdir(staging.path / part)
    written = _write_manifest(file_system, staging, manifest)
    sizes = {entry.path: entry.size for entry in (*manifest.files, written)}
    with saving(staging.path):
        difference = find_difference(file_system, staging.path, sizes)
    if difference is not None:
        path, problem = difference
        raise SaveError(str(staging.path / path), found=problem)
    for directory in (*(staging.path / part for part in reversed(used)), staging.path):
        with saving(directory):
            file_system.fsync_dir(directory)


def _write_manifest(file_system: FileSystem, staging: Staging, manifest: Manifest) -> FileEntry:
    data = manifest.to_bytes()
    path = staging.path / MANIFEST
    with FileWriter(file_system, path, relative=MANIFEST, writer=0) as writer:
        writer.write([memoryview(data)])
        return writer.finish()


def _point_latest(file_system: FileSystem, directory: Path, staging: Staging) -> None:
    """Names the newest step for people. Nothing reads it; so it is not synced and may fail."""
    draft = directory / STAGING / f"latest-{staging.name}"
    with suppress(OSError):
        handle = file_system.create(draft)
        try:
            file_system.write(handle, [memoryview(f"{staging.step}\n".encode("ascii"))])
        finally:
            file_system.close(handle)
        file_system.rename(draft, directory / LATEST)
