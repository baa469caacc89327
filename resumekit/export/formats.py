"""Files of other tools, written from the weights of a checkpoint."""

from __future__ import annotations

import json
import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from resumekit.capture.model import ADAPTER_NAMES
from resumekit.errors import StateMismatchError
from resumekit.export.weights import Tensors, Weights, batches_of
from resumekit.serialization.index import header
from resumekit.serialization.leaves import buffers_of

WEIGHTS = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
# In the folder of a component: the tensors of each rank, and what says where a tensor is.
_OF_TENSORS = ("rank-", "index", "model.safetensors.index")


def _safetensors(path: Path, weights: Weights, max_bytes: int | None) -> None:
    """One file; with a limit a directory of several, and an index that has the file of each name.

    A tensor above the limit has a file of its own.
    """
    if max_bytes is None:
        one_file(path, weights, [*weights.sizes])
        return
    path.mkdir()
    shards = [*batches_of([*weights.sizes], weights.sizes, max_bytes)]
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        one_file(path / file, weights, names)
        weight_map |= dict.fromkeys(names, file)
    metadata = {"total_size": sum(weights.sizes.values())}
    index = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2)
    write_bytes(path / f"{WEIGHTS}.index.json", index.encode())


def _pretrained(path: Path, weights: Weights, max_bytes: int | None) -> None:
    """What ``from_pretrained`` opens: the weights, configuration and tokenizer that the step has.

    Of a model with an adapter only the adapter, if the step has it as PEFT writes it.

    Raises:
        StateMismatchError: it has none.
    """
    step, files = weights.step, model_files(weights)
    names = json.loads(files.pop(ADAPTER_NAMES, b"{}"))
    if not names and not files.keys() & {"config.json", ADAPTER}:
        raise StateMismatchError(
            f"{step.name}: {weights.record.key}",
            found="no config.json",
            expected="the model of a Trainer, a PreTrainedModel",
            remedy="Export it as safetensors",
        )
    if not names:
        write_model(path, weights, max_bytes, files)
        return
    path.mkdir()
    adapter = weights.renamed(names)
    one_file(path / ADAPTER, adapter, [*adapter.sizes])
    for name, content in files.items():
        write_bytes(path / name, content)


def write_model(
    path: Path, weights: Weights, max_bytes: int | None, files: Mapping[str, bytes]
) -> None:
    """A directory with the weights, unless the files have them, and these files."""
    if max_bytes is None or ADAPTER in files:
        path.mkdir()
        if ADAPTER not in files:
            one_file(path / WEIGHTS, weights, [*weights.sizes])
    else:
        _safetensors(path, weights, max_bytes)
    for name, content in files.items():
        write_bytes(path / name, content)


def _torch(path: Path, weights: Weights, _: int | None) -> None:
    """A state dict that ``torch.load(weights_only=True)`` opens."""
    with mapped(path, weights) as tensors, path.open("xb") as file:
        torch.save(tensors, file)
        sync(file)


def _dcp(path: Path, weights: Weights, _: int | None) -> None:
    """What ``torch.distributed.checkpoint.load`` opens."""
    with mapped(path, weights) as tensors, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        save(dict(tensors), storage_writer=FileSystemWriter(path), no_dist=True)


# What each format is written by: the path, the weights, and the bytes of a file at most.
WRITERS: Mapping[str, Callable[[Path, Weights, int | None], None]] = {
    "safetensors": _safetensors,
    "pretrained": _pretrained,
    "torch": _torch,
    "dcp": _dcp,
}
IN_SHARDS = ("safetensors", "pretrained")


def one_file(path: Path, weights: Tensors, names: Sequence[str]) -> None:
    """Writes these tensors as a safetensors file, a few at a time."""
    records = weights.arranged(names)
    with path.open("xb") as file:
        file.write(header(records, {}))
        for tensor in weights.read([record.name for record in records]):
            for piece in buffers_of(tensor):
                file.write(piece)
        sync(file)


class Joined(Tensors):
    """Tensors of one dimension, each of which is made of several ones.

    Args:
        parts: at least one of each, by the name of what they become.
    """

    def __init__(self, parts: Mapping[str, Sequence[Tensor]]) -> None:
        self._parts = parts
        lengths = {name: sum(each.numel() for each in several) for name, several in parts.items()}
        super().__init__(
            {
                name: torch.empty(length, dtype=parts[name][0].dtype, device="meta")
                for name, length in lengths.items()
            }
        )

    def read(self, names: Sequence[str]) -> Iterator[Tensor]:
        """The parts, in their order."""
        for name in names:
            yield from self._parts[name]


@contextmanager
def mapped(path: Path, weights: Tensors) -> Iterator[dict[str, Tensor]]:
    """The tensors, in a file that is mapped for as long: they take no memory of their own."""
    file = path.with_name(f"{path.name}.mapped")
    records = weights.arranged([*weights.sizes])
    begin = len(header(records, {}))
    try:
        one_file(file, weights, [*weights.sizes])
        with file.open("rb") as opened:
            memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        yield {
            record.name: torch.frombuffer(
                memory, dtype=torch.uint8, count=record.num_bytes, offset=begin + record.begin
            )
            .view(record.element.dtype)
            .view(record.shape)
            if record.num_bytes
            else torch.empty(record.shape, dtype=record.element.dtype)
            for record in records
        }
    finally:
        file.unlink(missing_ok=True)


def model_files(weights: Weights) -> dict[str, bytes]:
    """The files beside the weights, of the model, its adapter and its tokenizer, by name."""
    files: dict[str, bytes] = {}
    for entry in weights.step.manifest.files:
        folder, _, name = entry.path.rpartition("/")
        if folder == weights.record.directory and not name.startswith(_OF_TENSORS):
            with weights.step.file(entry.path) as reader:
                files[name] = bytes(reader.read())
    return files


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a small file."""
    with path.open("xb") as file:
        file.write(content)
        sync(file)


def save_state(path: Path, state: Any, **options: Any) -> None:
    """Writes a file for ``torch.load(weights_only=True)``; options are those of ``torch.save``."""
    with path.open("xb") as file:
        torch.save(state, file, **options)
        sync(file)


def sync(file: BinaryIO) -> None:
    """Flushes a file to the disk."""
    file.flush()
    os.fsync(file.fileno())
