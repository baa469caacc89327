"""The checks of this repository: ``nox`` runs them all, ``nox -s lint`` one of them.

The sessions run in the environment that nox itself was started from, so that torch is installed
once: ``pip install -c constraints.txt -e ".[dev,all]"`` prepares it.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "package", "tests", "integration"]
nox.options.stop_on_first_error = False

PYTHON = sys.executable

# Pins of what is private, and exactness in every kind of model, data and callback.
OLDEST_TESTS = {
    "transformers": (
        "transformers",
        "transformers_saving",
        "transformers_changes",
        "trainer_rows",
        "trainer_beside",
    ),
    "lightning": ("lightning", "lightning_rows", "lightning_sharded"),
}

# A class of tests shares one warm server of processes, so its tests stay together.
PYTEST = (PYTHON, "-m", "pytest", "--numprocesses=logical", "--maxprocesses=4", "--dist=loadscope")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, likely bugs and formatting."""
    session.run(PYTHON, "-m", "ruff", "check")
    session.run(PYTHON, "-m", "ruff", "format", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """Types, by two checkers that disagree now and then."""
    session.run(PYTHON, "-m", "mypy")
    session.run(PYTHON, "-m", "pyright", "--pythonpath", PYTHON)


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that needs one process and no framework."""
    session.run(*PYTEST, "tests", *session.posargs)


@nox.session
def integration(session: nox.Session) -> None:
    """Real frameworks, several ranks, SIGKILL."""
    session.run(*PYTEST, "integration", *session.posargs)


@nox.session
@nox.parametrize("framework", list(OLDEST_TESTS))
def oldest(session: nox.Session, framework: str) -> None:
    """An adapter on the oldest versions that its extra allows; minutes, by name only."""
    extras = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]
    pins = [each.replace(">=", "==") for each in extras[framework]]
    with tempfile.TemporaryDirectory() as temporary:
        python = _environment(Path(temporary))
        session.run(str(python), "-m", "pip", "install", "--quiet", *pins)
        where = f"import {framework} as f; print(f.__version__, f.__file__)"
        found = (session.run(str(python), "-c", where, silent=True) or "").split()
        if not Path(found[-1]).is_relative_to(temporary):
            session.error(f"the oldest version was not what was imported: {found}")
        tests = [f"integration/test_{name}.py" for name in OLDEST_TESTS[framework]]
        alone = {"PYTHONPATH": str(Path.cwd())}  # the checkout, which is not installed there
        session.run(str(python), *PYTEST[1:], *tests, *session.posargs, env=alone)


@nox.session
def package(session: nox.Session) -> None:
    """The wheel, made from the source archive, works where the checkout cannot be seen."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        session.run(PYTHON, "-m", "build", "--outdir", str(work / "dist"), silent=True)
        (wheel,) = (work / "dist").glob("*.whl")
        _check_content(session, wheel)

        python = _environment_with(session, wheel, work / "venv")
        with session.chdir(work):  # the checkout's own package would be imported from its root
            _check_installed(session, python)


def _check_installed(session: nox.Session, python: Path) -> None:
    """The wheel is what is imported, and its command works."""
    where = "import resumekit, resumekit.adapters.torch as a; print(resumekit.__file__, a.__file__)"
    found = (session.run(str(python), "-I", "-c", where, silent=True) or "").split()
    if not all(Path(path).is_relative_to(python.parents[1]) for path in found):
        session.error(f"the wheel was not what was imported: {found}")
    command, alone = str(python.with_name("resumekit")), {"PYTHONPATH": None}
    session.run(command, "--help", env=alone)
    session.run(command, "demo", "--quick", env=alone)


def _check_content(session: nox.Session, wheel: Path) -> None:
    """Every module of the checkout, nothing else, and no top-level ``adapters``."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {path.as_posix() for path in Path("resumekit").rglob("*.py")}
    sources |= {f"resumekit/{path.as_posix()}" for path in Path("adapters").rglob("*.py")}
    expected = {name for name in sources if "__pycache__" not in name} | {"resumekit/py.typed"}
    if names != expected:
        session.error(f"missing: {expected - names}, unexpected: {names - expected}")


def _environment_with(session: nox.Session, wheel: Path, folder: Path) -> Path:
    """The Python of a new environment that holds the wheel and sees this one's dependencies."""
    python = _environment(folder)
    session.run(str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel))
    return python


def _environment(folder: Path) -> Path:
    """The Python of a new environment that sees this one's dependencies behind its own.

    They are seen through a path file. Path files of the folder it names are not read, so the
    editable install of the checkout stays out of sight.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    (own,) = folder.glob("lib/python*/site-packages")
    dependencies = sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})
    (own / "dependencies.pth").write_text("\n".join(dependencies), encoding="utf-8")
    return python
