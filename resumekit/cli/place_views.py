"""Output of the commands that copy checkpoints to a place and from it."""

from __future__ import annotations

from pathlib import Path

from resumekit.cli.terminal import print_line
from resumekit.cli.views import names_of, size_of
from resumekit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NoUsableCheckpointError,
)
from resumekit.imports.recognition import refuse_other
from resumekit.log import show_messages
from resumekit.places.copies import Copies, open_client
from resumekit.places.place import Place
from resumekit.progress_display import show_progress
from resumekit.storage.directories import StepName
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store


def mirror_run(directory: Path, url: str, *, step: str | None) -> bool:
    """Copies checkpoints to a place, the newest first; prints one line for each.

    Args:
        directory: the run directory.
        url: the place.
        step: only this checkpoint.

    Returns:
        Whether all of them are there now; a damaged one is not.

    Raises:
        CheckpointNotFoundError: there is none, or not this one.
        PlaceError: the place does not answer.
    """
    show_messages()
    client = open_client(Place(url))
    all_there, there = True, client.names()
    store = Store(directory)
    for name in names_of(store, step):
        try:
            reader = store.open_step(name)
            what = f"mirroring {name} to {client.place}"
            with show_progress(what, size_of(reader.manifest)) as advance:
                client.put(reader, RetentionPolicy(keep_latest=None), advance)
        except CheckpointError as error:
            all_there = False
            print_line(f"{name}  not copied  {error}")
        else:
            print_line(f"{name}  {'was there' if name in there else 'copied'}")
    return all_there


def fetch_run(url: str, directory: Path, *, step: str | None) -> None:
    """Commits the newest copy that verifies in a run directory, and prints which one.

    Args:
        url: the place.
        directory: the run directory; created if it is missing.
        step: only this checkpoint.

    Raises:
        CheckpointError: there is none, or none that verifies.
        PlaceError: the place does not answer.
        ResumekitError: the run directory cannot be used, or has another run.
    """
    show_messages()
    refuse_other(directory)
    copies, store = Copies([Place(url)]), Store(directory)
    copies.acquire(store)
    try:
        copies.require_answers()
        names = [name for name, _ in copies.names() if step in (None, str(name), str(name.step))]
        problems = []
        for name in names:
            is_here = _is_intact(store, name)
            problem = "" if is_here else copies.fetch(name, 0, store)
            if not problem:
                print_line(f"{directory / str(name)}{' was there' if is_here else ''}")
                return
            problems.append(problem.removeprefix(f"{Place(url)}: ").rstrip("."))
    finally:
        store.release()
    if problems:
        raise NoUsableCheckpointError(str(Place(url)), found="; ".join(problems))
    raise CheckpointNotFoundError(str(Place(url)), found=f"no checkpoint {step or ''}".rstrip())


def _is_intact(store: Store, name: StepName) -> bool:
    """Whether the run directory has this checkpoint; a damaged one makes room for its copy."""
    if name not in store.step_names():
        return False
    try:
        store.open_step(name).verify()
    except CorruptCheckpointError as error:
        moved = store.quarantine(name, error)
        print_line(f"moved to {moved}: {error}", to_stderr=True)
        return False
    return True
