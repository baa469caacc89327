"""What a Checkpointer holds while it runs: the components, the store, saving and resuming."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from resumekit.capture import differences, fingerprint, gradient_keys
from resumekit.capture.ddp_buckets import GradientBuckets
from resumekit.data import EpochUsage, Feed, epoch_usage, saved_batch_size
from resumekit.distributed import DataRanks, World
from resumekit.log import show_messages
from resumekit.record.step_values import RandomStates
from resumekit.record.trace import StateEvent, Trace, injected_components, relocated
from resumekit.run.agreement import ComponentGroups, Replicas, agreed_data_ranks, described
from resumekit.run.components import RunComponents
from resumekit.run.discovery import Discovery
from resumekit.run.garbage_collector import collector_paused
from resumekit.run.journaling import RunJournal, header_of_attempt
from resumekit.run.options import Options
from resumekit.run.replaying import Replay
from resumekit.run.report import Reporter, ResumeReport
from resumekit.run.resuming.compatibility import (
    HORIZON,
    changed_horizon,
    frameworks_in,
    frameworks_of,
    horizon_causes,
)
from resumekit.run.resuming.finder import Finder, Found, LoadBuffer, open_store
from resumekit.run.resuming.loading import Loading
from resumekit.run.resuming.restore_again import RestoredState
from resumekit.run.resuming.state_origins import StateOrigins
from resumekit.run.saving import SaveInFlight, Saver
from resumekit.state import AfterRng, BeforeSave, Slot, StateComponent, Validation, states_of
from resumekit.storage import Manifest, StepName, Store, holds_only_weights, lineage_of

# What a run's components may be given as: a list, or, where the objects do not exist yet when the
# run begins, a function that gives it.
Components = Sequence[StateComponent] | Callable[[], Sequence[StateComponent]]

# In a manifest's details: the journal's verdict on the steps that the attempt has repeated.
JOURNAL = "journal"


class Run:
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
        self.options = options
        self.world = World.current(timeout_seconds=options.agreement_timeout_seconds)
        num_ranks = self.world.world_size
        self._components = owned = RunComponents(options, extras, generators, num_ranks=num_ranks)
        self.counters, self.position, self.rng = owned.counters, owned.position, owned.rng
        self.selection, self.variables = owned.selection, owned.variables
        self._given = components
        self.discovery: Discovery | None = None
        self._groups = groups
        self._data_parallel_group = data_parallel_group
        self._data_ranks: DataRanks
        owned.set_given(() if callable(components) else components)
        self.reporter = Reporter(options, self.world, owned)
        self.trace = Trace.from_environment(self.world.rank)
        self.is_driven = False  # a framework runs the loop
        self.journal = RunJournal(
            self.directory,
            raises=options.on_divergence == "raise",
            observer=None if replay is None else replay.note,
        )
        self.in_flight = SaveInFlight(self.world, must_fit=options.async_save == "auto")
        self._store: Store | None = None
        self._saver: Saver
        self._load_buffer: LoadBuffer
        self._finder: Finder
        self._replicas: Replicas
        self._membership: ComponentGroups
        self._looked = False
        self._found: Found | None = None  # until it is loaded
        self._initial: Found | None = None  # the weights that a forked run starts with
        self._restored: RestoredState | None = None  # until the first fetch
        self._report: ResumeReport | None = None
        self._unlogged: ResumeReport | None = None  # until the line about it is logged
        self._resumed_from: Manifest | None = None  # until the trace has it
        self._parent: Manifest | None = None  # of the checkpoint that this attempt resumes from
        self._fresh: tuple[str, ...] = ()  # components that it lacks
        self._fingerprint: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}  # the horizon and the batch size of the loop that began

    @property
    def components(self) -> tuple[StateComponent, ...]:
        """The components as they are now."""
        return self._components.all

    # ---------------------------------------------------------------- resuming

    @property
    def has_resumed(self) -> bool:
        """Whether all but the data position and the RNG state is restored."""
        return self._report is not None

    @property
    def run_id(self) -> str:
        """What names this run, whichever directory it is moved to."""
        assert self._store is not None, "the run has begun"
        return self._store.run_id

    @collector_paused()
    def find(self, *, up_to: Callable[[str], int | None] | None = None) -> bool:
        """Finds the checkpoint to continue from, and takes its progress. Collective, idempotent.

        The rank has then read and verified all that it needs; no object of the user has changed.

        Args:
            up_to: gives for this run's id the step that the checkpoint is not to be newer than, as
                long as there is such a one, or None; rank 0's word counts.

        Returns:
            Whether there is one.
        """
        if self._looked:
            return self._found is not None
        self.world.require_equal("options", self.options.as_plain())
        self._store = store = open_store(self.directory, self.world)
        left_out = frozenset(self.options.exclude) | injected_components()
        self._data_ranks = agreed_data_ranks(self.world, self._data_parallel_group, self._groups)
        known = () if callable(self._given) else self.components
        membership = self._agree_on_components(known)
        sources = self._sources(membership)
        saves_async = self.options.async_save is not False
        self._load_buffer = LoadBuffer(self.world, self.in_flight.snapshot, is_kept=saves_async)
        self._finder = finder = Finder(
            self.world, store, self.options, left_out, known, membership, sources, self._load_buffer
        )
        self._found = finder.find(up_to=None if up_to is None else up_to(store.run_id))
        if self._found is not None and holds_only_weights(self._found.manifest):
            self._initial, self._found = self._found, None
        self._parent = None if self._found is None else self._found.manifest
        progress = self._found and self._found.states.get(Slot.PROGRESS.value)
        if progress:
            self.counters.load_state_dict(progress)
        self._looked = True
        return self._found is not None

    def saved(self, key: str) -> Any:
        """A component's state in the checkpoint that was found and is not loaded yet, or None."""
        return None if self._found is None else self._found.states.get(key)

    def under_way(self, loader: Any) -> EpochUsage:
        """How much of the epoch was used that the run continues in, in batches of this loader."""
        return epoch_usage(self.position, loader, self.saved(Slot.DATA.value))

    @collector_paused()
    def resume(self) -> ResumeReport:
        """Restores all but the random state from what was found, once. Collective."""
        if self._report is None:
            search = None if self._looked else self.discovery  # a framework looks before
            if search is not None:
                self._components.set_given(search.find(self.world, self.reporter))
            self.find()
            found = self._found
            given = search.renamed(found, self.reporter) if search else self._given
            given = given() if callable(given) else given
            saved = () if found is None else (each.key for each in found.manifest.components)
            self._components.set_given(given, gradients=gradient_keys(saved))
            self._components.check_named()
            self._begin_saving()
            report = self._start() if found is None else self._load(found)
            self._found = found = None
            self._load_buffer.give_back()
            seed = self._components.seed
            if seed is not None and seed.value is None:
                seed.value = self.world.broadcast(torch.initial_seed())
            self._report = self._unlogged = report
            may_change = HORIZON in self.options.allow_changes and not self.is_driven
            if not (report.finished and may_change):  # else the loop's horizon decides
                self._log_start()
        return self._report

    def enter(self, horizon: Mapping[str, int], loader: Any) -> None:
        """Resumes as a loop begins: from here on the script's changes are not kept. Collective.

        Args:
            horizon: of the loop.
            loader: of the loop, where it is known.
        """
        is_new = self._report is None
        self._asked = {**horizon, "batch_size": getattr(loader, "batch_size", None)}
        self.resume()
        if self._restored is not None:
            self._restored.enter(is_new=is_new)

    @collector_paused()
    def restore_again(self) -> None:
        """The first fetch of a resume: restores what the script has changed since. Collective.

        Raises:
            InexactError: ``strict=True``, and a component differs all the same.
            StateMismatchError: the script has rebuilt an object, so that it refuses its state.
            IncompleteLoadError: the checkpoint cannot be read any more.
        """
        restored, self._restored = self._restored, None
        if restored is not None:
            self.in_flight.wait_for_own()  # its copy is in the memory of the load
            self.reporter.log_restored_again(*restored.restore())

    def _log_start(self) -> None:
        """One line, once; of a new run it waits for the loader, see ``Reporter.announce``."""
        report, self._unlogged = self._unlogged, None
        if report is None:
            return
        if report.resumed:
            report = replace(report, finished=self.counters.finished)
            self.reporter.log_resume(report, is_driven=self.is_driven)
            return
        assert self._store is not None
        self.reporter.note_start(self.directory, self._store.unrelated_names, report.weights_of)

    def _sources(self, membership: ComponentGroups) -> StateOrigins:
        may_change = "world_size" in self.options.allow_changes
        named = self.options.per_rank
        return StateOrigins(self.world, self._data_ranks, membership, may_change, per_rank=named)

    def _agree_on_components(self, components: Sequence[StateComponent]) -> ComponentGroups:
        patterns = {each.key: str(each.sharing_pattern) for each in components}
        self.world.require_equal("components", patterns)
        return ComponentGroups.agreed(self.world, components, self._groups)

    def _add_late_components(self) -> None:
        """Adds the components of state that came into being after the start. Collective."""
        if self._components.add_late(self.world):
            parent = self._saver.parent
            self._begin_saving()
            self._saver.parent = parent

    def observe_gradients(self) -> None:
        """A step boundary: looks whether the gradients outlive their step."""
        self._components.observe_gradients()

    def _begin_saving(self) -> None:
        assert self._store is not None
        self._membership = membership = self._agree_on_components(self.components)
        options = self.options
        level = Validation(options.validate)
        self._replicas = Replicas(self.world, self.components, membership, level)
        self._saver = Saver(
            self.world, self._store, self.components, membership, options.retention, self.in_flight
        )
        # The manifest holds rank 0's, which says nothing of what other groups have.
        alike = [each for each in self.components if not membership.recorded(each)]
        now = fingerprint(
            world_size=self.world.world_size,
            components=alike,
            record_command=options.record_command,
        )
        # Of late components only: those of the start are the script's, and training changes them.
        self._fingerprint = {**now, **self._fingerprint}

    def _start(self) -> ResumeReport:
        """A fresh start, perhaps with the weights of another run. Collective."""
        self.world.everywhere(self._components.check_storable)  # a state may be gathered
        found, self._initial = self._initial, None
        if found is None:
            return ResumeReport(resumed=False)
        self._loading(found).load_weights()
        self.reporter.take_history(found.manifest)
        self._replicas.check_after_resume()
        return ResumeReport(resumed=False, weights_of=lineage_of(found.manifest)[-1])

    def _loading(self, found: Found) -> Loading:
        members, sources = self._membership, self._sources(self._membership)
        return Loading(found, self.world, self.options, self.components, members, sources)

    def _load(self, found: Found) -> ResumeReport:
        loading = self._loading(found)
        size = saved_batch_size(found.states.get(Slot.DATA.value) or {})
        then = {**self.counters.horizon, "batch_size": size}
        asked = {key: value for key, value in self._asked.items() if then.get(key) and value}
        causes = horizon_causes(differences({key: then[key] for key in asked}, asked))
        report = loading.resume(self._fingerprint, self.reporter, causes=causes)
        self._fresh = report.fresh
        self._components.gradients_resumed(found.states.keys())
        self._replicas.check_after_resume()
        self._saver.parent = str(found.name)
        self._resumed_from = found.manifest
        if not self.is_driven:
            self._restored = RestoredState(loading, self._finder)
        return replace(report, finished=self.counters.finished)

    def restore_random(self) -> None:
        """Sets the random state, the last act of a resume. A no-op when there is nothing to set."""
        for message in self.rng.restore():
            self.reporter.log(message)
        for each in states_of(self.components, AfterRng):
            each.after_rng_restore()
        if self._resumed_from is not None:
            self.trace_state("resumed", self._resumed_from)
            self._resumed_from = None

    @collector_paused()
    def enter_loop(self, owner: Any, feed: Feed) -> None:
        """A loop asks for its first batch: what the script has made until now is the baseline."""
        self._components.follow(feed, streams=False)
        self.variables.enter(owner)

    def open_loader(self, loader: Any, name: str) -> None:
        """Restores a loader's objects as an epoch begins, before its first line runs."""
        source = self.position.open_before_epoch(loader, name)
        self._components.follow(source, streams=False)

    def let_framework_drive(self) -> None:
        """A framework runs the loop: its functions are on the stack, and not the user's."""
        self.is_driven = True
        self._components.leave_out_variables()

    @collector_paused()
    def begin(self, feed: Feed, epoch: int) -> None:
        """Begins or continues an epoch of a loader, at the random state that it needs.

        Raises:
            InexactError: ``strict=True`` and a part would not be restored exactly.
            RankDisagreementError: ranks with fewer batches would wait where others save.
        """
        buckets = states_of(self.components, GradientBuckets)
        if any(each.requires_equal_batches for each in buckets):
            self.world.require_equal(
                "batches of an epoch:",
                {feed.name: feed.num_batches},
                remedy="A save needs all ranks: give them as many batches each, without join()",
            )
        self.restore_again()
        self.reporter.log_changed_loaders()
        self._components.follow(feed, streams=True)
        self.reporter.announce()
        self.rng.begin(feed, epoch, self.restore_random)

    def accept_horizon(
        self, horizon: dict[str, int], settings: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Takes the loop's horizon.

        Args:
            horizon: in steps, in epochs or in both.
            settings: of the fingerprint of this run, what the horizon follows from.

        Raises:
            DriftError: the interrupted run had another one, and no policy allows it.
        """
        self.world.require_equal(HORIZON, horizon)
        then, allowed = self.counters.horizon, HORIZON in self.options.allow_changes
        elsewhere = self._is_from_elsewhere
        saved = {} if self._parent is None else self._parent.fingerprint
        common = {key: saved[key] for key in settings if key in saved}
        causes = horizon_causes(differences(common, settings))
        change = changed_horizon(then, horizon, allowed=allowed, elsewhere=elsewhere, causes=causes)
        if change:
            self.reporter.log(change)
            self.counters.finished = None
        self._log_start()
        self.counters.horizon = horizon

    @property
    def _is_from_elsewhere(self) -> bool:
        """Whether another framework may have written the checkpoint."""
        if self._parent is None:
            return False
        is_known = self._report is not None or not callable(self._given)
        return not is_known or frameworks_in(self.components) != frameworks_of(self._parent)

    def finish_again(self) -> None:
        """A finished run was started again: all state is back, and there is nothing to do."""
        self._restored = None
        self.restore_random()
        self.trace_state("end")

    # ---------------------------------------------------------------- saving

    def _before_save(self) -> None:
        for each in states_of(self.components, BeforeSave):
            each.before_save()

    @collector_paused()
    def save(self, *, in_background: bool) -> None:
        """Saves at this safe point. Collective; no save is in flight.

        Args:
            in_background: return when all is copied, if the options say so.
        """
        self._add_late_components()
        self.world.everywhere(self._before_save)
        self._replicas.check_before_save()
        message = self.journal.at_save(self.counters.step, self.counters.progress.micro_step)
        messages = self.counters.fold(self.world, self._data_ranks, message)
        verdict = self.journal.agree(messages, self._data_ranks.first_ranks)
        progress = self.counters.progress
        in_background = self._saver.save(
            progress,
            self.reporter.captured(are_complete=True),
            finished=self.counters.finished,
            metric=self.selection.metric_of(progress.step),
            fingerprint=self._fingerprint,
            details={
                **self.reporter.details(),
                **described(self._data_ranks),
                **({JOURNAL: verdict} if verdict else {}),
                **self.in_flight.details(),
            },
            in_background=in_background and self.options.async_save is not False,
        )
        done = "saving" if in_background else "saved"
        self.reporter.detail(f"{done} step {progress.step} in {self.directory}")
        self.trace_state("checkpoint")
        self._components.gradients_saved()

    def finish_save(self) -> None:
        """Waits until the save in flight is durable. Collective.

        Raises:
            SaveError: it has failed, on whichever rank.
        """
        step = self.in_flight.step
        if step is not None:
            self._saver.finish()
            if self.trace is not None:
                self.trace.durable(step)

    def close(self) -> None:
        """Gives the directory back, once this rank has done its part of the save in flight."""
        self.in_flight.wait_for_own()
        self.reporter.log_skipped(self.in_flight.num_skipped)
        self._log_start()
        self.journal.close()
        if self._store is not None and self.world.is_first:
            self._store.release()

    def learning_rates(self) -> list[Any]:
        """The learning rate of every param group of every optimizer."""
        return self._components.learning_rates()

    def record_step(self, epoch: int, loss: Any) -> None:
        """Records the step that was just counted in the journal.

        Raises:
            DivergenceError: it is not what an earlier attempt recorded, and that ends the run.
        """
        counters = self.counters
        if self.journal.is_new:
            assert self._store is not None
            header = header_of_attempt(
                self._store,
                self.world,
                self._data_ranks,
                self._components,
                self.options,
                fingerprint=self._fingerprint,
                parent=self._parent,
                fresh=self._fresh,
            )
            self.journal.open(
                counters.step,
                header,
                optimizers=self._components.optimizers(),
                random_states=RandomStates(self._components.recorded_generators()),
            )
        self.journal.step(
            counters.step,
            epoch=epoch,
            samples=counters.samples_so_far(self._data_ranks.number),
            is_whole=counters.saw_whole_step,
            loss=loss,
        )

    def trace_state(self, event: StateEvent, resumed_from: Manifest | None = None) -> None:
        """Records every component's state, when tracing."""
        if self.trace is not None:
            counted = self.counters.progress.as_dict()
            progress = counted if resumed_from is None else resumed_from.progress
            states = {each.key: each.state.comparable_state() for each in self.components}
            self.trace.state(
                event,
                progress["step"],
                states,
                micro_step=progress["micro_step"],
                is_durable=self.in_flight.step is None,
            )

    def best(self) -> tuple[StepName, float] | None:
        """The best committed checkpoint and the metric's value in it, or None.

        Waits for the save in flight where that is the best one.
        """
        found = self.best_so_far()
        if found is None or found[0].step != self.in_flight.step:
            return found
        self.in_flight.wait_alone()
        return self.selection.best_step(self._store or Store(self.directory))

    def best_so_far(self) -> tuple[StepName, float] | None:
        """The same, where the save in flight counts as if it were committed. Waits for nothing."""
        store = self._store or Store(self.directory)
        return self.selection.best_step(store, self.in_flight.manifest)
