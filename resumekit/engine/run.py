"""What a Checkpointer holds while it runs: the components, the store, and the way in and out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash

from resumekit.capture import (
    Difference,
    Extras,
    RngState,
    SchedulerState,
    Severity,
    differences,
    fingerprint,
    generator_state,
    set_generator_state,
)
from resumekit.contract import (
    Absent,
    CaptureReport,
    SharingPattern,
    Slot,
    StateComponent,
    TrainState,
    check_components,
)
from resumekit.data import DataPosition
from resumekit.data.keys import SEED, RunSeed, check_randomness
from resumekit.distributed import World
from resumekit.engine.options import Options, names_component
from resumekit.engine.progress import Counters
from resumekit.engine.report import ResumeReport, tell
from resumekit.engine.resuming import Finder, Found, check_fit, check_states, resplit
from resumekit.engine.saving import Description, Saver, require_written
from resumekit.engine.selection import BestSelection
from resumekit.errors import CheckpointError, DriftError
from resumekit.prove.trace import StateEvent, Trace
from resumekit.prove.variables import INJECT_VARIABLE, RUN_ROOT_VARIABLE
from resumekit.storage import Manifest, RetentionPolicy, StepName, Store

# What a run's components may be given as: a list, or, where the objects do not exist yet when the
# run begins, a function that gives it.
Components = Sequence[StateComponent] | Callable[[], Sequence[StateComponent]]

# The order of a restore. The progress comes before it, as soon as the checkpoint is found; the data
# position and then the random state follow at the first fetch.
_RESTORE_ORDER = (
    Slot.MODEL,
    Slot.OPTIMIZER,
    Slot.LR_SCHEDULER,
    Slot.GRAD_SCALER,
    Slot.EMA,
    Slot.BEST_METRIC,
    Slot.CALLBACKS,
    Slot.EXTRAS,
    Slot.DATA,
)

Best = TypeVar("Best")


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
    ) -> None:
        self.directory = _relocated(directory)
        self.options = options
        self.counters = Counters()
        keyed = options.randomness == "keyed"
        self.seed = RunSeed(generators.values()) if keyed else None
        self.position = DataPosition(self.seed, allowed_changes=options.allow_changes)
        self.selection = BestSelection(options.best_metric, options.mode)
        self.rng = RngState(generators)
        self._own = self._own_components(extras)
        self._late = components if callable(components) else None
        self.components = self._with_own(() if callable(components) else components)
        self.world = World.current()
        self.trace = Trace.from_environment(self.world.rank)
        self._store: Store | None = None
        self._saver: Saver | None = None
        self._looked = False
        self._found: Found | None = None  # until it is loaded
        self._report: ResumeReport | None = None
        self._random: dict[str, Any] | None = None  # the random state to set at the first fetch
        self._resumed_step: int | None = None  # until the trace was told
        self._fingerprint: dict[str, Any] = {}
        self._told: set[tuple[str, Any]] = set()  # how exactly each part comes back, once announced
        self._history: list[dict[str, Any]] = []  # of changes that a resume followed
        self._injected = frozenset(filter(None, os.environ.get(INJECT_VARIABLE, "").split(",")))

    def _own_components(self, extras: dict[str, Any]) -> list[StateComponent]:
        seeds = (
            [] if self.seed is None else [StateComponent(SEED, self.seed, SharingPattern.GLOBAL)]
        )
        return [
            *seeds,
            StateComponent(Slot.DATA.value, self.position, SharingPattern.PER_RANK),
            StateComponent(Slot.RNG.value, self.rng, SharingPattern.PER_RANK),
            StateComponent(Slot.PROGRESS.value, self.counters, SharingPattern.GLOBAL),
            StateComponent(Slot.BEST_METRIC.value, self.selection, SharingPattern.GLOBAL),
            StateComponent(Slot.EXTRAS.value, Extras(extras), SharingPattern.GLOBAL),
        ]

    def _with_own(self, components: Sequence[StateComponent]) -> tuple[StateComponent, ...]:
        checked = check_components([*components, *self._own])
        require_written(checked)
        return checked

    # ---------------------------------------------------------------- the way in

    def find(self) -> None:
        """Finds the checkpoint to continue from, and takes its progress. Collective, idempotent.

        The rank has then read and verified all that it needs; no object of the user has changed.
        """
        if self._looked:
            return
        store = self._open()
        left_out = frozenset(self.options.exclude) | self._injected
        self._found = Finder(self.world, store, self.options, left_out).find()
        progress = self._found and self._found.states.get(Slot.PROGRESS.value)
        if progress:
            self.counters.load_state_dict(progress)
        self._looked = True

    def resume(self) -> ResumeReport:
        """Restores all but the random state from what was found, once. Collective."""
        if self._report is None:
            self.find()
            if self._late is not None:
                self.components = self._with_own(self._late())
            self._begin_saving()
            found = self._found
            report = ResumeReport(resumed=False) if found is None else self._load(found)
            self._found = None
            if self.seed is not None and self.seed.value is None:
                self.seed.value = self.world.broadcast(torch.initial_seed())
            self.tell(f"{report}" if report.resumed else f"{report} in {self.directory}")
            self._report = report
        return self._report

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

    def _begin_saving(self) -> None:
        assert self._store is not None
        options = self.options
        retention = RetentionPolicy(
            keep_latest=options.keep_latest,
            keep_best=options.keep_best,
            keep_every=options.keep_every,
        )
        self._saver = Saver(self.world, self._store, self.components, retention)
        self._fingerprint = fingerprint(
            world_size=self.world.world_size, components=self.components
        )

    def _load(self, found: Found) -> ResumeReport:
        manifest = found.manifest
        if not names_component(self.options.exclude, SEED):
            check_randomness({each.key for each in manifest.components}, self.options.randomness)
        changed = differences(manifest.fingerprint, self._fingerprint)
        self._accept_drift(changed)
        fresh = check_fit(manifest, self.components, self.options, world_size=self.world.world_size)
        self._take_history(manifest)
        changes = resplit(found, self.components, self.world)
        self._tell_changes(changes)
        self.world.everywhere(lambda: check_states(found.states, self.components))
        remarks = self.world.everywhere(lambda: self._restore(found.states))
        for difference in changed:
            self.tell(f"changed since the checkpoint: {difference}")
        for remark in (*self._start_fresh(found.name, fresh), *remarks[0]):
            self.tell(remark)
        assert self._saver is not None
        self._saver.parent = str(found.name)
        self._resumed_step = manifest.step
        restored = {line.key: line for line in self.capture_report().lines}
        return ResumeReport(
            resumed=True,
            step=manifest.step,
            path=found.reader.path,
            components=tuple(
                restored[record.key] for record in manifest.components if record.key in found.states
            ),
            differences=tuple(changed),
            changes=changes,
            rejected=found.rejected,
            finished=self.counters.finished,
        )

    def _take_history(self, manifest: Manifest) -> None:
        """The changes that earlier resumes followed, and room for those of this one."""
        earlier = manifest.details.get("changes", [])
        self._history = [*earlier, {"step": manifest.step, "changes": []}]

    def _tell_changes(self, changes: Sequence[str]) -> None:
        for change in changes:
            self.tell(change)
            self._history[-1]["changes"].append(change)

    def tell_changed_loaders(self) -> None:
        """Tells and records what changed in the loaders that were opened since the last call."""
        changes, self.position.changes = self.position.changes, []
        self._tell_changes(changes)

    def _accept_drift(self, changed: Sequence[Difference]) -> None:
        """Refuses a changed horizon; where it is allowed, schedulers keep the live one.

        Raises:
            DriftError: what the learning rate was planned for has changed.
        """
        refused = [
            each
            for each in changed
            if each.severity is Severity.HORIZON
            and not names_component(self.options.exclude, each.name.split(".", 1)[0])
        ]
        if "horizon" in self.options.allow_changes:
            for component in self.components:
                if isinstance(component.stateful, SchedulerState):
                    component.stateful.keep_horizon = True
        elif refused:
            raise DriftError(
                "horizon",
                found="; ".join(str(each) for each in refused),
                expected="the horizon that the learning rate was planned for",
                remedy="Restore it, or pass allow_changes={'horizon'}",
            )

    def _restore(self, states: Mapping[str, Any]) -> tuple[str, ...]:
        """Loads in the order of a restore; gives what the components had to remark."""
        order = {slot.value: place for place, slot in enumerate(_RESTORE_ORDER)}
        given = [each for each in self.components if each.key in states and each.slot in order]
        remarks: list[str] = []
        for component in sorted(given, key=lambda each: order[each.slot]):
            remarks.extend(component.stateful.load_state_dict(states[component.key]) or ())
        self._random = states.get(Slot.RNG.value)
        return tuple(remarks)

    def _start_fresh(self, name: StepName, keys: Sequence[str]) -> list[str]:
        """What to tell about components that the checkpoint lacks."""
        remarks: list[str] = []
        for component in self.components:
            if component.key in keys:
                start_fresh = getattr(component.stateful, "start_fresh", None)
                default = (f"{name} has no {component.key}: it starts from its live state",)
                remarks.extend(start_fresh() if start_fresh is not None else default)
        return remarks

    def restore_random(self) -> None:
        """Sets the random state, the last act of a resume. A no-op when there is nothing to set."""
        self.position.restore_generators()
        if self._random is not None:
            in_place = [(each, generator_state(each)) for each in self.position.drawn_again()]
            for remark in self.rng.load_state_dict(self._random):
                self.tell(remark)
            for generator, state in in_place:  # the user may have named a loader's own as well
                set_generator_state(generator, state)
            self._random = None
        if self._resumed_step is not None:
            self.trace_state("resumed", self._resumed_step)
            self._resumed_step = None

    def accept_horizon(self, horizon: dict[str, int]) -> None:
        """Takes the loop's horizon.

        Raises:
            DriftError: the interrupted run had another one, and no policy allows it.
        """
        then = self.counters.horizon
        if then and then != horizon:
            if "horizon" not in self.options.allow_changes:
                raise DriftError(
                    "horizon",
                    found=_words(horizon),
                    expected=f"{_words(then)}, as in the checkpoint",
                    remedy="Restore it, or pass allow_changes={'horizon'}",
                )
            self.tell(f"the horizon changes from {_words(then)} to {_words(horizon)}")
            self.counters.finished = None
        self.counters.horizon = horizon

    def finish_again(self) -> None:
        """A finished run was started again: all state is back, and there is nothing to do."""
        self.restore_random()
        self.trace_state("end")

    # ---------------------------------------------------------------- the way out

    def save(self) -> None:
        """Saves at this settled point. Collective."""
        assert self._saver is not None
        self.counters.fold(self.world)
        progress = self.counters.progress
        self._saver.save(
            Description(
                step=progress.step,
                progress=progress.as_dict(),
                finished=self.counters.finished,
                metric=self.selection.metric_of(progress.step),
                capture=self._capture(),
                fingerprint=self._fingerprint,
                details=self._details(),
            )
        )
        self.trace_state("checkpoint")

    def close(self) -> None:
        """Gives the directory back."""
        if self._store is not None and self.world.is_first:
            self._store.release()

    def world_is_alive(self) -> bool:
        """Whether the ranks can still talk, or there is only one."""
        return self.world.world_size == 1 or dist.is_initialized()

    def _details(self) -> dict[str, Any]:
        details: dict[str, Any] = {}
        if self.options.exclude:
            details["exclude"] = sorted(self.options.exclude)
        if self.options.resume_from is not None:
            details["resume_from"] = self.options.resume_from
        history = [entry for entry in self._history if entry["changes"]]
        if history:
            details["changes"] = history
        return details

    # ---------------------------------------------------------------- what it tells

    def announce(self) -> None:
        """Tells once, before the first batch, what a checkpoint will hold.

        Raises:
            InexactError: ``strict=True`` and a part would not come back exactly.
        """
        report = self.capture_report()
        if self.options.strict:
            report.require_exact()
        self._told = {(line.key, line.fidelity) for line in report.lines}
        self.tell(f"each checkpoint holds: {report}")

    def _capture(self) -> CaptureReport:
        """What the checkpoint that is being made holds; tells what was found out since the start.

        Raises:
            InexactError: ``strict=True``, and a part turned out not to come back exactly.
        """
        report = self.capture_report()
        if self.options.strict and self._told:
            self.world.everywhere(report.require_exact)
        for line in report.inexact:
            if self._told and (line.key, line.fidelity) not in self._told:
                self._told.add((line.key, line.fidelity))
                self.tell(f"from this checkpoint on: {line}")
        return report

    def capture_report(self) -> CaptureReport:
        """One line for each component and each empty slot."""
        slots: dict[str, Any] = {slot.value: Absent(f"no {slot.value} was given") for slot in Slot}
        for component in self.components:
            present = slots[component.slot]
            before = () if isinstance(present, Absent) else present
            slots[component.slot] = (*before, self._as_it_is(component))
        return TrainState(**slots).capture_report()

    def _as_it_is(self, component: StateComponent) -> StateComponent:
        """The component with the fidelity that the loaders allow, if it is the data position."""
        if component.stateful is not self.position:
            return component
        fidelity, reason = self.position.fidelity
        return replace(component, fidelity=fidelity, reason=reason)

    def learning_rates(self) -> list[Any]:
        """The learning rate of every param group of every optimizer."""
        return [
            group["lr"]
            for component in self.components
            if component.slot == Slot.OPTIMIZER.value
            for group in getattr(getattr(component.stateful, "optimizer", None), "param_groups", ())
        ]

    def trace_state(self, event: StateEvent, step: int | None = None) -> None:
        """Records every component's state, when tracing."""
        if self.trace is not None:
            step = self.counters.progress.step if step is None else step
            states = {each.key: _comparable(each.stateful) for each in self.components}
            self.trace.state(event, step, states)

    def best(self, make: Callable[[Path, int, float], Best]) -> Best | None:
        """The best committed checkpoint, made by ``make(path, step, value)``, or None."""
        best, metric = None, self.selection.best
        if metric is None:
            return None
        store, metric = self._store or Store(self.directory), replace(metric, value=None)
        for name in store.step_names():
            value = self._metric_value(store, name)
            if value is not None and metric.improved_by(value):
                metric = metric.with_value(value, name.step)
                best = make(self.directory / str(name), name.step, value)
        return best

    def _metric_value(self, store: Store, name: StepName) -> float | None:
        try:
            metric = store.open_step(name).manifest.metric
        except CheckpointError:
            return None
        if metric is None or metric["name"] != self.options.best_metric:
            return None
        return float.fromhex(metric["value"])

    def tell(self, message: str) -> None:
        """One line to the user, from rank 0."""
        if self.world.is_first:
            tell(message)


def _comparable(stateful: Any) -> Any:
    """What two equal runs have in common: the state, without what was read from a clock."""
    return getattr(stateful, "comparable_state", stateful.state_dict)()


def _words(horizon: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={count}" for name, count in horizon.items())


def _relocated(directory: Path) -> Path:
    """The directory, or its stand-in when a tool runs this program beside the user's real runs."""
    root = os.environ.get(RUN_ROOT_VARIABLE)
    if not root:
        return directory
    absolute = directory.absolute()
    return Path(root) / f"{absolute.name}-{xxhash.xxh3_64_hexdigest(str(absolute).encode())[:8]}"
