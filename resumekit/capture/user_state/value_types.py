"""Which values and attributes are user state: kinds of values, library code.

``ENGINES``, ``REPORTING`` and ``MACHINERY`` are the leaf table: classes that are never entered.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import io
import random
import re
import struct
import sys
import threading
import types
import weakref
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from importlib import metadata
from itertools import chain
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from resumekit.capture.nested_state import class_name
from resumekit.capture.rng import GENERATOR_TYPES
from resumekit.live.frames import digest_code, is_library_file, is_on_stack
from resumekit.state import Stateful


class Kind(Enum):
    """How a value is treated."""

    __hash__ = object.__hash__  # Enum's is Python code, and each value of a walk asks for it

    SCALAR = "a plain value"
    CONTAINER = "a container of values"
    TENSOR = "a tensor"
    ARRAY = "a numpy array"
    GENERATOR = "a random generator"
    STATEFUL = "an object with state_dict"
    MODULE = "a torch module"
    OBJECT = "an object with attributes"
    FUNCTION = "a function: its closure, defaults and attributes, and the globals that it loads"
    CLASS = "a class: its attributes and its methods"
    CALL = "a bound method, a partial or a function with a cache"
    NAMED = "known by its name or its text: a module, a method of C, an exception"
    LEAF = "never entered: not state, or saved elsewhere"
    ITERATOR = "its position is state that nothing can read"
    CONSTANT = "an immutable object, made again from its class and arguments"
    BUFFER = "a sequence of bytes or numbers"
    SHARED = "numbers in the memory of C, which processes may share"
    REDUCED = "an object with state that no attribute shows: read as copy and pickle read it"
    OPAQUE = "an object without visible content"


SCALARS = (bool, int, float, complex, str, bytes, type(None))
SEQUENCES = (list, tuple, deque)
SETS = (set, frozenset)
FACTORIES: dict[str, Any] = {each.__name__: each for each in (dict, float, int, list, set, str)}
MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
TORCH_CONSTANTS = (torch.dtype, torch.device, torch.Size)


class Absent:
    """The value of an attribute that training has deleted."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return Absent, ()


_CONSTANTS = (
    *(range, slice, Decimal, Fraction, timedelta, date, datetime, PurePosixPath, PosixPath),
    Absent,
)
# Their ``__reduce__`` gives the class and plain arguments.
CONSTANTS: dict[str, Any] = {each.__name__: each for each in _CONSTANTS}


def word_set(text: str) -> frozenset[str]:
    """The words of a text: long tables of names stay readable."""
    return frozenset(text.split())


# Libraries whose attributes are no user state in objects of classes that are derived from theirs.
LIBRARIES = word_set(
    """
    accelerate bitsandbytes datasets deepspeed diffusers evaluate huggingface_hub lightning
    lightning_fabric lightning_utilities peft pytorch_lightning resumekit safetensors
    sentence_transformers timm tokenizers torch torchdata torchtext torchvision transformers trl
    """
)

# Packages, and modules of packages, whose objects run the training or the machine: what they have
# to remember, adapters and other components save. Also private modules of torch.
ENGINES = word_set(
    """
    accelerate bitsandbytes datasets deepspeed evaluate huggingface_hub lightning lightning_fabric
    lightning_utilities pytorch_lightning resumekit safetensors tokenizers
    torch.autograd torch.cuda torch.distributed torch.export torch.fx torch.jit
    torch.multiprocessing torch.nn.parallel torch.profiler torch.utils.data._utils
    torch.utils.hooks torch.utils.tensorboard transformers.trainer transformers.pipelines trl
    """
)

# Packages whose objects report, show, log or test, and decide nothing.
REPORTING = word_set(
    """
    _pytest aim clearml comet_ml dvclive fsspec logging loguru matplotlib mlflow neptune plotly
    prometheus_client rich structlog swanlab tensorboard tensorboardX tqdm trackio wandb
    """
)

# Packages of threads, processes, clients, files and clocks.
MACHINERY = word_set(
    """
    _io _queue _thread asyncio boto3 botocore concurrent ctypes functools h5py importlib inspect io
    lmdb mmap multiprocessing paramiko pathlib queue requests select shelve socket sqlalchemy
    sqlite3 ssl subprocess tempfile threading typing urllib3 weakref zipfile
    """
)
_LEAVES = ENGINES | REPORTING | MACHINERY

# Packages whose objects are read as copy and pickle read them: some of their attributes are caches,
# and others are made from each other, so that no resume can set one after the other.
_READ_WHOLE = word_set("pandas")

# Classes whose derived classes are leaves too, also in user code.
_LEAF_BASES = word_set(
    """
    accelerate.accelerator.Accelerator datasets.arrow_dataset.Dataset
    datasets.iterable_dataset.IterableDataset deepspeed.runtime.engine.DeepSpeedEngine
    logging.Filterer tqdm.std.tqdm
    transformers.configuration_utils.PreTrainedConfig
    transformers.configuration_utils.PretrainedConfig
    transformers.tokenization_utils_base.PreTrainedTokenizerBase
    transformers.training_args.TrainingArguments
    """
)

# datasets 5.2, ``_fingerprint``.
_DATASETS = word_set("datasets.arrow_dataset.Dataset datasets.dataset_dict.DatasetDict")

# torch 2.13 utils/data/dataloader.py: what iter(loader) gives. Queues, pipes and proxies: no
# checkpoint has what other threads and processes put there, and they start again in a launch.
_ITERATOR_BASES = word_set(
    """
    torch.utils.data.dataloader._BaseDataLoaderIter
    _queue.SimpleQueue multiprocessing.connection._ConnectionBase multiprocessing.managers.BaseProxy
    multiprocessing.queues.Queue multiprocessing.queues.SimpleQueue queue.Queue socket.socket
    """
)
# Those of user code run it beside the training, as one that reads batches ahead.
_RUNNERS = word_set("multiprocessing.process.BaseProcess threading.Thread")

# Numbers in the memory of C, which processes may share.
_SHARED = "multiprocessing.sharedctypes.SynchronizedBase"
_NUMBERS_OF_C = frozenset("bBhHiIlLqQfd?")

# torch 2.13: made lazily; flags next to them say so.
_HANDLE_BASES = word_set(
    "torch.Event torch.Stream torch.cuda.streams.Event torch.cuda.streams.Stream"
)

# What is no state, also where a class of the user's is derived from it.
_NO_STATE = (io.IOBase, weakref.ReferenceType)
_NAMED = (
    *(types.ModuleType, BaseException, inspect.Signature, torch.finfo, torch.iinfo, struct.Struct),
    *(types.MethodWrapperType, types.WrapperDescriptorType, types.CodeType),
    *(types.MethodDescriptorType, types.ClassMethodDescriptorType, types.GetSetDescriptorType),
)
_SIMPLE_OF_C: Any = ctypes.c_int.__mro__[1]  # of all numbers, and of strings and pointers
_POINTER_BYTES = struct.calcsize("P")
# ``pickle.PickleBuffer``, as which the memory of an array is read without a copy of it.
_BUFFER: Any = type(np.zeros(1).__reduce_ex__(5)[1][0])
CACHED_FUNCTION = type(functools.cache(lambda: None))
CODE = frozenset({Kind.FUNCTION, Kind.CLASS, Kind.CALL})
# Code, and the like: each object has its name, and no launch makes another one.
NAMED = CODE | {Kind.NAMED}


def kind_of(value: Any) -> Kind:
    """How a value is treated, by its class; tensors and files also by their properties."""
    kind: Kind = kind_of_class(type(value))  # type: ignore[arg-type]
    if kind is Kind.TENSOR and (_is_elsewhere(value) or not _has_elements(class_of(value))):
        return Kind.LEAF
    if kind is Kind.LEAF and (isinstance(value, io.IOBase) or _is_process(value)):
        return Kind.ITERATOR if _is_read(value) else Kind.LEAF
    if kind is Kind.ITERATOR and isinstance(value, types.GeneratorType) and is_on_stack(value):
        return Kind.LEAF  # a batch is requested through it: its variables are those of a frame
    return kind


def is_code(value: Any) -> bool:
    """Whether it is a function, a class, a bound method or a partial."""
    return kind_of(value) in CODE


def fingerprints_of(value: Any) -> tuple[str, ...]:
    """What distinguishes a dataset of Hugging Face, or a dict of such; of all else nothing.

    Each transformation makes another one. What led to it makes up its fingerprint.
    """
    if not _DATASETS & _names_of(class_of(value)):
        return ()
    parts = value.values() if isinstance(value, dict) else (value,)
    return tuple(str(getattr(each, "_fingerprint", "")) for each in parts)


def is_left_out(value: Any) -> bool:
    """Whether it is never entered, as an object of a library."""
    return kind_of(value) is Kind.LEAF


def is_user_object(value: Any) -> bool:
    """Whether it is an object of a class of the user's, with attributes."""
    return kind_of(value) in (Kind.OBJECT, Kind.STATEFUL, Kind.MODULE)


def class_of(value: Any) -> Any:
    """The class of a value, for functions with a cache, which mypy types as taking a Hashable."""
    return type(value)


@functools.cache
def _has_elements(kind: Any) -> bool:
    """Whether a tensor of this class is its elements, or says of which tensors it is made."""
    is_lazy = issubclass(kind, (UninitializedParameter, UninitializedBuffer))
    dispatches = getattr(kind, "__torch_dispatch__", None)
    is_plain = dispatches is getattr(Tensor, "__torch_dispatch__", None)
    return not is_lazy and (is_plain or hasattr(kind, _FLATTEN))


def _is_elsewhere(tensor: Any) -> bool:
    """Whether a tensor lies on several ranks and this one has no part of it, or nowhere."""
    # deepspeed 0.19 runtime/zero/partition_parameters.py names the parameters of stage 3 so.
    return tensor.is_meta or hasattr(tensor, "ds_id")


_FLATTEN = "__tensor_flatten__"  # torch 2.13 utils/_python_dispatch.py: of what wraps other tensors
_INDICES = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys(
        (torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")
    ),
    **dict.fromkeys(
        (torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")
    ),
}


def wraps_others(value: Tensor) -> bool:
    """Whether a tensor is made of others, as a DTensor of the part that a rank has."""
    return hasattr(value, _FLATTEN)


def parts_of_tensor(value: Any) -> list[Tensor]:
    """The tensors with its elements: a tensor itself, its indices and values, or what it wraps."""
    if wraps_others(value):
        parts = (getattr(value, name) for name in value.__tensor_flatten__()[0])
        tensors = (each for each in parts if isinstance(each, Tensor))  # also a mesh
        return [part for each in tensors for part in parts_of_tensor(each)]
    return [getattr(value.detach(), name)() for name in _INDICES.get(value.layout, ("detach",))]


# Containers of weak references, and those of objects that show what they refer to.
WEAK: dict[Any, Any] = {
    weakref.WeakSet: list,
    weakref.WeakKeyDictionary: dict,
    weakref.WeakValueDictionary: dict,
}

# Classes of which only the class itself counts, and those whose derived classes count too.
_EXACT: dict[Any, Kind] = {
    **dict.fromkeys((*SCALARS, *TORCH_CONSTANTS), Kind.SCALAR),
    **dict.fromkeys((*SEQUENCES, *SETS, *MAPPINGS), Kind.CONTAINER),
    **dict.fromkeys(CONSTANTS.values(), Kind.CONSTANT),
    **dict.fromkeys((bytearray, array, _BUFFER), Kind.BUFFER),
    **dict.fromkeys((io.BytesIO, io.StringIO, *WEAK), Kind.REDUCED),
    np.ndarray: Kind.ARRAY,
    np.memmap: Kind.LEAF,  # a file
    threading.local: Kind.OBJECT,  # with the attributes of this thread
    types.FunctionType: Kind.FUNCTION,
    **dict.fromkeys((types.MethodType, types.BuiltinMethodType), Kind.CALL),
    **dict.fromkeys((functools.partial, CACHED_FUNCTION), Kind.CALL),
}
_DERIVED: tuple[tuple[Any, Kind], ...] = (
    ((Enum, np.generic), Kind.SCALAR),
    (Tensor, Kind.TENSOR),
    (GENERATOR_TYPES, Kind.GENERATOR),
    (nn.Module, Kind.MODULE),
    (type, Kind.CLASS),
)


@functools.cache
def kind_of_class(kind: Any) -> Kind:
    """How the objects of a class are treated."""
    if issubclass(kind, random.SystemRandom):
        return Kind.LEAF  # it has no state
    names = _names_of(kind)
    if names & _LEAF_BASES:
        return Kind.LEAF
    known = _EXACT.get(kind) or next((k for base, k in _DERIVED if issubclass(kind, base)), None)
    if known is not None:
        return known
    if is_namedtuple(kind):
        return Kind.CONTAINER
    if _SHARED in names or _is_of_c(kind):
        return Kind.SHARED
    if names & _ITERATOR_BASES or (names & _RUNNERS and not _is_library_module(kind.__module__)):
        return Kind.ITERATOR
    if names & _HANDLE_BASES:
        return Kind.OPAQUE
    if issubclass(kind, _NAMED):
        return Kind.NAMED
    is_leaf = is_leaf_module(str(kind.__module__)) and not issubclass(kind, (*SEQUENCES, dict, set))
    if issubclass(kind, _NO_STATE) or is_leaf:  # what a container has is the user's
        return Kind.LEAF
    return _kind_of_object(kind)


def _is_of_c(kind: Any) -> bool:
    """Whether a class is a number of ctypes, or an array of such."""
    of_items = getattr(kind, "_type_", None) if issubclass(kind, ctypes.Array) else kind
    is_number = isinstance(of_items, type) and issubclass(of_items, _SIMPLE_OF_C)
    return is_number and getattr(of_items, "_type_", "") in _NUMBERS_OF_C


def memory_of(value: Any) -> Any:
    """The object of ctypes in which a ``Kind.SHARED`` keeps its numbers."""
    return value.get_obj() if hasattr(value, "get_obj") else value


def is_leaf_module(module: str) -> bool:
    """Whether a module is one of the leaf table, or a part of one."""
    parts = module.split(".")
    is_named = any(".".join(parts[:n]) in _LEAVES for n in range(1, len(parts) + 1)) or (
        parts[0] == "torch" and len(parts) > 1 and parts[1].startswith("_")
    )
    return is_named and not _is_own(parts[0])


def _kind_of_object(kind: Any) -> Kind:
    has_attributes = bool(slots_of(kind)) or bool(kind.__dictoffset__)
    is_whole = _has_hidden_state(kind) or top_package(kind) in _READ_WHOLE
    if is_whole and not issubclass(kind, Iterator):
        return Kind.REDUCED
    if has_attributes and kind.__module__ != "builtins":
        is_known = issubclass(kind, (Optimizer, LRScheduler, DataLoader))
        # The state_dict() of a loader may make an iterator, which draws and starts threads.
        is_data = hasattr(kind, "__getitem__") or hasattr(kind, "__iter__")
        has_state = issubclass(kind, Stateful) and not is_data
        return Kind.STATEFUL if has_state and not is_known else Kind.OBJECT
    return Kind.ITERATOR if issubclass(kind, Iterator) else Kind.OPAQUE


def _has_hidden_state(kind: Any) -> bool:
    """Whether objects of a class have more memory than their attributes take: state in C.

    Items of a list, dict or set are seen. A class with ``state_dict`` gives its state by that.
    Builtin classes that are no values, as a view of a dict, show what another object has.
    """
    if kind.__module__ == "builtins":
        return False
    base = next((each for each in (list, dict, set) if issubclass(kind, each)), object)
    num_pointers = len(slots_of(kind)) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    is_larger = kind.__basicsize__ > base.__basicsize__ + _POINTER_BYTES * num_pointers
    has_items = bool(kind.__itemsize__) and base is object  # as a tuple or an int has
    return (is_larger or has_items) and not issubclass(kind, Stateful)


@functools.cache
def _names_of(kind: Any) -> frozenset[str]:
    """The full names of a class and its bases."""
    return frozenset(f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__)


@functools.cache
def is_namedtuple(kind: Any) -> bool:
    """Whether a class is that of a namedtuple."""
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make")


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
    """The top-level package of the module that defines a class; empty for one of the user's."""
    name = str(kind.__module__).partition(".")[0]  # a class may have a property of this name
    return "" if _is_own(name) else name


@functools.cache
def _is_own(package: str) -> bool:
    """Whether a package or a module is the user's, as a ``datasets.py`` or a folder ``evaluate``.

    A library that is no library file is one that was installed from its sources, to be edited.
    """
    module = sys.modules.get(package)
    folders = [Path(each).absolute() for each in getattr(module, "__path__", ())]
    file = getattr(module, "__file__", None) or next(iter(map(str, folders)), None)
    if file is None or is_library_file(file) or package == "resumekit":
        return False
    try:
        installed = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return True
    paths = [Path(str(installed.locate_file(name))) for name in (package, f"{package}.py")]
    return any(each.exists() for each in paths) and not {Path(file), *folders} & {*paths}


def parts_of_call(value: Any) -> list[Any]:
    """What a bound method, a partial or a function with a cache refers to."""
    if isinstance(value, functools.partial):
        return [value.func, value.args, (*value.keywords,), (*value.keywords.values(),)]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, CACHED_FUNCTION):
        return [value.__wrapped__]
    owner = value.__self__  # of a method of a list, or a function of a module
    return [] if owner is None or isinstance(owner, types.ModuleType) else [owner]


def parts_in(value: Any) -> Iterator[Any]:
    """A value, and what containers, arrays of objects, methods and partials in it refer to."""
    waiting, met = [value], set[int]()
    while waiting:
        each = waiting.pop()
        yield each
        kind = kind_of_class(class_of(each))
        if kind is Kind.CONTAINER and id(each) not in met:
            met.add(id(each))
            waiting.extend(items_of(each))
            waiting.extend(filter(None, [factory_of(each)]))
        elif kind is Kind.ARRAY and each.dtype == object:
            waiting.extend(each.flat)
        elif kind is Kind.CALL:
            waiting.extend(parts_of_call(each))


def factory_of(container: Any) -> Any:
    """What a defaultdict makes values with, where that is no builtin class."""
    factory = getattr(container, "default_factory", None)
    return None if factory in FACTORIES.values() else factory


def items_of(container: Any) -> Iterable[Any]:
    """The elements of a container; of a dict its keys and its values."""
    return chain(container, container.values()) if isinstance(container, dict) else container


def sort_of(value: Any) -> str:
    """What objects have in common of which one stands for another.

    Of code its full name and a digest of it, of what is known by its text that; else the class.
    """
    kind = kind_of(value)
    if kind is Kind.NAMED:
        is_module = isinstance(value, types.ModuleType)
        show = BaseException.__repr__ if isinstance(value, BaseException) else repr
        return value.__name__ if is_module else _ADDRESS.sub("", show(value))
    name = getattr(value, "__qualname__", "") if kind in CODE else ""
    if not name:
        return class_name(value)
    code = getattr(value, "__code__", None)  # a descriptor, of the class of functions
    digest = digest_code(code) if isinstance(code, types.CodeType) else None
    return f"{value.__module__}.{name} {digest}"


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # another one in each launch
_DRAWS = re.compile(r"rand|normal|choice|shuffle|sample|uniform|generator|seed")


def cache_size(value: Any) -> int:
    """The entries in the cache of a function that draws random numbers; 0 for any other value."""
    code = getattr(getattr(value, "__wrapped__", None), "__code__", None)
    if not isinstance(value, CACHED_FUNCTION) or code is None:
        return 0
    return value.cache_info().currsize if any(map(_DRAWS.search, names_in(code))) else 0


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names of the globals and attributes that a code, and all code in it, uses."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return tuple(dict.fromkeys((*code.co_names, *(name for i in inner for name in names_in(i)))))


@functools.cache
def _is_library_module(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return name.partition(".")[0] in sys.stdlib_module_names
    return name.startswith("resumekit.") or is_library_file(file)


def is_library(value: Any) -> bool:
    """Whether a module, a class, a function or an object's class is not the user's."""
    if isinstance(value, types.ModuleType):
        return _is_library_module(value.__name__)
    owner = value if kind_of(value) in CODE else class_of(value)
    return _is_library_module(str(getattr(owner, "__module__", "")))


@functools.cache
def is_object_of_library(kind: Any) -> bool:
    """Whether a class is not the user's, and its objects are neither modules nor data."""
    is_object = kind_of_class(kind) in (Kind.OBJECT, Kind.STATEFUL)
    return is_object and _is_library_module(str(getattr(kind, "__module__", "")))


def _is_process(value: Any) -> bool:
    return "subprocess.Popen" in _names_of(class_of(value))


def _is_read(value: Any) -> bool:
    """Whether a file is open for reading alone: its position decides what is read next.

    Of a pipe also the state of the process that writes to it.
    """
    file = value.stdout if _is_process(value) else value
    return bool(file) and not file.closed and file.readable() and not file.writable()


def takes(maker: Any, arguments: Sequence[Any]) -> bool:
    """Whether a callable can be called with these arguments, as far as its signature says."""
    try:
        signature = inspect.signature(maker)
    except ValueError:  # of C
        return True
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True
