"""Writes docs/explanation/reliability.md from the records of ``nox -s full`` and ``nox -s soak``.

``python benchmarks/reliability.py`` writes the page, ``--check`` fails where it is another one. A
test counts its faults by pytest's ``record_property("fault, variant", "number: details")``; the
numbers of the variants add up. Of each name the newest record counts. The numbers of a file with a
failed test are not shown.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from soak import rows_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "explanation" / "reliability.md"

# Measured once, with the frameworks' own savers on the CPU; a record of each figure is not kept.
VERSIONS = "torch 2.13.0, transformers 5.23.0, accelerate 1.15.0, lightning 2.6.6, deepspeed 0.19.8"


class Fault(NamedTuple):
    """One line of the page.

    Args:
        name: as tests count it.
        frameworks: what the frameworks' own savers do.
        survived: what the tests assert of each one, where that of the section does not say it.
    """

    name: str
    frameworks: str = ""
    survived: str = ""


class Section(NamedTuple):
    """Faults of one kind, and what the tests assert of each one."""

    title: str
    survived: str
    faults: Sequence[Fault]


SECTIONS = (
    Section(
        "Processes that are killed",
        "The same command starts at the newest complete step, and ends with the same bits as a run "
        "that nobody killed.",
        (
            Fault(
                "SIGKILL at a call of a save",
                "relaunches that start: Trainer 10 of 50, Accelerate 7 of 26, DeepSpeed 15 of 16, "
                "Lightning 3 of 3; `torch.distributed.checkpoint` 50 of 50 into a directory for "
                "each step, 6 of 50 into one directory",
            ),
            Fault(
                "SIGKILL within a write of a save",
                "relaunches that start: Accelerate 0 of 5, DeepSpeed 2 of 3",
            ),
            Fault("SIGKILL at a call of a first launch"),
            Fault(
                "SIGKILL of one of two ranks in a save",
                "DeepSpeed, rank 1 in its shard: 0 of 3 relaunches start, because `latest` names "
                "the incomplete step",
            ),
            Fault("SIGKILL at a call of a save in place"),
            Fault("fault at a call of a save of 96 MB"),
            Fault("kills with a memory place"),
        ),
    ),
    Section(
        "Disks, file systems and servers that fail",
        "An error that costs a checkpoint is reported, the older checkpoint is kept, and a "
        "relaunch ends with the same bits.",
        (
            Fault(
                "error at a call of a save",
                "a save raises in each; relaunches that start after ENOSPC: Trainer 10 of 50, "
                "Accelerate 7 of 26, DeepSpeed 15 of 16, Lightning 3 of 3",
            ),
            Fault("error at a call of a background save"),
            Fault("failed fsync"),
            Fault("I/O error of a read in a resume"),
            Fault("mount that stops at a change of a save in place"),
            Fault("mirror killed or stalled"),
            Fault("disk wiped during an upload"),
        ),
    ),
    Section(
        "Power cuts",
        "From each state that the disk may be left in, the newest checkpoint whose save had "
        "returned loads, byte for byte; after a quarter of them a save is tried, and works.",
        (
            Fault(
                "power cut during a save",
                "states from which no relaunch starts: Trainer 1,168 of 1,313 (30 more load "
                "silently with another state), Accelerate 218 of 237, DeepSpeed 30 of 153, "
                "Lightning 2 of 8, none of which calls fsync; `torch.distributed.checkpoint` 1 of "
                "1,082 into a directory for each step, 1,076 of 1,124 into one",
            ),
            Fault("power cut during a save above 64 MB"),
            Fault("power cut during a save in place"),
            Fault("power cut during a recovery"),
            Fault("power cut after a kill and a relaunch"),
            Fault("power cut after a failed fsync"),
            Fault("power cut after an error in a background save"),
        ),
    ),
    Section(
        "Damage",
        "What is damaged is found before anything of it is used.",
        (
            Fault(
                "flipped byte of a checkpoint",
                "flips that load silently as another state: Trainer 65 of 240, Accelerate 72 of "
                "150, DeepSpeed 30 of 73, Lightning 19 of 30, `torch.distributed.checkpoint` 5 of "
                "60",
                "a typed error names the file",
            ),
            Fault(
                "damaged file of a checkpoint",
                "files of the older checkpoint that load silently: Trainer 5 of 5, Accelerate 5 of "
                "5, DeepSpeed 2 of 2",
                "a typed error names the file",
            ),
            Fault(
                "resume past a damaged checkpoint",
                "where loading raises, none of them falls back to the older checkpoint",
                "the older one is loaded, and a warning names file and reason",
            ),
            Fault(
                "resume without a good checkpoint",
                "DeepSpeed without `latest`, and Lightning without `last.ckpt`, start at step 0",
                "refused; no live object is changed, and no run starts afresh",
            ),
            Fault("file that no manifest lists", survived="ignored, with a warning"),
            Fault(
                "mutations of content",
                survived="made with right checksums: a typed error before a live object changes, "
                "the older checkpoint, or it loads, and the program itself may raise at its next "
                "batch; never another step or batch in silence",
            ),
            Fault("hypothesis inputs", survived="a typed error, or it loads"),
            Fault(
                "hostile pickle in a checkpoint",
                "runs in a resume: `custom_checkpoint_0.pkl` of Accelerate, the model and "
                "optimizer files of DeepSpeed, `.metadata` and `.distcp` of "
                "`torch.distributed.checkpoint`; no file of Trainer or, by default, of Lightning",
                "nothing of it runs",
            ),
        ),
    ),
    Section(
        "Controls",
        "The tests of power cuts find each defect that is put into the protocol of saves, such as "
        "a sync that is left out.",
        (Fault("defect put into the protocol"),),
    ),
)

INTRODUCTION = f"""# Reliability

By `python benchmarks/reliability.py`, from what tests counted; do not edit it. Each number is from
a [record](../../benchmarks/results) of `nox -s full`, whose tests fail if one of these faults costs
more than it may. *Survived* is what each section says. *Not run*: no record has it yet.
[How it is proven](proof.md#how-this-library-is-tested) describes the means.

The last column has the frameworks' own savers under the same fault, measured once, with
{VERSIONS}:
a job of 16 steps on one CPU rank, a save every 4 steps, and the resume that each framework
recommends. Empty: not measured.
"""

LIMITS = """## Not tried

- A power cut of a real machine. Each state of a disk that POSIX allows is made in memory, or a
  sample of them where there are too many.
- Network file systems with caches of their own (NFS, Lustre), and every system but Linux.
- A full disk, or another number of ranks, for hours. The soak has both, for less than an hour.
- Somebody who changes a checkpoint and its checksums: see [SECURITY.md](../../SECURITY.md).
"""


class Count(NamedTuple):
    """What tests counted under one name.

    Args:
        number: how many; None if a test that counts it failed.
        file: of the test.
        record: where it is from.
    """

    number: int | None
    file: str
    record: Path


def counts(results: Path) -> dict[str, Count]:
    """By name, each from the newest record that has it."""
    found: dict[str, Count] = {}
    failing = set[str]()
    for record in sorted(results.glob("*-full*.md"), key=_time_of):
        has_whole_files = not re.search(" -k |::", record.read_text().partition("\n")[0])
        for file, num_failed in _files(record):
            failing = failing | {file} if num_failed else failing - {file}
            if has_whole_files:  # what a file counts no more is gone
                found = {name: each for name, each in found.items() if each.file != file}
        found |= _counted(record)
    return {
        name: each._replace(number=None) if each.file in failing else each
        for name, each in found.items()
    }


def _time_of(record: Path) -> str:
    """When it was written; of records without a time, when the day began."""
    time = re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d", record.read_text())
    return time[0] if time else record.name[:10]


def _rows(record: Path, num_cells: int) -> Iterator[list[str]]:
    for line in record.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == num_cells:
            yield cells


def _files(record: Path) -> Iterator[tuple[str, int]]:
    """Each file, and how many of its tests failed."""
    for file, num_tests, num_failed, *_ in _rows(record, 5):
        if num_tests.isdigit():
            yield file, int(num_failed)


def _counted(record: Path) -> dict[str, Count]:
    """What the tests of one run counted; of a sample of the cells and all of them, the latter."""
    found: dict[str, Count] = {}
    for name, value, file in _rows(record, 3):
        number = re.match(r"\d+", value)
        if number or value == "failed":
            here = Count(int(number[0]) if number else None, file, record)
            other = found.get(name, here)
            is_known = here.number is not None and other.number is not None
            found[name] = max(here, other) if is_known else here._replace(number=None)
    return found


def page(results: Path) -> str:
    """The whole page."""
    found = counts(results)
    lines = [INTRODUCTION]
    for section in SECTIONS:
        lines += [f"## {section.title}", "", section.survived, ""]
        lines += [*_table(section.faults, found), ""]
    lines += ["## Soak", "", *_soak(results), "", LIMITS]
    return "\n".join(lines)


def _table(faults: Sequence[Fault], found: dict[str, Count]) -> Iterator[str]:
    """Without the columns that are empty."""
    counted = ["fault", "tried", "survived", "lost"]
    rows = [[*counted, "what survived means", "record", "the frameworks' own savers"]]
    for fault in faults:
        of_fault = [each for name, each in found.items() if name.partition(", ")[0] == fault.name]
        numbers = [each.number for each in of_fault]
        total = f"{sum(filter(None, numbers)):,}"
        cells = [total, total, "0"]
        if not numbers:
            cells = ["not run", "-", "-"]
        elif None in numbers:
            cells = ["a test failed", "?", "?"]
        records = " ".join(_link(each) for each in sorted({each.record for each in of_fault}))
        rows.append([fault.name, *cells, fault.survived, records, fault.frameworks])
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    header, *lines = zip(*columns, strict=True)
    yield _line(header)
    yield _line(["---"] * len(header))
    yield from map(_line, lines)


def _soak(results: Path) -> Iterator[str]:
    """Each kind with the kills of all its seeds; of a seed the newest row counts."""
    records = sorted(results.glob("*-soak.md"))
    rows = {(row.kind, row.seed): (row, record) for record in records for row in rows_of(record)}
    if not rows:
        yield "Not run."
        return
    num_kills = sum(int(row.kills) for row, _ in rows.values() if row.is_exact)
    yield (
        "`nox -s soak` kills small trainings at random times, all processes at once, and launches "
        f"the same command again. {num_kills} kills ended with the bits and the samples of the "
        "uninterrupted run; where the number of ranks changes, with its samples, and with its "
        "weights but for rounding."
    )
    yield ""
    header = ["training", "ranks", "kills", "steps", "verdict", "samples", "directory", "notes"]
    yield _line([*header, "record"])
    yield _line(["---"] * 9)
    for kind in dict.fromkeys(kind for kind, _ in rows):
        found = [each for (name, _), each in rows.items() if name == kind]
        of_kind = [row for row, _ in found]
        columns = zip(*(row[3:] for row in of_kind), strict=True)
        _, steps, verdicts, ledgers, _, _, _, notes = map(_each_once, columns)
        yield _line(
            [
                *(kind, of_kind[0].ranks, str(sum(int(row.kills) for row in of_kind))),
                *(steps, verdicts, ledgers, of_kind[-1].directory, notes),
                " ".join(dict.fromkeys(_link(record) for _, record in found)),
            ]
        )


def _each_once(values: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(filter(None, values)))


def _link(record: Path) -> str:
    return f"[{record.name[5:10]}](../../benchmarks/results/{record.name})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Writes the page, or compares it."""
    expected = page(RESULTS)
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(expected)
    elif PAGE.read_text() != expected:
        sys.exit(f"{PAGE}: not what the records give; run python benchmarks/reliability.py")


if __name__ == "__main__":
    main()
