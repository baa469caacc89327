"""One digest of the content of any object."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import xxhash

from resumekit.capture.user_state.leaves import Kind, kind_of
from resumekit.capture.user_state.slots import Holder
from resumekit.capture.user_state.walk import Scope, walk
from resumekit.state import Stateful


def content_digest(value: Any, *, limit_bytes: int, foreign: Collection[Any] = ()) -> int | None:
    """A number that changes when the content of an object does.

    It depends on the order of elements, and cycles are no problem. Attributes are read from
    ``__dict__`` and ``__slots__``; what is never entered, as a logger, counts as constant. An
    object of a library with ``state_dict``, as an optimizer, is its state.

    Args:
        value: any object.
        limit_bytes: the most that is digested: of Python objects, and of tensors and arrays.
        foreign: objects that count as constant wherever they occur in it.

    Returns:
        The digest; None where the content is larger, or a part of it cannot be read.
    """
    if kind_of(value) is Kind.LEAF:
        if not isinstance(value, Stateful) or isinstance(value, type):
            return None
        value = value.state_dict()
    scope = Scope(lambda: foreign, limit_bytes=limit_bytes, memory_bytes=limit_bytes)
    found = walk({"it": Holder(SimpleNamespace(value=value))}, scope)
    digests = xxhash.xxh3_64()
    for path, each in found.seen.items():
        if each.problem is not None or (not each.is_ignored and kind_of(each.value) is Kind.OPAQUE):
            return None
        digests.update(f"{path}\0{each.digest}\n".encode("utf-8", "surrogatepass"))
    return digests.intdigest()
