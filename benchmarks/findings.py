"""A benchmark's table: shown, and written down with the machine that it was measured on."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def version_of(package: str) -> str | None:
    """The installed version; None when there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine(*packages: str) -> dict[str, str]:
    """Hardware, system, load, and the versions of those packages that are installed."""
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in cpus if "model name" in line), "unknown")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = {name: version_of(name) for name in packages}
    return {
        "processor": f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {found}" for name, found in versions.items() if found),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()) + " (1, 5, 15 minutes)",
    }


@dataclass(frozen=True)
class Findings:
    """What a benchmark found.

    Args:
        title: of the table.
        headings: of its columns.
        rows: its cells.
        about: the machine, by ``machine``.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    about: Mapping[str, str]

    def show(self, console: Console) -> None:
        """Prints the table and the machine."""
        table = Table(*self.headings, title=self.title)
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        facts = "\n".join(f"{name}: {text}" for name, text in self.about.items())
        console.print(facts, style="dim")

    def record(
        self, name: str, *, heading: str, before: Sequence[str], after: Sequence[str] = ()
    ) -> Path:
        """The dated file with the table.

        Args:
            name: of the file, after the date; empty for the date alone.
            heading: of the page, before the date.
            before: the lines that say what was measured.
            after: the lines that say how to read it.
        """
        now = datetime.now(timezone.utc)
        path = RESULTS / f"{now:%Y-%m-%d}{name and '-'}{name}.md"
        lines = [f"# {heading}, {now:%Y-%m-%d %H:%M} UTC", "", *before, ""]
        lines += [f"- {name}: {text}" for name, text in self.about.items()]
        lines += ["", *self.markdown(), *(["", *after] if after else [])]
        RESULTS.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def markdown(self) -> list[str]:
        """The table's lines."""
        table = [self.headings, ("---",) * len(self.headings), *self.rows]
        return ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in table]
