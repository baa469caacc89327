"""The checks of this repository: ``nox`` runs them all, ``nox -s lint`` one of them.

The sessions run in the environment that nox itself was started from, so that torch is installed
once: ``pip install -c constraints.txt -e ".[dev,all]"`` prepares it.
"""

from __future__ import annotations

import datetime
import glob
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import nox

nox.options.default_venv_backend = "none"
# The quickest first, and none after one that failed.
nox.options.sessions = ["checks", "tests", "integration"]
nox.options.stop_on_first_error = True

PYTHON = sys.executable

# Pins of what is private, and exactness in every kind of model, data and callback.
OLDEST_TESTS = {
    "transformers": (
        "transformers",
        "transformers_saving",
        "transformers_changes",
        "trainer_rows",
        "trainer_checkpoints",
    ),
    "lightning": ("lightning", "lightning_rows", "lightning_sharded"),
    "accelerate": ("accelerate", "accelerate_loops", "accelerate_states", "accelerate_many"),
    "deepspeed": ("deepspeed", "deepspeed_gan", "zero"),
    "torch": ("torch_exact", "sharded", "optimizer_parameters", "gradients_across_steps"),
}

# The tests of a file share one warm server; a worker continues with files that import the same.
PYTEST = (
    *(PYTHON, "-m", "pytest", "--numprocesses=logical", "--maxprocesses=4"),
    *("--dist=loadscope", "--no-loadscope-reorder"),
)
# Past this many seconds a run ends with the failures it has seen.
ENDS_AFTER = "--session-timeout=2400"
INTEGRATION_TYPES = ("integration", "benchmarks", "examples", "docs")
EVERY_TEST = ("-m", "full or not full")
RESULTS = Path("benchmarks", "results")
VERSIONS = """
from importlib.metadata import version
from platform import python_version
names = ("torch", "accelerate", "transformers", "lightning", "deepspeed")
print(f"Python {python_version()}", *(f"{name} {version(name)}" for name in names), sep=", ")
"""


@nox.session
def checks(session: nox.Session) -> None:
    """``lint``, ``types``, ``package``, ``docs``, two at a time: one alone leaves a core idle."""
    names = ("lint", "types", "package", "docs")
    _side_by_side(session, *(("nox", "-s", name) for name in names))


def _side_by_side(session: nox.Session, *commands: tuple[str, ...]) -> None:
    """Runs modules of Python, two at a time in this order; fails after the last one."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        runs = [pool.submit(session.run, PYTHON, "-m", *each) for each in commands]
    for each in runs:
        each.result()


@nox.session
def lint(session: nox.Session) -> None:
    """Style, likely bugs and formatting."""
    session.run(PYTHON, "-m", "ruff", "check")
    session.run(PYTHON, "-m", "ruff", "format", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """Types, by two checkers that disagree now and then; the longest first."""
    _side_by_side(
        session,
        ("mypy",),
        ("pyright", "--pythonpath", PYTHON),
        ("mypy", "--config-file", "tests/mypy.ini"),
        ("mypy", "--config-file", "integration/mypy.ini", *INTEGRATION_TYPES),
    )


@nox.session
def docs(session: nox.Session) -> None:
    """The site, in ``build/site``: each warning is an error, links and anchors included."""
    session.run(PYTHON, "-m", "mkdocs", "build", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that needs one process and no framework."""
    session.run(*PYTEST, ENDS_AFTER, "--maxfail=20", "tests", *session.posargs)


@nox.session
def integration(session: nox.Session) -> None:
    """Real frameworks, several ranks, SIGKILL: a sample of each matrix."""
    session.run(*PYTEST, ENDS_AFTER, "--maxfail=20", "integration", *session.posargs)


@nox.session
def full(session: nox.Session) -> None:
    """Every test and every cell of the matrices; hours, by name only. Its figures are recorded.

    Arguments are passed to pytest: ``nox -s full -- integration/lightning`` runs a part.
    """
    chosen = session.posargs or ["tests", "integration"]
    options = ["--full-matrix"] if any(path.startswith("integration") for path in chosen) else []
    words = [Path(word).stem for word in session.posargs if not word.startswith("-n")]  # processes
    stem = "-".join(["full", *re.findall("[a-z0-9_]+", " ".join(words).lower())])
    _run_recorded(session, PYTHON, stem, f"full: {' '.join(chosen)}", [*options, *chosen])


def _run_recorded(
    session: nox.Session, python: str, stem: str, title: str, chosen: list[str], **options: Any
) -> None:
    """Runs every cell of tests with a Python; what failed is recorded, too."""
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary, "report.xml")
        run = (python, *PYTEST[1:], *EVERY_TEST, f"--junitxml={report}", *chosen)
        session.run(*run, success_codes=(0, 1), **options)
        found = session.run(python, "-c", VERSIONS, silent=True) or ""
        failed = _record_run(report, title, stem, found.strip())
    if failed:
        session.error(f"{failed} tests failed")


def _record_run(report: Path, title: str, stem: str, versions: str) -> int:
    """Writes the figures of a run under ``benchmarks/results``; the number of failures.

    One table has a row for each file. The other has what tests counted, from which
    ``benchmarks/reliability.py`` makes a page; what a failed test counted is no figure.
    """
    rows: dict[str, list[float]] = {}
    counted = []
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        path = [part for part in case.get("classname", "").split(".") if part.islower()]
        has_failed = bool(tags & {"failure", "error"})
        row = rows.setdefault("/".join(path), [0, 0, 0, 0])
        for each in case.iter("property"):
            value = "failed" if has_failed else each.get("value", "").replace("|", "/")
            counted.append(f"| {each.get('name')} | {value} | {'/'.join(path)} |")
        row[0] += 1
        row[1] += has_failed
        row[2] += "skipped" in tags
        row[3] += float(case.get("time", "0"))
    sums = [sum(column) for column in zip(*rows.values(), strict=True)]
    lines = [
        f"# nox -s {title}",
        "",
        f"{datetime.datetime.now():%Y-%m-%d %H:%M}, {versions}; {os.cpu_count()} cores.",
        "",
        "| file | tests | failed | skipped | seconds |",
        "|---|---|---|---|---|",
    ]
    for name, (tests, failed, skipped, seconds) in (*sorted(rows.items()), ("all", sums)):
        lines.append(f"| {name} | {tests:.0f} | {failed:.0f} | {skipped:.0f} | {seconds:.0f} |")
    if counted:
        lines += ["", "| counted | number | file |", "|---|---|---|", *sorted(counted)]
    file = RESULTS / f"{datetime.date.today()}-{stem}.md"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(sums[1])


@nox.session
def examples(session: nox.Session) -> None:
    """Every example and its stock twin, killed and judged; 15 minutes, by name only."""
    session.run(*PYTEST, *EVERY_TEST, "integration/examples", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Trainings of eight kinds, each killed 60 times at random; hours, by name only; recorded.

    What the record of the day has is not run again: ``nox -s soak -- zero`` runs a part, and
    ``nox -s soak -- --kills 20 --seed 1`` is shorter and adds other kills. Two kinds need root, to
    mount a disk that fills up.
    """
    session.run(PYTHON, "benchmarks/soak.py", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Defects put into the sources one by one, each of which a test must catch; recorded.

    By name only. Arguments are passed on: ``nox -s mutants -- --jobs 2 --only retention``.
    """
    record = [] if "--only" in session.posargs else ["--record", str(RESULTS)]
    session.run(PYTHON, "tests/mutants/run_mutants.py", *record, *session.posargs)


@nox.session
@nox.parametrize("framework", list(OLDEST_TESTS))
def oldest(session: nox.Session, framework: str) -> None:
    """An adapter on the oldest versions that its extra allows; minutes, by name only; recorded.

    For torch let PIP_EXTRA_INDEX_URL name the builds without CUDA, a tenth of the size.
    """
    pins = [each.replace(">=", "==") for each in _requirements(framework)]
    _try_versions(session, framework, "oldest", *pins)


@nox.session
@nox.parametrize("framework", list(OLDEST_TESTS))
def newest(session: nox.Session, framework: str) -> None:
    """An adapter on the newest version that there is; as ``oldest``."""
    _try_versions(session, framework, "newest", "--upgrade", _requirements(framework)[0])


def _requirements(framework: str) -> list[str]:
    """The framework and what else its extra asks for."""
    project = nox.project.load_toml("pyproject.toml")["project"]
    wanted = project["optional-dependencies"] | {"torch": project["dependencies"][:1]}
    return list(wanted[framework])


def _try_versions(session: nox.Session, framework: str, which: str, *wanted: str) -> None:
    """Tests of an adapter, with what pip installs before what this environment has."""
    with tempfile.TemporaryDirectory() as temporary:
        python = str(_environment(Path(temporary)))
        session.run(python, "-m", "pip", "install", "-q", *wanted)
        program = f"import {framework} as f; print('found', f.__version__)"
        found = (session.run(python, "-c", program, silent=True) or "").split()[-1]
        pinned = wanted[0].partition("==")[2].removesuffix(".0")
        if pinned and found.partition("+")[0].removesuffix(".0") != pinned:
            session.error(f"{found} was imported, and not {wanted[0]}")
        tests = [f"integration/{framework}/test_{name}.py" for name in OLDEST_TESTS[framework]]
        alone = {"PYTHONPATH": str(Path.cwd())}  # the checkout, which is not installed there
        chosen = [*tests, *session.posargs]
        title = f"{which}: {framework} {found}: {' '.join(chosen)}"
        _run_recorded(session, python, f"{which}-{framework}", title, chosen, env=alone)


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


@nox.session
def release(session: nox.Session) -> None:
    """All of a release but the upload: ``nox -s release -- https://host/owner/resumekit``.

    Wheel and source archive are built from the last commit, with links of the README and addresses
    of the project that begin with the given one, and today as the date of the version. Each is
    installed in an empty environment of each supported Python that this machine has, beside the
    CPU build of torch and without the constraints, and proves a run there.
    """
    (address,) = session.posargs
    dist = Path("dist").absolute()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        archive = ("git", "archive", "--format=tar", f"--output={work / 'tree.tar'}", "HEAD")
        session.run(*archive, external=True)
        shutil.unpack_archive(work / "tree.tar", work / "tree")
        version = _address_links(work / "tree", address.rstrip("/"))
        shutil.rmtree(dist, ignore_errors=True)
        with session.chdir(work / "tree"):
            session.run(PYTHON, "-m", "build", "--outdir", str(dist), silent=True)
        files = sorted(map(str, dist.iterdir()))
        session.run(PYTHON, "-m", "twine", "check", "--strict", *files)
        pythons = {name: _python_of(name) for name in (10, 11, 12, 13)}
        for name, python in pythons.items():
            for number, file in enumerate(files if python else ()):
                place = work / f"python3.{name}-{number}"
                session.run(python or "", "-m", "venv", str(place), external=True)
                install = (str(place / "bin" / "python"), "-m", "pip", "install", "-q")
                session.run(*install, "torch==2.13.0", external=True)
                session.run(*install, file, external=True)
                with session.chdir(work):  # not the checkout's own package
                    command = str(place / "bin" / "resumekit")
                    session.run(command, "demo", "--quick", env={"PYTHONPATH": None}, external=True)
                    _check_link(session, command, f"{address.rstrip('/')}/blob/v{version}/docs/")
    missing = ", ".join(f"3.{name}" for name, python in pythons.items() if not python)
    session.log(f"not tried, not on this machine: Python {missing or 'none'}")
    session.log(f"ready: date {version} in CHANGELOG.md, tag v{version}, twine upload {dist}/*")


def _check_link(session: nox.Session, command: str, pages: str) -> None:
    """An error of the installed command ends with the link to its section."""
    alone: dict[str, Any] = {"env": {"PYTHONPATH": None}, "external": True, "success_codes": [2]}
    printed = session.run(command, "verify", "missing", silent=True, **alone) or ""
    link = rf" \[RK-(\d+)\] {re.escape(pages)}how-to/troubleshooting\.md#rk-\1\n$"
    if not re.search(link, printed):
        session.error(f"no link to a section of {pages}: {printed}")


def _python_of(minor: int) -> str | None:
    """A Python of this version that starts; a shim of pyenv may not."""
    shims = glob.glob(str(Path.home() / f".pyenv/versions/3.{minor}.*/bin/python"))
    for each in (*shims, shutil.which(f"python3.{minor}")):
        if (
            each
            and not subprocess.run([each, "-c", ""], capture_output=True, check=False).returncode
        ):
            return each
    return None


def _address_links(tree: Path, address: str) -> str:
    """Makes a tree what is released under an address; its version."""
    words = (tree / "resumekit" / "version.py").read_text(encoding="utf-8").split('"')
    version = words[-2]
    pages = f"{address}/blob/v{version}"
    readme = tree / "README.md"
    text = readme.read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\g<1>{address}/raw/v{version}/", text)
    readme.write_text(re.sub(r"(\]\()(?!https?:|#)", rf"\g<1>{pages}/", text), encoding="utf-8")
    changes = tree / "CHANGELOG.md"
    title = f"## [{version}] - "
    text = changes.read_text(encoding="utf-8")
    changes.write_text(
        text.replace(f"{title}unreleased", f"{title}{datetime.date.today()}"), encoding="utf-8"
    )
    project = tree / "pyproject.toml"
    urls = f'[project.urls]\nHomepage = "{address}"\nChanges = "{pages}/CHANGELOG.md"\n'
    urls += f'Documentation = "{pages}/docs/index.md"\nIssues = "{address}/issues"\n\n'
    text = project.read_text(encoding="utf-8")
    project.write_text(text.replace("[project.scripts]", f"{urls}[project.scripts]"), "utf-8")
    return version


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
    sources |= {path.as_posix() for path in Path("resumekit/html_report/templates").iterdir()}
    expected = {name for name in sources if "__pycache__" not in name} | {
        "resumekit/py.typed",
        "resumekit/troubleshooting.md",
    }
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
    (packages,) = folder.glob("lib/python*/site-packages")
    dependencies = sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})
    (packages / "dependencies.pth").write_text("\n".join(dependencies), encoding="utf-8")
    return python
