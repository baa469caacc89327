"""A new run that begins from a checkpoint of another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import xxhash

from resumekit.errors import ConfigurationError
from resumekit.storage.files import FileEntry
from resumekit.storage.io.file_system import FileSystem, LocalFileSystem
from resumekit.storage.manifest import (
    ComponentRecord,
    ForkOrigin,
    Manifest,
    StepReader,
    forked_details,
    is_pruned,
)
from resumekit.storage.ownership import DirectoryLock, is_unused
from resumekit.storage.store import Store


def fork_checkpoint(
    source: StepReader,
    directory: Path,
    *,
    only_weights: bool = False,
    file_system: FileSystem | None = None,
    lock: DirectoryLock | None = None,
) -> Path:
    """Makes a new run directory whose only checkpoint is one of another run.

    The same command with this directory resumes from it. The files are hard links where the file
    system allows it, else verified copies. A crash leaves the whole checkpoint or none; this call
    may then be repeated.

    Args:
        source: the checkpoint.
        directory: of the new run; it does not exist, or is empty.
        only_weights: take the weights and buffers of the models; the new run starts from step 0
            with them, and everything else is as the script makes it.
        file_system: that of both; by default the local one.
        lock: see ``Store``.

    Returns:
        The checkpoint's directory in the new run.

    Raises:
        CheckpointError: the source is damaged, or cannot be read.
        ConfigurationError: the directory is in use, or inside the source's run; there are no
            weights.
        DirectoryError: the directory cannot be used.
        SaveError: writing failed; the new run has no checkpoint.
    """
    _check_location(source, directory)
    if is_pruned(source.manifest) and not only_weights:
        raise ConfigurationError(
            str(source.path),
            found="only its weights are left",
            expected="a whole checkpoint, or --weights-only",
        )
    records = model_records(source) if only_weights else source.manifest.components
    files = files_of(source, records if only_weights else None)
    file_system = LocalFileSystem() if file_system is None else file_system
    _check_unused(file_system, directory)
    for entry in files:
        with source.file(entry.path) as reader:
            reader.verify()
    store = Store(directory, file_system=file_system, lock=lock)
    store.acquire()
    try:
        return _commit(store, source, records, files, only_weights=only_weights)
    finally:
        store.release()


def _commit(
    store: Store,
    source: StepReader,
    records: Sequence[ComponentRecord],
    files: Sequence[FileEntry],
    *,
    only_weights: bool,
) -> Path:
    """The committed checkpoint of the new run."""
    manifest = _manifest(store, source, records, files, only_weights=only_weights)
    # A copy for which there is no space fails and leaves nothing.
    return store.commit_copy(
        manifest, lambda staging, entry: staging.take(source.path / entry.path, entry)
    )


def _manifest(
    store: Store,
    source: StepReader,
    records: Sequence[ComponentRecord],
    files: Sequence[FileEntry],
    *,
    only_weights: bool,
) -> Manifest:
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    manifest = source.manifest
    digest = xxhash.xxh3_128_hexdigest(manifest.to_bytes())
    origin = ForkOrigin(manifest.run_id, str(source.name), digest, now, only_weights)
    forked = replace(
        manifest,
        run_id=store.run_id,
        attempt=store.attempt,
        created=now,
        revision=0,
        parent=None,
        details=forked_details(manifest, origin),
    )
    if not only_weights:
        return forked
    return replace(
        forked,
        step=0,
        progress={},
        finished=None,
        metric=None,
        components=tuple(records),
        files=tuple(files),
        capture={},
        fingerprint={},
    )


def _check_location(source: StepReader, directory: Path) -> None:
    run = source.path.parent.resolve()
    if directory.resolve().is_relative_to(run):
        raise ConfigurationError(
            str(directory),
            found=f"inside the run {run}",
            expected="a directory of its own for the new run",
        )


def _check_unused(file_system: FileSystem, directory: Path) -> None:
    """Refuses a directory with anything in it but the rest of a fork that was interrupted."""
    try:
        unused = is_unused(file_system, directory)
    except OSError as error:
        found = f"cannot be listed ({error.strerror})"
    else:
        if unused:
            return
        found = "it is not empty"
    raise ConfigurationError(
        str(directory),
        found=found,
        expected="a new directory",
        remedy="Choose another one, or remove it first",
    )


def model_records(source: StepReader) -> tuple[ComponentRecord, ...]:
    """The models of a checkpoint.

    Raises:
        ConfigurationError: it has none.
    """
    records = source.manifest.models
    if not records:
        keys = ", ".join(record.key for record in source.manifest.components)
        raise ConfigurationError(str(source.path), found=f"no model (it has {keys})")
    return records


def files_of(
    source: StepReader, records: Sequence[ComponentRecord] | None
) -> tuple[FileEntry, ...]:
    """The files of these components, or all."""
    if records is None:
        return source.manifest.files
    folders = {record.directory for record in records}
    return tuple(
        entry for entry in source.manifest.files if str(Path(entry.path).parent) in folders
    )
