"""The recorder under ZeRO on two ranks: each rank has partitions of what is trained."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from resumekit.prove import Outcome, Trial, prove
from resumekit.prove.causes import Cause, find_causes
from resumekit.record.moments import of_trace, read_trace

pytest.importorskip("deepspeed")

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "train_deepspeed.py"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The script without averaged weights: in stage 3 no rank has whole ones."""
    text = SCRIPT.read_text().replace("(0, 1, 2)", "(0, 1, 2, 3)").replace("ema=ema, ", "")
    begin, end = text.index("    ema = torch"), text.index("    checkpointer =")
    text = text[:begin] + text[end:].replace("ema.update_parameters(engine.module)", "pass")
    copy = tmp_path / SCRIPT.name
    copy.write_text(text)
    return copy


def judged(script: Path, stage: int, *, inject: str | None = None, keep: Path) -> Trial:
    command = [sys.executable, str(script), "--directory", "{dir}/run", "--epochs", "1"]
    command += ["--stage", str(stage)]
    result = prove(command, at=("step:25",), world=2, inject=inject, keep=keep, timeout_seconds=240)
    return result.trials[0]


@pytest.mark.full
@pytest.mark.parametrize("stage", [2])
def test_an_exact_resume_is_exact_and_a_lost_optimizer_is_named_on_each_rank(
    script: Path, stage: int, tmp_path: Path
) -> None:
    exact = judged(script, stage, keep=tmp_path / "exact")
    assert exact.outcome is Outcome.EXACT, str(exact.verdict)
    assert exact.recorded is not None
    assert (exact.recorded.exact, exact.recorded.num_ranks) == (True, 2)
    kept = tmp_path / "lost"
    lost = judged(script, stage, inject="optimizer", keep=kept)
    assert lost.outcome is Outcome.CAUGHT, str(lost.verdict)
    runs = [read_trace(kept / name / "records") for name in ("reference", "without-optimizer")]
    for rank in (0, 1):
        (reference, found) = (of_trace(run[rank]) for run in runs)
        causes = {each.cause for each in find_causes(reference, found)}
        assert Cause.OPTIMIZER_COLD in causes, (rank, causes)
        assert causes <= {Cause.OPTIMIZER_COLD, Cause.LR_RESTARTED, Cause.CONSEQUENCE}, causes
