"""When the reference run had a value, and where another run differs from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from resumekit.html_report.recordings import RESUMED, STEP, Launch, Moment, Recording

Leaf = tuple[str, str]  # component, leaf


class History:
    """When the reference run had a value."""

    def __init__(self, reference: Recording) -> None:
        self.moments = {each.key: each for each in reversed(reference.moments)}
        self.steps = sorted({each.step for each in reference.moments if each.kind == STEP})
        self._steps_with: dict[tuple[bool, str, str, str], list[int]] = {}
        for moment in reference.moments:
            for component, leaves in moment.parts.items():
                for leaf, text in leaves.items():
                    at = moment.kind == STEP, component, leaf, text
                    self._steps_with.setdefault(at, []).append(moment.step)

    def steps_with(self, moment: Moment, leaf: Leaf) -> list[int]:
        """The steps at which the reference had the value that a leaf has in this moment."""
        text = moment.parts.get(leaf[0], {}).get(leaf[1], "")
        return self._steps_with.get((moment.kind == STEP, *leaf, text), [])

    @cached_property
    def constants(self) -> frozenset[tuple[bool, str, str]]:
        """The leaves that have one value in the whole run."""
        num_values: dict[tuple[bool, str, str], int] = {}
        for is_step, component, leaf, _ in self._steps_with:
            at = is_step, component, leaf
            num_values[at] = num_values.get(at, 0) + 1
        return frozenset(at for at, number in num_values.items() if number == 1)


def differing(moment: Moment, expected: Moment) -> Iterator[Leaf]:
    """The leaves that two moments do not have in common, inputs of a step first."""
    components = {**moment.parts, **expected.parts}
    for component in components:
        now, then = moment.parts.get(component, {}), expected.parts.get(component, {})
        for leaf in {**then, **now}:
            if now.get(leaf) != then.get(leaf):
                yield component, leaf


@dataclass(frozen=True)
class Case:
    """The first difference of one component in a launch.

    Args:
        component: which one.
        leaves: each leaf that differs, as found and expected; None for an absent one.
        moment: of the judged run.
        expected: the same moment of the reference run.
        history: of the reference run.
        launch: the moments of the launch.
        number: of the launch.
    """

    component: str
    leaves: Mapping[str, tuple[str | None, str | None]]
    moment: Moment
    expected: Moment
    history: History = field(repr=False)
    launch: Launch = field(repr=False)
    number: int = 0

    @property
    def slot(self) -> str:
        """The part of the key before the first slash."""
        return self.component.split("/")[0]

    @property
    def resumed(self) -> int:
        """The last step that the launch did not have to train."""
        first = next((each for each in self.launch if each.kind in (RESUMED, STEP)), self.moment)
        return first.step if first.kind == RESUMED else first.step - 1

    def steps_with(self, leaf: str) -> list[int]:
        """When the reference had what this leaf has now."""
        return self.history.steps_with(self.moment, (self.component, leaf))

    def common_steps(self) -> list[int]:
        """When the reference had all values that differ now."""
        steps = [set(self.steps_with(leaf)) for leaf in self.leaves]
        return sorted(set.intersection(*steps)) if steps else []

    @property
    def step_of_fresh_start(self) -> int:
        """The step of the reference with as many steps done as this launch has done."""
        return self.history.steps[0] + self.moment.step - self.resumed - 1
