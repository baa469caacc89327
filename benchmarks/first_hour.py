"""From the first line of a Start page to a killed and resumed run: how long it takes.

    python benchmarks/first_hour.py [--record] [PAGE ...]

For each framework, in an empty environment: clone, the page's command to install, the page's
script, started, killed and started again by the page's commands. torch is downloaded before the
clock starts. Reading and typing are not counted.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from measuring import Findings, parser_for

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("pytorch", "transformers", "accelerate", "lightning", "deepspeed")


def blocks(page: str, language: str) -> list[str]:
    """The blocks of a Start page in one language."""
    text = (ROOT / "docs" / "start" / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def run(line: str, folder: Path, venv: Path) -> str:
    """Runs a line of a page as a shell in the activated environment does."""
    path = f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        line,
        shell=True,
        cwd=folder,
        env={"HOME": os.environ["HOME"], "PATH": path, "VIRTUAL_ENV": str(venv)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def kill_later(command: str, folder: Path, venv: Path) -> str:
    """Starts a command, and kills all its processes when it has a checkpoint of step 300."""
    path = f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        command.split(),
        cwd=folder,
        executable=str(venv / "bin" / command.split()[0]),
        env={"HOME": os.environ["HOME"], "PATH": path, "VIRTUAL_ENV": str(venv)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while process.poll() is None and not (folder / "runs/a/step-00000300").exists():
        time.sleep(0.05)
    time.sleep(0.2)
    leader = psutil.Process(process.pid)
    for each in [*leader.children(recursive=True), leader]:
        each.kill()
    return process.communicate()[0]


def seconds_of(page: str) -> tuple[float, float]:
    """Seconds of the installation, and of the run that is killed and resumed."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        venv, clone, mine = work / "venv", work / "resumekit", work / "mine"
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        run("pip install -q torch==2.13.0", work, venv)
        mine.mkdir()
        begun = time.monotonic()
        run(f"git clone -q {ROOT} {clone}", work, venv)
        (install,) = (each for each in blocks(page, "bash") if "pip install" in each)
        run(install.strip(), clone, venv)
        installed = time.monotonic()
        (script,) = (each for each in blocks(page, "python") if "seed" in each)
        (mine / "train.py").write_text(script, encoding="utf-8")
        (starts,) = (each for each in blocks(page, "bash") if re.search(r"\bKILL\b|pkill", each))
        command = starts.strip().splitlines()[-1]
        printed = kill_later(command, mine, venv) + run(command, mine, venv)
        ended = time.monotonic()
        if "repeated steps: identical" not in printed:
            raise SystemExit(f"{page}: {printed[-3000:]}")
        return installed - begun, ended - installed


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("pages", nargs="*", default=PAGES)
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
