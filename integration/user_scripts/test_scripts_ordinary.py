"""Ordinary scripts start under ``strict=True`` with nothing added and without a warning."""

from __future__ import annotations

import pytest
from preloads import ALL
from script_judge import Script, ScriptJudge

PRELOAD = ALL


def loop(name: str, kill: int = 7, num_ranks: int = 1) -> Script:
    return Script(f"ordinary_loops.py:{name}", kills=(kill,), num_ranks=num_ranks)


def framework(name: str, kill: int = 7, num_ranks: int = 1) -> Script:
    return Script(f"ordinary_frameworks.py:{name}", kills=(kill,), num_ranks=num_ranks)


def trainer(name: str, kill: int = 7) -> Script:
    return Script(f"ordinary_trainers.py:{name}", kills=(kill,))


SCRIPTS = (
    loop("running_loss"),
    loop("progress_bar"),
    loop("meters_and_timers"),
    loop("scalar_writer"),
    loop("early_break"),
    loop("evaluation_and_best"),
    loop("averaged_weights"),
    loop("accumulation"),
    loop("metrics_in_lists"),
    loop("ddp_meters", num_ranks=2),
    framework("accelerate_progress"),
    framework("accelerate_accumulation"),
    framework("deepspeed_running_loss"),
    framework("deepspeed_running_loss", num_ranks=2),
    trainer("trainer_evaluating"),
    trainer("trainer_early_stopping"),
    trainer("trainer_accumulating"),
    trainer("trainer_with_metrics"),
    trainer("trainer_language_model"),
    trainer("lightning_logging"),
    trainer("lightning_metrics"),
    trainer("lightning_callbacks"),
)


# strict=True refuses whatever is not exact, so a run that finishes has nothing to report.
@pytest.mark.quick(
    "ordinary_loops.py:evaluation*",
    "ordinary_loops.py:ddp_meters-2",
    "ordinary_frameworks.py:accelerate_accumulation*",
    "ordinary_trainers.py:trainer_evaluating*",
    "ordinary_trainers.py:lightning_metrics*",
)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda each: f"{each.name}-{each.num_ranks}")
def test_it_starts_without_a_warning_and_is_resumed_exactly(
    judge: ScriptJudge, script: Script
) -> None:
    judge.assert_exact(script)
    assert not judge.run_uninterrupted(script).warnings
