"""What an adapter requires of its framework: its version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from resumekit.errors import MissingDependencyError

# The oldest version of each framework that works; an older one is an error.
# The extras in pyproject.toml ask for the same; a test compares them.
MINIMUM_VERSIONS: Mapping[str, str] = MappingProxyType(
    {
        "accelerate": "1.15",
        "deepspeed": "0.19",
        "lightning": "2.6",
        "transformers": "5.17",
    }
)

_RELEASE = re.compile(r"(?:\d+!)?(\d+(?:\.\d+)*)")


def require(framework: str, *, under: str | None = None) -> None:
    """Returns when the framework is installed in a version that its adapter works with.

    The framework is not imported: an error inside it stays its own.

    Args:
        framework: a name in ``MINIMUM_VERSIONS``; the extra that installs it has the same name.
        under: another package that the same framework, of the same version, comes in.

    Raises:
        MissingDependencyError: it is missing, or too old.
    """
    minimum = MINIMUM_VERSIONS[framework]
    installed = installed_version(framework)
    if installed is None and under is not None:
        installed = installed_version(under)
    if installed is None or _release(installed) < _release(minimum):
        raise MissingDependencyError(
            framework,
            found="not installed" if installed is None else f"version {installed}",
            expected=f"{minimum} or newer",
            remedy=f'Install it with: pip install "resumekit[{framework}]"',
        )


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    """The release numbers of a version; a development or pre-release counts as its release."""
    match = _RELEASE.match(text)
    return tuple(int(number) for number in match.group(1).split(".")) if match else ()
