"""Size and structure of a checkout of this repository, to compare one version with another.

Run: python benchmarks/structure.py [--root CHECKOUT] [--junit FILE ...] [--json]

It prints lines of code (without docstrings, comments and blank lines), modules, files per folder,
the largest and smallest modules, which packages import which, class names that stand twice,
repeated code, `Any` and getattr/hasattr, the modules that a save and a resume enter, and the number
and duration of the tests in JUnit files.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SOURCES = ("resumekit", "adapters")
MIN_REPEATED_LINES = 6
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}

# Trains five steps with a save after the fourth one, or resumes there, and counts what each call
# enters: the first one, and each fetch of a batch.
TOY = """
import json, sys
import torch
from torch.utils.data import DataLoader
from resumekit.adapters.torch import Checkpointer

root, directory = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(torch.randn(64, 4), batch_size=8, shuffle=True)
options = {"save_every": 4, "transient": {"entered", "figures"}}
checkpointer = Checkpointer(directory, model=model, optimizer=optimizer, **options)
entered, figures = [], []

def profile(frame, event, argument):
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(root) and not name.endswith("__init__.py"):
        entered.append(name)

def counted(function):
    entered.clear()
    sys.setprofile(profile)
    try:
        return function()
    finally:
        sys.setprofile(None)
        figures.append({"modules": len(set(entered)), "calls": len(entered)})

class Counted:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return self

    def __next__(self):
        return counted(lambda: next(self.batches))

for batch in Counted(counted(lambda: checkpointer.batches(loader, epochs=1))):
    if checkpointer.progress.step == 5:
        break
    optimizer.zero_grad()
    model(batch).mean().backward()
    optimizer.step()
    checkpointer.step()
checkpointer.close()
print(json.dumps(figures))
"""


class Module(NamedTuple):
    """One source file."""

    path: str
    num_lines: int
    code: tuple[tuple[int, str], ...]  # line number and stripped text of each line of code
    num_any: int
    num_lookups: int
    classes: tuple[str, ...]
    imports: frozenset[str]  # packages of resumekit

    @property
    def package(self) -> str:
        """The package of resumekit, or the module at its top; the adapters are one."""
        first, *rest = Path(self.path).with_suffix("").parts
        return first if first == "adapters" else rest[0]


def _docstring_lines(tree: ast.Module) -> set[int]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines |= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def read_module(path: Path, root: Path) -> Module:
    """The figures of one file."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    physical = source.splitlines()
    code = [
        (number, physical[number - 1].strip()) for number in sorted(lines - _docstring_lines(tree))
    ]
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return Module(
        str(path.relative_to(root)),
        len(physical),
        tuple(code),
        sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree)),
        sum(isinstance(each, ast.Name) and each.id in {"getattr", "hasattr"} for each in called),
        tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef)),
        frozenset(_imported_packages(tree)),
    )


def _imported_packages(tree: ast.Module) -> Iterator[str]:
    """Also for type hints; names of the root package count as the root."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("resumekit"):
            _, *rest = str(node.module).split(".")
            yield rest[0] if rest else "resumekit"


def modules_of(root: Path) -> list[Module]:
    """Every module that is shipped; the link to the adapters is not followed."""
    found = [
        path
        for name in SOURCES
        for path in sorted((root / name).rglob("*.py"))
        if "resumekit/adapters" not in path.as_posix()
    ]
    return [read_module(path, root) for path in found]


def _runs(module: Module) -> Iterator[tuple[int, tuple[str, ...]]]:
    code = [text for _, text in module.code]
    for start in range(len(code) - MIN_REPEATED_LINES + 1):
        run = tuple(code[start : start + MIN_REPEATED_LINES])
        if not all(text.startswith(("import ", "from ", "@")) or len(text) < 4 for text in run):
            yield start, run


def repeated_lines(modules: list[Module]) -> int:
    """Lines of code that belong to a run of six or more lines that occurs elsewhere as well."""
    seen: defaultdict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for module in modules:
        for start, run in _runs(module):
            seen[run].append((module.path, start))
    repeated = {
        (path, start + offset)
        for found in seen.values()
        if len(found) > 1
        for path, start in found
        for offset in range(MIN_REPEATED_LINES)
    }
    return len(repeated)


def journeys(root: Path) -> dict[str, Any]:
    """Modules entered and calls made by a save and by a resume of a toy run."""
    with tempfile.TemporaryDirectory() as temporary:
        script = Path(temporary) / "toy.py"
        script.write_text(TOY, encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        arguments = [sys.executable, str(script), str(root), str(Path(temporary) / "run")]
        launches = [
            json.loads(
                subprocess.run(
                    arguments, env=environment, capture_output=True, text=True, check=True
                ).stdout.splitlines()[-1]
            )
            for _ in range(2)
        ]
    (*_, without_save, with_save, _), (opened, first, *_) = launches
    return {
        "batch without save": without_save,
        "batch with save": with_save,
        "resume": {name: max(opened[name], first[name]) for name in opened},
    }


def tests_of(files: list[Path]) -> dict[str, float]:
    """Number of tests and their minutes, summed over JUnit files."""
    cases = [case for file in files for case in ElementTree.parse(file).iter("testcase")]
    seconds = sum(float(case.get("time", 0)) for case in cases)
    return {"items": len(cases), "minutes": round(seconds / 60, 1)}


def measure(root: Path, junit: list[Path]) -> dict[str, Any]:
    """All figures of a checkout."""
    modules = modules_of(root)
    folders: Counter[str] = Counter(str(Path(each.path).parent) for each in modules)
    code: Counter[str] = Counter()
    for each in modules:
        code[str(Path(each.path).parent)] += len(each.code)
    by_size = sorted(modules, key=lambda each: each.num_lines)
    figures: dict[str, Any] = {
        "lines of code": sum(code.values()),
        "lines": sum(each.num_lines for each in modules),
        "modules": len(modules),
        "modules below 60 lines": sum(
            each.num_lines < 60 and not each.path.endswith("__init__.py") for each in modules
        ),
        "folders: files, lines of code": {
            name: [folders[name], code[name]] for name in sorted(folders)
        },
        "largest": {each.path: each.num_lines for each in reversed(by_size[-5:])},
        "smallest": {
            each.path: each.num_lines
            for each in [each for each in by_size if not each.path.endswith("__init__.py")][:5]
        },
        "arrows between packages": len(
            {(m.package, other) for m in modules for other in m.imports if other != m.package}
        ),
        "class names that stand twice": sum(
            number > 1 for number in Counter(name for m in modules for name in m.classes).values()
        ),
        "repeated lines": repeated_lines(modules),
        "Any": sum(each.num_any for each in modules),
        "getattr and hasattr": sum(each.num_lookups for each in modules),
        "journeys": journeys(root),
    }
    return {**figures, "tests": tests_of(junit)} if junit else figures


def main() -> None:
    """Prints the figures of one checkout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--junit", type=Path, nargs="*", default=[])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = measure(arguments.root.resolve(), arguments.junit)
    if arguments.json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        if not isinstance(value, dict):
            print(f"{name:32} {value:>8}")
            continue
        print(name)
        for key, part in value.items():
            shown = (
                part
                if not isinstance(part, dict)
                else ", ".join(f"{k} {v}" for k, v in part.items())
            )
            print(f"  {key:46} {shown}")


if __name__ == "__main__":
    main()
