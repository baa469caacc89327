"""The table of a saved user state: what its nodes are, and the check before they are followed.

``encoding`` makes it, ``decoding`` follows it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Annotated, Any, NamedTuple, TypeAlias, TypedDict

import numpy as np
import torch

from resumekit.capture.nested_state import describe
from resumekit.capture.rng import is_generator_state
from resumekit.capture.user_state.attributes import Role
from resumekit.capture.user_state.memory import check_layouts
from resumekit.capture.user_state.value_types import MAPPINGS, SEQUENCES, SETS
from resumekit.errors import InvalidStateError
from resumekit.state import Count, Misfit, Rule

NODE_SEQUENCES: dict[str, Any] = {each.__name__: each for each in (*SEQUENCES, *SETS)}
NODE_MAPPINGS: dict[str, Any] = {each.__name__: each for each in MAPPINGS}


class _NodeForm(NamedTuple):
    """The fields of a kind of node.

    Args:
        num_fields: its name, which is the first one, included.
        references: the fields that are lists of references or plain values, or the index of a list
            of numbers.
        data: the field with the index of what is next to the table; 0 for none.
        data_type: the type of that.
    """

    num_fields: int
    references: tuple[int, ...] = ()
    data: int = 0
    data_type: Any = str


_FORMS: dict[Any, _NodeForm] = {
    "live": _NodeForm(1),
    **dict.fromkeys(("code", "device", "dtype", "named", "size"), _NodeForm(2)),
    "array": _NodeForm(2, data=1, data_type=np.ndarray),
    "data": _NodeForm(2, data=1, data_type=object),
    **dict.fromkeys(("elsewhere", "enum", "object"), _NodeForm(3)),
    **dict.fromkeys(("buffer", "shared"), _NodeForm(3, data=2, data_type=bytes)),
    **dict.fromkeys(("generator", "stateful"), _NodeForm(3, data=2, data_type=object)),
    **dict.fromkeys(NODE_SEQUENCES, _NodeForm(3, (1,))),
    **dict.fromkeys(("call", "constant", "objects", "parts"), _NodeForm(3, (2,))),
    **dict.fromkeys(("copy", "new"), _NodeForm(4)),
    **dict.fromkeys(NODE_MAPPINGS, _NodeForm(4, (1, 2))),
    **dict.fromkeys(("namedtuple", "reduced"), _NodeForm(4, (3,))),
    **dict.fromkeys(("tensor", "parameter"), _NodeForm(5, (4,), data=1, data_type=torch.Tensor)),
}


class _OptionalFields(TypedDict, total=False):
    data: list[Any]  # former versions had it in the nodes
    copies: Any  # of a former version; not used
    waiting: list[UserStateContent]
    digests: dict[str, Any]  # of what a loader is built from
    sharing: list[Any]
    twice: list[Count]


class UserStateFields(_OptionalFields):
    """What ``UserState.state_dict`` gives."""

    slots: list[SavedSlot]
    nodes: str | list[Any]
    first: dict[str, str]
    lost: list[str]
    holders: dict[str, Any]


def _is_slot(entry: list[Any]) -> bool:
    """Whether it is the path of an owner, a role, a name and a value."""
    names = entry[:3] if len(entry) == 4 else [None]
    return all(isinstance(each, str) for each in names) and entry[1] in set(Role)


class Followable:
    """The nodes of a user state can be followed; for ``Annotated``."""

    def misfits(self, value: Any, path: str) -> Iterator[Misfit]:
        try:
            _, data = read_nodes("", value, [entry[3] for entry in value["slots"]])
            check_layouts("", value.get("sharing", []), data)
        except InvalidStateError as error:
            yield Misfit(f"{path}.nodes".lstrip("."), error.found, str(error.expected))


SavedSlot: TypeAlias = Annotated[list[Any], Rule("a slot", _is_slot)]
UserStateContent: TypeAlias = Annotated[UserStateFields, Followable()]


def read_nodes(
    where: str, state: Mapping[str, Any], values: Iterable[Any]
) -> tuple[list[Any], list[Any]]:
    """The table of a saved state, and what is next to it, as ``NodeDecoder`` can follow them.

    Args:
        where: what errors call the state.
        state: has the text under ``nodes``, and what is next to it under ``data``.
        values: that refer to the table.

    Raises:
        InvalidStateError: a node or a reference is malformed.
    """
    mismatch = partial(InvalidStateError, where, expected="user state")
    try:
        nodes, data = _table_of(state)
    except (ValueError, RecursionError) as error:
        raise mismatch(found=f"no JSON: {error}") from error
    if not isinstance(nodes, list):
        raise mismatch(found=describe(nodes))
    _check_nodes(nodes, data, mismatch)
    for value in chain(values, *(_references(node, data) for node in nodes)):
        if isinstance(value, list):
            is_index = len(value) == 1 and type(value[0]) is int
            if not is_index or not 0 <= value[0] < len(nodes):
                raise mismatch(found="a reference to nothing")
        elif isinstance(value, (dict, tuple)):
            raise mismatch(found=f"{describe(value)} outside of the table")
    return nodes, data


def _check_nodes(
    nodes: list[Any], data: Sequence[Any], mismatch: Callable[..., InvalidStateError]
) -> None:
    for node in nodes:
        kind, form = _kind_of(node)
        if kind in ("tensor", "parameter") and len(node) == 4:
            node.append([])  # a former version saved no gradient
        if form is None or len(node) != form.num_fields:
            raise mismatch(found=f"a node {kind!r:.40}")
        content = _at(data, node[form.data], kind)
        if not isinstance(content, form.data_type) or (form.data and content is kind):
            raise mismatch(found=f"a node {kind} without its content")
        if kind == "generator" and not is_generator_state(content):
            raise mismatch(found="a generator with another content")


def _table_of(state: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    if isinstance(state["nodes"], str):
        return json.loads(state["nodes"] or "[]"), state.get("data", [])
    data: list[Any] = []  # a former version kept the content in the nodes
    nodes = list[Any]()
    for node in state["nodes"]:
        _, form = _kind_of(node)
        if form is not None and 0 < form.data < len(node):
            data.append(node[form.data])
            node = [*node[: form.data], len(data) - 1, *node[form.data + 1 :]]
        nodes.append(node)
    return nodes, data


def _kind_of(node: Any) -> tuple[Any, _NodeForm | None]:
    kind = node[0] if isinstance(node, list) and node else None
    return kind, _FORMS.get(kind) if isinstance(kind, str) else None


def _at(data: Sequence[Any], index: Any, otherwise: Any) -> Any:
    is_index = type(index) is int and 0 <= index < len(data)
    return data[index] if is_index else otherwise


def _references(node: Sequence[Any], data: Sequence[Any]) -> Iterable[Any]:
    """What a node is made of; a reference to nothing where that is malformed."""
    kind = node[0]
    if kind in ("new", "copy"):
        return node[3].values() if isinstance(node[3], dict) else [[]]
    fields = [_at(data, node[index], node[index]) for index in _FORMS[kind].references]
    are_lists = all(isinstance(each, list) for each in fields)
    return chain(*fields) if are_lists and len({*map(len, fields)}) < 2 else [[]]
