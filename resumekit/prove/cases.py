"""When a run had a value, and where another run differs from it first: what causes are found by."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from resumekit.record.moments import (
    DATA,
    RESTORED,
    RESUMED,
    STEP,
    Launch,
    Leaves,
    Moment,
    Recording,
    differences,
    rest_of,
)
from resumekit.serialization.digests import leaf_digests

_MAX_DECODED = 20_000  # integers whose digests are known; more take seconds


class History:
    """When the reference run had a value."""

    def __init__(self, reference: Recording) -> None:
        self.moments = {each.key: each for each in reversed(reference.moments)}
        self.steps = [each for each in reference.moments if each.kind == STEP]
        self.first_step = min((each.step for each in self.steps), default=0)
        self._steps_with: dict[tuple[bool, str, str, str], list[int]] = defaultdict(list)
        for moment in reference.moments:
            for component, leaves in moment.parts.items():
                for leaf, text in leaves.items():
                    at = moment.kind == STEP, component, leaf, text
                    self._steps_with[at].append(moment.step)
        num_values = Counter(at[:3] for at in self._steps_with)
        # The leaves that have one value in the whole run.
        self.constants = frozenset(at for at, number in num_values.items() if number == 1)

    def steps_with(self, moment: Moment, component: str, leaf: str) -> list[int]:
        """The steps at which the reference had the value that a leaf has in this moment."""
        text = moment.parts.get(component, {}).get(leaf, "")
        is_step = moment.kind in (STEP, RESTORED)
        return self._steps_with.get((is_step, component, leaf, text), [])

    def expected(self, moment: Moment) -> Moment | None:
        """The moment of the reference run that this one is compared with; None if there is none."""
        if moment.kind == RESTORED:
            return self._before(moment)
        found = self.moments.get(moment.key)
        return rest_of(found, moment) if found else None

    def _before(self, restored: Moment) -> Moment | None:
        """What the reference had where a launch has restored its state; None: it is not known."""
        parts: dict[str, Mapping[str, str]] = {}
        for component in restored.parts:
            after = (each for each in reversed(self.steps) if each.step <= restored.step)
            found = next((each.parts[component] for each in after if component in each.parts), None)
            if found is not None:
                parts[component] = {k: v for k, v in found.items() if not is_setting(k)}
        return Moment(RESTORED, restored.step, parts) if parts else None

    def distance(self, moment: Moment, generator: str, step: int) -> int | None:
        """The draws by which a generator is ahead of where it was after a step of the reference.

        None where the recorder saw other words, and they cannot be counted.
        """
        then = self.moments.get((True, step, 0))
        now, there = (
            one.fields.get("rng_positions", {}).get(generator) if one else None
            for one in (moment, then)
        )
        if now is None or there is None or now[0] != there[0]:
            return None
        return int(now[1]) - int(there[1])

    def first_step_of_epoch(self, step: int) -> int | None:
        """The first step of the epoch that a step is in; None: it is not known."""
        moment = self.moments.get((True, step, 0), Moment(STEP, step))
        batch = moment.parts.get(DATA, {}).get("batch", "")
        if batch.isdigit():
            return step - int(batch)
        epochs = {each.step: each.epoch for each in self.steps if each.epoch is not None}
        return min((each for each in epochs if epochs[each] == moment.epoch), default=None)


@dataclass(frozen=True, eq=False)
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
        cases: all of the launch, by component.
    """

    component: str
    leaves: Leaves
    moment: Moment
    expected: Moment
    history: History
    launch: Launch
    number: int
    cases: Mapping[str, Case]

    @property
    def slot(self) -> str:
        """The part of the key before the first slash."""
        return self.component.split("/")[0]

    @property
    def topic(self) -> str:
        """The key of its rows in the table of causes: the slot, or a more specific one."""
        if self.component in self.moment.values:
            return "result"
        if self.component.split("/")[-1] == "gradients":
            return "gradients"
        if self.moment.kind == STEP and self.component == DATA:
            return "batch"
        if self.slot == "modules" and any(leaf.endswith("n_averaged") for leaf in self.before):
            return "averaged modules"
        return self.slot

    @property
    def before(self) -> Mapping[str, str]:
        """What the reference run had of the component."""
        return self.expected.parts.get(self.component, {})

    @property
    def resumed(self) -> int:
        """The last step that the launch did not have to train."""
        first = next((each for each in self.launch if each.kind in (RESUMED, STEP)), self.moment)
        return first.step if first.kind == RESUMED else first.step - 1

    @property
    def fresh(self) -> int:
        """The step of the reference with as many steps done as this launch has done."""
        return self.history.first_step + self.moment.step - self.resumed - 1

    def steps_with(self, leaf: str) -> list[int]:
        """When the reference had what this leaf has now."""
        return self.history.steps_with(self.moment, self.component, leaf)

    @cached_property
    def common_steps(self) -> list[int]:
        """When the reference had all values that differ now."""
        return sorted(set.intersection(*(set(self.steps_with(leaf)) for leaf in self.leaves)))

    def nearest(self, steps: Sequence[int]) -> int:
        """The step that is nearest to its own; its own without any."""
        step = self.moment.step
        return min(steps, key=lambda each: abs(each - step), default=step)

    def cases_before(self) -> list[Case]:
        """All until the step of the case, without results of the step."""
        until = [each for each in self.cases.values() if each.moment.step <= self.moment.step]
        return [each for each in until if each.component not in self.moment.values]

    @cached_property
    def state(self) -> Leaves:
        """The leaves of an optimizer without the settings of its param groups."""
        return {leaf: each for leaf, each in self.leaves.items() if self.is_state(leaf)}

    def is_state(self, leaf: str) -> bool:
        """Whether a leaf of an optimizer is no setting of a param group."""
        is_recorded = self.moment.kind in (STEP, RESTORED)
        return leaf.startswith("state") or (is_recorded and not is_setting(leaf))

    def is_part(self) -> bool:
        """Whether an optimizer has the right state for some parameters, and not for others."""
        every = {leaf.rpartition(".")[0] for leaf in self.before if self.is_state(leaf)}
        return len({leaf.rpartition(".")[0] for leaf in self.state}) < len(every)


def first_differences(
    history: History,
    saved: Mapping[tuple[bool, int, int], Moment],
    launch: Launch,
    number: int,
    ignored: frozenset[tuple[bool, str, str]],
) -> list[Case]:
    """The first difference of each component in a launch.

    Args:
        history: of the reference run.
        saved: the checkpoints of the launches before, which count where the reference has none.
        launch: that is judged.
        number: of the launch.
        ignored: leaves that are not compared.
    """
    cases: dict[str, Case] = {}
    for moment in launch:
        expected = history.expected(moment) or saved.get(moment.key)
        if expected is None:
            continue
        for component, values in differences(moment, expected).items():
            at = moment.kind == STEP, component
            leaves = {
                leaf: (_readable(now), _readable(then))
                for leaf, (now, then) in values.items()
                if (*at, leaf) not in ignored
            }
            if leaves and component not in cases:
                context = moment, expected, history, launch, number, cases
                cases[component] = Case(component, leaves, *context)
    return list(cases.values())


def is_setting(leaf: str) -> bool:
    """Whether a leaf of an optimizer is a number of a param group, not a part of its state."""
    return re.fullmatch(r"(param_groups\[\d+\]|group\d+)\.[a-z_]\w*(\[\d+\])?", leaf) is not None


def _readable(text: str | None) -> str | None:
    return None if text is None else _known_digests().get(text, text)


@cache
def _known_digests() -> Mapping[str, str]:
    """Plain values by their digests, so that counters and empty states can be read."""
    plain: dict[str, Any] = {
        **{str(number): number for number in range(_MAX_DECODED)},
        **{"None": None, "{}": {}, "[]": [], "0.0": 0.0, "1.0": 1.0, "False": False, "True": True},
    }
    return {digest: text for text, digest in leaf_digests(plain).items()}
