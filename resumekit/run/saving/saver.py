"""One save, from the agreement of the ranks to the commit. See docs/format.md for what it leaves.

Every rank calls ``Saver.save`` at the same safe point. A synchronous save writes there, and any
rank's failure aborts it on all of them. A save in the background only copies there, and what a job
has left to do follows beside the training. Either way a failure removes the staging directory and
leaves the previous checkpoint untouched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, NamedTuple

from resumekit.capture.model import frozen_of
from resumekit.distributed import World
from resumekit.errors import ResumekitError
from resumekit.progress_display import show_progress
from resumekit.run.agreement import ComponentGroups
from resumekit.run.progress import Progress
from resumekit.run.saving.in_flight import CopySize, Payloads, SaveInFlight, SaveJob
from resumekit.run.saving.payloads import (
    FrozenLinks,
    ShardPlanner,
    directory_of,
    finish_comparing,
    link,
    with_frozen,
)
from resumekit.run.saving.snapshot import wait_for_gpus
from resumekit.serialization import Payload
from resumekit.state import CaptureReport, SharingPattern, StateComponent
from resumekit.storage import (
    ComponentRecord,
    FileEntry,
    Manifest,
    RetentionPolicy,
    Staging,
    StepName,
    Store,
    num_threads,
)


class _Demand(NamedTuple):
    """What one rank needs for a save."""

    num_bytes: int
    num_files: int
    copy: CopySize


@dataclass
class Saver:
    """Writes checkpoints of a list of components into a store. Every method is collective.

    Args:
        world: the ranks.
        store: where the checkpoints go.
        components: of the run.
        membership: the ranks that share them.
        retention: which checkpoints are kept.
        in_flight: the save in the background.
        parent: the name of the checkpoint before.
    """

    world: World
    store: Store
    components: Sequence[StateComponent]
    membership: ComponentGroups
    retention: RetentionPolicy
    in_flight: SaveInFlight
    parent: str | None = None

    def __post_init__(self) -> None:
        self._shard_planner = ShardPlanner(self.world, self.components, self.membership)
        self._frozen_links = FrozenLinks(self.retention)
        self._ranks_on_node = self.world.world_size  # at most; known from the first save on

    def save(
        self,
        progress: Progress,
        capture: CaptureReport,
        *,
        finished: str | None,
        metric: dict[str, str] | None,
        fingerprint: dict[str, Any],
        details: dict[str, Any],
        in_background: bool = False,
    ) -> bool:
        """Writes and commits one checkpoint, and then lets the retention policy delete old ones.

        No save may be in flight, see ``finish``.

        Args:
            progress: of the run.
            capture: how exactly each component is restored.
            finished: why the run is over, or None.
            metric: the manifest's record of the metric, if there is one.
            fingerprint: the settings of the run.
            details: what else the manifest holds; plain values.
            in_background: return when all is copied, and write beside the training; if the option
                ``async_save`` allows it, and the memory.

        Returns:
            Whether the save is in flight, and not durable yet.

        Raises:
            UnsupportedValueError: a value cannot be stored; nothing was written.
            InsufficientSpaceError: there is no room; nothing was written.
            SharedDirectoryError: a rank does not see what rank 0 has made.
            RankLostError: a rank has died, or does not answer.
            SaveError: writing failed; nothing was committed.
            OwnershipLostError: another attempt owns the directory now.
        """
        self.in_flight.wait_for_deletion()
        payloads = with_frozen(self._payloads())
        with self._frozen_links.compared(
            progress.step, payloads, num_threads=num_threads(self._ranks_on_node)
        ):
            if in_background:
                finish_comparing(payloads)
            demands = self.world.gather(self._demand(payloads))
            copies = [each.copy for each in demands]
            self._ranks_on_node = [each.node for each in copies].count(self.world.node)
            in_background = in_background and self.in_flight.accepts(copies)
            name, staging = self._stage(progress.step, demands, in_background=in_background)
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
                files=(),
                # Values of this safe point: the run changes them while a job is in the background.
                capture=copy.deepcopy(capture.as_dict()),
                fingerprint=copy.deepcopy(fingerprint),
                details=copy.deepcopy(details),
            )
            number = self.in_flight.next_number()
            job = SaveJob(
                self.world, self.store, staging, payloads, manifest, self.retention, number
            )
            self._begin(job, in_background=in_background)
        if in_background:
            self.in_flight.start(job)
            return True
        self.parent = str(name)
        self._frozen_links.committed(name, job.files)
        self.world.on_first(job.retain)
        if self.world.is_first:
            self.in_flight.empty_trash(job)
        return False

    def finish(self) -> None:
        """Waits for the save in flight, until it is durable. Collective.

        Raises:
            ResumekitError: it has failed, on whichever rank; nothing was committed.
        """
        saved = self.in_flight.finish()
        if saved is not None:
            self.parent = str(saved.name)
            self._frozen_links.committed(saved.name, saved.files)

    def _demand(self, payloads: Payloads) -> _Demand:
        return _Demand(
            sum(payload.num_bytes for payload in payloads),
            sum(payload.num_files for payload in payloads),
            self.in_flight.size_of_copy(payloads),
        )

    def _begin(self, job: SaveJob, *, in_background: bool) -> None:
        try:
            if in_background:
                self.world.everywhere(lambda: self._copy(job))
            else:
                self._write(job)
        except ResumekitError:
            if self.world.is_first:
                job.abandon()
            raise

    def _copy(self, job: SaveJob) -> None:
        link(job.staging(), job.payloads)
        self.in_flight.copy(job.payloads)

    def _write(self, job: SaveJob) -> None:
        total = sum(payload.num_bytes for payload in job.payloads)
        what, first = f"saving {job.name}", self.world.is_first

        def write() -> Sequence[FileEntry]:
            with show_progress(what, total, shown=first) as advance, self.store.observed(advance):
                return job.write()

        written = self.world.everywhere(write)
        self.world.on_first(lambda: job.commit(entry for files in written for entry in files))

    def _payloads(self) -> list[Payload]:
        wait_for_gpus()  # a state_dict() may read values that another stream still copies
        encoded: list[Payload] = []
        self.world.everywhere(lambda: encoded.extend([*self._encode(), *self._files()]))
        payloads = [*encoded, *self._shard_planner.payloads()]
        wait_for_gpus()  # what a state_dict() has launched; mostly nothing
        return payloads

    def _files(self) -> list[Payload]:
        if not self.world.is_first:
            return []
        return [
            Payload(directory_of(component), self.world.rank, small_files=component.files())
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
                    frozen[directory] = frozen_of(component.state)
        return [
            Payload.of_states(directory, self.world.rank, states, frozen=frozen.get(directory, ()))
            for directory, states in by_directory.items()
        ]

    def _stage(
        self, step: int, demands: Sequence[_Demand], *, in_background: bool
    ) -> tuple[StepName, Callable[[], Staging]]:
        """Its name, and what looks for the staging: a rank may find that it does not see it."""
        directories = sorted({directory_of(component) for component in self.components})
        mine: list[Staging] = []
        store = self.store  # what looks for the staging outlives this Saver, and must not keep it

        def stage() -> tuple[StepName, str]:
            name = store.next_name(step)
            staging = store.stage(
                name,
                num_bytes=sum(demand.num_bytes for demand in demands),
                num_files=sum(demand.num_files for demand in demands),
                directories=directories,
                with_parts=in_background and self.world.world_size > 1,
            )
            mine.append(staging)
            return name, staging.name

        name, staging_name = self.world.on_first(stage)
        return name, lambda: mine[0] if mine else store.attach(staging_name)

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
