"""What one writer puts into a checkpoint directory, and how it is read back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from resumekit.errors import CorruptCheckpointError
from resumekit.serialization.decode import Decoder, names_in
from resumekit.serialization.encode import Encoder
from resumekit.serialization.index import Index
from resumekit.serialization.load import read_tensors
from resumekit.serialization.part import Part
from resumekit.storage import MAX_JSON_BYTES, StepReader


class Payload(Part):
    """The states of some components, ready to be written by one rank.

    Nothing is copied, and nothing written before ``write``: the states must not change until then.

    Args:
        directory: where its files go, relative to the step directory.
        rank: the rank that writes.
        states: nested state by component key. With one key the tensors are named by their place in
            the state (a model's by FQN); with more, the key comes first.

    Raises:
        UnsupportedValueError: a value cannot be stored; names its place.
    """

    def __init__(self, directory: str, rank: int, states: Mapping[str, Any]) -> None:
        encoder = Encoder(prefix_names=len(states) > 1)
        trees = {key: encoder.encode(state, where=key) for key, state in states.items()}
        stored = encoder.finish()
        super().__init__(
            stem_of(directory, rank), rank, stored.leaves, ties=stored.ties, states=trees
        )


def stem_of(directory: str, rank: int) -> str:
    """The path of a rank's files in a directory, without their suffix."""
    return f"{directory}/rank-{rank:05d}"


def read_index(step: StepReader, stem: str) -> Index:
    """The index of one rank's files, verified.

    Raises:
        CorruptCheckpointError: damage.
        FormatVersionError: written by a newer version, or with a newer torch.
        UnreadableCheckpointError: an I/O error.
    """
    with step.file(f"{stem}.json") as file:
        data = file.read(max_bytes=MAX_JSON_BYTES)
    return Index.from_bytes(data, where=f"{step.name}/{stem}.json")


def read_payload(
    step: StepReader, directory: str, rank: int, keys: Collection[str] | None = None
) -> dict[str, Any]:
    """The states that a rank wrote, every byte of them verified.

    Args:
        step: the checkpoint.
        directory: as given to ``Payload``.
        rank: the rank that wrote.
        keys: the component keys to read; all by default.

    Raises:
        CorruptCheckpointError: damage, or a key that is not there; names the file.
        FormatVersionError: written by a newer version, or with a newer torch.
        UnreadableCheckpointError: an I/O error.
    """
    stem = stem_of(directory, rank)
    data, where = f"{stem}.safetensors", f"{step.name}/{stem}"
    index = read_index(step, stem)
    wanted = list(index.states) if keys is None else list(keys)
    for key in wanted:
        if key not in index.states:
            raise CorruptCheckpointError(f"{where}.json", found=f"has no state of {key!r}")
    used = None if keys is None else set(names_in([index.states[key] for key in wanted]))
    tensors = read_tensors(lambda: step.file(data), index, where=f"{where}.safetensors", names=used)
    decoder = Decoder(tensors, where=f"{where}.json")
    return {key: decoder.decode(index.states[key]) for key in wanted}
