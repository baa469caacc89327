"""What a loop of the user needs and no component holds: checked when the loop is entered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any
from weakref import ref

from resumekit.capture import REMEDIES, Given, Unconfirmed, not_given, slot_of
from resumekit.run.calling_code import Activation, calling_place, running_functions
from resumekit.run.loop_variables import LoopVariables
from resumekit.run.options import Options
from resumekit.state import CaptureLine, Slot

# Objects are compared with what they were at the start after so many steps of this process, and at
# every save.
_NUM_STEPS = 2


class LoopCheck:
    """Reports loop-carried variables, and objects of the script that the run was not given.

    Args:
        options: of the run.
        extras: the user's live dict.
        saved: gives what the checkpoints of the run hold, at any time.

    Attributes:
        remedies: how the adapter takes an object that it was not given, by slot.
    """

    def __init__(
        self, options: Options, extras: Mapping[Any, Any], saved: Callable[[], Given]
    ) -> None:
        self._options = options
        self._entered: set[tuple[CodeType, int]] = set()
        self._saved = saved
        self._lines: dict[str, CaptureLine] = {}
        self._unconfirmed: list[Unconfirmed] = []
        self._variables = LoopVariables(
            extras, options.transient, saved, limit_bytes=options.user_state_limit
        )
        self._made_beside = _objects_beside()
        self._num_steps = 0
        self.remedies: Mapping[Slot, str] = REMEDIES

    def enter(self, run: Any) -> None:
        """A loop asks for its first batch. Reads the running functions, once for each loop.

        Args:
            run: what the script calls its run, the Checkpointer.
        """
        place = calling_place()
        if place is None or place in self._entered:
            return
        self._entered.add(place)
        functions = running_functions(run)
        given = self._saved()
        alive = {name: each() for name, each in self._made_beside.items()}
        self._made_beside = {}
        for variables in (*map(_variables, functions), alive):
            self._find_objects(variables, given)
        self._variables.enter(functions, given)

    def lines(self) -> list[CaptureLine]:
        """What is known by now; called for every capture report."""
        self._confirm()
        return [*self._lines.values(), *self._variables.lines()]

    def after_step(self) -> bool:
        """Looks after the first steps which objects have changed; True if some have."""
        if self._num_steps == _NUM_STEPS:
            return False
        self._num_steps += 1
        known = len(self._lines) + len(self._variables.lines())
        if self._num_steps == _NUM_STEPS:
            self._variables.confirm_copies()
        return len(self.lines()) > known

    def _find_objects(self, variables: Mapping[str, Any], given: Given) -> None:
        wanted = {n: v for n, v in variables.items() if n not in self._options.transient}
        lines, unconfirmed = not_given(wanted, given, self.remedies)
        self._lines.update((line.key, line) for line in lines)
        known = {id(each.value) for each in self._unconfirmed}
        self._unconfirmed += [each for each in unconfirmed if id(each.value) not in known]

    def _confirm(self) -> None:
        self._variables.confirm()
        changed = [each for each in self._unconfirmed if each.has_changed()]
        self._unconfirmed = [each for each in self._unconfirmed if each not in changed]
        self._lines.update((each.line.key, each.line) for each in changed)


def _objects_beside() -> dict[str, ref[Any]]:
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
    own = getattr(activation.receiver, "__dict__", {})
    attributes = {f"self.{name}": value for name, value in own.items()}
    receiver = activation.receiver
    named = {n: v for n, v in activation.variables.items() if v is not receiver or receiver is None}
    return {**named, **attributes}
