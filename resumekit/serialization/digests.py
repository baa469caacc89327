"""Digests of state: one for each leaf, so that what differs can be named."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
import xxhash

from resumekit.errors import UnsupportedValueError
from resumekit.serialization.encoding import MAX_DEPTH, as_numbers, described_dtype, encode
from resumekit.serialization.leaves import buffers_of
from resumekit.serialization.sharding import Box, box_of, copy_group, is_sharded, local_part
from resumekit.serialization.tensors import (
    StatePath,
    UniqueNames,
    check_tensor,
    is_subclass,
    parts_of,
)

_ROOT = StatePath("state")


def leaf_digests(value: Any) -> dict[str, str]:
    """The xxh3-128 digest of every leaf of a state, by its dotted name.

    Leaves are compared bit for bit: a tensor by type, shape and bytes, a float by its bits. The
    kind of a container does not count (a list and a tuple of the same leaves are the same), nor do
    the device or the memory layout of a tensor. Of a DTensor this rank's shard and its box are
    digested. The digests are the same in every process, and before and after a save.

    Args:
        value: nested state, of the types that the codec stores.

    Raises:
        UnsupportedValueError: a leaf is of another type; names its path.
    """
    return {name: _digest(leaf, path) for name, path, leaf in _named_leaves(value)}


@dataclass(frozen=True)
class Copy:
    """A part of a tensor that other ranks hold as well.

    Args:
        group: a name common to its holders.
        box: which part it is.
        digest: of its type, its whole shape and its bytes.
    """

    group: str
    box: Box
    digest: str


def copy_digests(
    value: Any, *, num_ranks: int, excluded: Collection[str] = frozenset()
) -> dict[str, Copy]:
    """The parts of a state's tensors that several ranks hold, by the dotted name of the tensor.

    Args:
        value: nested state, of the types that the codec stores.
        num_ranks: of the job.
        excluded: names of tensors that differ between the ranks.

    Raises:
        UnsupportedValueError: a tensor cannot be stored; names its path.
    """
    copies: dict[str, Copy] = {}
    for name, path, leaf in _named_leaves(value):
        is_tensor = isinstance(leaf, torch.Tensor) or is_sharded(leaf)
        if not is_tensor or name in excluded or not local_part(leaf).numel():
            continue
        group = copy_group(leaf, num_ranks)
        box = box_of(leaf, str(path)) if group is not None else None
        if group is not None and box is not None:
            copies[name] = Copy(group, box, _digest(leaf, path))
    return copies


def state_digest(value: Any) -> str:
    """One digest of a whole state, 32 hexadecimal digits.

    Raises:
        UnsupportedValueError: a leaf cannot be stored; names its path.
    """
    lines = sorted(f"{name}\0{digest}\n" for name, digest in leaf_digests(value).items())
    return xxhash.xxh3_128_hexdigest("".join(lines).encode("utf-8"))


def _named_leaves(value: Any) -> Iterator[tuple[str, StatePath, Any]]:
    names = UniqueNames()
    for path, leaf in leaves_of(value):
        yield names.take(path.name), path, leaf


def leaves_of(
    value: Any, path: StatePath = _ROOT, depth: int = 0
) -> Iterator[tuple[StatePath, Any]]:
    """The leaves of nested state, each with its path; an empty container is a leaf.

    Those of a tensor made of others are its parts, and its class with its context.
    """
    if depth > MAX_DEPTH:
        raise UnsupportedValueError(str(path), found="nested too deeply, or part of itself")
    if isinstance(value, Enum):
        yield from leaves_of(value.value, path, depth + 1)
    elif is_subclass(value):
        made_of = parts_of(value)
        yield path.attribute("class"), [made_of.name, made_of.context]
        for name, part in made_of.parts.items():
            yield from leaves_of(part, path.attribute(name), depth + 1)
    elif isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves_of(item, path.key(key), depth + 1)
    elif isinstance(value, list) and as_numbers(value) is not None:
        yield path, value
    elif isinstance(value, list | tuple | deque) and value:
        fields = getattr(value, "_fields", None)
        for index, item in enumerate(value):
            below = path.attribute(fields[index]) if fields else path.index(index)
            yield from leaves_of(item, below, depth + 1)
    else:
        yield path, value


def _digest(leaf: Any, path: StatePath) -> str:
    header: Any
    if isinstance(leaf, torch.Tensor) or is_sharded(leaf):
        local = local_part(leaf)
        check_tensor(local, path)
        header, pieces = [str(leaf.dtype), list(leaf.shape)], buffers_of(local)
        header += [str(box_of(leaf, str(path)))] if is_sharded(leaf) else []
    elif type(leaf) is np.ndarray:
        header, pieces = [described_dtype(leaf.dtype, path), list(leaf.shape)], buffers_of(leaf)
    elif type(leaf) is bytes:
        header, pieces = ["bytes"], buffers_of(leaf)
    else:
        encoded = encode(leaf, where=str(path))
        header = encoded.tree
        pieces = (piece for item in encoded.tensors.values() for piece in item.buffers())
    digester = xxhash.xxh3_128(json.dumps(header).encode("ascii"))
    for piece in pieces:
        digester.update(piece)
    return digester.hexdigest()
