"""What a comparison of two checkpoints found, as plain values and as rows of tables."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

Row = tuple[str, ...]


@dataclass(frozen=True)
class ElementDifferences:
    """How the elements of two tensors of one shape differ.

    Args:
        num_different: elements with other bits.
        num_nan: those of them where one side, or both, is no number; they count below nowhere.
        max_absolute: the largest difference; an int for whole numbers, None where there is none.
        max_relative: the largest difference relative to the larger of both values.
        max_ulp: the largest number of steps between neighbours of the type from one value to the
            other; only for floating-point numbers of one type. A zero is 0 steps from the zero of
            the other sign, and yet different.
    """

    num_different: int = 0
    num_nan: int = 0
    max_absolute: float | int | None = None
    max_relative: float | None = None
    max_ulp: int | None = None

    def joined(self, other: ElementDifferences) -> ElementDifferences:
        """Those of both parts of a tensor."""
        return ElementDifferences(
            self.num_different + other.num_different,
            self.num_nan + other.num_nan,
            _larger(self.max_absolute, other.max_absolute),
            _larger(self.max_relative, other.max_relative),
            _larger(self.max_ulp, other.max_ulp),
        )


def _larger(first: Any, second: Any) -> Any:
    return max((each for each in (first, second) if each is not None), default=None)


@dataclass(frozen=True)
class TensorDifference:
    """Two tensors that differ.

    Args:
        name: its path in both, without the prefixes of ``CheckpointDifference``.
        dtypes: of both.
        shapes: of both.
        elements: how the elements differ; None where shapes or types cannot be compared.
    """

    COLUMNS: ClassVar[Row] = (
        *("tensor", "type", "shape", "differ", "max abs", "max rel", "max ULP", "NaN"),
    )

    name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    elements: ElementDifferences | None

    @property
    def size(self) -> float:
        """By which the largest differences come first."""
        if self.elements is None or self.elements.num_nan:
            return float("inf")
        return float(self.elements.max_absolute or 0)

    @property
    def row(self) -> Row:
        """Its cells; empty where shapes or types cannot be compared."""
        kinds = _pair(*self.dtypes), _pair(*(str(list(shape)) for shape in self.shapes))
        found = self.elements
        if found is None:
            return (self.name, *kinds, "", "", "", "", "")
        numbers = (found.max_absolute, found.max_relative, found.max_ulp, found.num_nan or None)
        return self.name, *kinds, str(found.num_different), *map(_number, numbers)


def _pair(first: str, second: str) -> str:
    return first if first == second else f"{first} / {second}"


def _number(value: float | int | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.3g}"


@dataclass(frozen=True)
class ValueDifference:
    """Two plain values that differ, each as a short text."""

    COLUMNS: ClassVar[Row] = ("value", "A", "B")

    name: str
    first: str
    second: str

    @property
    def row(self) -> Row:
        """Its cells."""
        return self.name, self.first, self.second


@dataclass(frozen=True)
class ComponentDifference:
    """How a component differs.

    Args:
        key: in the first checkpoint, or in the second where only that has it.
        only_in: ``"first"`` or ``"second"``; None where both have it.
        num_tensors: compared.
        num_values: compared.
        from_clock: names of values that were read from a clock; not compared.
        tensors: those that differ, the largest difference first.
        values: those that differ.
        only_first: names without a partner in the second checkpoint.
        only_second: names without a partner in the first checkpoint.
    """

    COLUMNS: ClassVar[Row] = (
        *("component", "", "tensors", "differ", "values", "differ", "only in A", "only in B"),
    )

    key: str
    only_in: str | None = None
    num_tensors: int = 0
    num_values: int = 0
    from_clock: tuple[str, ...] = ()
    tensors: tuple[TensorDifference, ...] = ()
    values: tuple[ValueDifference, ...] = ()
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether both have the same names, types, shapes and bits."""
        found = self.tensors, self.values, self.only_first, self.only_second
        return self.only_in is None and not any(found)

    @property
    def row(self) -> Row:
        """Its cells; the second one is the verdict."""
        if self.only_in is not None:
            side = "A" if self.only_in == "first" else "B"
            return (self.key, f"only in {side}", "", "", "", "", "", "")
        counts = (
            *(self.num_tensors, len(self.tensors), self.num_values, len(self.values)),
            *(len(self.only_first), len(self.only_second)),
        )
        word = "equal" if self.is_equal else "differs"
        return self.key, word, *(str(count) if count else "-" for count in counts)


@dataclass(frozen=True)
class ComparedCheckpoint:
    """One side of a comparison."""

    path: str
    run_id: str
    step: int
    world_size: int

    def __str__(self) -> str:
        return f"{self.path}  ({self.world_size} rank{'s' * (self.world_size > 1)})"


@dataclass(frozen=True)
class CheckpointDifference:
    """How two checkpoints differ.

    Args:
        first: the first checkpoint.
        second: the second one.
        components: each of both, equal ones too.
        settings: of the runs (hyperparameters, versions, command), which do not decide the verdict.
        prefixes: that parameter names have in the first and in the second checkpoint, without
            which they are the same; None where names are compared as they are.
    """

    first: ComparedCheckpoint
    second: ComparedCheckpoint
    components: tuple[ComponentDifference, ...]
    settings: tuple[ValueDifference, ...] = ()
    prefixes: tuple[str, str] | None = None

    @property
    def prefix_note(self) -> str:
        """How parameter names were matched; empty where they are compared as they are."""
        if self.prefixes is None:
            return ""
        mine, theirs = (repr(prefix) if prefix else "no prefix" for prefix in self.prefixes)
        return f"parameter names are matched without their prefix: A has {mine}, B {theirs}"

    @property
    def is_equal(self) -> bool:
        """Whether all components that were compared are equal."""
        return all(component.is_equal for component in self.components)

    @property
    def verdict(self) -> str:
        """One line."""
        keys = [component.key for component in self.components if not component.is_equal]
        num_tensors = sum(component.num_tensors for component in self.components)
        num_values = sum(component.num_values for component in self.components)
        num_times = sum(len(component.from_clock) for component in self.components)
        left_out = f"; not compared: {num_times} time{'s' * (num_times > 1)}" if num_times else ""
        if not keys:
            equal = f"{num_tensors} tensors and {num_values} other values, bit for bit"
            return f"EQUAL: {equal}{left_out}"
        num_equal = len(self.components) - len(keys)
        rest = f" ({num_equal} other{'s' * (num_equal != 1)} equal)" if num_equal else ""
        return f"DIFFERENT: {', '.join(keys)}{rest}{left_out}"

    def as_plain(self) -> dict[str, Any]:
        """The same as dicts and lists for JSON; floats without a finite value are strings."""
        plain = {"is_equal": self.is_equal, **asdict(self)}
        for component, row in zip(self.components, plain["components"], strict=True):
            row["is_equal"] = component.is_equal
        result: dict[str, Any] = _finite(plain)
        return result


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return str(value)
    return value
