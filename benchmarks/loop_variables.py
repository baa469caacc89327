"""The names that the analysis of training loops reports for a source file, without running it.

    python benchmarks/loop_variables.py train.py 142
    python benchmarks/loop_variables.py --set FOLDER > report.json

A set is a folder of pairs ``name.py`` and ``name.json``, the second with the ``line`` of the loop.
The report gives the names of each file; relative indices as ``enumerate:i``. Two things only a run
adds: objects are recognised by their types, and a changed object is confirmed by its content.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from resumekit.analysis import LoopCarried, LoopNode, Program, loop_carried


def analysed(path: Path, line: int, *, with_logged: bool = True) -> LoopCarried:
    """What the analysis finds for the loop that begins at a line."""
    program = Program.parse(path.read_text(encoding="utf-8-sig"))
    for function in program.functions.values():
        for node in function.own_nodes:
            if isinstance(node, LoopNode) and node.lineno == line:
                return loop_carried(program, function, node, with_logged=with_logged)
    raise SystemExit(f"{path}:{line}: no loop begins here")


def report_of(folder: Path) -> dict[str, list[str]]:
    """The names of every file of a set."""
    report = {}
    for described in sorted(folder.glob("*.json")):
        line = json.loads(described.read_text(encoding="utf-8"))["line"]
        start = time.process_time()
        found = analysed(described.with_suffix(".py"), line, with_logged=False)
        print(f"{described.stem}: {time.process_time() - start:.2f} s", file=sys.stderr)
        names = [each.name for each in found.variables]
        report[described.stem] = [*names, *(f"enumerate:{i}" for i in found.relative_indices)]
    return report


def main() -> None:
    """Prints the names of one loop, or of a set as JSON."""
    first, second = sys.argv[1:3]
    if first == "--set":
        print(json.dumps(report_of(Path(second)), indent=1))
        return
    found = analysed(Path(first), int(second))
    print("not in the checkpoint:", *(each.name for each in found.variables))
    print("relative indices:", *found.relative_indices)
    print("only logged:", *(each.name for each in found.only_logged))


if __name__ == "__main__":
    main()
