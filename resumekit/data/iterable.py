"""Iterables: a resume replays the epoch from its start up to the position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.utils.data import IterableDataset

from resumekit.capture.rng import RngState
from resumekit.data.loader_changes import SHARED
from resumekit.data.loader_traits import (
    LoaderTraits,
    announce_epoch,
    each_once,
    is_hugging_face,
    nested_generators,
    rewrap,
    sample_iterator,
    with_state,
)
from resumekit.data.source import Source, user_objects
from resumekit.data.stream_objects import (
    FindParameters,
    MakeUserState,
    ModelsInUse,
    StreamObjects,
)
from resumekit.data.workers import FetchRecorder, PersistentWorkers
from resumekit.errors import DataPositionError
from resumekit.log import warn
from resumekit.progress_display import show_progress
from resumekit.state import Fidelity

_CONDITION = (
    "a resume produces the used batches of the epoch again; exact as long as the dataset depends "
    "only on RNG state, its constructor and set_epoch()"
)


_OTHER_BATCHES = (
    "the replayed batches differ from the used ones, so samples may occur twice or never; let the "
    "dataset depend only on RNG state and set_epoch(), and make its generators attributes"
)


_TRAINED = (
    "which training changes, so a resume inside an epoch may give others: save where an epoch "
    "ends, or use it in the training step"
)
_READ_LATER = "while the stream may read it: let __iter__ read it before the first yield"
_UNKNOWN = (
    "is replayed from the start of the epoch; exact only when nothing but random "
    "numbers of this process shapes it; a torch DataLoader over an IterableDataset is exact"
)


# Iterating them draws no random number and changes nothing.
_SEQUENCES = (range, list, tuple, np.ndarray, torch.Tensor)


class ReplaySource(Source):
    """Any iterable: an epoch is replayed from its RNG state up to the position.

    What the loader draws in this process, it draws again from the states that it drew from before;
    workers are started from the seed that they were started from, and persistent ones with the
    states that they began the epoch with. The replayed batches are compared with a digest of
    those that were used.

    A torch DataLoader, also inside a framework's loader, is iterated as a shallow copy.
    """

    kind = "replay"

    def __init__(self, traits: LoaderTraits, name: str) -> None:
        super().__init__(traits, name)
        self._stream = traits.stream
        self._stream_rngs = _stream_generators(traits.loader, self._stream)
        self._persistent: PersistentWorkers | None = None
        self._iterated = self._copied()
        workers = 0 if self._stream is None else self._stream.num_workers
        if not workers:
            self.private = each_once({**self.private, **self._stream_rngs})
            self._rng = RngState(self.private)
        # A framework's loader may draw here although its workers do as well.
        self._fetches = FetchRecorder() if not workers or traits.inner else None
        self._contents = BatchDigest()
        self._start: dict[str, Any] | None = None
        self._objects: StreamObjects | None = None
        self._watched: StreamObjects | None = None  # where training may change what is read
        calls = self._stream.parts.values() if self._stream is not None else ()
        self._models = ModelsInUse([traits.loader, *calls])
        self._at_end = False
        self._ran_ahead = False  # persistent workers did, in an epoch that was left early
        self._differs = False  # drawn again, the batches were others

    def _copied(self) -> Any:
        """What is iterated."""
        if self._stream is None:
            return self.loader
        inner = self._stream.shallow_copy()
        if self._stream.keeps_workers and self._stream.is_iterable:
            self._persistent = PersistentWorkers(inner, self.name)
        return rewrap(self.loader, inner) if self.traits.inner else inner

    def follow_objects(self, follow: MakeUserState) -> None:
        # Persistent workers keep the objects that they got in the first epoch.
        if self._objects is None and self._persistent is None:
            objects = user_objects(self)
            self._objects = StreamObjects(follow(objects)) if objects else None
            has_workers = self._stream is not None and self._stream.num_workers  # with copies
            self._watched = None if has_workers else self._objects

    def watch_models(self, trained: FindParameters) -> None:
        self._models.look(trained())

    @property
    def fed_by(self) -> str:
        return self._models.found

    # ---------------------------------------------------------------- how exact it is

    @property
    def fidelity(self) -> tuple[Fidelity, str]:
        if self.fed_by:
            return Fidelity.LOST, f"the stream uses {self.fed_by}, {_TRAINED}"
        if self._differs:
            return Fidelity.LOST, _OTHER_BATCHES
        if type(self.loader) in _SEQUENCES:
            return Fidelity.EXACT, "the script makes the same items again; a digest verifies them"
        if self._stream is None and not isinstance(self.loader, IterableDataset):
            return Fidelity.EQUIVALENT, f"{type(self.loader).__name__} {_UNKNOWN}"
        if self._stream is not None and self._stream.num_workers:
            lost = self._lost_in_workers(self._stream)
            if lost:
                return Fidelity.LOST, lost
        if self._fetches is not None and self._fetches.overflowed:
            return Fidelity.EQUIVALENT, (
                f"the dataset and the training step both draw from {self._fetches.overflowed}'s "
                "global generator, and the epoch is too long to keep all of its states; give the "
                "dataset a generator of its own: self.rng = random.Random(seed)"
            )
        changed = self._watched.changed_by_training() if self._watched and self.begun else []
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            return Fidelity.UNKNOWN, f"training changes {changed[0]}{more} {_READ_LATER}"
        return Fidelity.EXACT, _CONDITION

    def _lost_in_workers(self, stream: LoaderTraits) -> str:
        """What cannot be repeated of what the workers do; empty if all can."""
        if stream.unordered:
            return stream.unordered
        if stream.keeps_workers and self._persistent is None:
            return (
                "the RNG states of persistent workers of a dispatching loader over a map-style "
                "dataset are not restored; use persistent_workers=False"
            )
        # datasets 5.2 iterable_dataset.py shuffles with copies of the generators that it holds.
        if self._persistent and self._stream_rngs and not is_hugging_face(stream.dataset):
            names = ", ".join(self._stream_rngs)
            return f"{names} keeps its state in persistent workers; use persistent_workers=False"
        if self._ran_ahead:
            return (
                "an epoch was left early, while persistent workers were ahead of the loop; "
                "use persistent_workers=False"
            )
        return ""

    # ---------------------------------------------------------------- an epoch

    def begin(self, epoch: int) -> None:
        pending = self._take_pending(epoch)
        if pending is not None and pending["workers"] and self._persistent is not None:
            self._restart_workers(self._persistent, pending["workers"])
        used = pending if pending is not None and pending["batch"] else None
        if self._objects is not None:
            self._objects.begin(None if used is None else used.get("objects"))
        announce_epoch(self._iterated, epoch)
        if used is not None:
            self._rng.load_state_dict(used["start"])
        self._start = self._rng.state_dict()
        if self._persistent is not None:
            self._persistent.begin(epoch, self._start)
        self._iterator = iter(self._iterated)
        self.batch = 0
        self._at_end = self._ran_ahead = False
        self._contents = BatchDigest()
        if self._fetches is not None:
            self._fetches.begin(None if used is None else used["fetches"])
        if used is not None:
            self._replay(used)

    def _from_counted(self, state: Mapping[str, Any]) -> dict[str, Any]:
        shared = {key: state[key] for key in SHARED if key in state}
        known = {"generators": {}, "start": self._rng.state_dict(), "contents": None}
        return {**self._current_state(), **shared, **known}

    def _restart_workers(self, workers: PersistentWorkers, state: Mapping[str, Any]) -> None:
        current = self._rng.state_dict()
        self._load_rng(state["birth"]["rng"])
        workers.restart(state)
        self._rng.load_state_dict(current)

    def _replay(self, pending: Mapping[str, Any]) -> None:
        num_batches = pending["batch"]
        what = f"replaying the used batches of {self.name!r}"
        with show_progress(what, num_batches, unit="batches", shown=_rank() == 0) as advance:
            for number in range(num_batches):
                try:
                    self.next_batch()
                except StopIteration:
                    raise DataPositionError(
                        self.name,
                        found=f"an epoch of {number} batches",
                        expected=f"at least the {num_batches} that were already used",
                    ) from None
                advance(1)
        if self._watched is not None:
            self._watched.replayed()
        expected = pending["contents"]
        self._differs = expected is not None and expected != self._contents.hexdigest()
        if self._differs:
            warn_of_data(f"the position in {self.name!r} is lost: {_OTHER_BATCHES}")

    def next_batch(self) -> Any:
        assert self._iterator is not None
        if self._watched is not None:
            self._watched.before_batch()
        if self._fetches is not None:
            self._fetches.before(self.batch)
        try:
            with self._models.watched():
                batch = next(self._iterator)
        except StopIteration:
            self._at_end = True
            raise
        if self._fetches is not None:
            self._fetches.after(self.batch)
        if self._watched is not None:
            self._watched.after_batch(sample_iterator(self._iterator))
        self._contents.add(batch)
        self.batch += 1
        self.num_samples = first_dimension(batch)
        return batch

    def end_epoch(self) -> None:
        self._ran_ahead = self._persistent is not None and self.begun and not self._at_end
        super().end_epoch()

    # ---------------------------------------------------------------- what is saved

    def _current_state(self) -> dict[str, Any]:
        state = self._state()
        under_way = state["batch"] > 0
        fetches = self._fetches if under_way else None
        complete = under_way and not (fetches is not None and fetches.overflowed)
        state["start"] = self._start if under_way else None
        state["fetches"] = None if fetches is None else fetches.state_dict()
        state["contents"] = self._contents.hexdigest() if complete else None
        state["workers"] = self._state_of_workers(under_way=under_way)
        objects = self._objects if under_way else None
        state["objects"] = None if objects is None else objects.state_dict()
        if not under_way and self._persistent is None:
            del state["geometry"]["num_workers"]  # the next epoch may have another number
        return state

    def _state_of_workers(self, *, under_way: bool) -> dict[str, Any] | None:
        if self._persistent is None or self._start is None or self._ran_ahead:
            return None
        return self._persistent.state_dict(under_way=under_way)

    def _geometry(self) -> dict[str, Any]:
        geometry = super()._geometry()
        # What a worker reads depends on how many there are, and so does the order of the batches.
        stream = None if self._stream is None else self._stream.loader
        for setting in ("num_workers", "batch_size", "drop_last", "persistent_workers"):
            geometry[setting] = getattr(stream, setting, None)
        return geometry


def first_dimension(batch: Any) -> int:
    """The samples in a batch of unknown make: the length of its first tensor, else 1."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    while isinstance(batch, (list, tuple)) and batch:
        batch = batch[0]
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape is not None and len(shape) else 1


def _stream_generators(loader: Any, stream: LoaderTraits | None) -> dict[str, Any]:
    """The generators that a stream and the function that collates it hold, however deep."""
    dataset = loader if stream is None else stream.dataset
    if not isinstance(dataset, IterableDataset):
        return {}
    holders: dict[str, Any] = {"dataset": dataset}
    if stream is not None:
        holders["collate_fn"] = stream.parts["collate_fn"]
    return with_state(nested_generators(holders))


# Of anything larger the first and the last part are taken: another order shows in any of them.
_WHOLE_BYTES = 64 * 1024
_MAX_DEPTH = 16


class BatchDigest:
    """A running digest of batches of any make.

    Tensors on the CPU, arrays, numbers and text count with their values; tensors elsewhere with
    their shapes, because to read them would wait for the device; other objects with their class.
    """

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def add(self, batch: Any) -> None:
        """Takes in one batch."""
        self._add(batch, 0)

    def hexdigest(self) -> str:
        """The digest of all batches so far."""
        return self._digest.hexdigest()

    def _add(self, value: Any, depth: int) -> None:
        self._text(type(value).__qualname__)
        if depth > _MAX_DEPTH:
            return
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, np.ndarray):
            self._array(value)
        elif isinstance(value, (bool, int, float, str, type(None), np.generic)):
            self._text(repr(value))
        elif isinstance(value, (bytes, bytearray)):
            self._bytes(np.frombuffer(value, dtype=np.uint8))
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._text(repr(key))
                self._add(item, depth + 1)
        elif isinstance(value, (list, tuple)):
            self._text(str(len(value)))
            for item in value:
                self._add(item, depth + 1)

    def _tensor(self, tensor: torch.Tensor) -> None:
        self._text(f"{tensor.dtype}{tuple(tensor.shape)}")
        plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)
        if tensor.device.type == "cpu" and plain and tensor.numel():
            flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
            self._bytes(flat.view(torch.uint8).numpy())

    def _array(self, array: np.ndarray[Any, Any]) -> None:
        self._text(f"{array.dtype}{array.shape}")
        if array.dtype.hasobject:
            for item in array.flat:
                self._add(item, _MAX_DEPTH)
        elif array.size:
            self._bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    def _text(self, text: str) -> None:
        self._digest.update(text.encode() + b"\0")

    def _bytes(self, data: np.ndarray[Any, Any]) -> None:
        if len(data) > _WHOLE_BYTES:
            half = _WHOLE_BYTES // 2
            self._digest.update(data[:half].data)
            data = data[-half:]
        self._digest.update(data.data)


def digest_of(batch: Any) -> str:
    """The digest of one batch."""
    found = BatchDigest()
    found.add(batch)
    return found.hexdigest()


def warn_of_data(message: str) -> None:
    """A warning about this rank's own data."""
    on_rank = f"rank {_rank()}: " if _num_ranks() > 1 else ""
    warn("RK-825", "%s%s", on_rank, message)


def _rank() -> int:
    return dist.get_rank() if _num_ranks() > 1 else 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
