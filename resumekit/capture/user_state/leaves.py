"""Which values user state is made of, and the one table of types that are never entered."""

from __future__ import annotations

import functools
import inspect
import io
import re
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any
from uuid import UUID

import numpy as np
import torch
from torch import Tensor, nn

from resumekit.capture.rng import GENERATOR_KINDS
from resumekit.serialization import is_sharded
from resumekit.state import Stateful


class Kind(Enum):
    """How a value is treated."""

    SCALAR = "a plain value"
    CONTAINER = "a container of values"
    TENSOR = "a tensor"
    ARRAY = "a numpy array"
    GENERATOR = "a random generator"
    STATEFUL = "an object with state_dict"
    MODULE = "a torch module"
    OBJECT = "an object with attributes"
    LEAF = "never entered: not state, or saved elsewhere"
    ITERATOR = "its position is state that nothing can read"
    CONSTANT = "an immutable object, known by its repr"
    OPAQUE = "an object without visible content"


SCALARS = (bool, int, float, complex, str, bytes, type(None))
SEQUENCES = (list, tuple, deque)
SETS = (set, frozenset)
MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
TORCH_CONSTANTS = (torch.dtype, torch.device, torch.Size)
_CONSTANTS = (range, slice, Decimal, Fraction, UUID)

# The leaf table, by top-level package: objects of these classes hold the libraries' own state. A
# class of the user's that is derived from one of them is entered.
LIBRARIES = frozenset(
    {
        "accelerate",
        "bitsandbytes",
        "datasets",
        "deepspeed",
        "diffusers",
        "evaluate",
        "huggingface_hub",
        "lightning",
        "lightning_fabric",
        "lightning_utilities",
        "peft",
        "pytorch_lightning",
        "resumekit",
        "safetensors",
        "sentence_transformers",
        "timm",
        "tokenizers",
        "torch",
        "torchdata",
        "torchtext",
        "torchvision",
        "transformers",
        "trl",
    }
)

# The leaf table, packages whose objects report, show or log, and decide nothing.
REPORTING = frozenset(
    {
        "aim",
        "clearml",
        "comet_ml",
        "dvclive",
        "fsspec",
        "logging",
        "loguru",
        "matplotlib",
        "mlflow",
        "neptune",
        "plotly",
        "prometheus_client",
        "rich",
        "structlog",
        "swanlab",
        "tensorboard",
        "tensorboardX",
        "tqdm",
        "trackio",
        "wandb",
    }
)

# The leaf table, packages of threads, processes, clients, files, clocks and patterns.
MACHINERY = frozenset(
    {
        "_io",
        "_queue",
        "_thread",
        "asyncio",
        "boto3",
        "botocore",
        "concurrent",
        "ctypes",
        "datetime",
        "functools",
        "h5py",
        "importlib",
        "inspect",
        "io",
        "lmdb",
        "mmap",
        "multiprocessing",
        "paramiko",
        "pathlib",
        "pyarrow",
        "queue",
        "re",
        "requests",
        "select",
        "shelve",
        "socket",
        "sqlite3",
        "ssl",
        "subprocess",
        "tempfile",
        "threading",
        "typing",
        "urllib3",
        "weakref",
        "zipfile",
    }
)
_LEAF_PACKAGES = LIBRARIES | REPORTING | MACHINERY

# The leaf table, classes whose derived classes are leaves too, also in user code.
_LEAF_BASES = frozenset(
    {
        "accelerate.accelerator.Accelerator",
        "datasets.arrow_dataset.Dataset",
        "datasets.iterable_dataset.IterableDataset",
        "logging.Filterer",
        "multiprocessing.process.BaseProcess",
        "threading.Thread",
        "torch.optim.lr_scheduler.LRScheduler",
        "torch.optim.optimizer.Optimizer",
        "torch.utils.data.dataloader.DataLoader",
        "tqdm.std.tqdm",
        "transformers.configuration_utils.PreTrainedConfig",
        "transformers.configuration_utils.PretrainedConfig",
        "transformers.tokenization_utils_base.PreTrainedTokenizerBase",
        "transformers.training_args.TrainingArguments",
    }
)

# torch 2.13 utils/data/dataloader.py: what iter(loader) gives.
_ITERATOR_BASES = frozenset({"torch.utils.data.dataloader._BaseDataLoaderIter"})

# torch 2.13: made lazily beside flags that say so.
_HANDLE_BASES = frozenset({"torch.cuda.streams.Stream", "torch.cuda.streams.Event"})

_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, functools.partial)


def kind_of(value: Any) -> Kind:
    """How a value is treated; decided by its class, and of tensors and files by what they are."""
    kind: Kind = _kind_of_class(class_of(value))
    if kind is Kind.TENSOR and (is_sharded(value) or value.is_meta or type(value) not in _TENSORS):
        return Kind.LEAF
    if kind is Kind.LEAF and isinstance(value, io.IOBase):
        return Kind.ITERATOR if _is_read(value) else Kind.LEAF
    return kind


def is_user_object(value: Any) -> bool:
    """Whether it is an object of a class of the user's, with attributes."""
    return kind_of(value) in (Kind.OBJECT, Kind.STATEFUL, Kind.MODULE)


def class_of(value: Any) -> Any:
    """The class of a value, for functions with a cache, which mypy types as taking a Hashable."""
    return type(value)


_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


@functools.cache
def _kind_of_class(kind: Any) -> Kind:
    if kind in SCALARS or issubclass(kind, (Enum, np.generic)) or kind in TORCH_CONSTANTS:
        return Kind.SCALAR
    if kind in (*SEQUENCES, *SETS, *MAPPINGS) or _is_namedtuple(kind):
        return Kind.CONTAINER
    if kind in _CONSTANTS:
        return Kind.CONSTANT
    if issubclass(kind, Tensor):
        return Kind.TENSOR
    if kind is np.ndarray:
        return Kind.ARRAY
    if issubclass(kind, GENERATOR_KINDS):
        return Kind.GENERATOR
    if issubclass(kind, nn.Module):
        return Kind.MODULE
    names = frozenset(f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__)
    if names & _ITERATOR_BASES:
        return Kind.ITERATOR
    if names & _HANDLE_BASES:
        return Kind.OPAQUE
    is_code = issubclass(kind, _CODE) or callable(getattr(kind, "__wrapped__", None))
    if is_code or names & _LEAF_BASES or top_package(kind) in _LEAF_PACKAGES:
        return Kind.LEAF
    if issubclass(kind, (io.IOBase, weakref.ReferenceType, inspect.Signature, BaseException)):
        return Kind.LEAF
    return _kind_of_object(kind)


def _kind_of_object(kind: Any) -> Kind:
    has_attributes = bool(slots_of(kind)) or bool(kind.__dictoffset__)
    if has_attributes and kind.__module__ != "builtins":
        has_state = issubclass(kind, Stateful) and not hasattr(kind, "__getitem__")
        return Kind.STATEFUL if has_state else Kind.OBJECT
    if issubclass(kind, Iterator):
        return Kind.ITERATOR
    if issubclass(kind, tuple(getattr(types, name) for name in _BUILT_IN_CODE)):
        return Kind.LEAF
    return Kind.OPAQUE


_BUILT_IN_CODE = ("BuiltinFunctionType", "MethodWrapperType", "WrapperDescriptorType", "CodeType")


def _is_namedtuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make")


def is_namedtuple(value: Any) -> bool:
    """Whether a value is an instance of a namedtuple class."""
    return _is_namedtuple(class_of(value))


@functools.cache
def slots_of(kind: type) -> tuple[str, ...]:
    """The attributes that the class and its bases declare in ``__slots__``."""
    found: dict[str, None] = {}
    for each in kind.__mro__:
        declared = vars(each).get("__slots__", ())
        names = (declared,) if isinstance(declared, str) else tuple(declared)
        for name in names:
            if name not in ("__dict__", "__weakref__"):
                is_private = name.startswith("__") and not name.endswith("__")
                found[f"_{each.__name__.lstrip('_')}{name}" if is_private else name] = None
    return tuple(found)


@functools.cache
def top_package(kind: type) -> str:
    """The top-level package of the module that defines a class."""
    return kind.__module__.partition(".")[0]


def _is_read(file: io.IOBase) -> bool:
    """Whether a file is open for reading: its position decides what is read next."""
    return not file.closed and file.readable() and file.seekable()


# ---------------------------------------------------------------- names that look like secrets

_ALWAYS_SECRET = frozenset(
    {"apikey", "credential", "credentials", "passphrase", "passwd", "password", "pwd", "secret"}
)
_SECRET_KEYS = frozenset(
    {
        "access",
        "account",
        "api",
        "auth",
        "aws",
        "client",
        "encryption",
        "hf",
        "hub",
        "license",
        "private",
        "secret",
        "service",
        "session",
        "signing",
        "ssh",
        "storage",
        "wandb",
    }
)
_TOKENS_OF_TEXT = frozenset(
    {
        "bos",
        "cls",
        "current",
        "decoder",
        "end",
        "eos",
        "first",
        "forced",
        "image",
        "last",
        "mask",
        "new",
        "next",
        "pad",
        "per",
        "prev",
        "previous",
        "sep",
        "special",
        "start",
        "stop",
        "think",
        "unk",
    }
)


def is_secret(name: str, value: Any) -> bool:
    """Whether an attribute looks like a secret: by the last words of its name, and text in it.

    ``hf_token``, ``api_key`` and ``password`` do; ``tokens``, ``token_count``, ``pad_token``,
    ``sort_key`` and ``key_padding`` do not, and a number never does.
    """
    return _names_secret(name) and _holds_text(value)


@functools.cache
def _names_secret(name: str) -> bool:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    words = [*filter(None, snake.split("_"))]
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "token":
        return before not in _TOKENS_OF_TEXT
    if last == "key":
        return not before or before in _SECRET_KEYS
    return last in _ALWAYS_SECRET


def _holds_text(value: Any) -> bool:
    """Whether it is text, or a container with some."""
    if isinstance(value, (dict, list, tuple)):
        items = value.values() if isinstance(value, dict) else value
        return any(isinstance(each, (str, bytes)) and each for each in items)
    return isinstance(value, (str, bytes)) and bool(value)
