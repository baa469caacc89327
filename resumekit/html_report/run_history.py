"""When the reference run had a value, and where another run differs from it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from resumekit.html_report.recordings import (
    DATA,
    RESTORED,
    RESUMED,
    STEP,
    Launch,
    Moment,
    Recording,
)

# The recorder finds these when it looks for them; that one is absent shows nothing.
FOUND_BY_CHANCE = ("modules", "grad_scaler")

Leaf = tuple[str, str]  # component, leaf


class History:
    """When the reference run had a value."""

    def __init__(self, reference: Recording) -> None:
        self.moments = {each.key: each for each in reversed(reference.moments)}
        self.steps = sorted({each.step for each in reference.moments if each.kind == STEP})
        self._steps_with: dict[tuple[bool, str, str, str], list[int]] = {}
        self._steps = [each for each in reference.moments if each.kind == STEP]
        for moment in reference.moments:
            for component, leaves in moment.parts.items():
                for leaf, text in leaves.items():
                    at = moment.kind == STEP, component, leaf, text
                    self._steps_with.setdefault(at, []).append(moment.step)

    def steps_with(self, moment: Moment, leaf: Leaf) -> list[int]:
        """The steps at which the reference had the value that a leaf has in this moment."""
        text = moment.parts.get(leaf[0], {}).get(leaf[1], "")
        is_step = moment.kind in (STEP, RESTORED)
        return self._steps_with.get((is_step, *leaf, text), [])

    @property
    def first_weights(self) -> str:
        """The digest of the weights before the first step, as the recorder saw them."""
        digest: str = self._steps[0].facts["weights"]
        return digest

    def steps_with_counter(self, moment: Moment) -> list[int]:
        """The steps at which the optimizer had counted as many steps; none where it counts none."""
        counter = moment.facts.get("counter")
        return [each.step for each in self._steps if counter and each.facts["counter"] == counter]

    def before(self, restored: Moment) -> Moment | None:
        """What the reference had where a launch has restored its state; None: it is not known.

        Args:
            restored: the weights and the optimizer state before the first step of a launch.
        """
        parts: dict[str, Mapping[str, str]] = {}
        for component in restored.parts:
            after = (each for each in reversed(self._steps) if each.step <= restored.step)
            found = next((each.parts[component] for each in after if component in each.parts), None)
            if found is not None:
                parts[component] = {k: v for k, v in found.items() if not is_setting(k)}
        return Moment(RESTORED, restored.step, parts) if parts else None

    def expected(self, moment: Moment) -> Moment | None:
        """The moment of the reference that one of another run must be equal to."""
        if moment.kind == RESTORED:
            return self.before(moment)
        found = self.moments.get(moment.key)
        return _rest_of(found, moment) if found and moment.facts.get("is_rest") else found

    def distance(self, moment: Moment, generator: str, step: int) -> int | None:
        """The draws by which a generator is ahead of where it was after a step of the reference.

        None where the recorder saw other words, and they cannot be counted.
        """
        then = self.moments.get((True, step, 0))
        now, there = (
            one.facts.get("rng_positions", {}).get(generator) if one else None
            for one in (moment, then)
        )
        if now is None or there is None or now[0] != there[0]:
            return None
        return int(now[1]) - int(there[1])

    def first_step_of_pass(self, step: int) -> int | None:
        """The first step of the pass over the dataset that a step is in, as the recorder saw it."""
        first = None
        for moment in reversed(self._steps):
            if moment.step <= step:
                now = moment.facts.get("data_pass")
                if first is not None and now != first.facts.get("data_pass"):
                    break
                first = moment
        return None if first is None or "data_pass" not in first.facts else first.step

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
        is_common = component in moment.parts and component in expected.parts
        is_by_chance = moment.kind == STEP and component.split("/")[0] in FOUND_BY_CHANCE
        if not is_common and (is_by_chance or moment.kind == RESTORED):
            continue
        now, then = moment.parts.get(component, {}), expected.parts.get(component, {})
        for leaf in {**then, **now}:
            if now.get(leaf) != then.get(leaf):
                yield component, leaf


def is_setting(leaf: str) -> bool:
    """Whether a leaf of an optimizer is a number of a param group, not a part of its state."""
    return re.fullmatch(r"(param_groups\[\d+\]|group\d+)\.[a-z_]\w*(\[\d+\])?", leaf) is not None


def _rest_of(expected: Moment, rest: Moment) -> Moment:
    """The last micro-steps of a step, of which another launch has made the first ones."""
    parts: dict[str, Mapping[str, str]] = dict(expected.parts)
    now, then = rest.parts.get(DATA, {}), parts.get(DATA, {})
    parts[DATA] = {leaf: _last(text, now.get(leaf, "")) for leaf, text in then.items()}
    values = [parts.pop(name) for name in expected.values]
    kept = values[len(values) - len(rest.values) :]
    parts.update(zip(rest.values, kept, strict=False))
    return replace(expected, parts=parts, values=rest.values)


def _last(expected: str, found: str) -> str:
    return ",".join(expected.split(",")[-len(found.split(",")) :]) if found else expected


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

    def other_steps(self) -> list[int]:
        """The common steps without its own."""
        return [step for step in self.common_steps() if step != self.moment.step]

    @property
    def step_of_fresh_start(self) -> int:
        """The step of the reference with as many steps done as this launch has done."""
        return self.history.steps[0] + self.moment.step - self.resumed - 1
