"""What each framework's own resume loses, found in scripts without a line of resumekit.

The scripts and what each of them loses are the table of ``benchmarks/stock_cases.py``, which the
README sums up. Other scripts have a twin that resumes through resumekit, and is exact.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from stock_cases import CASES, OFFICIAL, PACKAGES, Case, summary
from stock_resume import ENVIRONMENT, judged, loss_in

from resumekit.prove import Outcome, ProveResult, prove

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "integration" / "scripts"


@pytest.fixture(autouse=True)
def _as_the_benchmark_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.quick("torch_word_language_model-1")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_the_resume_of_a_script_loses_is_found_and_named(case: Case) -> None:
    pytest.importorskip(PACKAGES[case.framework])
    result = judged(case)
    assert loss_in(result) == case.loss
    assert result.num_steps == case.num_steps
    (trial,) = result.trials
    assert [launch.was_killed for launch in trial.launches] == [True, False]
    assert trial.verdict is not None
    assert trial.verdict.num_ranks == case.num_ranks
    assert [resume.step for resume in trial.verdict.resumes] == [case.resumed]


def test_every_official_script_is_judged_and_has_no_line_of_resumekit() -> None:
    scripts = {
        path.name: path.read_text(encoding="utf-8").split('"""', 2)[2]
        for path in OFFICIAL.glob("*.py")
    }
    assert all("resumekit" not in code for code in scripts.values())
    names = {name for name, code in scripts.items() if "__main__" in code}
    assert {case.script for case in CASES} == names
    assert len(names) >= 12


@pytest.mark.parametrize("framework", PACKAGES)
def test_the_readme_sums_up_what_the_scripts_of_a_framework_lose(framework: str) -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith(f"| [{framework}")]
    assert [row[2] for row in rows] == [summary(framework)]


def judged_script(name: str, *, world: int = 1) -> ProveResult:
    command = [sys.executable, str(SCRIPTS / name), "--directory", "{dir}/run"]
    return prove(command, at=("step:45",), world=world, timeout_seconds=240)


TWINS = [(name, f"train_{name}.py", 1) for name in PACKAGES.values()]


@pytest.mark.full
@pytest.mark.parametrize(
    ("framework", "script", "world"),
    [*TWINS, ("torch", "train_ddp.py", 2), ("accelerate", "train_accelerate.py", 2)],
)
def test_the_twin_that_resumes_through_resumekit_is_exact_to_the_recorder_too(
    framework: str, script: str, world: int
) -> None:
    pytest.importorskip(framework)
    (trial,) = judged_script(script, world=world).trials
    assert trial.outcome is Outcome.EXACT, str(trial.verdict)
    assert trial.recorded is not None
    assert (trial.recorded.exact, trial.recorded.num_steps) == (True, 87)
    assert [resume.step for resume in trial.recorded.resumes] == [40]


@pytest.mark.full
@pytest.mark.parametrize("framework", ["torch", "accelerate"])
def test_a_script_s_trace_and_the_recorder_agree(framework: str) -> None:
    (trial,) = judged_script(f"stock_{framework}.py").trials
    assert trial.verdict is not None
    assert trial.recorded is not None
    for verdict in (trial.verdict, trial.recorded):
        assert verdict.divergence is not None
        assert (verdict.divergence.component, verdict.divergence.step) == ("data", 41)
    assert trial.digests.keys() == {"model", "optimizer", "ema"}
