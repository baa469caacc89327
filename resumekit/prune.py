"""Removes checkpoints that a run does not need any more, or all of them but the weights.

A checkpoint is never changed. One that keeps its weights is committed as a further revision of its
step, with links to the files of the models, before the whole one is deleted. A crash leaves the
whole one, the new one, or both; the next call deletes what is left over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from resumekit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    NoUsableCheckpointError,
)
from resumekit.fork import files_of, model_records
from resumekit.shared_files import freed_bytes
from resumekit.storage.directories import StepName
from resumekit.storage.manifest import PRUNED, Manifest, StepReader, is_pruned
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store


@dataclass(frozen=True)
class PrunedCheckpoint:
    """A checkpoint that was removed, or of which only the weights are left.

    Args:
        name: of it.
        freed_bytes: that no file needs any more.
        weights: the name of the checkpoint with its weights; None where it was removed.
        problem: why it stays as it is; None otherwise.
    """

    name: str
    freed_bytes: int
    weights: str | None = None
    problem: str | None = None


def prune_run(
    store: Store,
    policy: RetentionPolicy | None,
    *,
    reduces: Callable[[Manifest], bool],
    dry_run: bool = False,
) -> tuple[StepName, list[PrunedCheckpoint]]:
    """Removes checkpoints. The newest, the newest good one and the best stay whole in any case.

    Args:
        store: the run directory, acquired unless it is a dry run.
        policy: what is kept; None keeps everything.
        reduces: whether only the weights of a kept checkpoint stay.
        dry_run: change nothing.

    Returns:
        The newest checkpoint whose bytes verify, and what was done, or would be, oldest first.

    Raises:
        NoUsableCheckpointError: no checkpoint verifies; nothing was changed.
        CheckpointNotFoundError: a live run has deleted one meanwhile; only of a dry run.
        ResumekitError: something could not be written or removed; all that stays is untouched.
    """
    latest = _newest_good(store)
    removed = [] if policy is None else store.unneeded(policy, latest=latest)
    least = store.unneeded(RetentionPolicy(keep_latest=1, keep_best=1), latest=latest)
    reduced: dict[StepName, StepReader] = {}
    for name in least:
        reader = None if name in removed else store.open_step(name)
        if reader is not None and reduces(reader.manifest) and not is_pruned(reader.manifest):
            if store.next_name(name.step).revision > name.revision + 1:
                removed.append(name)  # a call was interrupted before it has deleted this one
            else:
                reduced[name] = reader
    removed.sort()
    sizes = freed_bytes(store.directory, [store.open_step(name).manifest for name in removed])
    done = [PrunedCheckpoint(str(name), sizes[name]) for name in removed]
    if not dry_run:
        store.delete(removed)
    return latest, done + [_reduce(store, each, dry_run=dry_run) for each in reduced.values()]


def _newest_good(store: Store) -> StepName:
    problems = []
    for name in store.step_names():
        try:
            reader = store.open_step(name)
            if not is_pruned(reader.manifest):
                reader.verify()
                return name
        except CheckpointNotFoundError:  # a live run, which a dry run reads, has deleted it
            raise
        except CheckpointError as error:
            problems.append(str(error).rstrip("."))
    raise NoUsableCheckpointError(
        str(store.directory),
        found="; ".join(problems) or "no checkpoint that a run can continue from",
        expected="at least one checkpoint that verifies",
    )


def _reduce(store: Store, source: StepReader, *, dry_run: bool) -> PrunedCheckpoint:
    name, manifest = source.name, source.manifest
    kept = replace(manifest, revision=name.revision + 1)
    try:
        records = model_records(source)
        files = files_of(source, records)
        others = tuple(entry for entry in manifest.files if entry not in files)
        freed = freed_bytes(store.directory, [replace(manifest, files=others)])[name]
        for entry in files:
            with source.file(entry.path) as reader:
                reader.verify()
        if not dry_run:
            details = {**manifest.details, PRUNED: True}
            kept = replace(kept, components=records, files=files, capture={}, details=details)
            store.commit_copy(
                kept, lambda staging, entry: staging.take(source.path / entry.path, entry)
            )
            store.delete([name])
    except (CheckpointError, ConfigurationError) as error:
        return PrunedCheckpoint(str(name), 0, problem=str(error))
    return PrunedCheckpoint(str(name), freed, weights=str(kept.name))
