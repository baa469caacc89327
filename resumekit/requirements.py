"""What an adapter requires of its framework: a version, and names that are not public."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from types import MappingProxyType
from typing import Any

from resumekit.errors import InexactError, MissingDependencyError
from resumekit.log import show_messages, warn

# The oldest version of each framework that works; an older one is an error.
# The extras in pyproject.toml ask for the same; a test compares them.
MINIMUM_VERSIONS: Mapping[str, str] = MappingProxyType(
    {
        "accelerate": "1.12",
        "deepspeed": "0.19",
        "lightning": "2.6",
        "transformers": "5.3",
    }
)

# The newest version that the tests ran with; a newer one is a warning.
# constraints.txt pins the same; a test compares them.
TESTED_VERSIONS: Mapping[str, str] = MappingProxyType(
    {
        "accelerate": "1.15.0",
        "deepspeed": "0.19.8",
        "lightning": "2.6.6",
        "torch": "2.13.0",
        "transformers": "5.23.0",
        "trl": "1.16.0",
    }
)

# A framework that also comes, with the same version, in another package.
_OTHER_PACKAGE = {"lightning": "pytorch-lightning"}

_RELEASE = re.compile(r"(?:\d+!)?(\d+(?:\.\d+)*)")


def require(framework: str) -> None:
    """Raises MissingDependencyError unless the framework is there, in a version that works.

    The framework is not imported: an error inside it stays its own.

    Args:
        framework: a name in ``MINIMUM_VERSIONS``; the extra that installs it has the same name.

    Raises:
        MissingDependencyError: it is missing, or too old.
    """
    minimum = MINIMUM_VERSIONS[framework]
    installed = _version_of(framework)
    if installed is None or _release(installed) < _release(minimum):
        raise MissingDependencyError(
            framework,
            found="not installed" if installed is None else f"version {installed}",
            expected=f"{minimum} or newer",
            remedy=f'Install it with: pip install "{framework}>={minimum}"',
        )


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True)
class PrivateName:
    """A name that a framework does not document, and where its source has it.

    Adapters read and write such names only through this class, so that one table lists them all,
    a probe checks them at start, and every write is read back.

    Args:
        path: the attribute, with dots from the object that the methods get.
        source: version, file and class or function, e.g. ``"lightning 2.6 loops/loop.py _Loop"``.
        parameters: of a function that is called or replaced: the parameters that it takes first.
        is_written: whether the adapter sets it.
        is_optional: whether some configurations or versions do not have it.
    """

    path: str
    source: str
    parameters: tuple[str, ...] | None = None
    is_written: bool = False
    is_optional: bool = False

    def of(self, owner: Any) -> Any:
        """The value; None where an optional one is missing."""
        value = reduce(getattr, self._parents, owner)
        return getattr(value, self.name, None) if self.is_optional else getattr(value, self.name)

    def write(self, owner: Any, value: Any) -> None:
        """Sets the attribute and reads it back.

        Raises:
            InexactError: the object has another value than was set.
        """
        holder = reduce(getattr, self._parents, owner)
        setattr(holder, self.name, value)
        if getattr(holder, self.name) is not value:
            raise InexactError(
                f"{type(holder).__name__}.{self.name}",
                found="another value than was set",
                expected=f"an attribute as in {self.source}",
            )

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def _parents(self) -> list[str]:
        return self.path.split(".")[:-1]

    def fault(self, owner: Any) -> str:
        """What is not as in the source: existence, signature, or a write; empty when all is."""
        try:
            value = self.of(owner)
        except AttributeError:
            return f"{type(owner).__name__}.{self.path} is missing ({self.source})"
        if self.parameters is not None and value is not None:
            found = tuple(signature(value).parameters)
            if found[: len(self.parameters)] != self.parameters:
                return f"{self.path} takes {', '.join(found)} ({self.source})"
        elif self.is_written and not (self.is_optional and value is None):
            try:
                self.write(owner, value)
            except (AttributeError, InexactError):
                return f"{self.path} cannot be set ({self.source})"
        return ""


def faults(owner: Any, names: Iterable[PrivateName]) -> Iterator[str]:
    """What of these names an object does not have as its framework's tested version does.

    Args:
        owner: the object that the paths begin at.
        names: to be checked; values that are set are set to what they are.
    """
    return filter(None, (name.fault(owner) for name in names))


def check_tested(*frameworks: str, found: Iterable[str] = (), strict: bool, warns: bool) -> None:
    """Warns of versions newer than the tested ones, or of private names that have changed.

    Args:
        *frameworks: names in ``TESTED_VERSIONS``.
        found: the faults of their private names.
        strict: whether faults are an error.
        warns: whether this rank does.

    Raises:
        InexactError: ``strict=True``, and there are faults.
    """
    missing = "; ".join(found)
    installed = [name for name in frameworks if _version_of(name) is not None]
    tested = ", ".join(f"{name}=={TESTED_VERSIONS[name]}" for name in installed)
    if missing and strict:
        raise InexactError(
            "strict=True", found=missing, expected=f"the names of {tested}", remedy="Install those"
        )
    show_messages()
    newer = ", ".join(f"{name} {_version_of(name)}" for name in installed if _is_newer(name))
    if warns and missing:
        warn("RK-861", "a resume may not be exact: %s; install %s", missing, tested)
    elif warns and newer:
        warn("RK-861", "%s: newer than the tested version (%s)", newer, tested)


def _is_newer(framework: str) -> bool:
    installed = _version_of(framework)
    return installed is not None and _release(installed) > _release(TESTED_VERSIONS[framework])


def _version_of(framework: str) -> str | None:
    other = _OTHER_PACKAGE.get(framework)
    found = installed_version(framework)
    return installed_version(other) if found is None and other is not None else found


def _release(text: str) -> tuple[int, ...]:
    """The release numbers of a version; a development or pre-release counts as its release."""
    match = _RELEASE.match(text)
    return tuple(int(number) for number in match.group(1).split(".")) if match else ()
