"""The checkpoints that a launch may continue from, in the run directory and in its places."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from resumekit.distributed import World
from resumekit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    NoUsableCheckpointError,
    PlaceError,
)
from resumekit.imports.recognition import refuse_other
from resumekit.places.copies import Copies
from resumekit.run.options import Options
from resumekit.run.saving.background import drain
from resumekit.storage.directories import StepName
from resumekit.storage.ownership import NoLock
from resumekit.storage.store import Store


def open_store(directory: Path, world: World, options: Options, copies: Copies) -> Store:
    """The run directory, owned by rank 0. Collective.

    Raises:
        DirectoryError: it cannot be used, or another live job owns it; or a rank sees another one.
        ConfigurationError: ``import_from`` cannot be taken over.
        ResumekitError: as of ``Copies.acquire``.
    """
    store = Store(directory, lock=NoLock() if options.lock == "none" else None)
    drain()  # an abandoned run of this process owns its directory until its save is done

    def acquire() -> tuple[str, str]:
        refuse_other(store.directory)
        copies.acquire(store)
        if options.import_from is not None and not copies.names():
            from resumekit.imports.importing import import_once  # loads safetensors

            source = Path(options.import_from).absolute()
            import_once(source, store, trusts=options.trust_import)
        return store.run_id, store.attempt

    try:
        run_id, attempt = world.on_first(acquire)
        world.everywhere(lambda: None if world.is_first else store.join(run_id, attempt))
    except BaseException:
        store.release()
        raise
    return store


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be read.

    Args:
        name: of it.
        place: the number of the place that has the copy; None for the run directory.
    """

    name: StepName
    place: int | None = None


@dataclass(frozen=True)
class CandidateSearch:
    """Lists the candidates. Rank 0 only.

    Args:
        store: the run directory.
        copies: in the places.
        resume_from: the option.
    """

    store: Store
    copies: Copies
    resume_from: str | None

    def candidates(self, up_to: int | None) -> list[Candidate]:
        """The newest first; of one name the run directory before the places.

        Args:
            up_to: those up to this step, if there are such.

        Raises:
            CheckpointNotFoundError: ``resume_from`` names one that is not there, nor what an
                earlier launch of this command made of it.
            NoUsableCheckpointError: all were damaged.
        """
        here = [Candidate(name) for name in self.store.step_names()]
        found = [*here, *(Candidate(name, number) for name, number in self.copies.names())]
        found.sort(key=lambda each: each.name, reverse=True)
        if self.resume_from is not None:
            return self._continuations(StepName.from_text(self.resume_from), found)
        set_aside = self.store.quarantined() if not found else []
        if set_aside:
            raise NoUsableCheckpointError(
                str(self.store.directory),
                found=f"all checkpoints are damaged ({', '.join(sorted(set_aside))})",
                expected="at least one checkpoint that verifies, or an empty directory",
                remedy="Restore one from a copy, or, to start a new run, remove "
                f"{self.store.directory / 'quarantine'}",
            )
        return [each for each in found if up_to is None or each.name.step <= up_to] or found

    def fetch(self, candidate: Candidate) -> str:
        """Commits a copy in the run directory; why that failed, or an empty text."""
        if candidate.place is None:
            return ""
        return self.copies.fetch(candidate.name, candidate.place, self.store)

    def _continuations(self, wanted: StepName, found: list[Candidate]) -> list[Candidate]:
        """The named checkpoint, after what an earlier launch of this command made of it."""
        newer = (each for each in found if each.name > wanted)
        named = [each for each in newer if self._origin(each) == str(wanted)]
        named += [each for each in found if each.name == wanted]
        if not named:
            raise CheckpointNotFoundError(
                f"resume_from={self.resume_from!r}",
                found=f"no such checkpoint in {self.store.directory}",
                expected=", ".join(str(each.name) for each in found)
                or "a directory with checkpoints",
            )
        return named

    def _origin(self, candidate: Candidate) -> object:
        name, place = candidate.name, candidate.place
        try:
            if place is None:
                return self.store.open_step(name).manifest.details.get("resume_from")
            return self.copies.manifest(name, place).details.get("resume_from")
        except (CheckpointError, PlaceError):
            return None
