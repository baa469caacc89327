"""The cause that is named for each thing that a resume can lose, from what the recorder saw."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from resumekit.prove.causes import Cause, find_causes
from resumekit.record.moments import Moment, Recording, of_trace, read_trace

SCRIPT = Path(__file__).parent / "scripts" / "recorded_faults.py"

# Of each fault of the script, the component that is blamed and the cause.
CAUSES: dict[str, tuple[str, Cause] | None] = {
    "exact": None,
    "weights": ("parameters", Cause.WEIGHTS_RESTARTED),
    "older weights": ("parameters", Cause.WEIGHTS_OLDER),
    "one weight": ("parameters", Cause.WEIGHTS_PARTLY),
    "buffers": ("buffers", Cause.BUFFERS_LOST),
    "optimizer": ("optimizer", Cause.OPTIMIZER_COLD),
    "one parameter": ("optimizer", Cause.OPTIMIZER_PARTLY),
    "older optimizer": ("optimizer", Cause.OPTIMIZER_OLDER),
    "counter": ("optimizer", Cause.OPTIMIZER_COUNTER),
    "settings": ("optimizer", Cause.OPTIMIZER_SETTINGS),
    "lr restarted": ("lr", Cause.LR_RESTARTED),
    "lr shifted": ("lr", Cause.LR_SHIFTED),
    "lr changed": ("lr", Cause.LR_CHANGED),
    "averaged": ("modules/AveragedModel", Cause.EMA_RESTARTED),
    "target": ("modules/Target", Cause.OTHER_MODEL_LOST),
    "scaler": ("grad_scaler", Cause.SCALER_RESET),
    "rng drawn": ("rng", Cause.RNG_AHEAD),
    "rng seeded": ("rng", Cause.RNG_LOST),
    "data": ("data", Cause.DATA_RESTARTED),
    "epoch": ("data", Cause.EPOCH_RESTARTED),
    "repeated": ("data", Cause.SAMPLES_REPEATED),
    "skipped": ("data", Cause.SAMPLES_SKIPPED),
    "other epoch": ("data", Cause.EPOCH_ORDER),
    "order": ("data", Cause.ORDER_RESHUFFLED),
    "order in a batch": ("data", Cause.BATCH_ORDER),
    "batch size": ("data", Cause.BATCH_SIZE),
    "variable": ("loss", Cause.UNSAVED_VARIABLE),
}

# After the second save, inside an epoch.
STOP = random.Random(3).choice([9, 10, 11, 16, 17, 21])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    subprocess.run([sys.executable, str(SCRIPT), str(directory), str(STOP)], check=True)
    return directory


@pytest.mark.parametrize("fault", CAUSES)
def test_what_a_recorded_resume_has_lost_is_named(fault: str, runs: Path) -> None:
    reference, judged = (of_trace(read_trace(runs / name)[0]) for name in ("reference", fault))
    found = [each for each in find_causes(reference, judged) if each.cause is not Cause.CONSEQUENCE]
    expected = CAUSES[fault]
    assert [(each.component, each.cause) for each in found] == ([expected] if expected else [])


@pytest.mark.parametrize(("loss", "causes"), [("2", []), ("1", [Cause.UNSAVED_VARIABLE])])
def test_the_rest_of_a_step_is_compared_with_its_last_micro_steps(
    loss: str, causes: list[Cause]
) -> None:
    """The launch before has made the first one, and saved inside the accumulation window."""
    first, second = (
        Moment(
            "step",
            step,
            {"data": {"samples": f"{step}a,{step}b"}, "loss": {"": "1"}, "loss 2": {"": "2"}},
            ("loss", "loss 2"),
        )
        for step in (1, 2)
    )
    fields = {"is_rest": True, "by": "weights"}
    parts = {"data": {"samples": "2b"}, "loss": {"": loss}}
    rest = Moment("step", 2, parts, ("loss",), fields=fields)
    judged = Recording({0: (first,), 1: (rest,)})
    found = find_causes(Recording({0: (first, second)}), judged)
    assert [each.cause for each in found] == causes


def test_the_sizes_of_many_inputs_are_shortened() -> None:
    """Reinforcement learning calls its network for many observations before each step."""
    first, few, many = (
        Moment("step", step, {"data": {"samples": str(number), "count": count}}, ())
        for number, (step, count) in enumerate([(1, "4"), (2, "4,64"), (2, ",".join("4" * 500))])
    )
    judged = Recording({0: (first,), 1: (many,)})
    (found,) = find_causes(Recording({0: (first, few)}), judged)
    assert found.cause is Cause.BATCH_SIZE
    assert found.evidence.endswith("… (999 characters) samples instead of 4,64.")
    assert len(found.evidence) < 120
