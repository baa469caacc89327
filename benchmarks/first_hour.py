"""From the first line of a Start page to a killed and resumed run: how long it takes.

    python benchmarks/first_hour.py [--record] [PAGE ...]

For each framework, in an empty environment: clone, the page's command to install, the page's
script, started, killed and started again by the page's commands. torch is downloaded before the
clock starts. Reading and typing are not counted.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import Findings, parser_for

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "integration" / "shared"))

from documents import START_PAGES, StartPage  # noqa: E402 - after the path
from start_pages import kill, start  # noqa: E402 - after the path


def environment(venv: Path) -> dict[str, str]:
    """Of a shell in which an environment is activated."""
    path = f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {"HOME": os.environ["HOME"], "PATH": path, "VIRTUAL_ENV": str(venv)}


def run(line: str, folder: Path, venv: Path) -> str:
    """Runs a line of a page as a shell in the activated environment does."""
    return start(["bash", "-c", line], folder, environment(venv)).communicate()[0]


def seconds_of(name: str) -> tuple[float, float]:
    """Seconds of the installation, and of the run that is killed and resumed."""
    page = StartPage(name)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        venv, clone, mine = work / "venv", work / "resumekit", work / "mine"
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        run("pip install -q torch==2.13.0", work, venv)
        mine.mkdir()
        begun = time.monotonic()
        run(f"git clone -q {ROOT} {clone}", work, venv)
        (install,) = (each for each in page.blocks("bash") if "pip install" in each)
        run(install.strip(), clone, venv)
        installed = time.monotonic()
        (mine / "train.py").write_text(page.script, encoding="utf-8")
        started = start(["bash", "-c", f"exec {page.restart}"], mine, environment(venv))
        printed = kill(started, mine) + run(page.restart, mine, venv)
        ended = time.monotonic()
        if "repeated steps: identical" not in printed:
            raise SystemExit(f"{name}: {printed[-3000:]}")
        return installed - begun, ended - installed


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("pages", nargs="*", default=START_PAGES)
    options = parser.parse_args()
    rows, sums = [], []
    for page in options.pages:
        install, trained = seconds_of(page)
        sums.append(install + trained)
        rows.append([page, f"{install:.0f}", f"{trained:.0f}", f"{install + trained:.0f}"])
        print(" | ".join(rows[-1]), flush=True)
    Findings(
        name="first-hour",
        heading="From a Start page to a resumed run",
        before=[
            "By `python benchmarks/first_hour.py --record`: an empty environment, torch downloaded",
            "before, the page's own commands and script. Reading and typing are not counted.",
        ],
        title="Seconds",
        headings=("page", "install", "killed and resumed", "in all"),
        rows=rows,
        packages=("torch",),
        after=[f"Median: {statistics.median(sums):.0f} s."],
    ).publish(options.record)


if __name__ == "__main__":
    main()
