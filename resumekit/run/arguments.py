"""Checks of the arguments that every adapter takes beside the options."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from resumekit.errors import ConfigurationError
from resumekit.state import StateComponent

# A URL, also after pathlib has joined its two slashes.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def run_directory(given: Any) -> Path:
    """The absolute path of a run directory, with ``~`` expanded. Nothing is made.

    Raises:
        ConfigurationError: it is no path, an empty one, or a URL.
    """
    expected, remedy = 'a path such as "runs/a"', None
    if not isinstance(given, (str, os.PathLike)):
        found = "None" if given is None else f"a {type(given).__name__}"
        raise ConfigurationError("directory", found=found, expected=expected)
    text = os.fspath(given)
    is_url = isinstance(text, str) and _URL.match(text)
    if is_url:
        expected = "a local or mounted path"
        remedy = "Mount the object store, or copy the run directory there"
    if not isinstance(text, str) or not text.strip() or is_url:
        raise ConfigurationError("directory", found=repr(text), expected=expected, remedy=remedy)
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:  # no such user
        raise ConfigurationError("directory", found=repr(text), expected=expected) from error


def require_order(first: Any, second: Any, *, call: str) -> None:
    """Returns unless a path was given first, where the framework's object belongs.

    Args:
        first: the first argument, the framework's object.
        second: the run directory.
        call: how to write it, e.g. ``Checkpointer(accelerator, "runs/a")``.

    Raises:
        ConfigurationError: it was; shows the call.
    """
    if isinstance(first, (str, os.PathLike)) or first is None:
        name = call.partition("(")[0]
        others = "" if second in (None, "") else f", {type(second).__name__}"
        found = f"called as {name}({first!s}{others})" if first else "no first argument"
        raise ConfigurationError(name, found=found, expected=call)


def checked_extras(extras: Any) -> dict[str, Any]:
    """The live dict of the user's own values; a new one where none was given.

    Raises:
        ConfigurationError: it is no dict.
    """
    if extras is None:
        return {}
    if not isinstance(extras, dict):
        raise ConfigurationError(
            "extras",
            found=_shortened(extras),
            expected="a dict that your code keeps up to date",
            remedy='Pass e.g. extras={"phase": 1}',
        )
    return extras


def checked_names(name: str, given: Any) -> Mapping[str, Any]:
    """A mapping of names to objects; an empty one where none was given.

    Raises:
        ConfigurationError: it is no mapping.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            name,
            found=f"a {type(given).__name__}",
            expected=f'a dict of names, e.g. {name}={{"first": ...}}',
        )
    return given


def check_components(components: Any) -> None:
    """Returns when the components are a function, or nothing but components.

    Raises:
        ConfigurationError: they are not; names the first that is none.
    """
    if callable(components):
        return
    if not isinstance(components, Sequence):
        raise ConfigurationError(
            "components", found=f"a {type(components).__name__}", expected="a list of them"
        )
    for each in components:
        if not isinstance(each, StateComponent):
            raise ConfigurationError(
                "components",
                found=f"a {type(each).__name__}",
                expected='StateComponents, e.g. StateComponent("model", ModelState(model))',
            )


def metric_values(values: Mapping[str, Any]) -> dict[str, float]:
    """What ``report()`` was given, as plain numbers.

    Raises:
        ConfigurationError: a value is no number; names it.
    """
    plain = {}
    for name, value in values.items():
        try:
            plain[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:  # a tensor of several elements
            raise ConfigurationError(
                f"report({name}=...)",
                found=_shortened(value),
                expected="a number, or a tensor with one element",
            ) from error
    return plain


def _shortened(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"a {type(value).__name__}"
