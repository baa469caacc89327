"""The example script of the Trainer: a stock script, and one line more."""

from __future__ import annotations

import importlib.util
import sys
from difflib import ndiff
from pathlib import Path

import pytest

from resumekit.prove import Outcome, prove

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "integration" / "scripts"

ADDED = {
    "from resumekit.adapters.transformers import ResumeCallback",
    "    trainer.add_callback(ResumeCallback(trainer, arguments.directory))",
}
# What the stock script needs to resume by itself, and to be judged.
NOT_NEEDED = """
from pathlib import Path
from transformers.trainer_utils import get_last_checkpoint

import resumekit

class Judged(TrainerCallback):
    def __init__(self, ema: AveragedModel) -> None:
        self.ema = ema

    def on_step_end(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **kwargs: Any
    ) -> None:
        resumekit.trace(state.global_step, model=model, optimizer=optimizer, ema=self.ema)

    latest = None
    if Path(arguments.directory).is_dir():
        latest = get_last_checkpoint(arguments.directory)
"""
REPLACED = {
    "    trainer.train(resume_from_checkpoint=latest)": "    trainer.train()",
    "        callbacks=[averaging, Judged(averaging.ema)],": "        callbacks=[averaging],",
}


def code_of(name: str) -> list[str]:
    """The lines of a script, without its docstring and empty ones."""
    text = (SCRIPTS / name).read_text(encoding="utf-8").split('"""', 2)[2]
    return [line for line in text.splitlines() if line]


def test_it_is_the_stock_script_and_the_line_of_the_callback() -> None:
    lines = list(ndiff(code_of("stock_transformers.py"), code_of("train_transformers.py")))
    added = {line[2:] for line in lines if line.startswith("+ ")}
    removed = {line[2:] for line in lines if line.startswith("- ")}
    assert added == ADDED | set(REPLACED.values())
    assert removed == {line for line in NOT_NEEDED.splitlines() if line} | set(REPLACED)


@pytest.mark.full
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="pip install transformers")
def test_it_continues_exactly_with_the_trainers_own_saving_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script = str(SCRIPTS / "train_transformers.py")
    command = [
        sys.executable,
        script,
        "--directory",
        "{dir}/run",
        "--save-every",
        "10",
        "--epochs",
        "2",
    ]
    (trial,) = prove(command, at=("step:35",), timeout_seconds=120).trials
    assert trial.outcome is Outcome.EXACT, trial.verdict
    assert trial.verdict is not None
    assert [resume.step for resume in trial.verdict.resumes] == [30]
