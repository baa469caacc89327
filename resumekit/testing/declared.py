"""What a subclass of the suite says about its function: whether it is complete and can be so."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from resumekit.errors import ConfigurationError

if TYPE_CHECKING:
    from resumekit.testing.suite import ConformanceSuite

_REQUIRED = ("function", "steps_per_epoch", "save_every", "components", "world_sizes")


def check_declared(suite: type[ConformanceSuite]) -> None:
    """Returns when every test of the suite has something to test.

    Raises:
        ConfigurationError: a required attribute is missing or empty, an epoch has no room for the
            kill points, or nobody runs a matrix.
    """
    for name in _REQUIRED:
        if not getattr(suite, name, None):
            raise ConfigurationError(
                f"{suite.__name__}.{name}", found="nothing", expected="a value of its own"
            )
    arguments = _arguments_of_tests(suite)
    for name in suite.matrices:
        if name not in arguments:
            raise ConfigurationError(
                f"{suite.__name__}.matrices[{name!r}]",
                found="no test with an argument of that name",
                expected="a test that runs its combinations",
            )
    for world_size in suite.world_sizes:
        for options in ({}, suite.everything):
            suite.cell("mid-epoch 1", options, world_size=world_size)


def _arguments_of_tests(suite: type[ConformanceSuite]) -> set[str]:
    members = [getattr(suite, name) for name in dir(suite) if name.startswith("test")]
    # A subclass switches a test off by setting it to None.
    tests = [member for member in members if callable(member)]
    return {name for test in tests for name in inspect.signature(test).parameters}
