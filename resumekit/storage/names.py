"""Names on disk: step directories, and paths inside them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from resumekit.errors import ConfigurationError

MANIFEST = "manifest.json"
LATEST = "latest"
OWNER = "owner.json"
LOCK = ".lock"
STAGING = ".staging"
QUARANTINE = "quarantine"

_STEP_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,18})(?:-r([1-9][0-9]{0,5}))?")
_MAX_NAME_BYTES = 255  # of one part, on every common file system
_MAX_PATH_BYTES = 1024


@dataclass(frozen=True, order=True)
class StepName:
    """The name of a step directory; the newer one is the greater one.

    Args:
        step: optimizer steps.
        revision: 0, or counting up where a step was saved again; nothing is ever replaced.
    """

    step: int
    revision: int = 0

    def __str__(self) -> str:
        suffix = f"-r{self.revision}" if self.revision else ""
        return f"step-{self.step:08d}{suffix}"

    @classmethod
    def parse(cls, text: str) -> StepName | None:
        """The step name that is written so, or None: every name has exactly one spelling."""
        match = _STEP_NAME.fullmatch(text)
        if match is None:
            return None
        return cls(int(match[1]), int(match[2] or 0))

    @classmethod
    def from_text(cls, text: str) -> StepName:
        """The step name that a user wrote.

        Raises:
            ConfigurationError: it is none.
        """
        name = cls.parse(text)
        if name is None:
            raise ConfigurationError(
                repr(text), found="not a step name", expected="'step-00000500'"
            )
        return name


def path_problem(path: str) -> str | None:
    """Why this cannot be the path of a file in a step directory; None when it can."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "is not a plain relative path"
    if "\\" in path or not path.isprintable():
        return "holds a backslash or an unprintable character"
    try:
        encoded = path.encode("utf-8")
    except UnicodeEncodeError:
        return "is not Unicode"
    if len(encoded) > _MAX_PATH_BYTES or any(
        len(part.encode("utf-8")) > _MAX_NAME_BYTES for part in parts
    ):
        return "is too long"
    if path == MANIFEST:
        return "is the manifest's own"
    return None


def paths_problem(paths: Iterable[str]) -> str | None:
    """Why these cannot be the files of one step directory; None when they can.

    Two spellings of one name (upper and lower case, composed and decomposed characters) are one
    file on some file systems, and a name cannot be both a file and a directory.
    """
    spelling = {_folded(MANIFEST): MANIFEST}
    directories: set[str] = set()
    files: set[str] = set()
    for path in paths:
        problem = path_problem(path)
        if problem is not None:
            return f"{path[:80]!r} {problem}"
        parts = path.split("/")
        for depth in range(1, len(parts) + 1):
            prefix = "/".join(parts[:depth])
            if spelling.setdefault(_folded(prefix), prefix) != prefix:
                return f"{path[:80]!r} is another spelling of {spelling[_folded(prefix)][:80]!r}"
            if depth < len(parts):
                directories.add(prefix)
        if path in files:
            return f"{path[:80]!r} is listed twice"
        files.add(path)
    for path in (files | {MANIFEST}) & directories:
        return f"{path[:80]!r} is both a file and a directory"
    return None


def directories_of(paths: Iterable[str]) -> tuple[str, ...]:
    """Every directory that these files need, parents first."""
    found: set[str] = set()
    for path in paths:
        parts = path.split("/")
        found.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
    return tuple(sorted(found))


def _folded(path: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", path).casefold())
