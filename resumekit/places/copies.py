"""The copies of a run in all its places, as rank 0 finds them when a launch begins."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from resumekit.errors import CheckpointError, ConfigurationError, ForeignCheckpointError, PlaceError
from resumekit.log import logger, warn
from resumekit.places.client import OpenPlace, PlaceClient
from resumekit.places.directory import DirectoryCopies, observed
from resumekit.places.memory import find_memory
from resumekit.places.mirror import Mirror
from resumekit.places.object_store import StoreCopies
from resumekit.places.place import Place
from resumekit.progress_display import show_progress
from resumekit.storage.directories import StepName
from resumekit.storage.manifest import Manifest
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store


def open_client(place: Place) -> PlaceClient:
    """Makes the calls to a place; nothing is opened yet.

    Raises:
        ConfigurationError: it is memory, which has the copies of a run.
    """
    if place.is_memory:
        expected = "a directory or a URL: a run alone copies to memory"
        raise ConfigurationError("place", found="memory", expected=expected)
    return PlaceClient(place, _open_place)


def _open_place(place: Place) -> OpenPlace:
    directory = place.directory
    return StoreCopies(place) if directory is None else DirectoryCopies(directory)


def _clients_of(place: Place, run_id: str | None) -> list[PlaceClient]:
    """The client for a place; none for memory without copies of the run."""
    if not place.is_memory:
        return [open_client(place)]
    found = None if run_id is None else find_memory(run_id)
    return [] if found is None else [PlaceClient(place, lambda _: DirectoryCopies(found))]


def copies_by_name(urls: Sequence[str], store: Store) -> dict[StepName, list[str]]:
    """The places, as they are shown, that have a copy of each checkpoint.

    Args:
        urls: of the places.
        store: the run directory.

    Raises:
        PlaceError: one does not answer.
    """
    found: dict[StepName, list[str]] = {}
    places = [*map(Place, urls)]
    run_id = store.recorded_run_id() if any(each.is_memory for each in places) else None
    for client in (each for place in places for each in _clients_of(place, run_id)):
        for name in client.names():
            found.setdefault(name, []).append(str(client.place))
    return found


class Copies:
    """The copies in the places of one run; without places there are none.

    Args:
        places: of the run.
    """

    def __init__(self, places: Sequence[Place] = ()) -> None:
        self._mirrored = [open_client(place) for place in places if not place.is_memory]
        self._memory = next((place for place in places if place.is_memory), None)
        self._clients = [*self._mirrored]
        self._names: dict[PlaceClient, list[StepName]] = {}
        self._away: PlaceError | None = None

    def acquire(self, store: Store) -> None:
        """Acquires the run directory, for the run of the places if no run has used it. Rank 0 only.

        Raises:
            PlaceError: no run has used the directory, and a place does not answer.
            ForeignCheckpointError: a place has the checkpoints of another run.
            ResumekitError: as of ``Store.acquire``.
        """
        known = store.recorded_run_id() if self._clients or self._memory else None
        if self._memory is not None:
            self._clients += _clients_of(self._memory, known)
        run_ids = {client: self._look(client, store.directory) for client in self._clients}
        if known is None:
            self.require_answers()
            known = next((each for each in run_ids.values() if each is not None), None)
        for client, run_id in run_ids.items():
            if run_id not in (None, known):
                raise ForeignCheckpointError(
                    str(client.place),
                    found=f"the copies of run {run_id}",
                    expected=f"those of run {known}, as in {store.directory}",
                    remedy="Give each run other places, or continue that run in a new directory",
                )
        store.acquire(run_id=known)

    def _look(self, client: PlaceClient, directory: Path) -> str | None:
        """Takes the names of the copies; gives the id of their run, where it is known."""
        if client.place.directory == directory:
            raise ConfigurationError(
                "places", found="the run directory", expected="further locations"
            )
        try:
            names = self._names[client] = client.names()
            for name in names:
                with suppress(CheckpointError):
                    return client.manifest(name).run_id
        except PlaceError as error:
            self._names.pop(client, None)
            self._away = error
            warn("RK-852", "the checkpoints there are left out: %s", error)
        return None

    def require_answers(self) -> None:
        """Checks that every place has answered: else newer checkpoints may be there.

        Raises:
            PlaceError: one has not.
        """
        if self._away is not None:
            raise PlaceError(
                self._away.where,
                found=f"{self._away.found}; the run directory has no checkpoint",
                expected="an answer, as this run may have checkpoints there",
                remedy="Start again when it answers, or leave it out to start a new run",
            )

    def names(self) -> list[tuple[StepName, int]]:
        """Each copy with the number of its place."""
        return [
            (name, number)
            for number, client in enumerate(self._clients)
            for name in self._names.get(client, ())
        ]

    def manifest(self, name: StepName, number: int) -> Manifest:
        """The manifest of a copy.

        Raises:
            PlaceError: its place does not answer.
            CheckpointError: it is damaged.
        """
        return self._clients[number].manifest(name)

    def fetch(self, name: StepName, number: int, store: Store) -> str:
        """Commits a copy in the run directory; why that failed, or an empty text.

        Raises:
            SaveError: the run directory has no room, or cannot be written.
        """
        client = self._clients[number]
        try:
            manifest = client.manifest(name)
            total = sum(entry.size for entry in manifest.files)
            with show_progress(f"fetching {name} from {client.place}", total) as advance:
                store.commit_copy(
                    manifest,
                    lambda staging, entry: staging.copy(
                        entry, observed(client.blocks(name, entry), advance)
                    ),
                    num_bytes=total,
                )
        except (CheckpointError, PlaceError) as error:
            return f"{client.place}: {error}"
        logger.info("%s was fetched from %s", name, client.place)
        return ""

    def start_mirror(self, store: Store, retention: RetentionPolicy) -> Mirror | None:
        """Begins to copy what is committed; None without places. Rank 0 only."""
        if not self._mirrored:
            return None
        newest = {client: max(names, default=None) for client, names in self._names.items()}
        clients = [(client, newest.get(client)) for client in self._mirrored]
        return Mirror(store, clients, retention)
