"""``prove --with-resumekit`` on scripts that know nothing of it.

The verdict is checked by the files that the scripts write themselves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from official_scripts import (
    ACCELERATE,
    LIGHTNING,
    TORCHRUN,
    TRAINER,
    results_of,
)
from stock_cases import CASES, OFFICIAL, Case

from resumekit.cli import main
from resumekit.errors import ProveError
from resumekit.prove import Outcome, ProveResult, Trial, prove

# A script with a loop of its own has nothing to attach a callback to.
ATTACHABLE = [case for case in CASES if case.framework in ("Trainer", "Lightning")]

PYTHON = (sys.executable,)
AT, SAVE_EVERY = ("step:13",), 5  # steps 11 to 13 are repeated


def command_of(script: str, *options: str, launcher: Sequence[str] = PYTHON) -> list[str]:
    return [*launcher, str(OFFICIAL / script), "--output_dir", "{dir}/out", *options]


def proved(kept: Path, command: Sequence[str], **arguments: Any) -> ProveResult:
    defaults: dict[str, Any] = {"with_resumekit": True, "timeout_seconds": 300}
    if arguments.get("with_resumekit", True):
        defaults["save_every"] = SAVE_EVERY
    if "kills" not in arguments:
        defaults["at"] = AT
    return prove(command, **{**defaults, "keep": kept, **arguments})


def only_trial(result: ProveResult) -> Trial:
    (trial,) = result.trials
    return trial


def files_of(kept: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Losses and weights of the killed run and of the uninterrupted one."""
    killed, reference = (results_of(kept / run / "files/out") for run in ("killed", "reference"))
    return killed, reference


def test_an_unchanged_script_is_exact_with_resumekit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, answer, page = tmp_path / "kept", tmp_path / "a.json", tmp_path / "a.html"
    options = ["--with-resumekit", "--save-every", str(SAVE_EVERY), "--at", *AT]
    options += ["--keep", str(kept), "--json", str(answer), "--html", str(page)]
    with pytest.raises(SystemExit, match="0"):
        main(["prove", *options, "--", *command_of(TRAINER)])
    output = capsys.readouterr().out
    verdict = "EXACT with resumekit attached: 20 steps, 1 resume, every bit equal"
    assert f"{verdict} to the uninterrupted run without it" in output
    killed, reference = files_of(kept)
    assert len(reference["losses"]) == 20
    assert killed == reference
    assert not list(kept.glob("reference/**/step-*"))
    result = json.loads(answer.read_text())
    assert (result["with_resumekit"], result["save_every"]) == (True, SAVE_EVERY)
    assert [each["step"] for each in result["trials"][0]["verdict"]["resumes"]] == [10]
    assert "EXACT with resumekit attached" in page.read_text()


def test_a_run_that_was_killed_after_its_last_step_is_no_proof(tmp_path: Path) -> None:
    with pytest.raises(ProveError, match="no resume was tried: each kill came after the last"):
        proved(tmp_path, command_of(TRAINER), at=("checkpoint:20",))


@pytest.mark.full
@pytest.mark.parametrize("script", [TRAINER, LIGHTNING])
def test_the_same_kill_is_not_exact_with_the_resume_of_the_script(
    tmp_path: Path, script: str
) -> None:
    result = proved(tmp_path, command_of(script), with_resumekit=False)
    assert only_trial(result).outcome is Outcome.DIVERGED, str(only_trial(result).verdict)
    killed, reference = files_of(tmp_path)
    assert killed != reference


@pytest.mark.full
@pytest.mark.parametrize("case", ATTACHABLE, ids=str)
def test_scripts_of_the_table_are_exact_with_resumekit(tmp_path: Path, case: Case) -> None:
    result = proved(tmp_path, case.command(), at=(f"step:{case.kill}",), world=case.world)
    trial = only_trial(result)
    assert trial.outcome is Outcome.EXACT, str(trial.verdict)
    assert trial.verdict is not None
    assert [each.step for each in trial.verdict.resumes] == [case.resumed]
    assert (result.num_steps, trial.verdict.num_ranks) == (case.num_steps, case.num_ranks)


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "num_ranks"), [(TORCHRUN, 2), (ACCELERATE, 1)], ids=["torchrun", "accelerate"]
)
def test_launchers_are_exact_with_resumekit(
    tmp_path: Path, launcher: Sequence[str], num_ranks: int
) -> None:
    trial = only_trial(proved(tmp_path, command_of(TRAINER, launcher=launcher)))
    assert trial.outcome is Outcome.EXACT, str(trial.verdict)
    assert trial.verdict is not None
    assert trial.verdict.num_ranks == num_ranks
    killed, reference = files_of(tmp_path)
    assert killed == reference


@pytest.mark.full
@pytest.mark.parametrize("with_resumekit", [True, False])
def test_ranks_that_lightning_starts_are_exact_only_with_resumekit(
    tmp_path: Path, with_resumekit: bool
) -> None:
    command = command_of(LIGHTNING, "--devices", "2")
    trial = only_trial(proved(tmp_path, command, with_resumekit=with_resumekit))
    assert trial.verdict is not None
    assert trial.verdict.num_ranks == 2
    expected = Outcome.EXACT if with_resumekit else Outcome.DIVERGED
    assert trial.outcome is expected, str(trial.verdict)
    killed, reference = files_of(tmp_path)
    assert (killed == reference) is with_resumekit


# Each loss depends on a number that nothing saves: how many of them this process has computed.
COUNTING = """
import itertools, sys
from pathlib import Path
from torch.nn import functional
sys.path.insert(0, {folder!r})
count, cross_entropy = itertools.count(), functional.cross_entropy
functional.cross_entropy = lambda *given, **named: cross_entropy(*given, **named) + next(count)
exec(compile(Path({script!r}).read_text(), {script!r}, "exec"))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "options", "world"),
    [(TRAINER, (), 2), (LIGHTNING, ("--devices", "2"), 1)],
    ids=["trainer", "lightning"],
)
def test_a_loss_that_differs_is_found_on_two_ranks_with_resumekit(
    tmp_path: Path, script: str, options: Sequence[str], world: int
) -> None:
    """Weights do not depend on what is added to a loss."""
    counting = tmp_path / "train.py"
    counting.write_text(COUNTING.format(folder=str(OFFICIAL), script=str(OFFICIAL / script)))
    command = [sys.executable, str(counting), "--output_dir", "{dir}/out", *options]
    trial = only_trial(proved(tmp_path / "kept", command, world=world))
    assert trial.outcome is Outcome.DIVERGED, str(trial.verdict)
    assert trial.verdict is not None
    assert trial.verdict.num_ranks == 2
    assert [(each.component, each.step) for each in trial.verdict.firsts] == [("loss", 11)]


@pytest.mark.full
@pytest.mark.parametrize("script", [TRAINER, LIGHTNING])
def test_random_kills_fall_after_the_first_save_of_the_default_cadence(
    tmp_path: Path, script: str
) -> None:
    result = proved(tmp_path, command_of(script), kills=3, seed=1, save_every=None)
    trial = only_trial(result)
    assert trial.outcome is Outcome.EXACT, str(trial.verdict)
    assert result.save_every == 2
    assert trial.num_kills == 3
    assert all((each.killed_after_step or 20) >= 2 for each in trial.launches)


@pytest.mark.full
def test_a_kill_after_a_checkpoint_of_the_callback(tmp_path: Path) -> None:
    trial = only_trial(proved(tmp_path, command_of(TRAINER), at=("checkpoint:10",)))
    assert trial.outcome is Outcome.EXACT, str(trial.verdict)
    assert [each.at for each in trial.launches] == ["checkpoint:10", None]
    killed, reference = files_of(tmp_path)
    assert killed == reference


@pytest.mark.full
@pytest.mark.parametrize("script", [TRAINER, LIGHTNING])
@pytest.mark.parametrize("component", ["optimizer", "rng"])
def test_a_component_that_the_callback_does_not_restore_is_caught(
    tmp_path: Path, script: str, component: str
) -> None:
    result = proved(tmp_path, command_of(script), inject=component)
    assert only_trial(result).outcome is Outcome.CAUGHT, str(only_trial(result).verdict)
    killed = results_of(tmp_path / f"without-{component}" / "files" / "out")
    assert killed != results_of(tmp_path / "stock" / "files" / "out")
    assert results_of(tmp_path / "reference/files/out") == results_of(tmp_path / "stock/files/out")


@pytest.mark.full
def test_a_callback_in_the_script_is_refused(tmp_path: Path) -> None:
    script = OFFICIAL.parents[1] / "scripts" / "train_transformers.py"
    command = [sys.executable, str(script), "--directory", "{dir}", "--epochs", "1"]
    with pytest.raises(ProveError, match="the script has a Checkpointer or a ResumeCallback"):
        proved(tmp_path, command)


@pytest.mark.full
def test_a_point_before_the_first_save_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProveError, match=r"has no checkpoint yet .* checkpoint:5 or later"):
        proved(tmp_path, command_of(TRAINER), at=("step:4",))


# A script that looks at the callbacks of its Trainer, or that has no seed.
CHANGED = """
import os, runpy, sys
import torch, transformers
train = transformers.Trainer.train
class Looking(transformers.TrainerCallback):
    def on_train_begin(self, args, state, control, model, **kwargs):
        names = [type(each).__name__ for each in self.trainer.callback_handler.callbacks]
        torch.rand({draws})
init = transformers.Trainer.__init__
def looking(self, *arguments, **named):
    init(self, *arguments, **named)
    callback = Looking()
    callback.trainer = self
    self.add_callback(callback)
transformers.Trainer.__init__ = looking
sys.path.insert(0, {folder!r})
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("draws", "outcome", "words"),
    [
        ("int('ResumeCallback' in names)", Outcome.DIVERGED, "attaching changes this script"),
        ("os.getpid() % 1000 + 1", Outcome.NOT_REPRODUCIBLE, "before the first kill"),
    ],
)
def test_a_difference_before_the_first_kill_is_blamed_on_the_callback_or_on_the_script(
    tmp_path: Path, draws: str, outcome: Outcome, words: str
) -> None:
    script = tmp_path / "train.py"
    target = str(OFFICIAL / TRAINER)
    script.write_text(CHANGED.format(draws=draws, folder=str(OFFICIAL), script=target))
    command = [sys.executable, str(script), "--output_dir", "{dir}/out"]
    trial = only_trial(proved(tmp_path / "kept", command))
    assert trial.outcome is outcome, str(trial.verdict)
    assert words in str(trial.verdict)
