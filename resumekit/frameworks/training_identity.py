"""What makes a training the same as one of an earlier launch: its model, its data, its arguments.

Nothing here depends on the values of the weights, and no code of the user runs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import xxhash
from torch import nn

from resumekit.capture.nested_state import class_name
from resumekit.capture.user_state.exclusions import is_secret
from resumekit.capture.user_state.walk import content_digest
from resumekit.live.frames import is_library_file

_MAX_BYTES = 2**28  # of the data whose content is digested
_NUM_ROWS = 3  # of a dataset that is not in memory
_PLAIN = (bool, int, float, str, type(None))
# Arguments that say where, how often or on what hardware, or how long, and not what is trained.
_OTHER = re.compile(
    r"dir|path|file|name|log|save|eval|hub|push|report|resume|step|epoch|tqdm|debug|port|device"
    r"|rank|worker|backend|track|verbose|time|run|prefetch|pin_memory|cache|^_"
)


def training_identity(
    model: nn.Module, data: Iterable[Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of a ``Training``.

    Args:
        model: that is trained.
        data: the datasets, or what makes them.
        settings: all arguments of the training.
    """
    plain = {
        name: str(value)
        for name, value in settings.items()
        if isinstance(value, _PLAIN) and not is_secret(name, value)
    }
    is_other = {name: _OTHER.search(name) is not None for name in plain}
    variables = {name: repr(value) for name, value in _variables_of_callers()}
    others = {**variables, **{name: each for name, each in plain.items() if is_other[name]}}
    return {
        "model": _digest(_structure(model)),
        "data": _digest(map(_content, data)),
        "settings": {name: value for name, value in plain.items() if not is_other[name]},
        "others": {name: _digest([value]) for name, value in others.items()},
    }


def _digest(texts: Iterable[str]) -> str:
    return xxhash.xxh3_64_hexdigest("\n".join(texts).encode("utf-8", "surrogatepass"))


def _structure(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        yield f"{name} {class_name(module)}"
    for name, parameter in model.named_parameters():
        yield f"{name} {tuple(parameter.shape)} {parameter.dtype}"


def _content(data: Any) -> str:
    """The class and the length of a dataset, and its content where it can be read."""
    length: int | None = None
    with suppress(Exception):  # the user's, as is what it gives below
        length = len(data)
    found = content_digest(data, limit_bytes=_MAX_BYTES)
    if found is None and length and hasattr(data, "with_format"):  # of Hugging Face datasets
        with suppress(Exception):
            rows = data.with_format(None)
            chosen = [rows[index] for index in range(0, length, -(-length // _NUM_ROWS))]
            found = content_digest(chosen, limit_bytes=_MAX_BYTES)
    return f"{class_name(data)} {length} {found}"


def _variables_of_callers() -> Iterator[tuple[str, Any]]:
    """The plain variables of the user's functions that are running, by function and name."""
    frame = inspect.currentframe()
    while frame is not None:
        code, package = frame.f_code, str(frame.f_globals.get("__name__")).partition(".")[0]
        if package != "resumekit" and not is_library_file(code.co_filename):
            for name, value in frame.f_locals.items():
                if isinstance(value, _PLAIN) and not name.startswith("__"):
                    yield f"{code.co_name}.{name}", value
        frame = frame.f_back
