"""What training changes and no checkpoint holds, so that it is reported.

Variables that training has rebound to other loops or datasets: the position of each loader is saved
under its name. Which loop a variable, an attribute or an item refers to is not, nor a dataset of
Hugging Face, which each transformation replaces by another one: a resumed launch has what the code
before the first batch binds there. And settings of the process, as those of torch and NumPy.
"""

from __future__ import annotations

import decimal
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import attrgetter
from types import CodeType
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch.utils.data import DataLoader

from resumekit.capture.user_state.value_types import fingerprints_of
from resumekit.capture.user_state.walk import Paths, Walk
from resumekit.data.source import Source
from resumekit.record.conditions import float32_precisions
from resumekit.run.progress import OwnLoop
from resumekit.state import CaptureLine, Fidelity

_CONTAINERS = (list, tuple, dict, set, frozenset)
_MAX_ITEMS = 1000  # of a container that is looked through


@dataclass(frozen=True)
class Bound:
    """The loop or the dataset that a variable refers to, without keeping it alive.

    Args:
        reference: to it.
        content: the loaders that a loop draws from, the fingerprints of a dataset.
    """

    reference: ReferenceType[Any]
    content: tuple[Any, ...]

    def is_same(self, other: Bound | None) -> bool:
        """Whether both refer to one object."""
        return other is not None and self.reference() is other.reference()


@dataclass(frozen=True)
class Bindings:
    """All loops and datasets that variables, attributes and items refer to, by path.

    Args:
        bound: by path.
        paths: those of all values that were looked at.
    """

    bound: Mapping[str, Bound] = field(default_factory=dict)
    paths: frozenset[str] = frozenset()

    @classmethod
    def among(cls, walk: Walk, variables: Mapping[str, Any]) -> Bindings:
        """Those that a walk has found, or that are items of variables; also items of containers.

        Args:
            walk: of the user state.
            variables: by path. Those that contain loops are no user state.
        """
        values = {path: each.value for path, each in walk.seen.items()}
        values.update((path, each) for path, each in variables.items() if has_loop(each))
        found = {path: each for key, value in values.items() for path, each in _bound(key, value)}
        return cls(found, frozenset(values))


def _bound(path: str, value: Any) -> Iterator[tuple[str, Bound]]:
    if type(value) in _CONTAINERS:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        named = [(f"{path}[{key!r}]", each) for key, each in islice(items, _MAX_ITEMS)]
    else:
        named = [(path, value)]
    for name, each in named:
        content = each.sources if isinstance(each, OwnLoop) else fingerprints_of(each)
        if content:
            yield name, Bound(ref(each), content)


def has_loop(value: Any) -> bool:
    """Whether it is a list or the like of the run's own loops: their positions are saved."""
    if type(value) not in _CONTAINERS:
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(isinstance(each, OwnLoop) for each in islice(items, _MAX_ITEMS))


def paths_of_loaders(sources: Iterable[Source], paths: Paths) -> dict[str, str]:
    """Where variables that were there before the loop lead to its loaders, by their names."""
    found = {each.name: paths.get(id(each.loader)) for each in sources}
    there = {name: known for name, known in found.items() if known is not None}
    return {name: path for name, (path, reference) in there.items() if reference() is not None}


def loaders_at(saved: Mapping[str, Any], paths: Paths) -> dict[str, Any]:
    """The loaders at those paths, by name; see ``paths_of_loaders``."""
    there = {path: reference() for path, reference in paths.values()}
    found = {name: there.get(str(path)) for name, path in saved.items()}
    return {name: each for name, each in found.items() if isinstance(each, DataLoader)}


class Rebindings:
    """Compares what variables refer to with what they would in a resumed launch."""

    def __init__(self) -> None:
        self._script: Bindings | None = None  # what the code before the loop binds
        self._at_epoch = Bindings()
        self._expected: dict[str, Bound] | None = None  # inside an epoch
        self._paths: frozenset[str] = frozenset()
        self._of_epoch: list[CaptureLine] = []

    def begin_epoch(self, now: Bindings) -> None:
        """``epochs()`` gives an epoch."""
        self._script = now if self._script is None else self._script
        self._at_epoch = now
        # The first lines of the epoch may make a dataset of the one that it begins with.
        is_loop = {path: isinstance(each.reference(), OwnLoop) for path, each in now.bound.items()}
        datasets = {path: each for path, each in now.bound.items() if not is_loop[path]}
        self._of_epoch = list(_lines(datasets, self._script.bound))

    def end_epoch(self) -> None:
        """``epochs()`` is asked for the next epoch."""
        self._expected = None

    def enter(self, now: Bindings) -> None:
        """A loop is asked for its first batch: a resume runs the code before it again.

        What that code has bound since the epoch began, it binds again. All else is as the script
        binds it before the first epoch.
        """
        if self._script is None:  # there is no epochs()
            self._script = self._at_epoch = now
        if self._expected is None:
            self._expected, self._paths = dict(self._script.bound), now.paths
            changed = {
                path: each
                for path, each in now.bound.items()
                if not each.is_same(self._at_epoch.bound.get(path))
            }
            self._at_epoch = Bindings()
        else:  # a further loop of the epoch, and the code between the two
            changed = {p: each for p, each in now.bound.items() if p not in self._paths}
        self._expected.update(changed)

    def lines(self, now: Bindings) -> Iterator[CaptureLine]:
        """A line for each path that refers to something else than it would after a resume."""
        script = {} if self._script is None else self._script.bound
        yield from self._of_epoch
        yield from _lines(now.bound, script if self._expected is None else self._expected)


def _lines(now: Mapping[str, Bound], expected: Mapping[str, Bound]) -> Iterator[CaptureLine]:
    for path, each in now.items():
        value, known = each.reference(), expected.get(path)
        if value is None or (isinstance(value, OwnLoop) and value.needs_no_variable):
            continue
        if known is None or known.content != each.content:
            is_loop = isinstance(value, OwnLoop)
            what = "other batches()" if is_loop else f"another {type(value).__name__}"
            reason = f"training rebound it to {what}; create all of them before the loop"
            yield CaptureLine(path, Fidelity.LOST, f"{reason} and choose by a number")


# ---------------------------------------------------------------- settings of the process

_BACKENDS = (
    *("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "opt_einsum.enabled"),
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
)

# What decides results: each by what reads it.
_SETTINGS: Mapping[str, Callable[[], Any]] = {
    "os.getcwd()": os.getcwd,
    "decimal.getcontext().prec": lambda: decimal.getcontext().prec,
    "decimal.getcontext().rounding": lambda: decimal.getcontext().rounding,
    "numpy.geterr()": np.geterr,
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.get_num_threads()": torch.get_num_threads,
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.backends.cuda.flash_sdp_enabled()": torch.backends.cuda.flash_sdp_enabled,
    "torch.backends.cuda.math_sdp_enabled()": torch.backends.cuda.math_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": (
        torch.backends.cuda.mem_efficient_sdp_enabled
    ),
    **{f"torch.backends.{name}": partial(attrgetter(name), torch.backends) for name in _BACKENDS},
}


class ProcessSettings:
    """The settings, and the environment variables, as they are when this is made."""

    def __init__(self) -> None:
        self._values = _read()
        self._environment = dict(os.environ)

    def lines(self, code: Iterable[CodeType]) -> Iterator[CaptureLine]:
        """A line for each one that has changed since.

        Args:
            code: of the user's; only the environment variables that it names are looked at.
        """
        for name, now in _read().items():
            value = self._values[name]
            if now != value:
                reason = f"training changed it from {value} to {now}; set it before the loop"
                yield CaptureLine(name, Fidelity.LOST, reason)
        changed = {name for name, _ in self._environment.items() ^ os.environ.items()}
        named = {text for each in code for text in _texts_in(each)} if changed else set()
        for name in sorted(changed & named):
            reason = "training changed this environment variable; keep the value in a variable"
            yield CaptureLine(f"os.environ.{name}", Fidelity.LOST, reason)


def _read() -> dict[str, Any]:
    return {**{name: read() for name, read in _SETTINGS.items()}, **float32_precisions()}


def _texts_in(code: CodeType) -> Iterator[str]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _texts_in(each)
        elif isinstance(each, str):
            yield each
