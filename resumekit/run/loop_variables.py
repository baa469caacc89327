"""The variables of a running loop: saved at a fetch, set at the same fetch of the next launch.

A save is made inside the fetch of a batch, while the user's functions are on the stack. What the
rest of the run needs of them are the variables that are live after that call, and what these reach.
``epochs()`` is a fetch too: the code between it and the first batch runs again after a resume
inside the epoch, with the variables that it had when the epoch began.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from types import CodeType, SimpleNamespace
from typing import Any, ClassVar
from weakref import ref

import numpy as np
from torch import Tensor, nn

from resumekit.capture.nested_state import class_name
from resumekit.capture.slots import is_training, slot_of
from resumekit.capture.user_state.attributes import Holder
from resumekit.capture.user_state.user_state import UserState, label_of
from resumekit.capture.user_state.value_types import SCALARS, is_code, is_leaf_module, is_left_out
from resumekit.capture.user_state.walk import Paths, Seen, Walk
from resumekit.errors import StateMismatchError
from resumekit.live.counts_and_operands import (
    EnumerateCounts,
    Enumerations,
    count_line,
    find_asked,
    has_operands,
    is_counter,
    move_progress_bars,
    moved_ranges,
    operand_lines,
    range_positions,
)
from resumekit.live.frames import (
    LiveFrame,
    Site,
    find_frames,
    name_frames,
    state_variables,
    variables_by_path,
)
from resumekit.log import logger
from resumekit.run.garbage_collector import collector_paused
from resumekit.run.progress import OwnLoop
from resumekit.run.unsaved_changes import (
    Bindings,
    ProcessSettings,
    Rebindings,
    has_loop,
    loaders_at,
    paths_of_loaders,
)
from resumekit.run.variables_state import VariablesContent
from resumekit.state import CaptureLine, Fidelity, Resplit, Slot, WorldChange

# Plain values: all that is kept of the variables at an epoch's start. The rest is read at the save.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.ndarray, np.generic)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_MAX_DEPTH = 100  # of containers in each other
_MAX_NESTED = 1000  # values of a container that is looked through for others

_AT_EPOCH = "@epoch"  # ends the name of a frame's variables as they were when the epoch began

RESTORE, REPORT, OFF = "restore", "report", "off"


class LoopVariables(UserState):
    """The component ``variables``: of the user's running functions, with all that they reach.

    Args:
        mode: the option ``loop_variables``.
        foreign: gives what other components save.
        named: gives the models, optimizers and the like among it, by their keys.
    """

    schema: ClassVar[Any] = VariablesContent

    def __init__(
        self,
        mode: str,
        *,
        foreign: Callable[[], Iterable[Any]],
        named: Callable[[], Mapping[str, Any]],
    ) -> None:
        super().__init__({}, key=Slot.VARIABLES.value, foreign=foreign, named=named, grows=True)
        self._roots: Mapping[str, Holder] = {}
        self._mode = mode
        self._owner: Callable[[], Any] = lambda: None
        self._saved: Mapping[str, Any] | None = None  # of the checkpoint, until its fetch is found
        self._has_batch = False  # this launch has handed out a batch
        self._at_epoch: dict[str, Holder] = {}
        self._has_operands = False  # a value that was read when the epoch began lies on a stack
        # Plain attributes when the epoch began, by path; None in the first epoch of a launch.
        self._numbers_at_epoch: dict[str, Any] | None = None
        self._sites: list[dict[str, Any]] = []  # of the frames that are saved
        self._lines: dict[str, CaptureLine] = {}  # about frames
        self._last_fetch: dict[CodeType, int] = {}  # the instruction of each function on the stack
        self._epoch_fetch: dict[CodeType, int] = {}  # the same, of the last epochs()
        self._epoch_sites: list[dict[str, Any]] = []
        self._has_left = False  # the loop, by break
        self._entered: set[tuple[Site, ...]] = set()  # of the loops that were looked at
        self._stored: Set[str] = set()  # paths of variables that functions may still write
        self._num_elsewhere = 0  # fetches in a row with which no loop began
        self._before_epoch: Paths | None = None  # of the objects that were there before epochs()
        self._settings: ProcessSettings | None = None  # as the script has made them
        self._rebindings = Rebindings()
        self._variables: dict[str, Any] = {}  # all live ones during a save, by path
        self._ranges: dict[str, int] = {}  # the positions at the first fetch, by line
        self._ranges_now: dict[str, int] = {}  # those at a later one
        self._has_counters = False  # an `enumerate` was around a fetch
        self._counts: EnumerateCounts | None = None  # of the fetch that is saved
        self._epoch_counts: EnumerateCounts | None = None  # of the last epochs()

    # ---------------------------------------------------------------- fetches

    @property
    def is_waiting(self) -> bool:
        """Whether the next batch is the first one, or variables are still to be set."""
        return self._mode != OFF and (not self._has_batch or self._saved is not None)

    def lead(self, holders: Mapping[str, Holder], code: Callable[[], Iterable[Any]]) -> None:
        self._roots = holders
        self._scope = replace(self._scope, code=code)

    def turn_off(self) -> None:
        """The loop is a framework's: there are no variables of the user's."""
        self._mode = OFF

    def enter(self, owner: Any, *, gives_batches: bool = True) -> None:
        """A loop is asked for the first time: what the script has made so far is the baseline.

        Args:
            owner: what the script calls its run, the Checkpointer.
            gives_batches: the loop is none over ``epochs()``.
        """
        if self._mode == OFF:
            return
        self._owner = ref(owner)
        self._has_left = False
        frames = self._frames()
        self._last_fetch = {each.code: each.lasti for each in frames}
        self._sites = [each.site.as_plain() for each in frames]
        chain = tuple(each.site for each in frames)
        is_new = chain not in self._entered
        has_count = is_new and bool(Enumerations.around(self._asked(frames)).found)
        self._has_counters = self._has_counters or has_count
        found: Walk | None = None
        if not self._has_batch:
            self._settings = ProcessSettings()
            is_script = not self._epoch_fetch  # an epoch's first lines run again after a resume
            found = self.extend_baseline(self._all_holders(frames), is_script=is_script)
        if gives_batches:
            self._rebindings.enter(self._bound_now(frames, found))
        if is_new:
            self._entered.add(chain)
            self._ranges = {**range_positions(frames, owner), **self._ranges}
            given = {id(each) for each in (owner, *self._scope.foreign())}
            self._note(operand_lines(frames, owner, has_count=has_count, given=given))
            self._has_operands = self._has_operands or has_operands(frames)
        self._release()
        if found is not None:
            self._for_save = self._encoded(found)  # for the report of the start

    def objects_before_epoch(self) -> dict[int, Any] | None:
        """What variables reached before the first epoch of ``epochs()``, by id; None without it."""
        if self._before_epoch is None:
            return None
        found = ((each, ref()) for each, (_, ref) in self._before_epoch.items())
        return {each: value for each, value in found if value is not None}

    def end_epoch(self) -> None:
        """``epochs()`` is asked for the next epoch."""
        self._at_epoch, self._epoch_counts = {}, None
        self._rebindings.end_epoch()

    @collector_paused()
    def begin_epoch(self) -> None:
        """``epochs()`` is about to give an epoch: sets variables, and records those of now."""
        if self._mode == OFF:
            return
        frames = self._frames()
        if self._before_epoch is None:
            self._before_epoch = dict(self._paths)
        self._epoch_fetch = {each.code: each.lasti for each in frames}
        self._epoch_sites = [each.site.as_plain() for each in frames]
        later = set() if self._saved is None else self._set(frames, is_batch=False)
        self._epoch_counts = self._counts_of(frames)
        self._at_epoch = {}
        for name, holder in self._holders_of(frames).items():
            now = vars(holder.value).items()
            plain = {k: v for k, v in now if _is_plain(v) and f"{name}.{k}" not in later}
            self._at_epoch[f"{name}{_AT_EPOCH}"] = Holder(SimpleNamespace(**plain))
        if self._has_operands and self._has_batch:
            self._holders = self._all_holders(frames)
            seen = self._walk().seen
            numbers = {p: e.value for p, e in seen.items() if type(e.value) in SCALARS}
            self._numbers_at_epoch = numbers
        least = 2 if self._has_batch else 1  # the script may have opened one beside the loop
        self._rebindings.begin_epoch(self._bound_now(frames, least=least))
        self._release()

    @collector_paused()
    def hand_out(self, *, is_over: bool = False) -> None:
        """The loop is about to get a batch, or to end: sets the variables of a checkpoint.

        Args:
            is_over: the run is finished: no batch follows.

        Raises:
            StateMismatchError: another line than that of the checkpoint requests the batch.
        """
        self._has_batch = True
        if self._saved is not None:
            self._set(self._frames(), is_batch=not is_over, is_over=is_over)
            self._saved = None
        self._release()

    def _all_holders(self, frames: Sequence[LiveFrame]) -> dict[str, Holder]:
        return {**self._roots, **self._holders_of(frames)}

    def _holders_of(self, frames: Sequence[LiveFrame]) -> dict[str, Holder]:
        """The live variables of each frame, but for loops and counts that are saved otherwise."""
        named = name_frames(frames)
        asked = self._asked(frames) if self._has_counters else ()
        holders: dict[str, Holder] = {}
        for name, values in state_variables(frames).items():
            kept = {k: v for k, v in values.items() if not (has_loop(v) or is_counter(v, asked))}
            holders[name] = Holder(SimpleNamespace(**kept), frame=named[name].frame)
        return holders

    def _frames(self) -> list[LiveFrame]:
        owner = self._owner()
        at = self._last_fetch if self._has_left else None
        # CPython documents sys._getframe for such use.
        if owner is None:
            return []
        return find_frames(owner, sys._getframe(1), at=at, is_passed_over=is_leaf_module)

    def leave(self, *, is_epoch_over: bool) -> None:
        """The loop was left by ``break``: a save continues at its fetch.

        Args:
            is_epoch_over: it had used up its epoch, so that ``epochs()`` gives the next one.
        """
        self._has_left = True
        if is_epoch_over and self._epoch_fetch:
            self._last_fetch, self._sites = self._epoch_fetch, self._epoch_sites
            self._at_epoch = {}

    def _release(self) -> None:
        """Releases all values of frames: no batch outlives its fetch because of this."""
        self._holders, self.objects, self._for_save, self._variables = {}, {}, None, {}

    def _bound_now(
        self, frames: Sequence[LiveFrame], found: Walk | None = None, *, least: int = 2
    ) -> Bindings:
        """The loops and datasets that variables refer to.

        None where fewer loaders than ``least`` are open, and ``datasets`` is not imported.
        """
        owner = self._owner()
        if owner is None or (len(owner._sources) < least and "datasets" not in sys.modules):
            return Bindings()
        if found is None:
            self._holders = self._all_holders(frames)
            found = self._walk()
        return Bindings.among(found, variables_by_path(frames) if frames else self._variables)

    def _rebound(self, found: Walk) -> Iterator[CaptureLine]:
        """A line for each variable that training has rebound to another loop or dataset.

        Not while a loader beside the loop is asked, perhaps by a function of the loop's body.
        """
        if tuple(map(Site.from_plain, self._sites)) not in self._entered:
            return iter(())
        lines = self._rebindings.lines(self._bound_now((), found))
        return (each for each in lines if not self._scope.is_transient(each.key))

    def _asked(self, frames: Sequence[LiveFrame]) -> list[Any]:
        """What is being asked for an item, where a fetch is under way and its counts are saved."""
        if not frames or self._has_left or self._mode != RESTORE:
            return []
        return find_asked(OwnLoop, sys._getframe(1), frames[-1].frame)

    def _counts_of(self, frames: Sequence[LiveFrame]) -> EnumerateCounts | None:
        """The counts around the fetch; None where they are not known."""
        return Enumerations.around(self._asked(frames)).as_plain() if self._has_counters else None

    # ---------------------------------------------------------------- saving

    def before_save(self) -> None:
        frames = self._frames()
        self._take(frames)
        self._counts = self._counts_of(frames)
        self._note_other_fetch(frames, is_save=True)
        super().before_save()

    def look(self) -> None:
        """Looks at a fetch of the loop in the first steps of a launch, without a save."""
        self._note_other_fetch(self._frames(), is_save=False)

    def _take(self, frames: Sequence[LiveFrame]) -> None:
        named = name_frames(frames).items()
        self._stored = {f"{name}.{each}" for name, frame in named for each in frame.stored}
        self._holders = {**self._all_holders(frames), **self._at_epoch} if frames else {}
        self._known.update((name, class_name(each.value)) for name, each in self._holders.items())
        self._variables = variables_by_path(frames)
        self._note(self._deleted(frames))
        if not self._has_left:
            self._sites = [each.site.as_plain() for each in frames]
            return
        names = {each.site.name for each in frames}
        for site in map(Site.from_plain, self._sites):
            if site.name not in names:
                reason = "variables are not in this checkpoint: the loop was left before the save"
                self._note([CaptureLine(site.name, Fidelity.LOST, reason)])

    def _deleted(self, frames: Sequence[LiveFrame]) -> Iterator[CaptureLine]:
        """A line for each variable that the script sets and training has deleted."""
        for name, frame in name_frames(frames).items():
            for each in sorted(frame.names - frame.variables().keys()):
                if f"{name}.{each}" in self._first:
                    reason = "training deleted this variable; set it to None instead"
                    yield CaptureLine(f"{name}.{each}", Fidelity.LOST, reason)

    def _changed_settings(self) -> Iterator[CaptureLine]:
        code = self._for_save.found.entered if self._for_save else ()
        return self._settings.lines(code) if self._settings else iter(())

    def _not_given(self, found: Walk) -> Iterator[CaptureLine]:
        """A line for each object of a framework that trains and that no component saves."""
        ignored = {
            id(each.value): each for each in reversed(found.seen.values()) if each.is_ignored
        }
        given = {id(each) for each in self._scope.foreign()} if ignored else set()
        for each in ignored.values():
            value = each.value
            slot = slot_of(value) if is_left_out(value) and id(value) not in given else None
            if slot is not None and is_training(value, given):
                reason = f"a {type(value).__name__} that was not given; pass it to the run"
                yield CaptureLine(f"{slot.value}/{each.slot.name}", Fidelity.LOST, reason)

    def _note_other_fetch(self, frames: Sequence[LiveFrame], *, is_save: bool) -> None:
        """A line where a resume would not continue at this fetch: of another line, or in a range.

        Before a save one such fetch is none yet: ``except StopIteration`` may request the first
        batch of an epoch in a line of its own.
        """
        chain = tuple(each.site for each in frames)
        is_elsewhere = bool(chain) and not self._has_left and chain not in self._entered
        self._num_elsewhere = self._num_elsewhere + 1 if is_elsewhere else 0
        if is_elsewhere and (is_save or self._num_elsewhere > 1):
            where = f"{chain[0].file}:{chain[0].line}"
            reason = "a resume cannot continue here: another line requests the first batch"
            self._note([CaptureLine(where, Fidelity.LOST, reason)])
        self._ranges_now = {} if self._has_left else range_positions(frames, self._owner())
        self._note(moved_ranges(self._ranges, self._ranges_now))

    def _note(self, lines: Iterable[CaptureLine]) -> None:
        self._lines.update((line.key, line) for line in lines)

    def state_dict(self) -> dict[str, Any]:
        """What differs from what the script made, or was restored; live tensors, not copies."""
        if self._saved is not None:
            return dict(self._saved)
        at_epoch = self._at_epoch_start() if self._at_epoch else []
        changes = self._for_save = self._for_save or self._encoded(self._walk())
        found = super().state_dict()
        saved = {label_of(entry) for entry in found["slots"]}
        name_of = changes.found.foreign.name_of
        digests = {
            path: str(each.digest)
            for path, each in changes.found.seen.items()
            if each.is_known and (each.owner in self._holders or path in saved)
            if name_of(each.value) is None
        }
        if self._mode != RESTORE:
            found = {**found, "slots": [], "nodes": "", "data": [], "lost": [], "sharing": []}
        self._release()
        # A value that training has written is the checkpoint's, whatever the script begins with.
        script: dict[str, Any] = {"sites": self._sites, "digests": digests}
        owner = self._owner()
        if self._epoch_fetch and owner is not None:  # an epoch has first lines
            script["loaders"] = paths_of_loaders(owner._sources, self._paths)
        around = {
            "counts": self._counts,
            "epoch_counts": self._epoch_counts,
            "ranges": self._ranges_now,
        }
        script.update((name, each) for name, each in around.items() if each)
        return {**found, "first": {}, "at_epoch": at_epoch, "script": script}

    def loaders(self) -> dict[str, Any]:
        """The loaders of a checkpoint that variables lead to, by name, until it is restored.

        The first lines of an epoch may change what they hold before their first batch.
        """
        saved = {} if self._saved is None else self._saved["script"].get("loaders", {})
        return loaders_at(saved, self._paths)

    def _at_epoch_start(self) -> list[list[Any]]:
        """The plain values that attributes had when the epoch began, where they have others now."""
        if not self._has_operands or self._for_save is None:
            return []
        then = self._made if self._numbers_at_epoch is None else self._numbers_at_epoch
        seen, changed = self._for_save.found.seen, self._for_save.values
        return [
            [seen[path].owner, seen[path].slot.role.value, seen[path].slot.name, then[path]]
            for path in changed
            if seen[path].owner not in self._holders and type(then.get(path, [])) in SCALARS
        ]

    def _changed(self, found: Walk) -> list[str]:
        """Without variables that are the script's, and were when the epoch began.

        A variable that the function may still write is saved, whatever value it has: code that a
        resume runs again may compute another one from what was restored.
        """
        changed = [
            path
            for path in super()._changed(found)
            if _AT_EPOCH not in path
            or self._first.get(path.replace(_AT_EPOCH, "", 1)) != found.seen[path].digest
        ]
        written = self._stored & found.seen.keys() - {*changed} if self._mode == RESTORE else ()
        return [*changed, *(path for path in sorted(written) if self._may_differ(found.seen[path]))]

    def _may_differ(self, seen: Seen) -> bool:
        return seen.is_known and not self.is_large(seen) and not is_code(seen.value)

    def findings(self) -> tuple[CaptureLine, ...]:
        if self._mode == OFF or self._saved is not None:
            return tuple(self._lines.values())
        is_saving = self._for_save is not None
        if not is_saving:
            self._take(self._frames())
        found = self._changes()
        if not is_saving:
            self._release()
        return (*self._lines.values(), *found)

    def _changes(self) -> tuple[CaptureLine, ...]:
        changes = self._for_save = self._for_save or self._encoded(self._walk())
        self._note((*self._not_given(changes.found), *self._rebound(changes.found)))
        if self._mode == RESTORE:
            return (*super().findings(), *self._changed_settings())
        reason = 'not saved; pass loop_variables="restore"'
        return tuple(CaptureLine(path, Fidelity.LOST, reason) for path in changes.values)

    def comparable_state(self) -> dict[str, Any]:
        """Nothing: of what they decide all is compared, and some are read from a clock."""
        return {}

    # ---------------------------------------------------------------- restoring

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Keeps the state until the fetch that it was saved at."""
        self._saved = dict(state) if self._mode == RESTORE else None
        return ()

    def resplit_state_dict(self, states: Mapping[int, Any], change: WorldChange) -> Resplit:
        """What was the same on the former ranks; values of single ranks have no meaning now."""
        former = states[change.model_rank]
        mine = former["script"]["digests"].items()
        others = [each["script"]["digests"] for each in states.values()]
        differs = {path for path, d in mine if any(d != each.get(path) for each in others)}
        slots = [each for each in former["slots"] if label_of(each) not in differs]
        lost = sorted(differs & set(map(label_of, former["slots"])))
        message = f"variables that differed between the ranks are not restored: {', '.join(lost)}"
        return {**former, "slots": slots}, (message,) if lost else ()

    def after_rng_restore(self) -> None:
        pass  # the fetch restores

    def _set(
        self, frames: Sequence[LiveFrame], *, is_batch: bool, is_over: bool = False
    ) -> set[str]:
        """Sets what the checkpoint has of the running functions.

        Args:
            frames: of the fetch.
            is_batch: a batch follows: nothing can be set later.
            is_over: the run is finished: some objects may not be made any more.

        Returns:
            Paths of variables that have a value of later than the start of the epoch.
        """
        assert self._saved is not None
        saved = self._saved
        sites = [Site.from_plain(each) for each in saved["script"]["sites"]]
        matches = [f.site.matches(s) for f, s in zip(frames, sites, strict=False)]
        # The frames of both: further out, a chain may end where the Checkpointer has another name.
        further = {each.name for each in sites[len(frames) :]}
        is_whole = bool(matches) and not any(each[0] in further for each in saved["slots"])
        is_there = is_whole and "other" not in matches
        if is_batch and not is_there and saved["slots"]:
            raise _elsewhere(frames, sites)
        found = self.extend_baseline(
            {**self._all_holders(frames), **self._at_epochs_of(frames)},
            is_script=not (is_batch and self._epoch_fetch),
        )
        named, slots = name_frames(frames), saved["slots"]
        if not is_there or "edited" in matches:
            slots = [each for each in slots if _is_read(each, named)]
        made = {name: frame.variables() for name, frame in named.items()}
        restored = {*self._restore({**saved, "slots": slots}, found, skips=is_over or not is_there)}
        if not is_there:
            self._restore({**saved, "slots": saved["at_epoch"]}, self._walk(), skips=True)
        later: set[str] = set()
        for name, frame in named.items():
            values = self._values(name, restored)
            if not (is_there or is_over):
                then, known = f"{name}{_AT_EPOCH}", saved["script"]["digests"]
                begun = {each for each in values if f"{then}.{each}" in known}
                later.update(f"{name}.{each}" for each in values.keys() - begun)
                # Those that are not in the checkpoint were what the script has made again.
                kept = {k: v for k, v in made[name].items() if k in begun and type(v) in SCALARS}
                values = {**values, **kept, **self._values(then, restored)}
            frame.set(values)
        if self._has_counters and not is_over:
            counts = saved["script"].get("counts" if is_there else "epoch_counts")
            self._set_counts(frames, counts if is_there or not is_batch else None)
        if not is_over:
            move_progress_bars(self._asked(frames))
        if is_there:
            self._saved = None
            self._note_edited(saved)
            self._note(moved_ranges(saved["script"].get("ranges", {}), self._ranges))
        return later

    def _set_counts(self, frames: Sequence[LiveFrame], saved: EnumerateCounts | None) -> None:
        """Sets the counts around the fetch; a line where that is not possible."""
        if not Enumerations.around(self._asked(frames)).set(saved):
            self._note([count_line(frames[0], "enumerate")])

    def _note_edited(self, saved: Mapping[str, Any]) -> None:
        """One line on values that the script begins with and that are others than they were."""
        written = {*map(label_of, saved["slots"]), *saved["lost"]}
        script = saved["script"]["digests"].items()
        changed = [p for p, digest in script if str(self._first.get(p, digest)) != digest]
        edited = [p for p in changed if p not in written and not self._is_resumed_step(p)]
        if edited:
            logger.info("changed in the script: %s; using the script's value", ", ".join(edited))

    def _is_resumed_step(self, path: str) -> bool:
        """Whether a variable has the step that the run resumes at, as from ``resume().step``."""
        frame, _, name = path.rpartition(".")
        holder, owner = self._holders.get(frame), self._owner()
        value = getattr(holder.value, name, None) if holder else None
        return type(value) is int and owner is not None and value == owner.progress.step

    def _at_epochs_of(self, frames: Sequence[LiveFrame]) -> dict[str, Holder]:
        return {f"{name}{_AT_EPOCH}": Holder(SimpleNamespace()) for name in name_frames(frames)}

    def _values(self, name: str, restored: Iterable[str]) -> dict[str, Any]:
        """The restored variables of one frame."""
        items = vars(self._holders[name].value).items()
        return {each: value for each, value in items if f"{name}.{each}" in restored}


def _is_read(entry: Sequence[Any], frames: Mapping[str, LiveFrame]) -> bool:
    """Whether a saved slot is none of a frame's variables, or one that the frame reads later."""
    owner, _, name, _ = entry
    frame = frames.get(owner.removesuffix(_AT_EPOCH))
    return frame is None or name in frame.names


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether it holds plain values alone; a result would keep its activations."""
    if isinstance(value, Tensor):
        return isinstance(value, nn.Parameter) or not value.requires_grad
    if depth > _MAX_DEPTH or type(value) not in _CONTAINERS:
        return isinstance(value, _PLAIN)
    items = [*value.values()] if isinstance(value, dict) else [*value]
    return len(items) <= _MAX_NESTED and all(_is_plain(each, depth + 1) for each in items)


def _elsewhere(frames: Sequence[LiveFrame], sites: Sequence[Site]) -> StateMismatchError:
    def shown(chain: Sequence[Site]) -> str:
        named = (f"{each.function} ({each.file}:{each.line})" for each in chain)
        return " in ".join(named) or "no user function"

    return StateMismatchError(
        Slot.VARIABLES.value,
        found=f"the first batch is requested by {shown([each.site for each in frames])}",
        expected=f"{shown(sites)}, as when the checkpoint was written",
        remedy='Request it there, or pass exclude={"variables"} to leave variables as they are',
    )
