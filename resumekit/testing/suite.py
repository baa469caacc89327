"""The conformance suite that every adapter inherits, and any third party's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from resumekit.errors import ConfigurationError, MissingDependencyError
from resumekit.record.trace import KillPoint
from resumekit.testing.cells import Cell, kill_points, pairwise
from resumekit.testing.kit import DEFAULT_ENVIRONMENT, DEFAULT_PRELOAD, Kit
from resumekit.testing.trace_checks import changing_components, wrong_length

try:
    import pytest
except ImportError as error:
    raise MissingDependencyError(
        "resumekit.testing.ConformanceSuite",
        found="pytest is not installed",
        remedy="Install it with: pip install pytest",
    ) from error

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_REQUIRED = ("function", "steps_per_epoch", "save_every", "components", "world_sizes")


class ConformanceSuite:
    """Tests that a training function resumes exactly, and that they would notice if it did not.

    Subclass it in a test file under a name that pytest collects, and say what is so::

        from resumekit.testing import ConformanceSuite

        class TestLightning(ConformanceSuite):
            function = train
            steps_per_epoch = 12
            save_every = 3
            everything = {"ema": True, "report": True}
            components = ("model", "optimizer", "ema", "data", "rng", "progress", "best_metric")
            world_sizes = (1, 2)
            preload = ("lightning.pytorch", "resumekit.adapters.lightning")

    The training function is called as ``function(directory, save_every=..., **options)`` in
    processes of its own, always with the same arguments. It starts, resumes or does nothing, as the
    directory says. It trains ``num_epochs`` epochs with a ``Checkpointer`` or a ``ResumeCallback``.

    On every world size it is

    * killed at each point of ``kill_points()``, and must end with the bits of the run that was not;
    * killed with one component left out of the restore, which must be caught and named: the
      negative controls; a component that changes and has no control is a failure;
    * started, resumed, and started once more after its end, which must do nothing;

    and once it is killed as processes that share nothing (a cold start). What the subclass says
    about the function is tested too: a boundary that is none would be no test of one.

    Attributes:
        function: the training function, at the top level of a file, or as ``"module:function"``.
        steps_per_epoch: optimizer steps of one epoch on one rank, under ``options``; at least 3.
            Where ranks or options change it otherwise, override ``steps_in_epoch``.
        save_every: steps from one save to the next; the function gets it as an option. It divides
            the steps of an epoch on every world size.
        num_epochs: the epochs that the function trains; at least 2.
        options: the function's options in every cell; plain JSON values.
        everything: options, on top of these, under which every one of ``components`` changes.
        components: keys or slots, one negative control for each.
        world_sizes: the numbers of ranks.
        matrices: more cells of your own: for each name, the values of each factor. A test method
            with an argument of that name is called with every combination that ``pairwise``
            chooses, a dict of factors; with the whole product if pytest has an option
            ``--full-matrix`` (``parser.addoption("--full-matrix", action="store_true")`` in a
            conftest.py) and is given it. ``KILL_POINTS`` are the values for a factor of kills.
        preload: modules that are imported once for all runs, beside torch and NumPy: the framework
            and its adapter. They must not start threads.
        environment: variables for every run, beside the inherited ones and one thread for each
            process.
        timeout_seconds: the longest that one launch may take.

    In tests of your own, ``kit`` is the warm kit of the class, ``self.cell(...)`` makes its cells,
    and the arguments ``kill``, ``component`` and ``world_size`` take all values of the class unless
    the test has a mark with its own. A test that has no meaning for a function is switched off by
    ``test_... = None``, with the reason beside it.
    """

    function: ClassVar[str | Callable[..., Any]]
    steps_per_epoch: ClassVar[int]
    save_every: ClassVar[int]
    num_epochs: ClassVar[int] = 2
    options: ClassVar[Mapping[str, Any]] = _NOTHING
    everything: ClassVar[Mapping[str, Any]] = _NOTHING
    components: ClassVar[Sequence[str]]
    world_sizes: ClassVar[Sequence[int]] = (1,)
    matrices: ClassVar[Mapping[str, Mapping[str, Sequence[Any]]]] = _NOTHING
    preload: ClassVar[Sequence[str]] = ()
    environment: ClassVar[Mapping[str, str]] = _NOTHING
    timeout_seconds: ClassVar[float] = 120.0

    # ---------------------------------------------------------------- what a subclass may override

    @classmethod
    def steps_in_epoch(cls, options: Mapping[str, Any], world_size: int) -> int:
        """The optimizer steps of one epoch; by default the ranks share those of one rank."""
        return -(-cls.steps_per_epoch // world_size)

    @classmethod
    def kill_points(cls, steps_per_epoch: int, save_every: int) -> dict[str, tuple[KillPoint, ...]]:
        """Where runs are killed, by name; add points of your own to those of ``super()``."""
        return kill_points(steps_per_epoch, save_every, num_epochs=cls.num_epochs)

    # ---------------------------------------------------------------- what its own tests may call

    @classmethod
    def cell(
        cls,
        kill: str | Sequence[KillPoint] = (),
        options: Mapping[str, Any] = _NOTHING,
        *,
        world_size: int = 1,
    ) -> Cell:
        """A cell of the class's function.

        Args:
            kill: a name of ``kill_points()``, or the points themselves; without it nobody kills.
            options: on top of the class's ``options``; may change ``save_every`` too.
            world_size: ranks.
        """
        whole = {"save_every": cls.save_every, **cls.options, **options}
        if isinstance(kill, str):
            steps = cls.steps_in_epoch(whole, world_size)
            kill = cls.kill_points(steps, whole["save_every"])[kill]
        return Cell(cls.function, whole, world_size, tuple(kill))

    @classmethod
    def new_kit(cls, directory: Path, *, cold: bool = False) -> Kit:
        """A kit as this class needs it, to be used as a context manager.

        Args:
            directory: an empty directory for everything that the runs write.
            cold: start every process as a fresh interpreter.
        """
        return Kit(
            directory,
            preload=(*DEFAULT_PRELOAD, *cls.preload),
            environment={**DEFAULT_ENVIRONMENT, **cls.environment},
            cold=cold,
            timeout_seconds=cls.timeout_seconds,
        )

    @pytest.fixture(scope="class")
    @classmethod
    def kit(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
        """The kit of this class, with one warm fork server for all its tests."""
        with cls.new_kit(tmp_path_factory.mktemp("kit")) as kit:
            yield kit

    # ---------------------------------------------------------------- the tests

    def test_the_function_is_what_the_subclass_declares(self, kit: Kit, world_size: int) -> None:
        for options in ({}, self.everything):
            cell = self.cell(options=options, world_size=world_size)
            num_steps = self.num_epochs * self.steps_in_epoch(cell.options, world_size)
            every = cell.options["save_every"]
            trace = kit.run_uninterrupted(cell).trace
            wrong = wrong_length(trace, num_steps=num_steps, save_every=every)
            assert not wrong, f"{cell}: {wrong}"

    def test_a_killed_run_continues_exactly(self, kit: Kit, kill: str, world_size: int) -> None:
        kit.assert_exact(self.cell(kill, world_size=world_size))

    def test_a_run_that_was_asked_to_leave_continues_exactly(
        self, kit: Kit, world_size: int
    ) -> None:
        steps = self.steps_in_epoch(self.cell(world_size=world_size).options, world_size)
        asked = steps + 1  # no save is due there, nor at the step after it
        asked_at = KillPoint.step(asked, rank=world_size - 1, signal="SIGTERM")
        verdict = kit.assert_exact(self.cell((asked_at,), world_size=world_size))
        left = verdict.resumes[0]
        # One rank leaves at once; several agree on the request at the next boundary.
        expected = asked if world_size == 1 else asked + 1
        assert (left.step, left.num_repeated_steps) == (expected, 0), f"{left}"

    def test_everything_together_continues_exactly(self, kit: Kit, world_size: int) -> None:
        kit.assert_exact(self.cell("mid-epoch 1", self.everything, world_size=world_size))

    def test_a_component_left_out_is_caught_and_named(
        self, kit: Kit, component: str, world_size: int
    ) -> None:
        cell = self.cell("mid-epoch 1", self.everything, world_size=world_size)
        kit.assert_caught(cell, component)

    def test_every_component_that_changes_has_a_control(self, kit: Kit, world_size: int) -> None:
        cell = self.cell(options=self.everything, world_size=world_size)
        changing = changing_components(kit.run_uninterrupted(cell).trace)
        named = set(self.components)
        missing = [key for key in changing if not named & {key, key.split("/", 1)[0]}]
        assert not missing, f"no negative control for {', '.join(missing)}"

    def test_the_identical_command_starts_resumes_and_then_does_nothing(
        self, kit: Kit, world_size: int
    ) -> None:
        cell = self.cell("mid-epoch 1", world_size=world_size)
        (kill,) = cell.kills
        # The first launch finds an empty directory, the second one without a checkpoint.
        cell = self.cell((KillPoint.step(1), kill), world_size=world_size)
        verdict = kit.assert_finished(cell)
        first = verdict.resumes[0]
        saved = kill.newest_save(cell.options["save_every"])
        assert first.launch == 2, f"{cell}: {first} before anything was saved"
        assert first.step >= saved, f"{cell}: {first}, and step {saved} was saved"

    def test_a_cold_start_continues_exactly(self, tmp_path: Path) -> None:
        with self.new_kit(tmp_path, cold=True) as cold:
            cold.assert_exact(self.cell("mid-epoch 1", self.everything))

    # ---------------------------------------------------------------- how they are made

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Gives the tests of this class their cells; pytest calls it."""
        _check_declared(cls)
        by_mark = {
            name
            for mark in metafunc.definition.iter_markers("parametrize")
            for name in _argument_names(*mark.args[:1], **mark.kwargs)
        }
        steps = cls.steps_in_epoch(cls.options, 1)
        values: dict[str, Sequence[Any]] = {
            "kill": tuple(cls.kill_points(steps, cls.save_every)),
            "component": cls.components,
            "world_size": cls.world_sizes,
        }
        full = bool(metafunc.config.getoption("--full-matrix", default=False))
        for name, factors in cls.matrices.items():
            if name in metafunc.fixturenames:
                values[name] = pairwise(factors, full=full)
        for name, given in values.items():
            if name in metafunc.fixturenames and name not in by_mark:
                metafunc.parametrize(name, given, ids=[_id(name, value) for value in given])


def _argument_names(argnames: str | Sequence[str], **_: Any) -> list[str]:
    """The names in the first argument of ``pytest.mark.parametrize``."""
    names = argnames.split(",") if isinstance(argnames, str) else argnames
    return [name.strip() for name in names]


def _id(name: str, value: Any) -> str:
    if name == "world_size":
        return f"{value} rank" if value == 1 else f"{value} ranks"
    if isinstance(value, Mapping):
        return ", ".join(f"{factor} {one}" for factor, one in value.items())
    return str(value)


def _check_declared(suite: type[ConformanceSuite]) -> None:
    """Raises ConfigurationError unless every test of the suite has something to test.

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
