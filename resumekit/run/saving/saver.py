"""One save, from the agreement of the ranks to the commit. See docs/format.md for what it leaves.

Every rank calls ``Saver.save`` at the same safe point. Any rank's failure aborts the save on all
of them: the staging is removed and the previous checkpoint is untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from resumekit.distributed import World
from resumekit.errors import ResumekitError, SaveError
from resumekit.log import logger
from resumekit.progress_display import show_progress
from resumekit.run.agreement import ComponentGroups
from resumekit.run.progress import Progress
from resumekit.run.saving.frozen_links import AnyPayload, FrozenLinks, with_frozen
from resumekit.run.saving.shard_planner import ShardPlanner, directory_of
from resumekit.serialization import ExtraFiles, Payload, ShardedPayload
from resumekit.state import CaptureReport, SharingPattern, StateComponent
from resumekit.storage import (
    ComponentRecord,
    FileEntry,
    Manifest,
    RetentionPolicy,
    Staging,
    StepName,
    Store,
)

Payloads = Sequence[AnyPayload]


@dataclass
class Saver:
    """Writes checkpoints of a list of components into a store. Every method is collective."""

    world: World
    store: Store
    components: Sequence[StateComponent]
    membership: ComponentGroups
    retention: RetentionPolicy
    parent: str | None = None

    def __post_init__(self) -> None:
        self._shard_planner = ShardPlanner(self.world, self.components, self.membership)
        self._frozen_links = FrozenLinks(self.retention)

    def save(
        self,
        progress: Progress,
        capture: CaptureReport,
        *,
        finished: str | None,
        metric: dict[str, str] | None,
        fingerprint: dict[str, Any],
        details: dict[str, Any],
    ) -> StepName:
        """Writes and commits one checkpoint, and then lets the retention policy delete old ones.

        Args:
            progress: of the run.
            capture: how exactly each component is restored.
            finished: why the run is over, or None.
            metric: the manifest's record of the metric, if there is one.
            fingerprint: the settings of the run.
            details: what else the manifest holds; plain values.

        Raises:
            UnsupportedValueError: a value cannot be stored; nothing was written.
            InsufficientSpaceError: there is no room; nothing was written.
            SharedDirectoryError: a rank does not see what rank 0 has made.
            RankLostError: a rank has died, or does not answer.
            SaveError: writing failed; nothing was committed.
            OwnershipLostError: another attempt owns the directory now.
        """
        payloads = with_frozen(self._payloads())
        self._frozen_links.find(progress.step, payloads)
        name, staging = self._stage(progress.step, payloads)
        try:
            written = self.world.everywhere(lambda: self._write(staging(), payloads))
            manifest = Manifest(
                run_id=self.store.run_id,
                attempt=self.store.attempt,
                step=name.step,
                revision=name.revision,
                created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                parent=self.parent,
                world_size=self.world.world_size,
                progress=progress.as_dict(),
                finished=finished,
                metric=metric,
                components=tuple(self._record(each, capture) for each in self.components),
                files=tuple(entry for entries in written for entry in entries),
                capture=capture.as_dict(),
                fingerprint=fingerprint,
                details=details,
            )
            self.world.on_first(lambda: str(self.store.commit(staging(), manifest)))
        except ResumekitError:
            if self.world.is_first:
                self.store.abandon(staging())
            raise
        self.parent = str(name)
        self._frozen_links.committed(name, written[self.world.ranks.index(self.world.rank)])
        self.world.on_first(self._retain)
        return name

    def _payloads(self) -> list[Payload | ShardedPayload | ExtraFiles]:
        encoded: list[Payload | ExtraFiles] = []
        self.world.everywhere(lambda: encoded.extend([*self._encode(), *self._files()]))
        return [*encoded, *self._shard_planner.payloads()]

    def _files(self) -> list[ExtraFiles]:
        if not self.world.is_first:
            return []
        return [
            ExtraFiles(directory_of(component), self.world.rank, component.files())
            for component in self.components
            if component.files is not None
        ]

    def _encode(self) -> list[Payload]:
        by_directory: dict[str, dict[str, Any]] = {}
        frozen: dict[str, Collection[str]] = {}
        for component in self.components:
            if component.sharing_pattern is SharingPattern.SHARDED:
                continue
            if self.world.rank in self.membership.writers(component):
                directory = directory_of(component)
                states = by_directory.setdefault(directory, {})
                states[component.key] = component.stateful.state_dict()
                if directory == component.key:  # alone in its file, where names have no prefix
                    frozen[directory] = component.state.frozen()
        return [
            Payload(directory, self.world.rank, states, frozen=frozen.get(directory, ()))
            for directory, states in by_directory.items()
        ]

    def _stage(self, step: int, payloads: Payloads) -> tuple[StepName, Callable[[], Staging]]:
        """Its name, and what looks for the staging: a rank may find that it does not see it."""
        demands = self.world.gather(
            (sum(p.num_bytes for p in payloads), sum(p.num_files for p in payloads))
        )
        directories = sorted({directory_of(component) for component in self.components})
        mine: list[Staging] = []

        def stage() -> tuple[StepName, str]:
            name = self.store.next_name(step)
            staging = self.store.stage(
                name,
                num_bytes=sum(num_bytes for num_bytes, _ in demands),
                num_files=sum(num_files for _, num_files in demands),
                directories=directories,
            )
            mine.append(staging)
            return name, staging.name

        name, staging_name = self.world.on_first(stage)
        return name, lambda: mine[0] if mine else self.store.attach(staging_name)

    def _write(self, staging: Staging, payloads: Payloads) -> list[FileEntry]:
        self._frozen_links.link(staging, payloads)
        total = sum(payload.num_bytes for payload in payloads)
        what, first = f"saving {staging.step}", self.world.is_first
        with show_progress(what, total, shown=first) as advance, self.store.observed(advance):
            return [entry for payload in payloads for entry in payload.write(staging)]

    def _record(self, component: StateComponent, capture: CaptureReport) -> ComponentRecord:
        assert isinstance(component.sharing_pattern, SharingPattern)
        line = next(line for line in capture.lines if line.key == component.key)
        assert line.fidelity is not None
        return ComponentRecord(
            key=component.key,
            pattern=component.sharing_pattern.value,
            fidelity=line.fidelity.value,
            reason=line.reason,
            directory=directory_of(component),
            writers=self.membership.writers(component),
            groups=self.membership.recorded(component),
        )

    def _retain(self) -> None:
        # The new checkpoint is committed: an old one that cannot be removed does not undo that.
        try:
            self.store.retain(self.retention)
            self.store.empty_trash()
        except SaveError as error:
            logger.warning("old checkpoints could not be removed: %s", error)
