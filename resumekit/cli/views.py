"""Output of the commands that look at checkpoints; none of them changes one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from rich.table import Table

from resumekit.cli.terminal import (
    console,
    filled,
    new_table,
    plain,
    print_json,
    print_line,
    print_table,
)
from resumekit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
)
from resumekit.fork import fork_checkpoint
from resumekit.imports.recognition import recognise
from resumekit.log import show_messages
from resumekit.places.copies import copies_by_name
from resumekit.progress_display import human_bytes, show_progress
from resumekit.shared_files import shared_bytes
from resumekit.storage.directories import OWNER, StepName, name_few
from resumekit.storage.manifest import ForkOrigin, Manifest, StepReader, is_pruned, lineage_of
from resumekit.storage.store import Store

Read = TypeVar("Read")
_MAX_FORKS = 100  # the latest ones
_MAX_VALUE = 2000  # characters of a value in a table
_DIGITS = 16  # of a digest; --json prints it whole


_COLUMNS = (
    *("checkpoint", "epoch", "batch", "size"),
    *("created", "metric", "journal", "state", "copies"),
)
_OPTIONAL = ("metric", "journal", "copies")  # shown where a checkpoint has them


def list_directory(directory: Path, *, as_json: bool, places: Sequence[str] = ()) -> bool:
    """Prints one line for each checkpoint, newest first; only manifests are read.

    Args:
        directory: the run directory.
        as_json: print JSON.
        places: whose copies are shown.

    Returns:
        Whether all of them can be used.

    Raises:
        CheckpointNotFoundError: there is none.
        PlaceError: a place does not answer.
    """
    copies, runs = copies_by_name(places, Store(directory)), _runs_in(directory)
    if runs and not copies:
        _list_runs(runs, as_json=as_json)
        return True
    rows = again_if_deleted(lambda: _rows(directory, copies))
    all_good = all(manifest is not None or state == _ELSEWHERE for _, manifest, state in rows)
    shared = shared_bytes(directory, (manifest for _, manifest, _ in rows if manifest))
    if as_json:
        fields = [_plain(*row, shared.get(row[0], 0)) for row in rows]
        where = [{"copies": copies.get(row[0], [])} if places else {} for row in rows]
        print_json([{**row, **found} for row, found in zip(fields, where, strict=True)])
        return all_good
    cells = [
        [
            *(str(name), *_middle(manifest, shared.get(name, 0))),
            *(state.partition("  ")[0], ", ".join(copies.get(name, []))),
        ]
        for name, manifest, state in rows
    ]
    columns = [
        (column, *texts)
        for column, *texts in zip(_COLUMNS, *cells, strict=True)
        if column not in _OPTIONAL or any(texts)
    ]
    table = new_table(*(column for column, *_ in columns))
    for row in zip(*(texts for _, *texts in columns), strict=True):
        table.add_row(*map(plain, row))
    print_table(table)
    for reason in filter(None, (state.partition("  ")[2] for *_, state in rows)):
        print_line(reason)
    newest = next((manifest for _, manifest, _ in rows if manifest is not None), None)
    for origin in () if newest is None else lineage_of(newest)[-_MAX_FORKS:]:
        print_line(f"forked from {_lineage_line(origin)}")
    return all_good


def _runs_in(directory: Path) -> list[Path]:
    """The run directories in a directory that is none itself, by name."""
    if (directory / OWNER).exists() or Store(directory).step_names():
        return []
    return sorted(each for each in directory.iterdir() if (each / OWNER).is_file())


def _list_runs(runs: Sequence[Path], *, as_json: bool) -> None:
    rows = []
    for run in runs:
        names = [*map(str, Store(run).step_names())]
        newest = names[0] if names else None
        rows.append({"run": str(run), "num_checkpoints": len(names), "newest": newest})
    if as_json:
        print_json(rows)
    else:
        cells = [[str(cell or "-") for cell in row.values()] for row in rows]
        print_table(filled(new_table("run", "checkpoints", "newest"), cells))


def inspect_checkpoint(path: Path, *, as_json: bool) -> None:
    """Prints the manifest of a checkpoint as tables.

    Args:
        path: a step directory, or a run directory: its newest readable checkpoint.
        as_json: print the manifest itself.

    Raises:
        CheckpointError: it cannot be opened, or there is none.
    """
    reader = again_if_deleted(lambda: reader_at(path), named=is_step(path))
    manifest = reader.manifest
    if as_json:
        print_json(json.loads(manifest.to_bytes()))
        return
    terminal = console()
    print_table(_facts(str(reader.name), manifest))
    terminal.print("\ncomponents", style="bold")
    print_table(_component_table(manifest))
    terminal.print("\nfiles", style="bold")
    print_table(_file_table(manifest))
    for title, values in (("written by", manifest.fingerprint), ("details", manifest.details)):
        if values:
            terminal.print(f"\n{title}", style="bold")
            print_table(_value_table(values))


def export_checkpoint(path: Path, out: Path, *, to: str, **options: Any) -> None:
    """Writes a checkpoint for other tools, and prints what it wrote and what it left out.

    Args:
        path: a step directory, or a run directory: its newest readable checkpoint.
        out: the file or directory to write.
        to: the format.
        **options: see ``resumekit.export.export_model``; None for what is not given.

    Raises:
        CheckpointError: it cannot be read, or there is none.
        ResumekitError: it has no such model, or the file cannot be written.
    """
    # the other views need no torch
    from resumekit.export import FORMATS, TRAININGS, export_model, export_training

    given = {name: value for name, value in options.items() if value is not None}
    of_model = to not in TRAININGS
    others = given.keys() & ({"ranks", "stage"} if of_model else {"weights", "key", "dtype"})
    if others:
        formats = ("deepspeed",) if of_model else FORMATS
        raise ConfigurationError(
            f"--to {to}", found=f"with {min(others)}", expected=f"one of {', '.join(formats)}"
        )

    def export() -> tuple[StepReader, tuple[str, ...]]:
        reader = reader_at(path)
        write = export_model if of_model else export_training
        return reader, write(reader, out, to=to, **given)

    reader, lines = again_if_deleted(export, named=is_step(path))
    files = [each for each in (out, *out.rglob("*")) if each.is_file()]
    size = human_bytes(sum(each.stat().st_size for each in files))
    count, noun = (len(lines), "tensor") if of_model else (len(files), "file")
    print_line(f"{out}: {count} {noun}{'s' * (count != 1)} of {reader.name}, {size}")
    for line in () if of_model else lines:
        print_line(line)


def fork_run(path: Path, directory: Path, *, step: str | None, only_weights: bool) -> None:
    """Makes a run that begins from a checkpoint, and prints what it has.

    Args:
        path: a step directory, or a run directory: its newest readable checkpoint.
        directory: of the new run.
        step: of a run directory, this checkpoint.
        only_weights: whether to take the model's weights alone.

    Raises:
        ResumekitError: see ``fork_checkpoint``.
    """
    reader = reader_at(path, step)
    made = fork_checkpoint(reader, directory, only_weights=only_weights)
    (*_, origin) = lineage_of(Store(directory).open_step(StepName.from_text(made.name)).manifest)
    print_line(f"{made}: {origin}; run the same command with {directory}")


def verify_directory(directory: Path, *, step: str | None, as_json: bool) -> bool:
    """Compares every byte with the digests of the manifest; prints one line a checkpoint.

    Nothing is moved or changed: the next resume quarantines a checkpoint that fails here.

    Args:
        directory: the run directory.
        step: only this checkpoint.
        as_json: print JSON at the end.

    Returns:
        Whether all of them are intact.

    Raises:
        CheckpointNotFoundError: there is none, or not this one.
    """
    show_messages()

    def verify() -> list[dict[str, Any]]:
        store, show = Store(directory), (lambda _: None) if as_json else print_line
        return _of_those_left(names_of(store, step), lambda name: _verified(store, name, show))

    rows = again_if_deleted(verify, named=step is not None)
    if as_json:
        print_json(rows)
    return all(row["is_intact"] for row in rows)


def _verified(store: Store, name: StepName, show: Callable[[str], None]) -> dict[str, Any]:
    """Reads a checkpoint, and shows the line about it."""
    started = time.perf_counter()
    row = {"name": str(name), "step": name.step, "revision": name.revision}
    try:
        reader = store.open_step(name)
        what = f"verifying {store.directory / str(name)}"
        with show_progress(what, size_of(reader.manifest)) as advance, store.observed(advance):
            reader.verify()
    except CheckpointNotFoundError:
        raise
    except CheckpointError as error:
        show(f"{name}  {_state_of(error)}")
        return {**row, "is_intact": False, "state": _state_of(error)}
    num_files, size = len(reader.manifest.files), size_of(reader.manifest)
    seconds = time.perf_counter() - started
    show(f"{name}  ok  {num_files} files, {human_bytes(size)}, {seconds:.2f} s")
    counts = {"num_files": num_files, "num_bytes": size, "seconds": seconds}
    return {**row, "is_intact": True, "state": "ok", **counts}


# ---------------------------------------------------------------- a run that deletes meanwhile

_MAX_TRIES = 20


def again_if_deleted(read: Callable[[], Read], *, named: bool = False) -> Read:
    """What a function reads of a run that may be alive, and delete what is being read.

    Args:
        read: is called again where it raises CheckpointNotFoundError, and then finds newer ones.
        named: the user has named the checkpoint, so no other one will do.

    Raises:
        CheckpointNotFoundError: the named one has been deleted; or each one, time after time.
    """
    for _ in range(0 if named else _MAX_TRIES - 1):
        with suppress(CheckpointNotFoundError):
            return read()
    return read()


def _of_those_left(names: list[StepName], read: Callable[[StepName], Read]) -> list[Read]:
    """What a function reads of each checkpoint that the run does not delete meanwhile."""
    found: list[Read] = []
    for name in names:
        with suppress(CheckpointNotFoundError):
            found.append(read(name))
    if not found:
        raise CheckpointNotFoundError(
            ", ".join(map(str, names)),
            found="deleted while it was read",
            remedy="Let the run keep more checkpoints: keep_latest",
        )
    return found


def is_step(path: Path) -> bool:
    """Whether this is the path of a step directory, and not of a run."""
    return StepName.parse(path.resolve().name) is not None


def names_of(store: Store, step: str | None = None) -> list[StepName]:
    """The names of the checkpoints in a run directory, newest first.

    Args:
        store: the run directory.
        step: only these: ``500`` is every save of step 500, ``step-00000500-r1`` one of them.

    Raises:
        CheckpointNotFoundError: there is none.
    """
    names = store.step_names()
    if step is not None:
        names = [name for name in names if step in (str(name), str(name.step))]
    if not names:
        what = "no checkpoint" if step is None else f"no checkpoint {step}"
        raise nothing_in(store.directory, what)
    return names


def nothing_in(directory: Path, found: str) -> CheckpointNotFoundError:
    """The error about a directory that has nothing to show; names what it has instead."""
    runs = name_few([run.name for run in _runs_in(directory)])
    others = [each for each in map(recognise, directory.iterdir()) if each]
    newest = max(others, key=lambda each: (each.step or 0, each.path), default=None)
    return CheckpointNotFoundError(
        str(directory),
        found=found if newest is None else f"{found} of resumekit, but {newest}",
        expected=f"one of the runs in it: {runs}" if runs else None,
        remedy=None if newest is None else f"Make it the start of a run: {newest.command()}",
    )


def reader_at(path: Path, step: str | None = None) -> StepReader:
    """A checkpoint.

    Args:
        path: a step directory, or a run directory: its newest readable checkpoint.
        step: of a run directory, only this checkpoint; see ``verify_directory``.

    Raises:
        CheckpointError: it cannot be opened, or there is none.
    """
    name = StepName.parse(path.resolve().name)
    if name is not None:
        return Store(path.resolve().parent).open_step(name)
    store = Store(path)
    reader, rejected = store.open_newest(names_of(store, step))
    for reason in rejected:
        print_line(f"passed over: {reason}", to_stderr=True)
    return reader


_Row: TypeAlias = tuple[StepName, Manifest | None, str]
_ELSEWHERE = "only in a place"


def _rows(directory: Path, elsewhere: Collection[StepName]) -> list[_Row]:
    """Name, manifest and state of each checkpoint, newest first.

    Args:
        directory: the run directory.
        elsewhere: names of copies.
    """
    store = Store(directory)
    here = store.step_names() if elsewhere else names_of(store)
    rows: list[_Row] = []
    if here:
        rows = _of_those_left(here, lambda name: (name, *_manifest_and_state(store, name)))
    rows += [(name, None, _ELSEWHERE) for name in elsewhere if name not in here]
    return sorted(rows, key=lambda row: row[0], reverse=True)


def _manifest_and_state(store: Store, name: StepName) -> tuple[Manifest | None, str]:
    try:
        manifest = store.open_step(name).manifest
    except CheckpointNotFoundError:
        raise
    except CheckpointError as error:
        return None, _state_of(error)
    finished = manifest.finished
    if is_pruned(manifest):
        return manifest, "weights only"
    return manifest, "complete" if finished is None else f"finished ({finished})"


def _state_of(error: CheckpointError) -> str:
    return f"{'DAMAGED' if isinstance(error, CorruptCheckpointError) else '?'}  {error}"


def _plain(
    name: StepName, manifest: Manifest | None, state: str, num_shared_bytes: int
) -> dict[str, Any]:
    row = {"name": str(name), "step": name.step, "revision": name.revision, "state": state}
    if manifest is None:
        return row
    rest = {"created": manifest.created, "num_bytes": size_of(manifest), "metric": manifest.metric}
    if num_shared_bytes:
        rest["shared_bytes"] = num_shared_bytes
    if lineage_of(manifest):
        rest["lineage"] = [asdict(origin) for origin in lineage_of(manifest)]
    if isinstance(manifest.details.get("journal"), Mapping):
        rest["journal"] = manifest.details["journal"]
    return {**row, "progress": dict(manifest.progress), **rest}


def _middle(manifest: Manifest | None, num_shared_bytes: int) -> tuple[str, ...]:
    """The cells of a list row between the name and the state; shared bytes count once."""
    if manifest is None:
        return ("",) * 6
    epoch, batch = (str(manifest.progress.get(key, "")) for key in ("epoch", "batch"))
    size, created = human_bytes(size_of(manifest) - num_shared_bytes), _time(manifest.created)
    return epoch, batch, size, created, _metric(manifest.metric), _verdict(manifest)


def _verdict(manifest: Manifest) -> str:
    """The journal's verdict on the steps repeated after the resume."""
    found = manifest.details.get("journal")
    if not isinstance(found, Mapping):
        return ""
    steps, word = found.get("num_steps"), str(found.get("verdict", ""))
    return f"{word} ({steps} step{'' if steps == 1 else 's'})" if steps else word


def size_of(manifest: Manifest) -> int:
    """The bytes of a checkpoint's files."""
    return sum(entry.size for entry in manifest.files)


def _facts(name: str, manifest: Manifest) -> Table:
    facts: dict[str, Any] = {
        "checkpoint": name,
        "created": _time(manifest.created),
        "run": manifest.run_id,
        "attempt": manifest.attempt,
        "parent": manifest.parent,
        "forked from": ", ".join(map(_lineage_line, lineage_of(manifest)[-_MAX_FORKS:])),
        "ranks": manifest.world_size,
        "progress": ", ".join(f"{key} {value}" for key, value in manifest.progress.items()),
        "finished": manifest.finished,
        "metric": _metric(manifest.metric),
        "size": f"{human_bytes(size_of(manifest))} in {len(manifest.files)} files",
    }
    return _value_table({key: value for key, value in facts.items() if value not in (None, "")})


def _component_table(manifest: Manifest) -> Table:
    rows: list[tuple[str, ...]] = []
    for record in manifest.components:
        fidelity = f"{record.fidelity} ({record.reason})" if record.reason else record.fidelity
        ranks = ", ".join(map(str, record.writers))
        rows.append((record.key, fidelity, record.pattern, record.directory, ranks))
    saved = {record.key for record in manifest.components}
    for key, line in manifest.capture.items():
        if key not in saved and isinstance(line, Mapping):
            rows.append((key, f"none ({line.get('reason', '')})"))
    return filled(new_table("component", "fidelity", "pattern", "in", "written by ranks"), rows)


def _file_table(manifest: Manifest) -> Table:
    rows = [
        (entry.path, human_bytes(entry.size), entry.digest[:_DIGITS], str(entry.writer))
        for entry in manifest.files
    ]
    return filled(new_table("file", "size", "digest", "rank"), rows)


def _value_table(values: Mapping[str, Any]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    texts = (value if isinstance(value, str) else json.dumps(value) for value in values.values())
    shown = (_cut(text) for text in texts)
    return filled(table, list(zip(values, shown, strict=True)))


def _cut(text: str) -> str:
    """A text that fits on the screen; a step of DCP lists all its keys in its details."""
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}... (--json prints it all)"


def _time(created: str) -> str:
    return created.replace("T", " ").replace("+00:00", " UTC").replace("Z", " UTC")


def _lineage_line(origin: ForkOrigin) -> str:
    return f"{origin} ({_time(origin.forked)})"


def _metric(metric: Mapping[str, str] | None) -> str:
    if metric is None:
        return ""
    return f"{metric['name']} {float.fromhex(metric['value']):.6g} ({metric['mode']})"
