"""Mutations of the values that a checkpoint holds, with digests that are right all the same."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from resumekit.storage.files import BlockDigester
from resumekit.storage.manifest import Manifest

Path_ = tuple[Any, ...]
INSIDE = "<json>"  # a step of a path: into the JSON text that a string holds


def reseal(step: Path, path: str, data: bytes, *, blocks_of: str = "") -> None:
    """Replaces a file of a step directory, and computes all digests again.

    Args:
        step: the step directory.
        path: of the file in it.
        data: its new content.
        blocks_of: the index that has the digests of its blocks.
    """
    digester = BlockDigester()
    digester.update(memoryview(data))
    if blocks_of:
        index = json.loads((step / blocks_of).read_bytes())
        index["block_digests"] = [each.hex() for each in digester.blocks]
        reseal(step, blocks_of, json.dumps(index).encode())
    (step / path).write_bytes(data)
    manifest = Manifest.from_bytes((step / "manifest.json").read_bytes())
    files = tuple(
        replace(each, size=len(data), digest=digester.hexdigest()) if each.path == path else each
        for each in manifest.files
    )
    (step / "manifest.json").write_bytes(replace(manifest, files=files).to_bytes())


Change = Callable[[Any, Any], None]  # of what is under a key or number of its parent


def edit(step: Path, path: Path_, change: Change, file: str = "state/rank-00000.json") -> None:
    """Changes one encoded value of a step directory, which is sealed again.

    Args:
        step: the step directory.
        path: of the value: the component's key, then the keys and numbers.
        change: changes its parent in place.
        file: the index that holds it.
    """
    index = json.loads((step / file).read_bytes())
    _at(index["states"], path, change)
    reseal(step, file, json.dumps(index).encode())


@dataclass(frozen=True)
class Mutation:
    """One change of one encoded value.

    Args:
        file: the index that holds the value.
        path: of the value in it: the component's key, then the keys and numbers.
        name: of the change.
        change: changes the parent of the value in place.
    """

    file: str
    path: Path_
    name: str
    change: Change

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path))}: {self.name}"

    def apply(self, step: Path) -> None:
        """Changes a step directory."""
        edit(step, self.path, self.change, self.file)


def _at(tree: Any, path: Path_, change: Change) -> None:
    if len(path) == 1:
        change(tree, path[0])
    elif path[1] == INSIDE:
        inner = {INSIDE: json.loads(tree[path[0]])}
        _at(inner, path[1:], change)
        tree[path[0]] = json.dumps(inner[INSIDE])
    else:
        _at(tree[path[0]], path[1:], change)


def _values(tree: Any, path: Path_) -> Iterator[tuple[Path_, Any, Any]]:
    """Every value below a tree, with its path and its parent."""
    if isinstance(tree, dict):
        items: Any = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    elif isinstance(tree, str) and tree[:2] in ("[[", "[]") and path[-1] == "nodes":
        items = [(INSIDE, json.loads(tree))]
    else:
        return
    for key, value in items:
        yield (*path, key), value, tree
        yield from _values(value, (*path, key))


def _setter(value: Any) -> Change:
    def change(parent: Any, key: Any) -> None:
        parent[key] = copy.deepcopy(value)

    return change


def _delete(parent: Any, key: Any) -> None:
    del parent[key]


def _rename(parent: Any, key: Any) -> None:
    items = [(f"{k}x" if k == key else k, v) for k, v in parent.items()]
    parent.clear()
    parent.update(items)


def _longer(parent: Any, key: Any) -> None:
    parent[key] = [*parent[key], *(parent[key][-1:] or [0])]


REPLACEMENTS: dict[str, Any] = {
    "None": None,
    "true": True,
    "negative": -1,
    "huge": {"$int": f"{1 << 70:x}"},
    "float": 0.5,
    "NaN": {"$float": "7ff8000000000000"},
    "text": "x",
    "empty dict": {},
    "empty list": [],
    "tuple": {"$tuple": [1]},
    "bytes": {"$bytes": "00"},
}


def mutations(step: Path) -> Iterator[Mutation]:
    """Every mutation of every encoded value of a step directory."""
    for file in sorted([*step.glob("*/**/rank-?????.json"), *step.glob("*/index.json")]):
        name, index = str(file.relative_to(step)), json.loads(file.read_bytes())
        tensors = list(index["tensors"])
        for key, state in index["states"].items():
            root = {key: state}
            for path, value, parent in [((key,), state, root), *_values(state, (key,))]:
                yield from _of_value(name, path, value, parent, tensors)


def _of_value(
    file: str, path: Path_, value: Any, parent: Any, tensors: list[str]
) -> Iterator[Mutation]:
    changes: dict[str, Change] = {}
    for name, other in REPLACEMENTS.items():
        if json.dumps(other) != json.dumps(value):
            changes[name] = _setter(other)
    if len(path) > 1 and path[-1] != INSIDE:
        changes["deleted"] = _delete
        if isinstance(parent, dict) and not str(path[-1]).startswith("$"):
            changes["renamed"] = _rename
    changes["nested"] = _setter([value])
    changes["in a dict"] = _setter({"x": value})
    if type(value) is int:
        changes["one more"] = _setter(value + 1)
    elif type(value) is float:
        changes["another number"] = _setter(value * 1.5 + 1)
    elif isinstance(value, str) and path[-1] == "$tensor":
        others = [each for each in tensors if each != value]
        for number, other in enumerate(others[:: max(1, len(others) // 3)][:3]):
            changes[f"tensor {number}"] = _setter(other)
    elif isinstance(value, str):
        changes["other text"] = _setter(value + "x")
    elif isinstance(value, list) and value:
        changes["longer"] = _longer
        changes["shorter"] = _setter(value[:-1])
    for name, change in changes.items():
        yield Mutation(file, path, name, change)
