"""A rank of a ZeRO run dies inside a save: no loss, and no pointer to an incomplete checkpoint.

The uninterrupted run logs every write-side call of both ranks. Each trial kills one rank at one
of the calls of the save of step 3, and the log of that rank names it. ``--full-matrix``
makes 20 trials at each stage.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from failpoints import launch
from preloads import DEEPSPEED

pytest.importorskip("deepspeed")

from zero_workloads import save_natively_and_lose, train_and_lose

from resumekit.errors import CorruptCheckpointError
from resumekit.prove import compare
from resumekit.storage.directories import StepName
from resumekit.storage.store import Store
from resumekit.testing import Cell, Kit, Run
from resumekit.testing.task import target_of

pytestmark = pytest.mark.full

RecordProperty = Callable[[str, object], None]

PRELOAD = DEEPSPEED
PEERS_SECONDS = 60.0

NUM_TRIALS, ALL_TRIALS = 4, 20
STEP = 3  # in whose save a rank is killed; by then a save lets an older checkpoint go
TIMEOUT_SECONDS = 3  # of the agreement in the training function


@dataclass(frozen=True)
class Call:
    """A write-side call of a rank: its number there, its kind, and the path that it is about."""

    rank: int
    number: int
    kind: str
    path: Path

    @property
    def is_after_the_commit(self) -> bool:
        """Whether the checkpoint exists when the call is about to be made."""
        name = self.path.name
        return name.startswith("latest-") or str(StepName(STEP)) not in str(self.path)

    @property
    def lost_message(self) -> str:
        """What the other rank ends with, as a pattern.

        The files of an old checkpoint are removed while training continues, so the other rank may
        wait in a collective of the engine then, and not in a save.
        """
        in_training = r"|RuntimeError: .* by peer" if "/.staging/trash-" in str(self.path) else ""
        return "RankLostError: " + in_training

    def __str__(self) -> str:
        inside = re.sub(r"-([0-9a-f]{32}|[0-9a-f]{12})\b", "", str(self.path)).partition("/run/")[2]
        return f"rank {self.rank}, call {self.number}: {self.kind} {inside or '.'}"


def log_of(run: Run, rank: int, launch: int = 0) -> Path:
    return run.directory / f"launch-{launch:05d}-rank-{rank:05d}.log"


def logged_calls(run: Run, rank: int) -> list[Call]:
    found = re.findall(r"^failpoint: (\d+) (\w+) (.*)$", log_of(run, rank).read_text(), re.M)
    return [Call(rank, int(number), kind, Path(path)) for number, kind, path in found]


def calls_of_the_save(run: Run, rank: int) -> list[Call]:
    """From the first call that names the step to the one before the next step is named."""
    calls = logged_calls(run, rank)
    first, following = (
        next(index for index, call in enumerate(calls) if str(StepName(step)) in str(call.path))
        for step in (STEP, STEP + 1)
    )
    return calls[first:following]


def evenly(calls: list[Call], num: int) -> list[Call]:
    """So many of them, at equal distances."""
    num = min(num, len(calls))
    return [calls[(2 * number + 1) * len(calls) // (2 * num)] for number in range(num)]


def step_that_latest_names(directory: Path) -> StepName:
    """The step directory that ``latest`` names, every byte of it verified."""
    name = StepName.from_text((directory / "latest").read_text().strip())
    Store(directory).open_step(name).verify()
    return name


def newest_complete(directory: Path) -> StepName:
    name = Store(directory).step_names()[0]
    Store(directory).open_step(name).verify()
    return name


def with_faults(cell: Cell, failpoints: str, rank: int | None = None) -> Cell:
    """The same training with faults of the file system, on one rank or on all."""
    options = {"target": target_of(cell.function), "failpoints": failpoints, "rank": rank}
    return replace(cell, function=launch, options={**cell.options, **options})


@pytest.mark.parametrize("stage", [2, 3], ids="stage {}".format)
def test_a_rank_killed_inside_a_save_loses_nothing(
    request: pytest.FixtureRequest, kit: Kit, record_property: RecordProperty, stage: int
) -> None:
    plain = Cell(train_and_lose, {"stage": stage}, 2)
    whole = kit.run_uninterrupted(with_faults(plain, "1+=log"))
    of_rank = [calls_of_the_save(whole, rank) for rank in range(2)]
    all_of_it = request.config.getoption("--full-matrix")
    num_trials = ALL_TRIALS if all_of_it else NUM_TRIALS
    of_rank_1 = evenly(of_rank[1], num_trials // 2)
    trials = [*evenly(of_rank[0], num_trials - len(of_rank_1)), *of_rank_1]
    assert len(set(trials)) == num_trials
    for trial in trials:
        faulty = with_faults(plain, f"{trial.number}=kill", trial.rank)
        run = kit.run_again(kit.new_run(faulty))
        (killed_at,) = logged_calls(run, trial.rank)
        assert str(killed_at) == str(trial)  # it died where the uninterrupted run was saving
        print(f"killed at stage {stage}: {trial}")
        other = log_of(run, 1 - trial.rank)
        assert re.search(trial.lost_message, other.read_text()), f"{trial}: {other}"
        waited = other.stat().st_mtime - log_of(run, trial.rank).stat().st_mtime
        assert waited < TIMEOUT_SECONDS + 2, trial
        # What the next launch will find.
        directory = run.directory / "training" / "run"
        newest = newest_complete(directory)
        assert newest.step == (STEP if trial.is_after_the_commit else STEP - 1), trial
        assert step_that_latest_names(directory) in (newest, StepName(STEP - 1)), trial
        run = kit.run_again(replace(run, cell=plain))
        assert not run.launches[-1].failure, f"{trial}: {run.launches[-1].failure}"
        verdict = compare(whole.trace, run.trace, expect_resume=True)
        assert verdict.exact, f"{trial}: {verdict}"
        assert [resume.step for resume in verdict.resumes] == [newest.step], trial
    killed = f"{num_trials}: {'; '.join(map(str, trials))}"
    record_property(f"SIGKILL of one of two ranks in a save, ZeRO stage {stage}", killed)


def test_a_step_that_latest_names_and_that_is_not_whole_is_seen(kit: Kit) -> None:
    run = kit.run_again(kit.new_run(Cell(train_and_lose, {"stage": 2}, 2)))
    directory = run.directory / "training" / "run"
    name = step_that_latest_names(directory)
    shard = next((directory / str(name)).glob("optimizer/rank-00001*.safetensors"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CorruptCheckpointError, match="optimizer/rank-00001"):
        step_that_latest_names(directory)


def test_the_latest_of_the_stock_engine_names_a_half_written_step(kit: Kit) -> None:
    run = kit.run_again(kit.new_run(Cell(save_natively_and_lose, {"stage": 2}, 2)))
    assert run.failure
    directory = run.directory / "training"
    named = directory / (directory / "latest").read_text()
    assert named.name == "second"
    files = {path.name for path in (directory / "first").iterdir()}  # each is a zip archive
    whole = {name for name in files if zipfile.is_zipfile(named / name)}
    assert files - whole == {"zero_pp_rank_1_mp_rank_00_optim_states.pt"}
