"""Several DeepSpeed engines in one run: killed by SIGKILL, it ends with the same bits.

Losses and weights are compared as the script itself wrote them.
"""

from __future__ import annotations

from typing import Any

import pytest
from preloads import DEEPSPEED

pytest.importorskip("deepspeed")

from deepspeed_gan_workloads import train

from resumekit.errors import CommandFailedError
from resumekit.testing import Cell, KillPoint, Kit
from resumekit.testing.kit import Run

PRELOAD = DEEPSPEED

CASES: dict[str, tuple[int, dict[str, Any]]] = {  # the ranks, and the options
    **{f"stage {n} on {ranks} ranks": (ranks, {"stage": n}) for n in range(4) for ranks in (1, 2)},
    "the generator every third batch": (1, {"n_critic": 3}),
    "the generator every third batch, stage 3": (2, {"n_critic": 3, "stage": 3, "mark": True}),
    "accumulation in one engine": (1, {"accumulate": [1, 2], "stage": 2}),
    "accumulation in both engines": (
        2,
        {"accumulate": [3, 2], "save_every": 1, "epochs": 4},
    ),
    "as upstream without ZeRO": (1, {"stage": 0, "freeze": False}),
    "as upstream, stage 1": (2, {"stage": 1, "freeze": False, "mark": True}),
}


@pytest.mark.quick("stage 3 on 2 ranks", "as upstream, stage 1")
@pytest.mark.parametrize("case", CASES)
def test_two_engines_continue_exactly(kit: Kit, case: str) -> None:
    world_size, options = CASES[case]
    whole, killed = run_both(kit, options, world_size)
    for rank in range(world_size):
        assert difference(whole, killed, rank) == ""


@pytest.mark.quick("strict")
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_gradients_that_another_engine_leaves_in_zero_are_reported(kit: Kit, strict: bool) -> None:
    # Through engine.forward() the next backward pass of the discriminator adds to them.
    options = {"stage": 3, "freeze": False, "through_engine": True, "strict": strict}
    if strict:
        with pytest.raises(CommandFailedError, match="model/D/gradients: lost"):
            kit.run_uninterrupted(Cell(train, options, 1))
        return
    whole, killed = run_both(kit, options, 1)
    assert difference(whole, killed, 0)
    log = (whole.directory / "launch-00000-rank-00000.log").read_text()
    assert log.count("model/D/gradients: lost") == 1


@pytest.mark.quick("stage 0-G")
@pytest.mark.parametrize("given", ["D", "G"])
@pytest.mark.parametrize("stage", [0, 3], ids="stage {}".format)
def test_an_engine_that_was_not_given_is_caught(kit: Kit, stage: int, given: str) -> None:
    options = {"stage": stage, "given": given, "strict": False}
    whole, killed = run_both(kit, options, 1)
    assert difference(whole, killed, 0)


def run_both(kit: Kit, options: dict[str, Any], world_size: int) -> tuple[Run, Run]:
    """A run that nobody killed, and one that was killed twice between two saves."""
    num_batches = 12 * options.get("epochs", 2) // world_size
    num_steps = num_batches // least_common_window(options)
    kills = tuple(KillPoint.step(step) for step in sorted({num_steps // 3 + 1, num_steps - 1}))
    cell = Cell(train, options, world_size, kills)
    killed = kit.run_killed(cell)
    assert not killed.failure, killed.failure
    assert not killed.missed_kills
    return kit.run_uninterrupted(cell), killed


def least_common_window(options: dict[str, Any]) -> int:
    """The batches of a step."""
    (d, g), n_critic = options.get("accumulate", (1, 1)), options.get("n_critic", 1)
    return next(n for n in range(1, 99) if n % d == 0 and (g == 1 or n % (g * n_critic) == 0))


def difference(whole: Run, killed: Run, rank: int) -> str:
    """What a rank wrote otherwise; empty if nothing."""
    (expected,) = losses_of(whole, rank)
    first, *relaunches = losses_of(killed, rank)
    if first != expected[: len(first)]:
        return "the launch before the first kill is another training"
    for number, launch in enumerate(relaunches):
        starts = range(1, len(expected) - len(launch) + 1)
        if not any(launch == expected[i : i + len(launch)] for i in starts):
            return f"the losses of relaunch {number}"
    if relaunches[-1][-1] != expected[-1]:
        return "the last loss"
    name = f"weights-rank-{rank}.txt"
    texts = [(run.directory / name).read_text() for run in (whole, killed)]
    return "" if texts[0] == texts[1] else "the weights at the end"


def losses_of(run: Run, rank: int) -> list[list[str]]:
    """What each launch wrote, a line for each batch."""
    paths = sorted(run.directory.glob(f"losses-*-rank-{rank}.txt"))
    return [path.read_text().splitlines() for path in paths]
