"""The path of a value in nested state, as an expression for people and as a tensor's name."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

_MAX_KEY_CHARACTERS = 100


@dataclass(eq=False, slots=True)  # not frozen: a state has a path for each value
class StatePath:
    """A position in nested state; ``str`` gives it as an expression: ``extras['a'][3].b``.

    Args:
        part: the name of the root, a key, an index or an attribute.
        kind: which of these it is.
        parent: the container's path; None for the root.
    """

    part: Any
    kind: Literal["key", "index", "attribute"] = "key"
    parent: StatePath | None = None
    _name: str | None = field(default=None, init=False)  # once asked for, as each child asks

    def key(self, part: Any) -> StatePath:
        """The path of the value under this key; an enum is stored as its value."""
        return StatePath(part.value if isinstance(part, Enum) else part, "key", self)

    def index(self, part: int) -> StatePath:
        """The path of this element."""
        return StatePath(part, "index", self)

    def attribute(self, part: str) -> StatePath:
        """The path of this field of a namedtuple."""
        return StatePath(part, "attribute", self)

    def __str__(self) -> str:
        if self.parent is None:
            return str(self.part)
        here = f".{self.part}" if self.kind == "attribute" else f"[{_short(self.part)}]"
        return f"{self.parent}{here}"

    @property
    def name(self) -> str:
        """The dotted name below the root, ``transformer.wte.weight`` or ``state[0].exp_avg``.

        A flat dict of tensors by FQN gives the FQNs. Empty for the root.
        """
        if self._name is None:
            self._name = self._below(self.parent.name) if self.parent else ""
        return self._name

    def _below(self, above: str) -> str:
        if self.kind == "attribute" or type(self.part) is str:
            return f"{above}.{self.part}" if above else str(self.part)
        return f"{above}[{_short(self.part)}]"

    @property
    def root(self) -> StatePath:
        """The path of the whole value."""
        return self if self.parent is None else self.parent.root


def _short(part: Any) -> str:
    text = repr(part)
    return text if len(text) <= _MAX_KEY_CHARACTERS else text[:_MAX_KEY_CHARACTERS] + "..."


class UniqueNames:
    """Distinct names; a second ``a.b`` becomes ``a.b~2``."""

    def __init__(self, *reserved: str) -> None:
        self._taken = set(reserved)

    def take(self, wanted: str) -> str:
        """The wanted name, or the first free one after it."""
        # The header of a file is UTF-8, which has no lone surrogates.
        if not wanted.isascii():
            wanted = wanted.encode("utf-8", "replace").decode("utf-8")
        name, number = wanted, 1
        while name in self._taken:
            number += 1
            name = f"{wanted}~{number}"
        self._taken.add(name)
        return name
