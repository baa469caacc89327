"""One launch of a run: its state as components, the directory of its checkpoints, and its phase.

What is known later than the options is in the phase, so that nothing can be read before it exists:

- ``Searched``: the run directory is owned and searched, see ``find`` in ``resume.py``.
- ``Loaded``: the live objects are restored, but for what waits for the first fetch, see ``resume``.
  The run can be saved.
- ``Running``: the random state is restored too, see ``restore_random`` in ``fetch.py``.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from resumekit.capture.fingerprint import fingerprint
from resumekit.distributed import DataRanks, World
from resumekit.log import show_messages
from resumekit.places.mirror import Mirror
from resumekit.record.comparison import Comparison, lineage, replayed
from resumekit.record.conditions import (
    Header,
    code_digests,
    environment,
    initialize_vector_math,
    settings_digest,
)
from resumekit.record.journal import DIRECTORY, Record, find_attempts
from resumekit.record.step_values import RandomStates
from resumekit.record.trace import StateEvent, Trace, relocated
from resumekit.replay_plan import ReplayPlan
from resumekit.run.agreement import ComponentGroups, Replicas
from resumekit.run.components import RunComponents
from resumekit.run.discovery import Discovery
from resumekit.run.journaling import RunJournal
from resumekit.run.options import Options
from resumekit.run.report import Reporter, ResumeReport
from resumekit.run.resuming.compatibility import frameworks_in
from resumekit.run.resuming.finder import Finder, Found
from resumekit.run.resuming.loading import RestoredState
from resumekit.run.saving.in_flight import SaveInFlight
from resumekit.run.saving.memory import MemoryCopies
from resumekit.run.saving.payloads import FrozenLinks, ShardPlanner
from resumekit.state import StateComponent, Validation
from resumekit.storage.directories import StepName
from resumekit.storage.manifest import Manifest
from resumekit.storage.store import Store
from resumekit.trackers import TRACKERS, Mark, Trackers

initialize_vector_math()  # as the script imports an adapter, before it computes anything

# What a run's components may be given as: a list, or, where the objects do not exist yet when the
# run begins, a function that gives it.
Components = Sequence[StateComponent] | Callable[[], Sequence[StateComponent]]


# ---------------------------------------------------------------- the phases


@dataclass(frozen=True)
class Agreed:
    """What the ranks have agreed on about the components of a run.

    Args:
        membership: the ranks that share each component.
        replicas: compares what several ranks hold alike.
        shards: plans what each rank writes of sharded components.
        links: to the files of earlier checkpoints.
        fingerprint: the settings of the run.
    """

    membership: ComponentGroups
    replicas: Replicas
    shards: ShardPlanner
    links: FrozenLinks
    fingerprint: dict[str, Any]


@dataclass
class Opened:
    """The run directory belongs to this launch.

    Args:
        store: the run directory.
        data_ranks: the data-parallel rank of each rank.
        parent: the manifest of the checkpoint that this launch continues from, or None.
    """

    store: Store
    data_ranks: DataRanks
    parent: Manifest | None


@dataclass
class Searched(Opened):
    """The rank has read and verified all that it needs; no object of the user has changed.

    Args:
        finder: has searched the run directory.
        found: the checkpoint to continue from, or None.
        weights: the checkpoint of another run whose weights a forked run starts with, or None.
    """

    finder: Finder
    found: Found | None
    weights: Found | None


@dataclass
class Running(Opened):
    """The run trains.

    Args:
        agreed: about the components as they are now.
        report: on the resume.
        latest: the name of the checkpoint before the next one, or None.
        num_ranks_here: the ranks on this node.
        is_logged: whether the line about the resume is.
    """

    agreed: Agreed
    report: ResumeReport
    latest: str | None
    num_ranks_here: int
    is_logged: bool = False


@dataclass
class Loaded:
    """The live objects are restored; what is set at the first fetch waits, see ``resume.py``.

    Args:
        running: the phase after this one.
        restored: what other code may change before the fetch; None after a fresh start, and once
            it was restored again.
    """

    running: Running
    restored: RestoredState | None


class RunState:
    """One run: its state as components, and the directory that its checkpoints are in."""

    def __init__(
        self,
        directory: Path,
        components: Components,
        options: Options,
        *,
        extras: dict[str, Any],
        generators: Mapping[str, Any],
        groups: Mapping[str, Any],
        data_parallel_group: Any,
    ) -> None:
        show_messages()
        self.replay = replay = Replay.of_run(directory)
        if replay is not None:
            options = replay.options(options)
        self.directory = relocated(directory) if replay is None else replay.directory
        is_scratch = self.directory != directory
        self.options = options = options.without_mirrors() if is_scratch else options
        self.world = World.current(timeout_seconds=options.agreement_timeout_seconds)
        self.owned = owned = RunComponents(
            options,
            extras,
            generators,
            rank=self.world.rank,
            num_ranks=self.world.world_size,
        )
        self.counters, self.position, self.rng = owned.counters, owned.position, owned.rng
        self.selection, self.variables = owned.selection, owned.variables
        self.given = components
        self.discovery: Discovery | None = None
        self.groups = groups
        self.data_parallel_group = data_parallel_group
        owned.set_given(() if callable(components) else components)
        self.reporter = Reporter(options, self.world, owned)
        follows = options.trackers == "continue" and replay is None and self.world.is_first
        self.trackers = Trackers(partial(self.reporter.warn, "RK-853"), is_on=follows)
        self.trace = Trace.from_environment(self.world.rank)
        self.is_driven = False  # a framework runs the loop
        self.checked: Sequence[StateComponent] = ()  # see `Checkpointer.drive`
        self.journal = RunJournal(
            self.directory,
            raises=options.on_divergence == "raise",
            observer=None if replay is None else replay.note,
        )
        self.in_flight = SaveInFlight(self.world, must_fit=options.async_save == "auto")
        self.phase: Searched | Loaded | Running | None = None
        self.mirror: Mirror | None = None  # on rank 0, once the phase is known
        self.memory: MemoryCopies | None = None  # once there is something to copy

    @property
    def components(self) -> tuple[StateComponent, ...]:
        """The components as they are now."""
        return self.owned.all

    # ---------------------------------------------------------------- the phase

    @property
    def opened(self) -> Opened | None:
        """The run directory; None before it was searched."""
        return self.phase.running if isinstance(self.phase, Loaded) else self.phase

    @property
    def resumed(self) -> Running | None:
        """What there is once all but the data position and the RNG state is restored, or None."""
        opened = self.opened
        return opened if isinstance(opened, Running) else None

    @property
    def running(self) -> Running:
        """The same where it is there."""
        resumed = self.resumed
        assert resumed is not None, "resume() comes first"
        return resumed

    @property
    def run_id(self) -> str:
        """What names this run, whichever directory it is moved to."""
        opened = self.opened
        assert opened is not None, "the run has begun"
        return opened.store.run_id

    @property
    def store(self) -> Store:
        """The run directory, which may not be there yet."""
        return Store(self.directory) if self.opened is None else self.opened.store

    def saved(self, key: str) -> Any:
        """A component's state in the checkpoint that was found and is not loaded yet, or None."""
        found = self.phase.found if isinstance(self.phase, Searched) else None
        return None if found is None else found.states.get(key)

    # ---------------------------------------------------------------- the components

    def group_components(self, components: Sequence[StateComponent]) -> ComponentGroups:
        """The ranks that share each component. Collective.

        Raises:
            RankDisagreementError: ranks have other components.
        """
        patterns = {each.key: str(each.sharing_pattern) for each in components}
        self.world.require_equal("components", patterns)
        return ComponentGroups.agreed(self.world, components, self.groups)

    def agree(self, former: Mapping[str, Any] | None = None) -> Agreed:
        """What the ranks agree on about the components as they are now. Collective.

        Args:
            former: the fingerprint of the start: training changes what the script has set.
        """
        world, components, options = self.world, self.components, self.options
        membership = self.group_components(components)
        # The manifest holds rank 0's, which says nothing of what other groups and ranks have.
        per_rank = self.owned.per_rank
        alike = [
            each for each in components if not (membership.recorded(each) or each.key in per_rank)
        ]
        now = fingerprint(
            world_size=world.world_size, components=alike, record_command=options.record_command
        )
        return Agreed(
            membership,
            Replicas(world, components, membership, Validation(options.validate)),
            ShardPlanner(world, components, membership),
            FrozenLinks(options.retention),
            {**now, **(former or {})},
        )

    # ---------------------------------------------------------------- records

    def log_start(self) -> None:
        """One line, once; of a new run it waits for the loader, see ``Reporter.announce``."""
        resumed = self.resumed
        if resumed is None or resumed.is_logged:
            return
        resumed.is_logged = True
        report = resumed.report
        if report.resumed:
            report = replace(report, finished=self.counters.finished)
            self.reporter.log_resume(report, is_driven=self.is_driven)
            return
        self.reporter.note_start(self.directory, resumed.store.unrelated_names, report.weights_of)

    def record_step(self, epoch: int, loss: Any) -> None:
        """Records the step that was just counted in the journal.

        Raises:
            DivergenceError: it is not what an earlier attempt recorded, and that ends the run.
        """
        counters, running = self.counters, self.running
        if self.journal.is_new:
            self.journal.open(
                counters.step,
                self._header(running),
                optimizers=self.owned.optimizers(),
                random_states=RandomStates(self.owned.recorded_generators()),
            )
        self.journal.step(
            counters.step,
            epoch=epoch,
            samples=counters.samples_so_far(running.data_ranks.number),
            is_whole=counters.saw_whole_step,
            loss=loss,
        )

    def _header(self, running: Running) -> Header:
        """The header of this attempt's journal, its number apart."""
        world, owned, options = self.world, self.owned, self.options
        store, data_ranks, parent = running.store, running.data_ranks, running.parent
        share = data_ranks.of_ranks[world.rank]
        header = Header(
            run_id=store.run_id,
            attempt=store.attempt,
            number=0,
            rank=world.rank,
            world_size=world.world_size,
            share=share,
            writes_share=data_ranks.first_ranks[share] == world.rank,
            lineage=(),
            resumed_step=None if parent is None else parent.step,
            options={
                "randomness": options.randomness,
                "mid_accumulation": options.mid_accumulation,
                "horizon": dict(owned.counters.horizon),
                "framework": sorted(frameworks_in(owned.all)),
                "settings": settings_digest(running.agreed.fingerprint),
            },
            geometry=owned.position.geometry(),
            code=code_digests(),
            environment=environment(owned.optimizers()),
            excluded=(*(sorted(options.exclude) if parent else ()), *running.report.fresh),
            fed_by=owned.position.fed_by,
        )
        earlier = lineage(store.directory, header, parent.attempt if parent else None)
        return replace(header, lineage=earlier)

    def trace_state(
        self,
        event: StateEvent,
        resumed_from: Manifest | None = None,
        *,
        is_durable: bool = True,
    ) -> None:
        """Records every component's state, when tracing; it survives a kill if it is durable."""
        if self.trace is not None:
            counted = self.counters.progress.as_dict()
            progress = counted if resumed_from is None else resumed_from.progress
            states = {each.key: each.state.comparable_state() for each in self.components}
            self.trace.state(
                event,
                progress["step"],
                states,
                micro_step=progress["micro_step"],
                is_durable=is_durable,
            )

    def best(self) -> tuple[StepName, float] | None:
        """The best committed checkpoint and the metric's value in it, or None.

        Waits for the save in flight where that is the best one.
        """
        found = self.best_so_far()
        if found is None or found[0].step != self.in_flight.step:
            return found
        self.in_flight.wait_alone()
        return self.selection.best_step(self.store)

    def best_so_far(self) -> tuple[StepName, float] | None:
        """The same, where the save in flight counts as if it were committed. Waits for nothing."""
        return self.selection.best_step(self.store, self.in_flight.manifest)

    def continue_trackers(self, *, is_over: bool = False) -> None:
        """Drops what this launch has logged so far, where the run is resumed; once.

        Args:
            is_over: no step follows, so that nothing of what was logged is repeated.
        """
        self.trackers.begin(self.run_id, self._former_marks, is_over=is_over)

    def tracker_marks(self) -> Sequence[Mark]:
        """What the next checkpoint says of the trackers; they are flushed."""
        return self._former_marks if self.trackers.waits else self.trackers.marks()

    @property
    def _former_marks(self) -> Sequence[Mark]:
        parent = self.running.parent
        return () if parent is None else parent.details.get(TRACKERS, ())

    def finish_copies(self) -> None:
        """Waits for the copy of the newest checkpoint, at most ``mirror_flush``."""
        memory, self.memory = self.memory, None
        if memory is not None:
            memory.close(self.running.latest)
        mirror, self.mirror = self.mirror, None
        if mirror is not None:
            mirror.finish(self.options.flush_seconds or 0.0)

    def close(self) -> None:
        """Gives the directory back, once this rank has done its part of the save in flight."""
        self.in_flight.wait_for_own()
        self.reporter.log_skipped(self.in_flight.num_skipped)
        self.log_start()
        if self.resumed is not None and self.counters.finished is not None:
            self.continue_trackers(is_over=True)
        self.journal.close()
        try:
            self.finish_copies()
        finally:
            self.in_flight.snapshot.release()  # the object of the run may live on, as in a notebook
            if self.opened is not None and self.world.is_first:
                self.opened.store.release()


# ---------------------------------------------------------------- a run that is replayed


class Replay:
    """What a run does otherwise under ``resumekit replay``.

    It uses the scratch directory, resumes from the only checkpoint there, saves after the steps of
    the plan, or where a signal asks it to leave, and ends the process after the last step.

    Args:
        plan: which steps.
    """

    def __init__(self, plan: ReplayPlan) -> None:
        self._plan = plan
        self._comparison: Comparison | None = None

    @classmethod
    def of_run(cls, directory: Path) -> Replay | None:
        """The replay of the run in this directory, or None."""
        plan = ReplayPlan.for_run(directory)
        return None if plan is None else cls(plan)

    @property
    def directory(self) -> Path:
        """The run directory to use instead."""
        return Path(self._plan.scratch)

    @staticmethod
    def options(options: Options) -> Options:
        """The options of the run, but for what it begins from and which checkpoints it keeps."""
        return replace(options, resume_from=None, import_from=None, keep_latest=None)

    def note(self, header: Header, record: Record) -> None:
        """Compares a record that was just written with the journal of the run that is replayed."""
        if not self._plan.until_differs or self._plan.directory is None:
            return
        if self._comparison is None:
            recorded = find_attempts(Path(self._plan.directory) / DIRECTORY)
            self._comparison = replayed(header, recorded)
        self._comparison.add(record)

    def saves_after(self, step: int) -> bool:
        """Whether this step is saved: the run has a checkpoint of it, to compare with."""
        return step in self._plan.saved_steps

    def ends_after(self, step: int, world: World) -> bool:
        """Whether this is the last step. Collective."""
        last = self._plan.last_step
        if last is not None and step >= last:
            return True
        if not self._plan.until_differs:
            return False
        differs = self._comparison is not None and self._comparison.difference is not None
        return any(world.gather(differs))

    @staticmethod
    def end_process() -> NoReturn:
        """Ends this process with exit status 0; ``finally`` blocks and exit handlers run."""
        # After the framework's own clean-up. Gloo's threads abort a process that ends with a
        # process group: "terminate called without an active exception", torch 2.13.
        atexit.register(_destroy_process_groups)
        raise SystemExit(0)


def _destroy_process_groups() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
