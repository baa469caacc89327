"""Reads shards as whole tensors: from directories of DCP, and from the files of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from resumekit.imports.reading import read_metadata, read_torch_bytes, read_torch_file
from resumekit.serialization.sharding import Box, Layout, box_of, local_part


class _Level(dict[Any, Any]):
    """A dict or a list of the state dict; no leaf."""


def read_dcp(directory: Path, *, trusts: bool) -> dict[str, Any]:
    """The state dict that ``dcp.save`` was given, in whole tensors.

    Dicts have strings as keys, as DCP makes them, and no empty containers. A state of an optimizer
    has the keys of its groups.

    Args:
        directory: of the checkpoint.
        trusts: see ``read_torch_file``; the metadata is read as ever.

    Raises:
        ConfigurationError: a file is damaged, or has objects of other classes.
        ValueError: parts of a tensor are missing, or do not fit; also other built-in errors for
            metadata that is none.
    """
    metadata = read_metadata(directory / ".metadata")
    read = partial(_item, directory, trusts)
    places = {
        (index.fqn, tuple(getattr(index, "offset", None) or ())): info
        for index, info in metadata.storage_data.items()
    }
    paths = getattr(metadata, "planner_data", None) or {}
    root = _Level()
    for key, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "properties"):
            value = _tensor(read, key, entry, places)
        else:
            value = read(places[key, ()])
        *above, last = paths.get(key, (key,))
        level = root
        for name in above:
            level = level.setdefault(name, _Level())
        level[last] = value
    return {name: _nested(each) for name, each in root.items()}


def _item(directory: Path, trusts: bool, info: Any) -> Any:
    """What one entry of a file holds."""
    name = str(info.relative_path)
    if Path(name).name != name or getattr(info, "transform_descriptors", None):
        raise ValueError(f"{name!r}, which is compressed or not in the directory")
    return read_torch_bytes(directory / name, info.offset, info.length, trusts=trusts)


def _tensor(read: Callable[[Any], Any], key: str, entry: Any, places: Mapping[Any, Any]) -> Tensor:
    shape, (dtype, *_) = tuple(entry.size), entry.properties.parts
    boxes = [Box(tuple(each.offsets), tuple(each.sizes)) for each in entry.chunks]
    return _whole(key, shape, dtype, boxes, lambda box: read(places[key, box.offsets]))


def _whole(
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    boxes: Iterable[Box],
    read: Callable[[Box], Any],
) -> Tensor:
    """A tensor of its parts, which are read one after the other."""
    boxes = [each for each in boxes if each.num_elements]
    problem = Layout.of_chunks([(0, each) for each in boxes]).tiling_problem(shape)
    if problem:  # torch 2.13 checks it when it saves alone
        raise ValueError(f"{key}: {problem}")
    whole = torch.empty(shape, dtype=dtype)
    for box in boxes:
        part = read(box)
        if not isinstance(part, Tensor) or (tuple(part.shape), part.dtype) != (box.sizes, dtype):
            raise ValueError(f"{key}: the part {box} is another one")
        whole[box.slices] = part
    return whole


def read_ranks(files: Iterable[Path], *, trusts: bool) -> Any:
    """What the ranks have saved, each in a file of its own, in whole tensors.

    What is no shard is that of the first file.

    Args:
        files: of all ranks.
        trusts: see ``read_torch_file``.

    Raises:
        ConfigurationError: a file is damaged, or has objects of other classes.
        ValueError: parts of a tensor are missing, or do not fit.
    """
    return _joined("", [read_torch_file(each, trusts=trusts) for each in files])


def _joined(key: str, states: Sequence[Any]) -> Any:
    first = states[0]
    if isinstance(first, DTensor):  # its mesh has the coordinate of the rank that saved it
        parts = {box: local_part(e) for e in states if (box := box_of(e, key)) is not None}
        return _whole(key, tuple(first.shape), first.dtype, parts, parts.__getitem__)
    if isinstance(first, Mapping):
        return {name: _joined(f"{key}.{name}", [each[name] for each in states]) for name in first}
    return first


def _nested(value: Any) -> Any:
    if not isinstance(value, _Level):
        return value
    found = {name: _nested(each) for name, each in value.items()}
    if all(type(name) is int for name in found):  # as DCP writes down a place in a list
        return [found[index] for index in range(len(found))]
    groups = found.get("param_groups")
    if isinstance(groups, list):
        found["state"] = _by_identity(found.get("state", {}), groups)
    return found


def _by_identity(state: Mapping[str, Any], groups: Sequence[dict[str, Any]]) -> dict[Any, Any]:
    """The states of parameters by what the groups call them."""
    names = {str(each): each for group in groups for each in group.setdefault("params", [])}
    return {names.get(name, name): each for name, each in state.items()}
