"""Reads the files of other programs; nothing in them is imported or called."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from resumekit.errors import ConfigurationError

_MAX_SETTINGS_BYTES = 1 << 20

# What a state of NumPy's generator is made of; transformers 5.23 trainer_pt_utils.py allows it too.
_RECONSTRUCT = np.zeros(0).__reduce__()[0]
_ARRAYS: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), _RECONSTRUCT]


def read_torch_file(path: Path) -> Any:
    """What ``torch.save`` wrote: tensors, plain values and containers, on the CPU.

    Raises:
        ConfigurationError: the file is damaged, or has objects of other classes.
    """
    is_zip = zipfile.is_zipfile(path)  # an older file cannot be mapped
    return _load(path, path, mmap=is_zip or None)


def read_torch_bytes(path: Path, offset: int, length: int) -> Any:
    """The same of a part of a file.

    Args:
        path: of the file.
        offset: where the part begins, in bytes.
        length: of the part, in bytes.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            part = io.BytesIO(file.read(length))
    except OSError as error:
        raise _unreadable(path, error) from error
    return _load(part, path)


def _load(source: Any, path: Path, **options: Any) -> Any:
    try:
        with torch.serialization.safe_globals(_ARRAYS):
            return torch.load(source, map_location="cpu", weights_only=True, **options)
    except pickle.UnpicklingError as error:
        raise ConfigurationError(
            str(path),
            found=f"objects that only an unrestricted pickle can make ({_reason(error)})",
            expected="tensors and plain values",
            remedy="Load it in the program that wrote it, and save the state_dicts alone",
        ) from error
    except (EOFError, OSError, RuntimeError, ValueError) as error:
        raise _unreadable(path, error) from error


def _reason(error: Exception) -> str:
    """The first line that names what is not allowed."""
    lines = [line.strip() for line in str(error).splitlines()]
    named = (line for line in lines if "GLOBAL" in line or "class" in line)
    return next(named, lines[0] if lines else type(error).__name__)[:160]


def _unreadable(path: Path, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        str(path),
        found=f"it cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:160]}",
        expected="an intact file",
    )


def read_weights(directory: Path) -> dict[str, Any] | None:
    """The tensors of a model by name, of one file or of several with an index; None for neither.

    Raises:
        ConfigurationError: a file is damaged.
    """
    for name, read in (("model.safetensors", _read_safetensors), ("pytorch_model.bin", _read_bin)):
        if (directory / name).is_file():
            return read(directory / name)
        index = directory / f"{name}.index.json"
        if index.is_file():
            files = sorted(set(read_json(index)["weight_map"].values()))
            parts = [read(directory / Path(each).name) for each in files]
            return {key: value for part in parts for key, value in part.items()}
    return None


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _read_bin(path: Path) -> dict[str, Any]:
    return dict(read_torch_file(path))


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file.

    Raises:
        ConfigurationError: the file is damaged.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(found, dict):
        raise ConfigurationError(str(path), found="no JSON object", expected="one")
    return found


def read_attributes(path: Path) -> Mapping[str, Any]:
    """The plain attributes of the one object in a ``torch.save`` file, e.g. training_args.bin.

    Empty where they cannot be read: no class of the file exists here.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(each for each in archive.namelist() if each.endswith("/data.pkl"))
            if archive.getinfo(name).file_size > _MAX_SETTINGS_BYTES:
                return {}
            with archive.open(name) as pickled:
                found = vars(_Attributes(pickled).load())
    # A damaged pickle raises anything, and so does one that calls methods of the empty classes.
    except Exception:  # noqa: BLE001
        return {}
    return {key: value for key, value in found.items() if not isinstance(value, _Nothing)}


class _Nothing:
    """Stands in for every class and function that a pickle names."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Takes whatever the pickle passes."""

    def __call__(self, *arguments: Any) -> _Nothing:
        return _Nothing()


class _Attributes(pickle.Unpickler):
    """Makes nothing but plain values and empty objects."""

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Nothing,), {})

    def persistent_load(self, pid: Any) -> Any:
        return _Nothing()


# ---------------------------------------------------------------- the metadata of DCP

_DCP = "torch.distributed.checkpoint"
# What torch 2.13 distributed/checkpoint/filesystem.py FileSystemWriter.finish pickles.
_IN_METADATA = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((f"{_DCP}.metadata", f"{name}StorageMetadata") for name in ("Tensor", "Chunk", "Bytes")),
    *((f"{_DCP}.metadata", name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    *((f"{_DCP}.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout")),
}


def read_metadata(path: Path) -> Any:
    """The metadata of a DCP checkpoint: objects with the attributes of torch's classes.

    Raises:
        ConfigurationError: the file is damaged, or names anything else than these classes.
    """
    try:
        with path.open("rb") as pickled:
            return _DcpMetadata(pickled).load()
    # A damaged pickle raises anything.
    except Exception as error:
        raise _unreadable(path, error) from error


class _Attributed:
    """Stands in for a class of the metadata."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"parts": state})


class _DcpMetadata(pickle.Unpickler):
    """Makes plain values, and objects of new classes: one cannot change a class of torch."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch", "Size"):
            return tuple
        is_path = module.partition(".")[0] == "pathlib" and name.isidentifier()
        if (module, name) in _IN_METADATA or is_path:
            return type(name, (_Attributed,), {})
        raise pickle.UnpicklingError(f"it names {module}.{name}, no part of DCP's metadata")
