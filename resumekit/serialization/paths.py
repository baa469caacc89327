"""Where a value stands inside nested state, as people write it and as a tensor is named."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

_MAX_KEY_CHARACTERS = 100


@dataclass(frozen=True)
class Place:
    """One place in nested state; ``str`` gives it as an expression: ``extras['a'][3].b``.

    Args:
        part: the name of the root, a key, an index or an attribute.
        kind: which of these it is.
        parent: the place of the container; None for the root.
    """

    part: Any
    kind: Literal["root", "key", "index", "attribute"] = "root"
    parent: Place | None = None

    def key(self, part: Any) -> Place:
        """The place of the value under this key; an enum counts as its value, as it is stored."""
        return Place(part.value if isinstance(part, Enum) else part, "key", self)

    def index(self, part: int) -> Place:
        """The place of this element."""
        return Place(part, "index", self)

    def attribute(self, part: str) -> Place:
        """The place of this field of a namedtuple."""
        return Place(part, "attribute", self)

    def __str__(self) -> str:
        return "".join(_expression(place) for place in self._from_root())

    @property
    def name(self) -> str:
        """The dotted name below the root, ``transformer.wte.weight`` or ``state[0].exp_avg``.

        A flat dict of tensors by FQN gives exactly the FQNs. Empty for the root itself.
        """
        text = ""
        for place in self._from_root()[1:]:
            text += _name_part(place) if text else _name_part(place).removeprefix(".")
        return text

    @property
    def root(self) -> Place:
        """The place of the whole value."""
        return self._from_root()[0]

    def _from_root(self) -> list[Place]:
        places: list[Place] = []
        place: Place | None = self
        while place is not None:
            places.append(place)
            place = place.parent
        return places[::-1]


def _expression(place: Place) -> str:
    if place.kind == "root":
        return str(place.part)
    return f".{place.part}" if place.kind == "attribute" else f"[{_short(place.part)}]"


def _name_part(place: Place) -> str:
    if place.kind == "attribute" or type(place.part) is str:
        return f".{place.part}"
    return f"[{_short(place.part)}]"


def _short(part: Any) -> str:
    text = repr(part)
    return text if len(text) <= _MAX_KEY_CHARACTERS else text[:_MAX_KEY_CHARACTERS] + "..."


class UniqueNames:
    """Names of which no two are the same; a second ``a.b`` becomes ``a.b~2``."""

    def __init__(self, *reserved: str) -> None:
        self._taken = set(reserved)

    def take(self, wanted: str) -> str:
        """The wanted name, or the first free one after it."""
        # A lone surrogate has no place in the UTF-8 of a file's header.
        wanted = wanted.encode("utf-8", "replace").decode("utf-8")
        name, number = wanted, 1
        while name in self._taken:
            number += 1
            name = f"{wanted}~{number}"
        self._taken.add(name)
        return name
