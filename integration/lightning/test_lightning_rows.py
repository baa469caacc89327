"""Lightning with other loaders, modules and callbacks, killed by SIGKILL and started again.

Each row ends with the same bits, and so do what it logged at which step, what it validated at which
step, what the Trainer's metrics are, and the files of Lightning's own ``ModelCheckpoint``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from preloads import LIGHTNING

pytest.importorskip("lightning")

from lightning_rows_workloads import LOGGED, RESULT, VALIDATED, read, train

from resumekit.prove import compare
from resumekit.testing import Cell, KillPoint, Kit
from resumekit.testing.kit import Run

PRELOAD = LIGHTNING
MIDDLE = (KillPoint.step(17),)  # of the second epoch; two steps are repeated
TWICE = (KillPoint.step(5), KillPoint.step(17))
BOUNDARY = (KillPoint.checkpoint(12),)
BOUNDARY_2 = (KillPoint.checkpoint(24),)
LAST = (KillPoint.step(24),)
EDGE = (KillPoint.step(2), KillPoint.checkpoint(3))  # in accumulation windows of 5, 5 and 2 batches

ROWS: dict[str, tuple[dict[str, Any], tuple[KillPoint, ...]]] = {
    "what its steps gave in a list, and a layer that anneals": ({"module": "gathering"}, TWICE),
    "the same on the boundary": ({"module": "gathering"}, BOUNDARY),
    "a stateful loader": ({"loader": "stateful"}, TWICE),
    "a stateful loader, on the boundary": ({"loader": "stateful"}, BOUNDARY),
    "a stateful loader with 2 workers": ({"loader": "stateful", "workers": "2"}, TWICE),
    "a stateful loader with persistent workers": (
        {"loader": "stateful", "workers": "persistent"},
        MIDDLE,
    ),
    "a list of two loaders": ({"loader": "a list of two", "module": "of two"}, TWICE),
    "two loaders until the shortest ends": (
        {"loader": "min_size", "module": "of two", "workers": "2"},
        TWICE,
    ),
    "two loaders, on the boundary": ({"loader": "min_size", "module": "of two"}, BOUNDARY),
    "two loaders of which the shorter begins again": (
        {"loader": "a dict of two", "module": "of two"},
        TWICE,
    ),
    "two loaders of which the shorter begins again, with 2 workers": (
        {"loader": "a dict of two", "module": "of two", "workers": "2"},
        BOUNDARY,
    ),
    "two loaders, of which the shorter begins again, with persistent workers": (
        {"loader": "a dict of two", "module": "of two", "workers": "persistent"},
        MIDDLE,
    ),
    "two loaders of which the shorter ends": ({"loader": "max_size", "module": "of two"}, TWICE),
    "two loaders of which the shorter ends, on the boundary": (
        {"loader": "max_size", "module": "of two", "workers": "2"},
        BOUNDARY,
    ),
    "a stream": ({"loader": "stream", "module": "by epoch"}, TWICE),
    "a stream, on the boundary": ({"loader": "stream", "accumulate": 5, "save_every": 1}, EDGE),
    "a stream, on the last step": ({"loader": "stream", "val_check_interval": 5}, LAST),
    "a stream with 2 workers": ({"loader": "stream", "workers": "2"}, TWICE),
    "a stream with persistent workers": ({"loader": "stream", "workers": "persistent"}, MIDDLE),
    "a stateful stream": ({"loader": "stateful stream"}, TWICE),
    "a stateful stream with 2 workers": ({"loader": "stateful stream", "workers": "2"}, BOUNDARY),
    "new loaders in every epoch": (
        {"module": "with loaders", "loader": "of the module", "reload_every": 1},
        TWICE,
    ),
    "new loaders in every epoch, on the boundary": (
        {"module": "with loaders", "loader": "of the module", "reload_every": 1, "epochs": 3},
        BOUNDARY,
    ),
    "new loaders in every second epoch": (
        {"module": "with loaders", "loader": "of the module", "reload_every": 2, "epochs": 3},
        (KillPoint.step(17), KillPoint.step(30)),
    ),
    "averaged weights, swapped in for an epoch of batch norms": (
        {"changing": "swa", "module": "by epoch", "epochs": 4},
        (KillPoint.step(14), *BOUNDARY_2, KillPoint.step(47)),
    ),
    "averaged weights, killed where they are swapped in": (
        {"changing": "swa", "module": "plain", "epochs": 3},
        (KillPoint.step(11), KillPoint.checkpoint(36)),
    ),
    "averaged weights without batch norms": (
        {"changing": "swa", "module": "bare", "epochs": 4},
        (KillPoint.step(12), KillPoint.step(29)),
    ),
    "a backbone that is unfrozen": (
        {"changing": "backbone", "module": "on a backbone", "epochs": 3},
        (KillPoint.step(8), *BOUNDARY, KillPoint.step(17), KillPoint.step(30)),
    ),
    "a schedule by epochs": ({"module": "by epoch", "epochs": 3}, (*BOUNDARY, KillPoint.step(29))),
    "a compiled module": ({"compiled": True, "module": "bare"}, TWICE),
    "Lightning's own saving": (
        {"own_saving": True, "val_check_interval": 4},
        (KillPoint.step(7), KillPoint.step(14)),
    ),
    "Lightning's own saving beside saves in the background": (
        # Every second step: the save in flight at a kill may be lost, and Lightning gives another
        # name to what it saves twice.
        {"own_saving": True, "val_check_interval": 4, "async_save": True, "save_every": 2},
        (KillPoint.step(7), KillPoint.step(15)),
    ),
    "Lightning's own saving of a stateful loader": (
        {"own_saving": True, "val_check_interval": 4, "loader": "stateful"},
        (KillPoint.step(14),),
    ),
    "a limit of time": ({"max_time": True}, TWICE),
    "outputs and metrics that the module and a callback keep": (
        {"module": "keeps outputs", "changing": "keeping", "epochs": 3},
        (KillPoint.step(8), KillPoint.step(17), *BOUNDARY_2),
    ),
    "a log in double precision": ({"precision": "64-true", "epochs": 3}, (KillPoint.step(8),)),
    "a log of accumulation windows": ({"accumulate": 2, "log_every": 3}, (KillPoint.step(4),)),
}


def logical(path: Path) -> dict[Any, Any]:
    """The lines of a file by what they are about; of what was done again the last ones."""
    if not path.exists():
        return {}
    about = ("step", "batch", "sanity check")
    return {
        (*(line.get(key) for key in about), *line.keys()): tuple(map(str, line.values()))
        for line in read(path)
    }


def require_equal(reference: Run, run: Run) -> None:
    assert not run.failure, run.failure
    assert not run.missed_kills
    verdict = compare(reference.trace, run.trace, expect_resume=True)
    assert verdict.exact, verdict
    expected, found = (each.directory / "training" for each in (reference, run))
    assert (found / RESULT).read_text() == (expected / RESULT).read_text()
    for name in (LOGGED, VALIDATED):
        assert logical(found / name) == logical(expected / name)


@pytest.mark.quick(
    "what its*",
    "a stateful loader",
    "two loaders of which the shorter begins again",
    "new loaders in every epoch",
    "averaged weights, killed*",
    "Lightning's own saving",
    "outputs and*",
)
@pytest.mark.parametrize("row", ROWS)
def test_a_killed_run_continues_exactly(kit: Kit, row: str) -> None:
    options, kills = ROWS[row]
    cell = Cell(train, options, kills=kills)
    require_equal(kit.run_uninterrupted(cell), kit.run_killed(cell))


@pytest.mark.quick("a stream")
@pytest.mark.parametrize("row", ["a stream", "two loaders of which the shorter begins again"])
def test_two_ranks_continue_exactly(kit: Kit, row: str) -> None:
    options, _ = ROWS[row]  # an epoch has 6 steps on each rank
    kit.assert_exact(Cell(train, options, 2, (KillPoint.step(5), KillPoint.step(10))))


@pytest.mark.quick("optimizer")
@pytest.mark.parametrize("component", ["optimizer", "callbacks/StochasticWeightAveraging-0"])
def test_averaged_weights_without_a_part_are_caught(kit: Kit, component: str) -> None:
    options, _ = ROWS["averaged weights without batch norms"]
    kit.assert_caught(Cell(train, options, kills=(KillPoint.step(29),)), component)


@pytest.mark.quick("after-4")
@pytest.mark.parametrize("save_every", [3, 4])
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_killed_around_a_validation_the_same_is_validated(
    kit: Kit, moment: str, save_every: int
) -> None:
    """Step 6 is validated; with ``save_every=3`` it is saved too."""
    options = {"val_check_interval": 3, "save_every": save_every, "stop_after": 20}
    cell = Cell(train, options)
    killed = replace(cell, options={**options, "kill_in_validation": moment})
    run = kit.run_again(kit.new_run(killed), leaves_on="SIGKILL")
    run = kit.run_again(replace(run, cell=cell))
    require_equal(kit.run_uninterrupted(cell), run)
    validated = logical(run.directory / "training" / VALIDATED)
    assert {key[0] for key in validated} == {None, *range(3, 25, 3)}


@pytest.mark.quick("stream-data", "a dict of two-data")
@pytest.mark.parametrize("component", ["data", "rng"])
@pytest.mark.parametrize("loader", ["stream", "a dict of two"])
def test_the_position_in_other_loaders_left_out_is_caught_and_named(
    kit: Kit, loader: str, component: str
) -> None:
    module = "plain" if loader == "stream" else "of two"
    options = {"loader": loader, "module": module}
    kit.assert_caught(Cell(train, options, kills=(KillPoint.step(17),)), component)


@pytest.mark.parametrize("component", ["callbacks/attributes", "model/attributes"])
def test_what_the_module_keeps_left_out_is_caught_and_named(kit: Kit, component: str) -> None:
    options = {"module": "keeps outputs", "changing": "keeping"}
    kit.assert_caught(Cell(train, options, kills=(KillPoint.step(17),)), component)


@pytest.mark.full
@pytest.mark.parametrize("component", ["data", "callbacks/lightning", "rng", "lr_scheduler"])
def test_a_part_left_out_is_caught_and_named(kit: Kit, component: str) -> None:
    loader = {"loader": "min_size", "module": "of two"}
    options = {"module": "by epoch", "epochs": 3} if component == "lr_scheduler" else loader
    kit.assert_caught(Cell(train, options, kills=(KillPoint.step(17),)), component)


@pytest.mark.full
def test_a_run_directory_that_was_moved_is_continued(kit: Kit) -> None:
    cell = Cell(train, {"val_check_interval": 4, "own_saving": True})
    run = kit.run_again(kit.new_run(cell), kill=KillPoint.step(14))
    moved = run.directory.with_name("moved")
    run.directory.rename(moved)
    run = kit.run_again(replace(run, directory=moved, trace=moved / "trace"))
    require_equal(kit.run_uninterrupted(cell), run)
