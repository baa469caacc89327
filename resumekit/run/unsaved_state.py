"""Reports what the loop of the user needs and no component holds."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any
from weakref import ref

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler

from resumekit.analysis import (
    Function,
    Located,
    LoopCarried,
    Program,
    Role,
    Variable,
    function_of,
    loop_at,
    loop_carried,
    program_of,
    stored_keys,
)
from resumekit.capture import (
    REMEDIES,
    SavedObjects,
    Unconfirmed,
    content_digest,
    not_given,
    slot_of,
)
from resumekit.log import logger
from resumekit.run.options import Options
from resumekit.run.user_frames import Activation, calling_location, running_functions
from resumekit.state import CaptureLine, Fidelity, Slot

# Objects are compared with what they were at the start after so many steps of this process, and at
# every save.
_NUM_STEPS = 2


_TRAINING_KINDS = (nn.Module, Optimizer, LRScheduler, DataLoader, Sampler)
_TRAINING_PACKAGES = frozenset({"accelerate", "deepspeed", "resumekit"})
_LOGGING_PACKAGES = frozenset(
    {"io", "logging", "mlflow", "rich", "tensorboard", "tensorboardX", "tqdm", "wandb", "_io"}
)
_NO_STATE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
_IMMUTABLE = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))
_MISSING = object()


@dataclass(eq=False)
class _Candidate:
    """An object that the loop may change, until its content is seen to have changed."""

    location: str
    name: str
    value: Any
    digest: int


class UnsavedState:
    """Reports loop-carried variables, and objects of the script that the run was not given.

    Each loop of the user is analysed once; what is found is confirmed on the objects.

    Args:
        options: of the run.
        extras: the user's live dict.
        saved: gives what the checkpoints of the run hold, at any time.

    Attributes:
        remedies: how the adapter takes an object that it was not given, by slot.
    """

    def __init__(
        self, options: Options, extras: Mapping[Any, Any], saved: Callable[[], SavedObjects]
    ) -> None:
        self._options = options
        self._extras = extras
        self._transient = frozenset(options.transient)
        self._saved = saved
        self._entered: set[tuple[CodeType, int]] = set()
        self._given = SavedObjects()  # while a loop is entered
        self._modules: Sequence[nn.Module] = ()  # that were saved when the last loop was entered
        self._objects: dict[str, CaptureLine] = {}  # that were not given
        self._unconfirmed: list[Unconfirmed] = []
        self._lines: list[CaptureLine] = []  # about loops
        self._candidates: list[_Candidate] = []
        self._copies: dict[str, Any] = {}  # values of extras that the loop may leave stale
        self._made_by_caller = _objects_of_caller()
        self._num_steps = 0
        self.remedies: Mapping[Slot, str] = REMEDIES

    def enter(self, run: Any) -> None:
        """A loop asks for its first batch. Reads the running functions, once for each loop.

        Args:
            run: what the script calls its run, the Checkpointer.
        """
        location = calling_location()
        if location is None or location in self._entered:
            return
        self._entered.add(location)
        functions = running_functions(run)
        self._given = self._saved()
        self._modules = self._given.modules
        alive = {name: each() for name, each in self._made_by_caller.items()}
        self._made_by_caller = {}
        for variables in (*map(_variables, functions), alive):
            self._find_objects(variables)
        left: Sequence[Activation] = functions
        while left:
            try:
                left = self._enter_file(left, is_innermost=len(left) == len(functions))
            except Exception:  # noqa: BLE001 - no source may stop a run
                where = f"{Path(left[0].code.co_filename).name}:{left[0].line}"
                logger.debug("%s: the loop could not be analysed", where, exc_info=True)
                self._lines.append(_unknown(where, "the analysis of the loop failed"))
                left = left[1:]
        self._given = SavedObjects()

    def lines(self) -> list[CaptureLine]:
        """What is known by now; called for every capture report."""
        self._confirm()
        return [*self._objects.values(), *self._lines]

    def after_step(self) -> bool:
        """Looks after the first steps which objects have changed; True if some have."""
        if self._num_steps == _NUM_STEPS:
            return False
        self._num_steps += 1
        known = len(self._objects) + len(self._lines)
        if self._num_steps == _NUM_STEPS:
            self._confirm_copies()
        return len(self.lines()) > known

    def _find_objects(self, variables: Mapping[str, Any]) -> None:
        wanted = {n: v for n, v in variables.items() if n not in self._transient}
        lines, unconfirmed = not_given(wanted, self._given, self.remedies)
        self._objects.update((line.key, line) for line in lines)
        known = {id(each.value) for each in self._unconfirmed}
        self._unconfirmed += [each for each in unconfirmed if id(each.value) not in known]

    def _confirm(self) -> None:
        """Reports the objects whose content has changed since the loop was entered."""
        seen = [each for each in self._candidates if self._digest(each.value) != each.digest]
        if seen:
            self._candidates = [each for each in self._candidates if each not in seen]
            saved = self._saved()
            for each in seen:
                if not saved.saves(each.value):  # an optimizer may train it by now
                    advice = _keep([each.name])
                    self._report(f"{each.location} {each.name}", f"not in the checkpoint. {advice}")
        changed = [each for each in self._unconfirmed if each.has_changed()]
        self._unconfirmed = [each for each in self._unconfirmed if each not in changed]
        self._objects.update((each.line.key, each.line) for each in changed)

    def _confirm_copies(self) -> None:
        """Reports the values of ``extras`` that are still those from before the loop."""
        for name, value in self._copies.items():
            if self._extras.get(name, _MISSING) is value:
                self._report(
                    f"extras/{name}",
                    f"a copy of {name} from before the loop. "
                    f'Write extras["{name}"] = {name} in the loop.',
                )
        self._copies = {}

    # ---------------------------------------------------------------- one file

    def _enter_file(
        self, functions: Sequence[Activation], *, is_innermost: bool
    ) -> Sequence[Activation]:
        """Analyses the innermost function and its callers in the same file; gives the others."""
        first = functions[0]
        name = Path(first.code.co_filename).name
        located = _located(first)
        if located is None:
            if is_innermost:
                reason = "the source of the loop cannot be read"
                self._lines.append(_unknown(f"{name}:{first.line}", reason))
            return functions[1:]
        callers, running = _callers(located, functions)
        if located.loop is not None:
            found = loop_carried(
                located.program,
                located.function,
                located.loop,
                callers=[(function, each.line) for function, each in callers],
                live=lambda path: self._role(_value_of(path, running, first)),
                with_logged=bool(self._extras) or logger.isEnabledFor(logging.DEBUG),
            )
            location = f"{name}:{located.loop.lineno}"
            self._note(location, found, located.program, lambda p: _value_of(p, running, first))
        return functions[1 + len(callers) :]

    def _note(
        self,
        location: str,
        found: LoopCarried,
        program: Program,
        value_of: Callable[[str], Any],
    ) -> None:
        kept = {key for path, key in stored_keys(program) if value_of(path) is self._extras}
        names = []
        for each in found.variables:
            value = value_of(each.path)
            if isinstance(value, _NO_STATE) or self._is_silent(each, kept, value_of):
                continue
            is_object = not each.is_rebound and value is not _MISSING
            if not (is_object and self._watch(location, each.name, value)):
                names.append(each.name)
        for each in found.asked:
            value = value_of(each.path)
            is_plain = isinstance(value, (*_NO_STATE, *_IMMUTABLE)) or value is _MISSING
            is_known = is_plain or self._role(value) is not Role.NONE
            if not (is_known or self._is_silent(each, kept, value_of)):
                self._watch(location, each.name, value)
        if names:
            self._report(location, f"not in the checkpoint: {', '.join(names)}. {_keep(names)}")
        self._note_indices(location, found)
        self._note_copies(found, kept)
        if found.only_logged:
            logged = ", ".join(each.name for each in found.only_logged)
            logger.debug("%s: not in the checkpoint, only logged: %s", location, logged)

    def _watch(self, location: str, name: str, value: Any) -> bool:
        """Compares an object later; False where its content has no digest."""
        digest = self._digest(value)
        if digest is not None:
            self._candidates.append(_Candidate(location, name, value, digest))
        return digest is not None

    def _note_indices(self, location: str, found: LoopCarried) -> None:
        for index in found.relative_indices:
            if index not in self._transient:
                self._report(
                    f"{location} {index}",
                    f"{index} starts again after a resume and decides something. "
                    "Write enumerate(batches, start=batches.initial).",
                    fidelity=Fidelity.UNKNOWN,
                )

    def _note_copies(self, found: LoopCarried, kept: set[str]) -> None:
        for each in (*found.variables, *found.only_logged):
            key = _last(each.name)
            if not each.is_rebound or key in kept or each.name in self._transient:
                continue
            if key in self._extras and isinstance(self._extras[key], _IMMUTABLE):
                self._copies[key] = self._extras[key]

    def _digest(self, value: Any) -> int | None:
        """Of what an object holds beside what the run saves."""
        limit_bytes = self._options.user_state_limit
        return content_digest(value, limit_bytes=limit_bytes, foreign=self._modules)

    def _is_silent(
        self, variable: Variable, kept: set[str], value_of: Callable[[str], Any]
    ) -> bool:
        """Whether the user or the run saves a variable, or it need not be saved."""
        names = {variable.name, _last(variable.name)}
        owners = _owners(variable.path, value_of)
        return bool(names & (self._transient | kept | set(self._extras))) or any(
            map(self._given.saves_attributes_of, owners)
        )

    def _role(self, value: Any) -> Role | None:
        if value is _MISSING:
            return None
        if self._given.saves(value) or isinstance(value, _TRAINING_KINDS):
            return Role.TRAINING
        package = type(value).__module__.partition(".")[0]
        if package in _TRAINING_PACKAGES:
            return Role.TRAINING
        is_writer = type(value).__module__.startswith("torch.utils.tensorboard")
        if package in _LOGGING_PACKAGES or is_writer:
            return Role.LOGGING
        return Role.NONE

    def _report(self, key: str, reason: str, *, fidelity: Fidelity = Fidelity.LOST) -> None:
        self._lines.append(CaptureLine(key, fidelity, reason, is_at_source=True))


def _objects_of_caller() -> dict[str, ref[Any]]:
    """Models, optimizers and the like in the function that makes the Checkpointer."""
    functions = running_functions()[:1]
    return {
        name: ref(value)
        for each in functions
        for name, value in _variables(each).items()
        if slot_of(value) is not None
    }


def _variables(activation: Activation) -> dict[str, Any]:
    """The variables of a function, and the attributes of the object whose method it is."""
    attributes = getattr(activation.receiver, "__dict__", {})
    named_attributes = {f"self.{name}": value for name, value in attributes.items()}
    receiver = activation.receiver
    named = {n: v for n, v in activation.variables.items() if v is not receiver or receiver is None}
    return {**named, **named_attributes}


def _located(activation: Activation) -> Located | None:
    program = program_of(activation.code, activation.module_globals)
    function = None if program is None else function_of(program, activation.code)
    if program is None or function is None:
        return None
    return Located(program, function, loop_at(function, activation.line))


def _callers(
    located: Located, functions: Sequence[Activation]
) -> tuple[list[tuple[Function, Activation]], dict[str, Activation]]:
    """The running functions of the same file that lead to the first one."""
    first = functions[0]
    running = {located.function.name: first}
    callers = []
    for each in functions[1:]:
        if each.code.co_filename != first.code.co_filename:
            break
        function = function_of(located.program, each.code)
        if function is None:
            break
        callers.append((function, each))
        running.setdefault(function.name, each)
    return callers, running


def _value_of(path: str, running: Mapping[str, Activation], first: Activation) -> Any:
    """The object at a path; no property and no ``__getattr__`` runs."""
    function, at, variable = path.rpartition("@")
    name, *attributes = variable.split(".")
    if at:
        activation = running.get(function)
        value = _MISSING if activation is None else activation.variables.get(name, _MISSING)
    else:
        value = first.module_globals.get(name, _MISSING)
    for attribute in attributes:
        try:
            value = vars(value).get(attribute, _MISSING)
        except TypeError:
            return _MISSING
    return value


def _owners(path: str, value_of: Callable[[str], Any]) -> Iterator[Any]:
    """The objects that a path of attributes leads through."""
    head, at, variable = path.rpartition("@")
    parts = variable.split(".")
    for count in range(1, len(parts)):
        yield value_of(f"{head}{at}{'.'.join(parts[:count])}")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _keep(names: Sequence[str]) -> str:
    keep = "it" if len(names) == 1 else "them"
    return f'Keep {keep} in extras["{_last(names[0])}"], or list {keep} in transient={{...}}.'


def _unknown(location: str, reason: str) -> CaptureLine:
    reason = f"{reason}; variables that it carries are not checked"
    return CaptureLine(location, Fidelity.UNKNOWN, reason, is_hint=True, is_at_source=True)
