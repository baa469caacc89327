"""Reads tensors that a load copies into live ones, without building them a second time.

Nothing live changes before all bytes are verified, on every rank. Until then these tensors are in
memory that is allocated once for all of them; or, where there is none for that, they are verified
only, and a second pass reads and verifies them again, straight into the live tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from resumekit.errors import CheckpointError, IncompleteLoadError
from resumekit.serialization.decoding import Decoder
from resumekit.serialization.leaves import PLAIN_TYPES, dense_strides, retyped, stored_values
from resumekit.serialization.sharding import Logical
from resumekit.storage.io.pipeline import HostBuffer

# Takes a state with its tensors on the meta device; gives each with the live tensor that it is
# copied into.
LiveTensors = Callable[[Any], Iterable[tuple[Tensor, Tensor]]]

_PAGE_BYTES = 4096
_MIN_BYTES = 64 << 10  # smaller ones are read at once: their values may decide whether they fit


class LoadMemory:
    """Memory for the tensors of one load; nothing is kept of it when they are copied.

    Args:
        buffer: it begins at the boundary of a page.
    """

    def __init__(self, buffer: HostBuffer) -> None:
        lent = buffer.view[:]
        self._lent = weakref.ref(lent)
        self._bytes: Tensor | None = torch.frombuffer(lent, dtype=torch.uint8)
        self._taken = 0

    def take(self, logical: Logical, offset: int) -> Tensor | None:
        """Memory of a whole tensor as plain numbers; None where no more is left.

        Args:
            logical: of the tensor.
            offset: of its bytes in their file. What is consecutive there is so here too, at the
                same position in a page: direct I/O then needs no copy.
        """
        assert self._bytes is not None, "the load is not over"
        width = logical.element.num_bytes
        num_bytes = width * torch.Size(logical.shape).numel()
        begin = self._taken + (offset - self._taken) % _PAGE_BYTES
        if begin % width or begin + num_bytes > self._bytes.numel():
            return None
        self._taken = begin + num_bytes
        strides = dense_strides(logical.shape)
        return retyped(self._bytes, PLAIN_TYPES[width], begin // width, logical.shape, strides)

    def is_free(self) -> bool:
        """Whether nothing uses the memory any more. Takes no more tensors after it."""
        self._bytes = None
        return self._lent() is None


@dataclass
class Deferral:
    """What of a checkpoint's states a load copies into live tensors.

    Args:
        live: by component key, for states that are read whole.
        memory: for these tensors; None to verify them first, and to read them with ``complete``.
    """

    live: Mapping[str, LiveTensors] = field(default_factory=dict)
    memory: LoadMemory | None = None
    _pending: dict[str, PendingState] = field(default_factory=dict)

    def add(self, key: str, pending: PendingState) -> None:
        """Takes note of a state that ``complete`` reads."""
        self._pending[key] = pending

    def complete(self, key: str, state: Any, live: LiveTensors) -> Any:
        """The state with all its tensors. Those that were verified only are read again.

        Args:
            key: of the component.
            state: as it was read.
            live: its live tensors now.

        Returns:
            The state; in place of the tensors that are read here it has the live ones, which then
            hold the values.

        Raises:
            IncompleteLoadError: the file has changed, or could not be read again.
        """
        pending = self._pending.pop(key, None)
        return state if pending is None else pending.read(state, live)


@dataclass(frozen=True)
class PendingState:
    """A state whose large tensors were verified only.

    Args:
        where: what error messages call its file.
        tree: of the state.
        tensors: by name; those that are to be read are on the meta device.
        reread: reads tensors by name into memory of plain numbers, verified.
    """

    where: str
    tree: Any
    tensors: Mapping[str, Tensor]
    reread: Callable[[Mapping[str, Tensor]], None]

    def read(self, state: Any, live: LiveTensors) -> Any:
        """The state with all its tensors; see ``Deferral.complete``."""
        missing = {name: tensor for name, tensor in self.tensors.items() if tensor.is_meta}
        targets = live_targets(missing, live(state), in_place=True)
        made = {
            name: targets[name] if name in targets else torch.empty_like(tensor, device="cpu")
            for name, tensor in missing.items()
        }
        try:
            self.reread({name: stored_values(tensor) for name, tensor in made.items()})
        except CheckpointError as error:
            raise IncompleteLoadError(
                self.where,
                found=f"it changed after it was verified ({error})",
                expected="the bytes of the first pass; some live tensors are already replaced",
                remedy="End this process, and start it again when nothing changes the checkpoint",
            ) from error
        return Decoder({**self.tensors, **made}, where=self.where).decode(self.tree)


def live_targets(
    saved: Mapping[str, Tensor], pairs: Iterable[tuple[Tensor, Tensor]], *, in_place: bool
) -> dict[str, Tensor]:
    """The live tensor that each saved one is copied into, of the large ones that have one alone.

    Args:
        saved: on the meta device, by name.
        pairs: saved and live ones.
        in_place: only live ones whose memory can take the bytes of the file.
    """
    names = {id(tensor): name for name, tensor in saved.items()}
    found: dict[str, Tensor] = {}
    owners: dict[tuple[object, int], str] = {}
    shared: set[str] = set()
    for tensor, target in pairs:
        name = names.get(id(tensor))
        if name is None or not _can_take(tensor, target, in_place=in_place):
            continue
        memory = (target.device, target.data_ptr())
        if found.get(name, target).data_ptr() != target.data_ptr():
            shared.add(name)  # tied in the checkpoint only: each live tensor gets a copy
        if owners.setdefault(memory, name) != name:
            shared |= {name, owners[memory]}  # tied here only: the values are compared
        found[name] = target.detach()
    return {name: target for name, target in found.items() if name not in shared}


def _can_take(saved: Tensor, live: Tensor, *, in_place: bool) -> bool:
    # Classes of their own may have no memory, and FSDP frees that of parameters for a while.
    if saved.nbytes < _MIN_BYTES or live.is_meta or type(live.detach()) is not Tensor:
        return False
    is_plain = live.is_contiguous() and not live.is_conj() and not live.is_neg()
    return live.data_ptr() != 0 and (not in_place or (live.is_cpu and is_plain))
