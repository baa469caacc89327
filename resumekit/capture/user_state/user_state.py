"""User state of a run as one component: found, compared with what the script made, restored."""

from __future__ import annotations

import builtins
import copy
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from weakref import ReferenceType

from torch import nn

from resumekit.capture.user_state.attributes import (
    Holder,
    Role,
    ValueSlot,
    deleted_slots,
    is_below,
    may_appear,
    moved_state,
)
from resumekit.capture.user_state.decoding import NodeDecoder, device_of
from resumekit.capture.user_state.decoding import label_of as label_of
from resumekit.capture.user_state.digests import TOO_MANY, UncapturedError, has_paths
from resumekit.capture.user_state.encoding import NodeEncoder
from resumekit.capture.user_state.exclusions import is_secret
from resumekit.capture.user_state.memory import Layout, aliases
from resumekit.capture.user_state.module_parts import lines_of_changed_parts, parts_of_modules
from resumekit.capture.user_state.table import UserStateContent
from resumekit.capture.user_state.value_types import (
    SCALARS,
    Absent,
    Kind,
    is_code,
    is_library,
    kind_of,
    parts_in,
)
from resumekit.capture.user_state.walk import Problem, Scope, Seen, Walk, over_limit, paths_of, walk
from resumekit.errors import StateMismatchError
from resumekit.state import (
    AfterRng,
    BeforeSave,
    CaptureLine,
    Checked,
    Fidelity,
    Renamed,
    Renaming,
    Resplit,
    SharingPattern,
    StateComponent,
    WorldChange,
)

_NAMESPACES = (dict, SimpleNamespace)  # of modules and functions: their variables stand alone
# Of functions that are reached later, these are the script's when they are seen for the first time.
_OF_CODE = (Role.GLOBAL, Role.CELL, Role.DEFAULTS)
_MAX_COPIED = 1000  # values of a plain container that is set back to what the script made


class _Changes(NamedTuple):
    """What differs from the baseline.

    Args:
        found: the walk that saw it.
        encoder: has the table that the values refer to.
        values: the encoded values, by path.
        sharing: the layouts of the memory that some of it shares.
        twice: the nodes of what another user state saves as well.
        problems: why others that differ cannot be saved, by path.
    """

    found: Walk
    encoder: NodeEncoder
    sharing: list[Layout]
    twice: list[int]
    values: dict[str, Any]
    problems: dict[str, Problem]


class UserState(Checked, Renamed, BeforeSave, AfterRng):
    """What the attributes of a user's objects hold, where it is not what the script made.

    The state of the objects when this is made is the baseline. At a save, what differs from it is
    saved; at a resume, the saved values are set, and what only this launch has changed is set back.
    A plain value whose baseline differs from that of the former launch stays the script's.

    Args:
        holders: the objects by name; one that needs more than its attributes as a ``Holder``.
        key: the component's key.
        foreign: gives what is saved elsewhere, at any time: models, optimizers, parameters.
        named: gives those that a value may refer to, by the keys of their components.
        transient: attribute paths that are neither saved nor reported, see ``Options``.
        limit_bytes: see ``Options.user_state_limit``.
        grows: holders are added later, so that state of others waits for them.

    Attributes:
        always: the paths of what is saved also where it is what the script made.
        declared: the keys of the components that save the rest of a holder, by its name.
    """

    schema: ClassVar[Any] = UserStateContent

    def __init__(
        self,
        holders: Mapping[str, Any],
        *,
        key: str,
        foreign: Callable[[], Iterable[Any]] = tuple,
        named: Callable[[], Mapping[str, Any]] = dict,
        transient: Collection[str] = (),
        limit_bytes: int = 256 * 10**6,
        grows: bool = False,
    ) -> None:
        self.key = key
        self._grows = grows
        self.always: set[str] = set()
        self._holders = _as_holders(holders)
        self._scope = Scope(foreign, named).limited(transient, limit_bytes)
        self._pending: Mapping[str, Any] | None = None  # as it was loaded
        self._waiting: list[Mapping[str, Any]] = []  # for holders that were not added yet
        self._for_save: _Changes | None = None
        self._paths: dict[int, tuple[str, ReferenceType[Any]]] = {}  # of what the script made
        self._too_large: dict[str, int] = {}  # ids of values of too many objects, by path
        self._began = False
        self._early: Collection[str] = ()  # paths that ``restore_early`` has set
        self.declared: Mapping[str, Collection[str]] = {}
        self._left_alone: Collection[str] = ()
        self._not_made: set[str] = set()  # by the script: objects that a checkpoint has
        self._parts: dict[str, dict[str, str]] = {}  # of modules, before the first batch
        self.objects: Mapping[str, Any] = {}  # that the last walk entered, by path
        self.code: Collection[Any] = ()  # functions and classes that it met and did not enter
        self.saved_twice: Callable[[], Iterable[Any]] = tuple  # gives what another state has
        self._take_baseline()

    def _take_baseline(self) -> Walk:
        self._first: dict[str, Any] = {}  # digests of what the script made, by path
        self._views: dict[str, tuple[Any, ...]] = {}  # whose memory it shares
        self._sorts: dict[str, dict[str, int]] = {}  # of what is no plain value in it
        self._made: dict[str, Any] = {}
        self._known: dict[str, str] = {}
        self._unsaved_from_start: set[str] = set()
        return self.extend_baseline(self._holders)

    @property
    def _baseline(self) -> tuple[dict[str, Any], ...]:
        return self._first, self._views, self._sorts, self._made, self._known

    def configure(self, transient: Collection[str], limit_bytes: int) -> None:
        """Takes these options of the run, see ``__init__``."""
        former = self._scope.limit_bytes
        self._scope = self._scope.limited(transient, limit_bytes)
        if limit_bytes != former:  # what the baseline has of transient paths is not looked at again
            self._take_baseline()

    def lead(self, holders: Mapping[str, Holder], code: Callable[[], Iterable[Any]]) -> None:
        """Takes what no other state of the run has: functions, classes, the globals that they use.

        Args:
            holders: objects of components with attributes that these do not save.
            code: gives the functions and classes that other user states have met.
        """
        self._scope = replace(self._scope, code=code)
        self.extend_baseline({**holders, **self._holders})

    def leave_alone(self, is_left_out: Callable[[str], bool]) -> None:
        """A resume does not change the holders of components whose keys are left out."""
        self._left_alone = {n for n, keys in self.declared.items() if any(map(is_left_out, keys))}

    def add(
        self, holders: Mapping[str, Any], first_of: Callable[[Any, ValueSlot], Any] | None = None
    ) -> None:
        """More holders, as they are now; state that was loaded for them is restored next.

        A name that another object had before is that of the new object from now on.

        Args:
            holders: the objects by name.
            first_of: the digest that a slot of an object had at first; None where it is not known.
        """
        known = {name: each.value for name, each in self._holders.items()}
        new = {n: h for n, h in _as_holders(holders).items() if known.get(n) is not h.value}
        if not new:
            return
        before = self._baseline
        self._holders.update(new)
        found = self._take_baseline()
        for path, each in found.seen.items():
            first = first_of(found.objects[each.owner], each.slot) if first_of else None
            if first not in (None, each.digest) and not has_paths(each.value):
                # Code of the epoch has changed it.
                self._first.pop(path, None)
                self._made.pop(path, None)
        for now, then in zip(self._baseline, before, strict=True):
            now.update((path, each) for path, each in then.items() if not is_below(path, new))
        self._began = False

    def replace(self, holders: Mapping[str, Any]) -> None:
        """Other objects under the same names; what the first ones held stays the baseline."""
        self._holders = _as_holders(holders)
        self._note_known(self._walk())

    def extend_baseline(self, holders: Mapping[str, Any], *, is_script: bool = True) -> Walk:
        """Other objects under these names; values that were not there before are the script's.

        Args:
            holders: the objects by name.
            is_script: False where code that a resume runs again has made the new values, perhaps
                from what a resume restores: those that are not large count as changed.
        """
        self._holders = _as_holders(holders)
        found = self._walk()
        for path, each in found.seen.items():
            if not each.is_known or path in self._first:
                continue
            if is_script or self.is_large(each) or is_code(each.value):
                self._note_first(path, each, found)
                if each.is_plain and _is_small(each.value):
                    self._made[path] = self._kept(each.value)
            else:
                self._sorts.setdefault(path, found.foreign.sorts_in(each.value))
        self._note_known(found)
        alive = {each: path for each, path in self._paths.items() if path[1]() is not None}
        self._paths = {**alive, **paths_of(found.objects)}
        self._unsaved_from_start |= found.unsaved()
        return found

    def _note_known(self, found: Walk, *, but: Collection[str] = ()) -> None:
        """Each launch makes these objects by itself, but for those of a checkpoint."""
        for path, kind in found.kinds().items():
            if path not in self._not_made and not (but and is_below(path, but)):
                self._known.setdefault(path, kind)

    def _note_first(self, path: str, seen: Seen, found: Walk) -> None:
        if path not in self._first:
            self._first[path] = seen.digest
            if seen.views:
                self._views[path] = seen.views
            if not seen.is_plain:
                self._sorts[path] = found.foreign.sorts_in(seen.value)

    def _kept(self, value: Any) -> Any:
        """A plain value as it is now; of containers that are never set back only that they were."""
        if self._grows:
            return value if type(value) in SCALARS else ...
        return copy.deepcopy(value)

    def first_of(self, owner: Any, slot: ValueSlot) -> Any:
        """The digest of what a slot of an object held at first; None where it is not known."""
        path, reference = self._paths.get(id(owner), ("", None))
        is_there = reference is not None and reference() is owner
        return self._first.get(slot.label(path)) if is_there else None

    def is_large(self, seen: Seen) -> bool:
        """Whether a value takes much of what may be saved."""
        return seen.num_bytes > self._scope.limit_bytes // 4

    def live_objects(self) -> Iterable[Any]:
        return self.objects.values()

    def component(self) -> StateComponent:
        """This state as a component; each rank has its own."""
        return StateComponent(self.key, self, SharingPattern.PER_RANK, required=False)

    # ---------------------------------------------------------------- saving

    def before_save(self) -> None:
        """Walks the objects once for the whole save."""
        self._for_save = self._encoded(self._walk())

    def state_dict(self) -> dict[str, Any]:
        """What differs from the baseline; live tensors, not copies."""
        if self._pending is not None:
            return dict(self._pending)
        changes, self._for_save = self._for_save or self._encoded(self._walk()), None
        found, encoded, nodes = changes.found, changes.values, changes.encoder.nodes
        return {
            "slots": [_entry(found.seen[path], value) for path, value in encoded.items()],
            "nodes": json.dumps(nodes, separators=(",", ":")) if nodes else "",
            "data": changes.encoder.data,
            "first": {p: str(self._first[p]) for p in encoded if p in self._made},
            "lost": sorted(changes.problems),
            "holders": {name: {} for name in self._holders},  # without content, so it may be empty
            "waiting": [dict(each) for each in self._waiting],
            **({"sharing": changes.sharing} if changes.sharing else {}),
            **({"twice": changes.twice} if changes.twice else {}),
        }

    def saved_parts(self) -> Iterator[Any]:
        """The values that are saved, and all in them; from ``before_save`` to ``state_dict``."""
        changes = self._for_save
        seen = changes.found.seen if changes else {}
        for path in changes.values if changes else ():
            yield from parts_in(seen[path].value)

    def _encoded(self, found: Walk) -> _Changes:
        """What differs from the baseline, as it is saved."""
        encoder = NodeEncoder(found, self._known)
        changed = found.clusters.with_sharers(self._changed(found), found.seen, self._known)
        values: dict[str, Any] = {}
        problems: dict[str, Problem] = {}
        left = self._scope.limit_bytes
        for path in changed:
            seen = found.seen[path]
            # Of an object with state_dict the attributes count.
            size = 0 if kind_of(seen.value) is Kind.STATEFUL else seen.num_bytes
            if size > left:
                problems[path] = over_limit(size)
                continue
            try:
                values[path] = encoder.encode(seen, self._sorts.get(path, {}))
                left -= size
            except UncapturedError as error:
                if seen.owner not in found.trusted:
                    problems[path] = Problem(str(error))
        problems.update(self._made_foreign(found))
        unsaved = self._owners_of_new_unsaved(found, problems)
        for path in [each for each in values if found.seen[each].owner in unsaved]:
            del values[path]
            problems[path] = Problem(
                f"changed together with {unsaved[found.seen[path].owner]}, which is not saved"
            )
        values = {**aliases(encoder.indices, found.seen, self._known, values), **values}
        sharing = found.clusters.layouts(encoder.placed, found.seen, values)
        twice = {encoder.indices.get(id(each), -1) for each in self.saved_twice()} - {-1}
        return _Changes(found, encoder, sharing, sorted(twice), values, problems)

    def _changed(self, found: Walk) -> list[str]:
        """The slots that differ, of the objects whose slots are saved one by one."""
        changed = [
            path
            for path, each in found.seen.items()
            if each.is_known
            and each.owner in self._known
            and (path not in self._first or self._first[path] != each.digest or path in self.always)
        ]
        return changed + found.moved_views(self._views, self._known)

    def _made_foreign(self, found: Walk) -> Iterator[tuple[str, Problem]]:
        """The slots whose tensor training has made memory that is saved elsewhere, by path."""
        for path in self._first.keys() & found.seen.keys():
            if found.seen[path].is_ignored and found.foreign.has_view(found.seen[path].value):
                yield path, Problem("training made it memory of a model or an optimizer")

    def _owners_of_new_unsaved(
        self, found: Walk, problems: Mapping[str, Problem]
    ) -> dict[str, str]:
        """Objects that training gave something that cannot be saved, with the path of that.

        Its flags or lengths may describe what a resumed launch would not have.
        """
        paths = [path for path in (*found.unsaved(), *problems) if path in found.seen]
        new = (found.seen[path] for path in paths if path not in self._unsaved_from_start)
        objects = (each for each in new if type(found.objects[each.owner]) not in _NAMESPACES)
        return {each.owner: each.slot.label(each.owner) for each in objects}

    def digests(self) -> dict[str, Any]:
        """The digest of each value as it is now, or was at ``before_save``, by path."""
        found = self._for_save.found if self._for_save else self._walk()
        return {path: each.digest for path, each in found.seen.items() if each.is_known}

    def comparable_state(self) -> dict[str, Any]:
        """The digests of what differs, without floats: some are read from a clock."""
        changed = self._changed(self._walk())
        found = walk(self._holders, self._scope, ignore_floats=True, paths=self._paths)
        return {path: str(found.seen[path].digest) for path in changed if path in found.seen}

    def findings(self) -> tuple[CaptureLine, ...]:
        """What the holders have that is not in the checkpoint, by attribute path."""
        changes = self._for_save or self._encoded(self._walk())
        seen = changes.found.seen.items()
        owners = changes.found.objects
        unknown = {
            path: each.problem
            for path, each in seen
            if each.problem and self._is_reported(owners.get(each.owner))
        }
        lines = [each.line(path, Fidelity.UNKNOWN) for path, each in unknown.items()]
        lines += [each.line(path, Fidelity.LOST) for path, each in changes.problems.items()]
        if changes.found.is_cut:
            lines.append(CaptureLine(self.key, Fidelity.UNKNOWN, TOO_MANY))
        of_components = changes.found.foreign.of_components
        lines += lines_of_changed_parts(self._parts, changes.found.objects, of_components)
        return tuple(each for each in lines if not self._scope.is_transient(each.key))

    def _is_reported(self, owner: Any) -> bool:
        """Whether a value of this object that nothing can read is reported.

        Not of objects of libraries, which a training reaches in great numbers.
        """
        is_root = any(owner is each.value for each in self._holders.values())
        is_object = kind_of(owner) in (Kind.OBJECT, Kind.FUNCTION)
        return is_root or not is_object or not is_library(owner)

    # ---------------------------------------------------------------- restoring

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Keeps the state until ``restore_now``: objects may make their attributes first.

        Returns:
            What is not restored.
        """
        begun_otherwise = {p for p, d in state["first"].items() if self._differs_at_start(p, d)}
        slots = [e for e in state["slots"] if label_of(e) not in begun_otherwise]
        self._pending = {**state, "slots": slots}
        messages = []
        if begun_otherwise:
            names = _listed(sorted(begun_otherwise))
            messages.append(
                f"initial value changed in the script: {names}; using the script's value"
            )
        gone = sorted(label_of(each) for each in slots if self._has_gone(each[0]))
        if gone:
            messages.append(f"not in this program, not restored: {_listed(gone)}")
        return tuple(messages)

    def _has_gone(self, owner: str) -> bool:
        """Whether no holder of this launch has the object, or will make it."""
        if owner in self._known:
            return False
        names = [name for name in self._holders if is_below(owner, [name])]
        is_of_model = any(self._holders[name].is_component for name in names)
        return is_of_model or not (names or self._grows)

    def _differs_at_start(self, path: str, digest: str) -> bool:
        return path in self._made and str(self._first[path]) != digest

    def renamed(self, state: Any, renaming: Renaming) -> Any:
        return moved_state(state, self._holders, renaming)

    def start_fresh(self) -> tuple[str, ...]:
        return ()  # a checkpoint without it was written when nothing had changed

    def resplit_state_dict(self, states: Mapping[int, Any], change: WorldChange) -> Resplit:
        return dict(states[change.model_rank]), ()

    def after_rng_restore(self) -> None:
        self.restore_now()

    def restore_early(self) -> tuple[str, ...]:
        """Does ``restore_now`` for code before the first batch, and leaves it to be done again."""
        pending = self._pending
        self._early = self.restore_now()
        self._pending = pending
        return self._early

    def restore_now(self) -> tuple[str, ...]:
        """Sets the saved values in the live objects, once, and records what training starts from.

        To be called in each launch just before the first batch, when all hooks that make objects
        have run. Nothing changes where an object that is needed is missing.

        Returns:
            The paths that were set.

        Raises:
            StateMismatchError: an object whose state was saved is not there.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._waiting = [pending, *pending.get("waiting", ())]
        if self._began and pending is None:
            return ()
        self._began = True
        found = self._walk()
        for path, each in found.seen.items():  # code is the script's as hooks have left it
            if not each.is_known or path in self._early:
                continue
            if is_code(each.value) and not self._grows:
                self._first.pop(path, None)
            if is_code(each.value) or self._scope.code is not None:
                self._note_first(path, each, found)
        restored = [path for saved in self._waiting for path in self._restore(saved, found)]
        waiting = map(self._rest, self._waiting) if self._grows else ()
        self._waiting = [each for each in waiting if each["slots"]]
        self._unsaved_from_start |= found.unsaved()
        self._parts = {**parts_of_modules(found.objects), **self._parts}
        appended = found.listed - self._known.keys()  # not each launch does it here
        self._note_known(found, but=appended)
        return tuple(restored)

    def waiting_paths(self) -> set[str]:
        """The paths of the values that were loaded and are not set yet."""
        states = self._waiting if self._pending is None else [self._pending]
        return {label_of(entry) for each in states for entry in each["slots"]}

    def _rest(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """What of a state is for holders that were not added yet."""
        slots = [each for each in saved["slots"] if not is_below(each[0], self._holders)]
        return {**saved, "slots": slots, "waiting": []}

    def _restore(
        self, saved: Mapping[str, Any], found: Walk, *, skips: bool = False
    ) -> tuple[str, ...]:
        """Sets what a saved state has of the live objects; gives the paths.

        Args:
            saved: the state.
            found: the live objects.
            skips: what needs an object that is not there yet is left out.
        """
        decoder, restored = self._decoded(saved, found, skips=skips)
        if decoder.load_states():  # they may have replaced what their objects refer to
            decoder, restored = self._decoded(saved, self._walk(), skips=skips)
        decoder.run()
        self._not_made.update(decoder.objects)
        self._paths.update(paths_of(decoder.objects))
        return tuple(restored)

    def _decoded(
        self, saved: Mapping[str, Any], found: Walk, *, skips: bool
    ) -> tuple[NodeDecoder, list[str]]:
        """What sets a saved state in the live objects, and the paths that it sets."""
        given = [*self._scope.foreign(), *(each.value for each in self._holders.values())]
        decoder = NodeDecoder(self.key, saved, found, device_of(given))
        restored: list[str] = []
        for entry in saved["slots"]:
            slot = self._slot(entry, found)
            if slot is None:
                continue
            try:
                decoder.restore(slot, entry[3], label_of(entry))
            except StateMismatchError:
                if not skips:
                    raise
            else:
                restored.append(label_of(entry))
        kept = {*restored, *saved["lost"], *saved["first"]}
        for path in [] if self._grows else self._changed(found):
            if path in self._made and path not in kept and is_below(path, saved["holders"]):
                decoder.assign(found.seen[path].slot, copy.deepcopy(self._made[path]))
        return decoder, restored

    def _slot(self, entry: Any, found: Walk) -> ValueSlot | None:
        """The live slot that an entry is for; None where it has gone, or is named no more.

        Raises:
            StateMismatchError: a variable that Python itself sets.
        """
        owner_path, role, name, _ = entry
        owner = found.objects.get(owner_path)
        if isinstance(owner, _NAMESPACES) and name.startswith("__") and name.endswith("__"):
            raise StateMismatchError(
                self.key, found=f"a value of {name}", expected="variables of your functions"
            )
        is_alone = is_below(owner_path, self._left_alone)
        is_left_out = is_alone or self._scope.is_transient(label_of(entry))
        if owner is None or is_left_out or is_secret(name, "text"):
            return None
        slot = ValueSlot(owner, Role(role), name)
        present = found.seen.get(label_of(entry))
        if present is not None:
            return slot if present.slot.role is slot.role else None
        if slot.role is Role.GLOBAL:
            is_name = name in found.names[owner_path] and name not in owner
            return slot if is_name and not hasattr(builtins, name) else None
        is_of_module = slot.role in (Role.BUFFER, Role.PARAMETER) and isinstance(owner, nn.Module)
        may_be_new = is_of_module or slot.role is Role.ATTRIBUTE
        return slot if may_be_new and may_appear(owner, name) else None

    # ---------------------------------------------------------------- helpers

    def _walk(self) -> Walk:
        found = walk(self._holders, self._scope, too_large=self._too_large, paths=self._paths)
        self.objects, self.code = found.objects, found.code.values()
        for path, each in found.seen.items():
            if each.slot.role in _OF_CODE and each.is_known:
                self._note_first(path, each, found)
        gone = deleted_slots({*self._first, *self.always} - found.seen.keys(), found.objects)
        for path, owner, slot in gone:
            found.seen[path] = Seen(slot, owner, Absent(), "deleted", False, False, None)
        self._too_large.update(
            (path, id(each.value))
            for path, each in found.seen.items()
            if each.problem and each.problem.reason == TOO_MANY
        )
        return found


def _as_holders(given: Mapping[str, Any]) -> dict[str, Holder]:
    return {n: each if isinstance(each, Holder) else Holder(each) for n, each in given.items()}


def _is_small(value: Any) -> bool:
    return not isinstance(value, (list, tuple, dict, set)) or len(value) <= _MAX_COPIED


def _entry(seen: Seen, value: Any) -> list[Any]:
    return [seen.owner, seen.slot.role.value, seen.slot.name, value]


def _listed(names: list[str], num: int = 3) -> str:
    more = len(names) - num
    return ", ".join(names[:num]) + (f" and {more} more" if more > 0 else "")
