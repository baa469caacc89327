"""The type of a component's state, and the check of a state that a checkpoint has against it.

A schema is a ``TypedDict`` or another type annotation, declared with the class that makes the
state. A dict has exactly the keys of its ``TypedDict``, but for those of a base with
``total=False``. ``Annotated`` adds a ``Rule``, or ``Variants``: one type for each value of a field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from resumekit.errors import InvalidStateError


class Misfit(NamedTuple):
    """Where a value is not of its type: a path in the state, what is there and what belongs."""

    path: str
    found: str
    expected: str


@dataclass(frozen=True)
class Rule:
    """What a value satisfies besides its type; for ``Annotated``.

    Args:
        expected: in the words of an error.
        holds: whether a value of that type satisfies it.
    """

    expected: str
    holds: Callable[[Any], bool]

    def misfits(self, value: Any, path: str) -> Iterator[Misfit]:
        if not self.holds(value):
            yield _misfit(path, value, self.expected)


@dataclass(frozen=True, eq=False)
class Variants:
    """The types of a dict by the value of one of its fields; for ``Annotated``.

    Args:
        field: the name of the field.
        types: by its value.
    """

    field: str
    types: Mapping[str, Any]

    def misfits(self, value: Any, path: str) -> Iterator[Misfit]:
        kind = value.get(self.field)
        if isinstance(kind, str) and kind in self.types:
            yield from misfits(self.types[kind], value, path)
        else:
            yield _misfit(_below(path, self.field), kind, f"one of {', '.join(self.types)}")


Count = Annotated[int, Rule("a count", lambda value: 0 <= value < 2**63)]


def check_schema(key: str, schema: Any, state: Any) -> None:
    """Checks the state of a component.

    Args:
        key: of the component.
        schema: the type.
        state: as it was read.

    Raises:
        InvalidStateError: it is not of this type; names the first field that is not.
    """
    misfit = next(misfits(schema, state, ""), None)
    if misfit is not None:
        where = f"{key}: {misfit.path}" if misfit.path else key
        raise InvalidStateError(
            where,
            found=misfit.found,
            expected=misfit.expected,
            remedy="The bytes are intact: the state was wrong when it was written",
        )


def misfits(schema: Any, value: Any, path: str) -> Iterator[Misfit]:
    """Where a value is not of a type, in its order."""
    if schema is Any:
        return
    origin, args = get_origin(schema), get_args(schema)
    if origin is Annotated:
        found = next(misfits(args[0], value, path), None)
        if found is not None:  # a rule may rely on the type
            yield found
            return
        for rule in args[1:]:
            yield from rule.misfits(value, path)
    elif origin in (Union, UnionType):
        yield from _of_union(args, value, path)
    elif is_typeddict(schema):
        yield from _of_fields(schema, value, path)
    else:
        yield from _of_class(schema, value, path)


def _of_class(schema: Any, value: Any, path: str) -> Iterator[Misfit]:
    origin, args = get_origin(schema), get_args(schema)
    if origin is Literal:
        if not any(type(value) is type(each) and value == each for each in args):
            yield _misfit(path, value, " or ".join(map(repr, args)))
    elif not _is_instance(value, origin or schema):
        yield _misfit(path, value, _name_of(origin or schema))
    elif origin is dict:
        for key, item in value.items():
            yield from misfits(args[0], key, _below(path, key))
            yield from misfits(args[1], item, _below(path, key))
    elif origin in (list, tuple):
        yield from _of_items(args[0], value, path)


def _of_items(schema: Any, value: Sequence[Any], path: str) -> Iterator[Misfit]:
    if schema in (int, str) and set(map(type, value)) <= {schema}:
        return  # of a million items in milliseconds
    for index, item in enumerate(value):
        yield from misfits(schema, item, f"{path}[{index}]")


def _of_union(schemas: tuple[Any, ...], value: Any, path: str) -> Iterator[Misfit]:
    tried = [next(misfits(each, value, path), None) for each in schemas]
    found = [each for each in tried if each is not None]
    if len(found) == len(schemas):
        inside = (each for each in found if each.path != path)
        expected = " or ".join(each.expected for each in found)
        yield next(inside, _misfit(path, value, expected))


def _of_fields(schema: Any, value: Any, path: str) -> Iterator[Misfit]:
    if not isinstance(value, dict):
        yield _misfit(path, value, "a dict")
        return
    fields = _hints(schema)
    for name in fields:
        if name not in value and name in schema.__required_keys__:
            yield Misfit(_below(path, name), "missing", "this field")
    for name, item in value.items():
        if name not in fields:
            yield Misfit(_below(path, name), "an unknown field", f"one of {', '.join(fields)}")
        else:
            yield from misfits(fields[name], item, _below(path, name))


@cache
def _hints(schema: Any) -> dict[str, Any]:
    return get_type_hints(schema, include_extras=True)


def _is_instance(value: Any, kind: type) -> bool:
    """Whether it has this type; a bool is no number, an integer is a float."""
    kinds = (int, float) if kind is float else kind
    return isinstance(value, kinds) and (kind not in (int, float) or not isinstance(value, bool))


def _name_of(kind: type) -> str:
    return "None" if kind is type(None) else kind.__name__


def _misfit(path: str, value: Any, expected: str) -> Misfit:
    return Misfit(path, f"{type(value).__name__} {value!r:.40}".replace("\n", " "), expected)


def _below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
