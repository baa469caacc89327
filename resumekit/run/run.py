"""What a Checkpointer holds while it runs: the components, the store, and the way in and out."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from resumekit.capture import (
    AccumulatedGradients,
    Extras,
    Given,
    Holder,
    OptimizerState,
    UserState,
    bucket_components,
    fingerprint,
    gradient_components,
    holds_gradients,
    parameter_components,
    require_gradients,
    uncaptured_parameters,
)
from resumekit.data import (
    SEED,
    DataPosition,
    EpochUnderWay,
    Feed,
    RunSeed,
    epoch_under_way,
    user_objects,
)
from resumekit.distributed import Shares, World
from resumekit.journal import Header, RandomStates, lineage
from resumekit.log import show_messages
from resumekit.run.agreement import Membership, Replicas, agreed_shares, described
from resumekit.run.compatibility import (
    HORIZON,
    changed_horizon,
    drift_messages,
    frameworks_in,
    frameworks_of,
)
from resumekit.run.journaling import RunJournal, code, environment, settings
from resumekit.run.loading import Loading, call_everywhere
from resumekit.run.loop_check import LoopCheck
from resumekit.run.options import Options
from resumekit.run.progress import BestSelection, Counters, best_step
from resumekit.run.randomness import RandomState
from resumekit.run.report import Account, ResumeReport, weakly
from resumekit.run.resuming import Finder, Found
from resumekit.run.saving import Description, Saver
from resumekit.run.world_change import Sources
from resumekit.state import (
    CaptureLine,
    ComponentState,
    SharingPattern,
    Slot,
    StateComponent,
    Validation,
    check_components,
)
from resumekit.storage import Manifest, RetentionPolicy, StepName, Store
from resumekit.tracing import INJECT_VARIABLE, RUN_ROOT_VARIABLE, StateEvent, Trace

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
        self.directory = _relocated(directory)
        self.options = options
        self.counters = Counters()
        keyed = options.randomness == "keyed"
        self.seed = RunSeed(generators.values()) if keyed else None
        self.position = DataPosition(self.seed, allowed_changes=options.allow_changes)
        self.selection = BestSelection(options.best_metric, options.mode)
        self.rng = RandomState(generators, self.position)
        self.components: tuple[StateComponent, ...] = ()
        self._loader_state = UserState(
            {}, key="data/attributes", grows=True, foreign=weakly(self._objects_of_others, [])
        )
        self._stream_states: dict[frozenset[str], UserState] = {}  # by the objects' names
        self._extras = extras
        self._own = self._own_components(extras)
        self._given = components
        self._groups = groups
        self._data_parallel_group = data_parallel_group
        self._shares: Shares | None = None
        self._gradients: tuple[StateComponent, ...] = ()  # saved where training still needs them
        self.components = self._with_own(() if callable(components) else components)
        self.world = World.current(timeout_seconds=options.agreement_timeout_seconds)
        self.account = Account(options, self.world, self.position)
        self.account.components = self.components
        self.account.add_finding(self._uncaptured_parameters)
        self.loop_check = LoopCheck(options, extras, weakly(self._saved_objects, Given()))
        self.account.add_finding(self.loop_check.lines)
        self._generators = generators
        self.trace = Trace.from_environment(self.world.rank)
        self.is_driven = False  # a framework runs the loop
        self.journal = RunJournal(self.directory, raises=options.on_divergence == "raise")
        self._store: Store | None = None
        self._saver: Saver | None = None
        self._replicas: Replicas | None = None
        self._membership: Membership | None = None  # of the components as they are now
        self._looked = False
        self._found: Found | None = None  # until it is loaded
        self._former_frameworks: frozenset[str] | None = None  # under which that was saved
        self._report: ResumeReport | None = None
        self._resumed_from: Manifest | None = None  # until the trace was told
        self._parent: Manifest | None = None  # of the checkpoint that this attempt resumed from
        self._fresh: tuple[str, ...] = ()  # components that it lacks
        self._fingerprint: dict[str, Any] = {}
        self._injected = frozenset(filter(None, os.environ.get(INJECT_VARIABLE, "").split(",")))

    def _own_components(self, extras: dict[str, Any]) -> list[StateComponent]:
        seeds = (
            [] if self.seed is None else [StateComponent(SEED, self.seed, SharingPattern.GLOBAL)]
        )
        return [
            *seeds,
            StateComponent(Slot.DATA.value, self.position, SharingPattern.PER_RANK),
            self._loader_state.component(),
            StateComponent(Slot.RNG.value, self.rng, SharingPattern.PER_RANK),
            StateComponent(Slot.PROGRESS.value, self.counters, SharingPattern.GLOBAL),
            StateComponent(Slot.BEST_METRIC.value, self.selection, SharingPattern.GLOBAL),
            StateComponent(Slot.EXTRAS.value, Extras(extras), SharingPattern.GLOBAL),
        ]

    def _follow_stream(self, objects: Mapping[str, Holder]) -> UserState:
        """The user state of what a stream reads; modules are not set to what they were then.

        A loader that is built again in each epoch keeps the baseline of the first one: a resumed
        process has made no other.
        """
        names = frozenset(objects)
        if names in self._stream_states:
            self._stream_states[names].replace(objects)
        else:
            self._stream_states[names] = UserState(
                objects,
                key=Slot.DATA.value,
                foreign=weakly(self._modules_of_others, []),
                transient=self.options.transient,
                limit_bytes=self.options.user_state_limit,
            )
        return self._stream_states[names]

    def _modules_of_others(self) -> list[Any]:
        return [each for each in self._objects_of_others() if isinstance(each, nn.Module)]

    def _objects_of_others(self) -> list[Any]:
        """What other components with user state follow: a dataset may share it with a module."""
        others = (each.stateful for each in self.components)
        states = [e for e in others if isinstance(e, UserState) and e is not self._loader_state]
        return [each for state in states for each in state.objects.values()]

    def _with_own(
        self, components: Sequence[StateComponent], *, gradients: Collection[str] = ()
    ) -> tuple[StateComponent, ...]:
        given = {each.key for each in components}
        derived = (*bucket_components(components), *parameter_components(components))
        added = tuple(each for each in derived if each.key not in given)
        for each in (*components, *self._own):
            each.state.configure(
                transient=self.options.transient, limit_bytes=self.options.user_state_limit
            )
        if self.options.saves_gradients:
            require_gradients(components)
        summed = gradient_components([*components, *added], self.counters.is_within_window)
        self._gradients = tuple(each for each in summed if each.key not in given)
        added += tuple(
            each
            for each in self._gradients
            if self.options.saves_gradients or each.key in gradients
        )
        return check_components([*components, *added, *self._own])

    # ---------------------------------------------------------------- the way in

    def _uncaptured_parameters(self) -> Iterable[CaptureLine]:
        return uncaptured_parameters(self.components)

    @property
    def has_resumed(self) -> bool:
        """Whether the way in is over: all but data and random state is in place."""
        return self._report is not None

    @property
    def run_id(self) -> str:
        """What names this run, whichever directory it is moved to."""
        assert self._store is not None, "the run has begun"
        return self._store.run_id

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
        store = self._open()
        left_out = frozenset(self.options.exclude) | self._injected
        self._shares = agreed_shares(self.world, self._data_parallel_group, self._groups)
        known = () if callable(self._given) else self.components
        membership = self._agree_on_components(known)
        sources = self._sources(membership)
        finder = Finder(self.world, store, self.options, left_out, known, membership, sources)
        self._found = finder.find(up_to=None if up_to is None else up_to(store.run_id))
        if self._found is not None:
            self._former_frameworks = frameworks_of(self._found.manifest)
        progress = self._found and self._found.states.get(Slot.PROGRESS.value)
        if progress:
            self.counters.load_state_dict(progress)
        self._looked = True
        return self._found is not None

    def saved(self, key: str) -> Any:
        """A component's state in the checkpoint that was found and is not loaded yet, or None."""
        return None if self._found is None else self._found.states.get(key)

    def under_way(self, loader: Any) -> EpochUnderWay:
        """How much of the epoch was used that the run continues in, in batches of this loader."""
        return epoch_under_way(self.position, loader, self.saved(Slot.DATA.value))

    def resume(self) -> ResumeReport:
        """Restores all but the random state from what was found, once. Collective."""
        if self._report is None:
            self.find()
            found, given = self._found, self._given
            saved = () if found is None else (each.key for each in found.manifest.components)
            self.components = self._with_own(
                given() if callable(given) else given, gradients=holds_gradients(saved)
            )
            self.account.components = self.components
            self._begin_saving()
            report = ResumeReport(resumed=False) if found is None else self._load(found)
            self._found = None
            if self.seed is not None and self.seed.value is None:
                self.seed.value = self.world.broadcast(torch.initial_seed())
            self._log_start(report)
            self._report = report
        return self._report

    def _log_start(self, report: ResumeReport) -> None:
        """One line; of a new run it waits until the loader is known, see ``Account.announce``."""
        assert self._store is not None
        others = self._store.others  # a name that was mistyped shows in what the directory holds
        if not report.resumed:
            self.account.start = f"starting in {self.directory}" + (
                f", beside {others}" if others else ""
            )
        elif report.finished is None:
            self.account.tell(f"{report}; saves {self.account.cadence}")
        else:
            hint = "" if self.is_driven else "; after the loop, ask already_finished"
            self.account.tell(f"{report}{hint}")

    def _open(self) -> Store:
        """Takes the directory: rank 0 owns it, the others check that they see the same one."""
        store = Store(self.directory)

        def acquire() -> tuple[str, str]:
            store.acquire()
            return store.run_id, store.attempt

        run_id, attempt = self.world.on_first(acquire)
        if not self.world.is_first:
            self.world.everywhere(lambda: store.join(run_id, attempt))
        else:
            self.world.everywhere(lambda: None)
        self._store = store
        return store

    def _sources(self, membership: Membership) -> Sources:
        assert self._shares is not None
        may_change = "world_size" in self.options.allow_changes
        return Sources(self.world, self._shares, membership, may_change=may_change)

    def _agree_on_components(self, components: Sequence[StateComponent]) -> Membership:
        patterns = {each.key: str(each.sharing_pattern) for each in components}
        self.world.require_equal("components", patterns)
        return Membership.agreed(self.world, components, self._groups)

    def _add_late_components(self) -> None:
        """Adds the components of state that came into being after the start. Collective."""
        found: dict[str, StateComponent] = {}

        def find() -> list[str]:
            known = {each.key for each in self.components}
            late = [p for p in parameter_components(self.components) if p.key not in known]
            self._gradients += gradient_components(late, self.counters.is_within_window)
            found.update({each.key: each for each in (*late, *self._gradients)})
            needed = (each.key for each in self._gradients if _gradients_of(each).is_needed)
            return [key for key in (*(each.key for each in late), *needed) if key not in known]

        keys = dict.fromkeys(key for own in self.world.everywhere(find) for key in own)
        if keys:
            assert self._saver is not None
            parent = self._saver.parent
            added = (found[key] for key in keys if key in found)
            self.account.components = self.components = check_components([*self.components, *added])
            self._begin_saving()
            self._saver.parent = parent

    def observe_gradients(self) -> None:
        """A step boundary: looks whether the gradients outlive their step."""
        for each in self._gradients:
            _gradients_of(each).watch.observe()

    def _begin_saving(self) -> None:
        assert self._store is not None
        self._membership = membership = self._agree_on_components(self.components)
        options = self.options
        retention = RetentionPolicy(
            keep_latest=options.keep_latest,
            keep_best=options.keep_best,
            keep_every=options.keep_every,
        )
        level = Validation(options.validate)
        self._replicas = Replicas(self.world, self.components, membership, level)
        self._saver = Saver(self.world, self._store, self.components, membership, retention)
        # The manifest holds rank 0's, which says nothing of what other groups have.
        alike = [each for each in self.components if not membership.recorded(each)]
        self._fingerprint = fingerprint(
            world_size=self.world.world_size,
            components=alike,
            record_command=options.record_command,
        )

    def _load(self, found: Found) -> ResumeReport:
        assert self._membership is not None
        assert self._replicas is not None
        assert self._saver is not None
        sources = self._sources(self._membership)
        loading = Loading(self.world, self.options, self.components, self._membership, sources)
        fit = loading.fit(found, self._fingerprint)
        self.account.take_history(found.manifest)
        changes = loading.divide(found)
        self.account.tell_changes(changes)
        remarks = loading.load(found, fit.fresh)
        self._parent, self._fresh = found.manifest, tuple(fit.fresh)
        for each in self._gradients:
            if self.counters.step and each.key not in found.states:
                _gradients_of(each).watch.inherit()
        self._replicas.check_after_resume()
        drift = drift_messages(fit.differences, self.options)
        for warning in drift.warnings:
            self.account.warn(warning)
        for remark in (*drift.notes, *fit.not_needed, *remarks):
            self.account.tell(remark)
        for difference in fit.differences:
            self.account.detail(f"changed since the checkpoint: {difference}")
        self._saver.parent = str(found.name)
        self._resumed_from = found.manifest
        restored = {line.key: line for line in self.account.capture_report().lines}
        keys = [each.key for each in found.manifest.components if each.key in found.states]
        return ResumeReport(
            resumed=True,
            step=found.manifest.step,
            path=found.reader.path,
            components=tuple(restored[key] for key in keys),
            differences=fit.differences,
            changes=changes,
            not_needed=fit.not_needed,
            rejected=found.rejected,
            finished=self.counters.finished,
        )

    def restore_random(self) -> None:
        """Sets the random state, the last act of a resume. A no-op when there is nothing to set."""
        for remark in self.rng.restore():
            self.account.tell(remark)
        for component in self.components:
            component.state.after_rng_restore()
        if self._resumed_from is not None:
            self.trace_state("resumed", self._resumed_from)
            self._resumed_from = None

    def enter_loop(self, owner: Any, feed: Feed) -> None:
        """A loop asks for its first batch: looks what it needs and no component holds."""
        for source in feed.sources:
            self._loader_state.add(user_objects(source))
        self.loop_check.enter(owner)

    def _saved_objects(self) -> Given:
        """What the checkpoints of this run hold, as it is now."""
        states = [each.stateful for each in self.components]
        tracked = [o for e in states if isinstance(e, UserState) for o in e.objects.values()]
        return Given(self.components, [*self._extras.values(), *self._generators.values()], tracked)

    def begin(self, feed: Feed, epoch: int) -> None:
        """Begins or continues an epoch of a loader, at the random state that it needs.

        Raises:
            InexactError: ``strict=True`` and a part would not come back exactly.
            RankDisagreementError: ranks with fewer batches would wait where others save.
        """
        if any(each.state.requires_equal_batches for each in self.components):
            self.world.require_equal(
                "batches of an epoch:",
                {feed.name: feed.num_batches},
                remedy="A save needs all ranks: give them as many batches each, without join()",
            )
        self.account.tell_changed_loaders()
        for source in feed.sources:
            self._loader_state.add(user_objects(source))
            source.follow_objects(self._follow_stream)
        self.account.announce()
        self.rng.begin(feed, epoch, self.restore_random)

    def accept_horizon(self, horizon: dict[str, int]) -> None:
        """Takes the loop's horizon.

        Raises:
            DriftError: the interrupted run had another one, and no policy allows it.
        """
        self.world.require_equal(HORIZON, horizon)
        then, allowed = self.counters.horizon, HORIZON in self.options.allow_changes
        elsewhere = self._is_from_elsewhere
        change = changed_horizon(then, horizon, allowed=allowed, elsewhere=elsewhere)
        if change:
            self.account.tell(change)
            self.counters.finished = None
        self.counters.horizon = horizon

    @property
    def _is_from_elsewhere(self) -> bool:
        """Whether another framework may have written the checkpoint."""
        if self._former_frameworks is None:
            return False
        is_known = self._report is not None or not callable(self._given)
        return not is_known or frameworks_in(self.components) != self._former_frameworks

    def finish_again(self) -> None:
        """A finished run was started again: all state is back, and there is nothing to do."""
        self.restore_random()
        self.trace_state("end")

    # ---------------------------------------------------------------- the way out

    def save(self) -> None:
        """Saves at this settled point. Collective."""
        assert self._saver is not None
        self._add_late_components()
        assert self._replicas is not None
        call_everywhere(self.world, self.components, ComponentState.before_save)
        self._replicas.check_before_save()
        assert self._shares is not None
        message = self.journal.at_save(self.counters.step, self.counters.progress.micro_step)
        messages = self.counters.fold(self.world, self._shares, message)
        verdict = self.journal.agree(messages, self._shares.first_ranks)
        progress = self.counters.progress
        self._saver.save(
            Description(
                step=progress.step,
                progress=progress.as_dict(),
                finished=self.counters.finished,
                metric=self.selection.metric_of(progress.step),
                capture=self.account.captured(),
                fingerprint=self._fingerprint,
                details={
                    **self.account.details(),
                    **described(self._shares),
                    **({JOURNAL: verdict} if verdict else {}),
                },
            )
        )
        self.account.detail(f"saved step {progress.step} in {self.directory}")
        self.trace_state("checkpoint")
        if not self.counters.is_within_window():  # there the gradients are to outlive the save
            for each in self._gradients:
                _gradients_of(each).watch.saved()

    def close(self) -> None:
        """Gives the directory back."""
        self.journal.close()
        if self._store is not None and self.world.is_first:
            self._store.release()

    def world_is_alive(self) -> bool:
        """Whether the ranks can still talk, or there is only one."""
        return self.world.world_size == 1 or dist.is_initialized()

    def learning_rates(self) -> list[Any]:
        """The learning rate of every param group of every optimizer."""
        return [group["lr"] for each in self._optimizers() for group in each.param_groups]

    def _optimizers(self) -> list[Any]:
        states = (each.stateful for each in self.components if each.slot == Slot.OPTIMIZER.value)
        given = [each.optimizer for each in states if isinstance(each, OptimizerState)]
        return [each for each in given if hasattr(each, "param_groups")]

    def record_step(self, epoch: int, loss: Any) -> None:
        """Records the step that was just counted in the journal.

        Raises:
            DivergenceError: it is not what an earlier attempt recorded, and that ends the run.
        """
        assert self._shares is not None
        counters = self.counters
        if self.journal.is_new:
            self.journal.open(
                counters.step,
                self._describe_attempt(),
                optimizers=self._optimizers(),
                random_states=self._random_states(),
            )
        self.journal.step(
            counters.step,
            epoch=epoch,
            samples=counters.samples_so_far(self._shares.number),
            is_whole=counters.saw_whole_step,
            loss=loss,
        )

    def _describe_attempt(self) -> Header:
        """The header of this attempt's journal, but for its number."""
        assert self._store is not None
        assert self._shares is not None
        options, parent, rank = self.options, self._parent, self.world.rank
        share = self._shares.of_ranks[rank]
        header = Header(
            run_id=self._store.run_id,
            attempt=self._store.attempt,
            number=0,
            rank=rank,
            world_size=self.world.world_size,
            share=share,
            writes_share=self._shares.first_ranks[share] == rank,
            lineage=(),
            resumed_step=None if parent is None else parent.step,
            options={
                "randomness": options.randomness,
                "mid_accumulation": options.mid_accumulation,
                "horizon": dict(self.counters.horizon),
                "framework": sorted(frameworks_in(self.components)),
                "settings": settings(self._fingerprint),
            },
            geometry=self.position.geometry(),
            code=code(),
            environment=environment(self._optimizers()),
            excluded=(*(sorted(options.exclude) if parent else ()), *self._fresh),
        )
        return replace(
            header, lineage=lineage(self.directory, header, parent.attempt if parent else None)
        )

    def _random_states(self) -> RandomStates:
        """The generators that the journal digests: not the loaders', which workers run ahead of."""
        sources = self.position.sources.values()
        others = {id(each) for source in sources for each in source.private.values()}
        named = self.rng.generators.items()
        return RandomStates({name: each for name, each in named if id(each) not in others})

    def trace_state(self, event: StateEvent, resumed_from: Manifest | None = None) -> None:
        """Records every component's state, when tracing."""
        if self.trace is not None:
            there = None if resumed_from is None else resumed_from.progress
            progress = self.counters.progress.as_dict() if there is None else there
            states = {each.key: each.state.comparable_state() for each in self.components}
            self.trace.state(event, progress["step"], states, micro_step=progress["micro_step"])

    def best(self) -> tuple[StepName, float] | None:
        """The best committed checkpoint and the metric's value in it, or None."""
        metric = self.selection.best
        return None if metric is None else best_step(self._store or Store(self.directory), metric)


def _gradients_of(component: StateComponent) -> AccumulatedGradients:
    assert isinstance(component.stateful, AccumulatedGradients)
    return component.stateful


def _relocated(directory: Path) -> Path:
    """The directory, or its stand-in when a tool runs this program beside the user's real runs."""
    root = os.environ.get(RUN_ROOT_VARIABLE)
    if not root:
        return directory
    absolute = directory.absolute()
    return Path(root) / f"{absolute.name}-{xxhash.xxh3_64_hexdigest(str(absolute).encode())[:8]}"
