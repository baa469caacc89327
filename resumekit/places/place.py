"""A place as the user names it: a directory, a URL or memory, with cadence and retention."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from resumekit.cadence import AUTO, Cadence, parse_cadence
from resumekit.errors import ConfigurationError

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+)://|[a-z0-9]+::")
_USER_INFO = re.compile(r"(?<=://)[^/?#\s]*@")
_QUERY = re.compile(r"(?<=[^\s?])\?\S*")
_BANDWIDTH = re.compile(r"([1-9]\d*(?:\.\d+)?) ?MB/s")
_LOCAL = ("file", "local")
_MEMORY = "memory"  # that of the node, and not a directory of this name
_MIN_SECRET_CHARACTERS = 6


@dataclass(frozen=True, repr=False)
class Place:
    """A further location for the checkpoints of a run. See docs/how-to/places.md.

    Args:
        url: a directory, or a URL that fsspec can open, e.g. ``"s3://bucket/run"``; or
            ``"memory"``, to which the state itself is copied between two saves.
        save_every: a checkpoint is copied when so many steps, or a duration such as ``"1h"``, have
            passed since the last one that was; None copies each. The last one of a launch is
            always copied. In memory None is as often as copies take 5% of the time at most.
        keep_latest: the number of newest checkpoints that stay there; None for that of the run.
        max_bandwidth: of the copies, e.g. ``"20MB/s"``, at least 1 MB/s; None for no limit.
        storage_options: arguments for fsspec, e.g. ``{"profile": "training"}``. They are neither
            recorded nor shown.

    Raises:
        ConfigurationError: a value that has no meaning.
    """

    url: str | os.PathLike[str]
    _: KW_ONLY
    save_every: int | str | None = None
    keep_latest: int | None = None
    max_bandwidth: str | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        text = os.fspath(self.url) if isinstance(self.url, str | os.PathLike) else None
        if not isinstance(text, str) or not text.strip():
            expected = 'a path such as "/disk2/run", a URL such as "s3://bucket/run", or "memory"'
            raise ConfigurationError("places", found=repr(self.url), expected=expected)
        object.__setattr__(self, "url", text)
        if self.save_every == AUTO:
            expected = "a number of steps, a duration, or None for each checkpoint"
            raise ConfigurationError("Place(save_every)", found="'auto'", expected=expected)
        parse_cadence(self.save_every)
        number = self.keep_latest
        if number is not None and (type(number) is not int or number < 1):
            expected = "a whole number of at least 1"
            raise ConfigurationError("Place(keep_latest)", found=repr(number), expected=expected)
        if self.max_bandwidth is not None and not _BANDWIDTH.fullmatch(str(self.max_bandwidth)):
            found, expected = repr(self.max_bandwidth), 'megabytes a second, e.g. "20MB/s"'
            raise ConfigurationError("Place(max_bandwidth)", found=found, expected=expected)
        others = ("keep_latest", "max_bandwidth", "storage_options")
        if self.is_memory and any(getattr(self, name) for name in others):
            found = ", ".join(name for name in others if getattr(self, name))
            raise ConfigurationError("Place('memory')", found=found, expected="save_every only")

    @property
    def is_memory(self) -> bool:
        """Whether it is the memory of the node."""
        return self.url == _MEMORY

    @property
    def directory(self) -> Path | None:
        """The local or mounted directory; None for memory, or a store that fsspec opens."""
        text = str(self.url)
        if self.is_memory:
            return None
        match = _URL.match(text)
        if match is None:
            return Path(text).expanduser().absolute()
        return Path(text[match.end() :]) if match["scheme"] in _LOCAL else None

    @property
    def cadence(self) -> Cadence:
        """When a checkpoint is due to be copied."""
        return parse_cadence(self.save_every)

    @property
    def bytes_per_second(self) -> float:
        """The limit of its bandwidth."""
        match = _BANDWIDTH.fullmatch(self.max_bandwidth or "")
        return float(match[1]) * 1e6 if match else math.inf

    def without_secrets(self, text: str) -> str:
        """A text, such as an error of a store, without credentials."""
        for secret in _texts(self.storage_options):
            text = text.replace(secret, "***")
        return _QUERY.sub("", _USER_INFO.sub("", text))

    def __str__(self) -> str:
        """The URL without user information and query."""
        return self.without_secrets(str(self.url))

    def __repr__(self) -> str:
        limits = f"save_every={self.save_every!r}, keep_latest={self.keep_latest!r}"
        return f"Place({str(self)!r}, {limits})"


GivenPlace: TypeAlias = str | os.PathLike[str] | Place


def checked_places(given: Any, mirror: Any) -> tuple[Place, ...]:
    """The places of the options ``places`` and ``mirror``.

    Raises:
        ConfigurationError: one has no meaning, or is there twice.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        expected = f"a list, e.g. places=[{given!r}]" if isinstance(given, str) else "a list"
        raise ConfigurationError("places", found=f"a {type(given).__name__}", expected=expected)
    every = [*given] if mirror is None else [mirror, *given]
    places = tuple(each if isinstance(each, Place) else Place(each) for each in every)
    urls = [str(place.directory or place.url).rstrip("/") for place in places]
    for place, url in zip(places, urls, strict=True):
        if urls.count(url) > 1:
            raise ConfigurationError("places", found=f"{place} twice", expected="each place once")
    return places


def _texts(value: Any) -> Iterator[str]:
    """The texts in nested options that may be secrets."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, str) and len(value) >= _MIN_SECRET_CHARACTERS and "://" not in value:
        yield value
