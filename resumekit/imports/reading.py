"""Reads the files of other programs; nothing in them is imported or called."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from resumekit.errors import ConfigurationError

_MAX_SETTINGS_BYTES = 1 << 20

# What a state of NumPy's generator is made of; transformers 5.23 trainer_pt_utils.py allows it too.
_RECONSTRUCT = np.zeros(0).__reduce__()[0]
_ARRAYS: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32)), _RECONSTRUCT]


def read_torch_file(path: Path, *, trusts: bool) -> Any:
    """What ``torch.save`` wrote: tensors, plain values and containers, on the CPU.

    Args:
        path: of the file.
        trusts: the user asks for objects of any class: code that the file names is run.

    Raises:
        ConfigurationError: the file is damaged, or has objects of other classes.
    """
    is_zip = zipfile.is_zipfile(path)  # an older file cannot be mapped
    return _load(path, path, trusts, mmap=is_zip or None)


def read_torch_bytes(path: Path, offset: int, length: int, *, trusts: bool) -> Any:
    """The same of a part of a file.

    Args:
        path: of the file.
        offset: where the part begins, in bytes.
        length: of the part, in bytes.
        trusts: see ``read_torch_file``.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            part = io.BytesIO(file.read(length))
    except OSError as error:
        raise _unreadable(path, error) from error
    return _load(part, path, trusts)


def _load(source: Any, path: Path, trusts: bool, **options: Any) -> Any:
    try:
        with torch.serialization.safe_globals(_ARRAYS):
            return torch.load(source, map_location="cpu", weights_only=not trusts, **options)
    except (AttributeError, ImportError) as error:
        raise ConfigurationError(
            str(path),
            found=f"an object whose class is not here: {error}",
            expected="the classes that the file names",
            remedy="Pass import_from=PATH and trust_import=True in the script that has them",
        ) from error
    except pickle.UnpicklingError as error:
        names = _named(source, error)
        if "torch.distributed._shard" in names:
            what = "ShardedTensors of FSDP1, which need the process group that saved them"
            refuse(path, what, "whole tensors, or shards in a DCP directory")
        raise ConfigurationError(
            str(path),
            found=f"objects that only an unrestricted pickle can make ({names})",
            expected="tensors and plain values",
            remedy="Load it in the program that wrote it, and save the state_dicts alone; or, if "
            "you trust who wrote it, run what it names: --trust, trust_import=True",
        ) from error
    except (EOFError, OSError, RuntimeError, ValueError) as error:
        raise _unreadable(path, error) from error


def _named(source: Any, error: Exception) -> str:
    """What a file names that is not allowed; else the first line of the error."""
    names: list[str] = []
    with suppress(RuntimeError, ValueError, pickle.UnpicklingError):
        if isinstance(source, io.BytesIO):
            source.seek(0)
        with torch.serialization.safe_globals(_ARRAYS):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    return (", ".join(sorted(names)) or str(error).strip().partition("\n")[0])[:160]


def refuse(path: Path, found: str, expected: str) -> NoReturn:
    """Raises ConfigurationError for what cannot be taken over."""
    raise ConfigurationError(str(path), found=found, expected=expected)


def _unreadable(path: Path, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        str(path),
        found=f"it cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:160]}",
        expected="an intact file",
    )


def read_state(path: Path, *, trusts: bool) -> Any:
    """What a file holds, or several with an index of that name; None for neither.

    Args:
        path: of the file.
        trusts: see ``read_torch_file``.

    Raises:
        ConfigurationError: a file is damaged.
    """
    is_safe = path.suffix == ".safetensors"
    read = _read_safetensors if is_safe else partial(read_torch_file, trusts=trusts)
    if path.is_file():
        return read(path)
    index = path.with_name(f"{path.name}.index.json")
    if not index.is_file():
        return None
    files = sorted(set(read_json(index)["weight_map"].values()))
    parts = [read(path.with_name(Path(each).name)) for each in files]
    return {key: value for part in parts for key, value in part.items()}


def _read_safetensors(path: Path) -> dict[str, Any]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


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
        refuse(path, "no JSON object", "one")
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
    return {key: value for key, value in found.items() if not isinstance(value, StandIn)}


class StandIn:
    """Stands in for a class or a function that a pickle names, which is not imported."""

    def __init__(self, *parts: Any, **_: Any) -> None:
        """Takes whatever the pickle passes."""
        self.parts = parts

    def __call__(self, *_: Any) -> StandIn:
        """Nothing of the pickle runs."""
        return StandIn()

    def __setstate__(self, state: Any) -> None:
        """Takes the attributes that the pickle has of the object."""
        vars(self).update(state if isinstance(state, dict) else {"parts": state})


class _Attributes(pickle.Unpickler):
    """Makes nothing but plain values and empty objects."""

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (StandIn,), {})

    def persistent_load(self, pid: Any) -> Any:
        return StandIn()


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


class _DcpMetadata(pickle.Unpickler):
    """Makes plain values, and objects of new classes: one cannot change a class of torch."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch", "Size"):
            return tuple
        is_path = module.partition(".")[0] == "pathlib" and name.isidentifier()
        if (module, name) in _IN_METADATA or is_path:
            return type(name, (StandIn,), {})
        raise pickle.UnpicklingError(f"it names {module}.{name}, no part of DCP's metadata")
