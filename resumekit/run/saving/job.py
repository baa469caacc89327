"""What is left of one save after its safe point: each rank's files, and on rank 0 the commit.

A job refers to no live object of the training but to the leaves of its payloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from resumekit.distributed import World
from resumekit.errors import SaveError
from resumekit.log import logger
from resumekit.run.saving.frozen_links import AnyPayload
from resumekit.storage import (
    FileEntry,
    Manifest,
    Part,
    Parts,
    RetentionPolicy,
    Staging,
    StepName,
    Store,
)

Payloads = Sequence[AnyPayload]


@dataclass
class SaveJob:
    """One save of one rank.

    Args:
        world: the ranks.
        store: where the checkpoint goes.
        staging: looks for the staging directory; a rank may find that it does not see it.
        payloads: what this rank writes.
        manifest: of the checkpoint, but for the files.
        retention: which old checkpoints are kept.
        save_number: counts the saves of this attempt, the same on all ranks.

    Attributes:
        files: that this rank has written, once ``write`` has returned.
    """

    world: World
    store: Store
    staging: Callable[[], Staging]
    payloads: Payloads
    manifest: Manifest
    retention: RetentionPolicy
    save_number: int
    files: tuple[FileEntry, ...] = ()

    @property
    def name(self) -> StepName:
        """Of the checkpoint."""
        return self.manifest.name

    def write(self) -> tuple[FileEntry, ...]:
        """This rank's lines of the inventory, once its files survive a power cut.

        Raises:
            SaveError: a file could not be written.
            SharedDirectoryError: this rank does not see what rank 0 has made.
        """
        staging = self.staging()
        with staging.writing():
            self.files = tuple(entry for each in self.payloads for entry in each.write(staging))
        return self.files

    def leave_part(self, files: Iterable[FileEntry] = (), error: str | None = None) -> None:
        """Reports to rank 0 what this rank has written, or why it has not.

        Raises:
            SaveError: the report could not be written.
            SharedDirectoryError: this rank does not see what rank 0 has made.
        """
        run_id, attempt = self.manifest.run_id, self.manifest.attempt
        step, rank = self.manifest.step, self.world.rank
        part = Part(run_id, attempt, step, self.save_number, rank, tuple(files), error)
        self.staging().leave_part(part)

    def parts(self) -> Parts:
        """The reports of all ranks. Rank 0 only."""
        return self.staging().parts(
            run_id=self.manifest.run_id,
            attempt=self.manifest.attempt,
            save_number=self.save_number,
            world_size=self.world.world_size,
        )

    def commit(self, files: Iterable[FileEntry]) -> None:
        """Makes the checkpoint of all ranks' files. Rank 0 only.

        Raises:
            OwnershipLostError: another attempt owns the directory now.
            SaveError: nothing was committed.
        """
        self.store.commit(self.staging(), replace(self.manifest, files=tuple(files)))

    def abandon(self) -> None:
        """Removes what was written. Rank 0 only."""
        self.store.abandon(self.staging())

    # The new checkpoint is committed: an old one that cannot be removed does not undo that.

    def retain(self) -> None:
        """Renames old checkpoints away; ``empty_trash`` frees their space. Rank 0 only."""
        _logged(lambda: self.store.retain(self.retention))

    def empty_trash(self) -> None:
        """Removes the files of old checkpoints, which may take long. Rank 0 only."""
        _logged(self.store.empty_trash)


def _logged(removal: Callable[[], object]) -> None:
    try:
        removal()
    except SaveError as error:
        logger.warning("old checkpoints could not be removed: %s", error)
