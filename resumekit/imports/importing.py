"""Writes what another program has saved as the first step of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from resumekit.errors import ConfigurationError
from resumekit.imports.content import OtherContent, StartPosition, read_content
from resumekit.imports.deepspeed_tags import COUNTERS
from resumekit.serialization.writing import Payload
from resumekit.state import SharingPattern, Slot
from resumekit.storage.files import FileEntry
from resumekit.storage.imported import ImportOrigin, import_of, imported_details
from resumekit.storage.manifest import ComponentRecord, Manifest
from resumekit.storage.store import Store

_NOTHING = StartPosition()
_TRAINER_STATE = "callbacks/trainer_state"
# These have a folder of their own, as in every checkpoint.
_OWN_DIRECTORY = (Slot.MODEL.value, Slot.OPTIMIZER.value)


def import_checkpoint(
    path: Path, directory: Path, *, asked: StartPosition = _NOTHING, trusts: bool = False
) -> tuple[Path, ImportOrigin]:
    """Makes a checkpoint of another program the first step of a new run.

    Args:
        path: of the checkpoint.
        directory: of the run; it has no checkpoint.
        asked: the position, where the checkpoint does not say it.
        trusts: see ``read_content``.

    Returns:
        The step directory, and what its manifest says of the import.

    Raises:
        ConfigurationError: it cannot be taken over, or the directory has checkpoints.
        DirectoryError: the directory cannot be used.
        SaveError: writing failed; the run has no checkpoint.
        UnsupportedValueError: the checkpoint has a value that cannot be stored; names its path.
    """
    content = read_content(path, trusts=trusts)
    store = Store(directory)
    store.acquire()
    try:
        names = store.step_names()
        if names:
            raise _is_in_use(f"resumekit import {path}", store, str(names[0]))
        return _write(store, content, asked)
    finally:
        store.release()


def import_once(path: Path, store: Store, *, trusts: bool) -> None:
    """The same into a run directory that this process owns; nothing where it was done before.

    Raises:
        ConfigurationError: the directory has checkpoints that did not begin from this one.
    """
    names = store.step_names()
    if not names:
        _write(store, read_content(path, trusts=trusts), _NOTHING)
        return
    reader, _ = store.open_newest(names)
    origin = import_of(reader.manifest)
    # Its files may be gone by now; only their name is compared.
    if origin is None or not origin.source.endswith(f" {path.name}"):
        began = "from no import" if origin is None else f"from {origin.source}"
        raise _is_in_use(f"import_from={str(path)!r}", store, f"{names[0]}, which began {began}")


def _is_in_use(where: str, store: Store, what: str) -> ConfigurationError:
    return ConfigurationError(
        where,
        found=f"{store.directory} holds {what}",
        expected="a run directory without checkpoints",
        remedy="Choose another run directory, or leave the import out to continue that run",
    )


def _write(store: Store, content: OtherContent, asked: StartPosition) -> tuple[Path, ImportOrigin]:
    """The committed step. Its states are those of the manifest's components."""
    if content.named_epoch is not None and asked.epoch is None:
        raise ConfigurationError(
            content.source,
            found=f"epoch {content.named_epoch}, which is the finished epoch or the next one",
            expected="the epoch that the run continues with, counted from 0",
            remedy=f"Run `resumekit import` with --epoch {content.named_epoch} or "
            f"--epoch {content.named_epoch + 1}",
        )
    content = replace(content, position=content.position.with_asked(asked))
    shared, per_rank = _states(content)
    as_given = (*content.given, *(key for key in (Slot.RNG.value,) if key in per_rank[0]))
    origin = ImportOrigin(content.source, content.all_lacks, as_given)
    payloads = [*_payloads(shared, per_rank)]
    manifest = _manifest(store, content, origin, shared, per_rank)
    staging = store.stage(
        manifest.name,
        num_bytes=sum(each.num_bytes for each in payloads),
        num_files=sum(each.num_files for each in payloads),
        directories=sorted({record.directory for record in manifest.components}),
    )
    files: list[FileEntry] = []
    try:
        with staging.writing():
            for each in payloads:
                files += each.write(staging)
    except BaseException:
        store.abandon(staging)
        raise
    return store.commit(staging, replace(manifest, files=tuple(files))), origin


def _states(content: OtherContent) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The states by component key: of the job, and of each rank."""
    position, num_ranks = content.position, content.num_ranks
    epoch, batch = position.epoch or 0, position.batch or 0
    counts = {
        "step": position.step or 0,
        "micro_step": content.num_batches,
        "epoch": epoch,
        "batch": batch,
        "samples": content.num_batches * content.batch_size * num_ranks,
        "tokens": int(content.counts.get("num_input_tokens_seen") or 0),
    }
    progress: dict[str, Any] = {
        "progress": counts,
        "horizon": {},
        "finished": None,
        "loops": {"asked": [], "over": []},
        "within_window": False,
    }
    shared = {**content.given, **content.engine_states, Slot.PROGRESS.value: progress}
    per_rank = []
    has_rng = None not in content.rng
    for random in content.rng:
        states: dict[str, Any] = {Slot.RNG.value: random} if has_rng else {}
        if epoch or batch:
            # What was drawn for a batch that was fetched ahead, is not known.
            ahead = [random] * content.num_ahead if has_rng and batch else []
            states[Slot.DATA.value] = {"train": _counted(epoch, batch, ahead, content.batch_size)}
        if content.counts:
            states[_TRAINER_STATE] = dict(content.counts)
        per_rank.append(states)
    if not has_rng:  # then the ranks do not differ, and their number may not be known
        return {**shared, **per_rank[0]}, [{} for _ in per_rank]
    return shared, per_rank


def _counted(epoch: int, batch: int, ahead: list[Any], batch_size: int) -> dict[str, Any]:
    """A position in a loader of which nothing else is known."""
    size = {"batch_size": batch_size} if batch_size else {}
    return {
        "kind": "counted",
        "epoch": epoch,
        "batch": batch,
        "endless": False,
        "rebuilt": None,
        "made_anew": [],
        "geometry": {"num_batches": None, "generators": [], **size},
        "generators": {},
        "ahead": ahead,
    }


def _payloads(shared: Mapping[str, Any], per_rank: list[dict[str, Any]]) -> Iterator[Payload]:
    apart = {key: state for key, state in shared.items() if key.partition("/")[0] in _OWN_DIRECTORY}
    rest = {key: state for key, state in shared.items() if key not in apart}
    for key, state in apart.items():
        yield Payload.of_states(key, 0, {key: state})
    for rank, states in enumerate(per_rank):
        states = {**rest, **states} if rank == 0 else states
        if states:
            yield Payload.of_states("state", rank, states)


def _manifest(
    store: Store,
    content: OtherContent,
    origin: ImportOrigin,
    shared: Mapping[str, Any],
    per_rank: list[dict[str, Any]],
) -> Manifest:
    counts = shared[Slot.PROGRESS.value]["progress"]
    patterns = dict.fromkeys(content.given, SharingPattern.REPLICATED)
    records = [
        ComponentRecord(
            key=key,
            pattern=patterns.get(key, SharingPattern.GLOBAL).value,
            fidelity="exact",
            reason="",
            directory=key if key.partition("/")[0] in _OWN_DIRECTORY else "state",
            writers=(0,),
        )
        for key in shared
    ]
    every = tuple(range(content.num_ranks))
    records += [
        ComponentRecord(key, SharingPattern.PER_RANK.value, "exact", "", "state", every)
        for key in per_rank[0]
    ]
    framework = {_TRAINER_STATE: "the Trainer"} if content.counts else {}
    framework |= {key: "DeepSpeed" for key in content.engine_states if key == COUNTERS}
    return Manifest(
        run_id=store.run_id,
        attempt=store.attempt,
        step=counts["step"],
        revision=0,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        world_size=content.num_ranks,
        progress=counts,
        components=tuple(records),
        files=(),
        details={**imported_details(origin), **({"frameworks": framework} if framework else {})},
    )
