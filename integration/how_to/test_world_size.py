"""The page on another number of processes: killed on two, continued on one and on four."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from how_to_pages import Page, Workplace, same

pytestmark = pytest.mark.full

PAGE = Page("world-size")
ON_TWO = "torchrun --standalone --nproc-per-node=2"
KILLED_AT, SAVED_AT, NUM_STEPS = 23, 20, 48  # 16 steps an epoch


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_run_of_two_processes_continues_on_others(tmp_path: Path, num_ranks: int) -> None:
    whole = Workplace(tmp_path / "whole", PAGE)
    whole.run(PAGE.command(ON_TWO))
    killed = Workplace(tmp_path / "killed", PAGE)
    started = killed.start(PAGE.command(ON_TWO), HOW_TO_WAIT_AT=f"{KILLED_AT}")
    killed.wait_for_ranks(2, started)
    started.kill_tree()
    killed.run(PAGE.command(ON_TWO.replace("=2", f"={num_ranks}")))

    (expected,) = whole.launches()
    first, resumed = killed.launches()
    assert (len(expected), len(first), len(resumed)) == (NUM_STEPS, KILLED_AT, NUM_STEPS - SAVED_AT)
    assert same(resumed[0]["before"], expected[SAVED_AT - 1]["weights"])
    for after, before in zip(resumed, expected[SAVED_AT:], strict=True):
        for one, other in zip(after["weights"], before["weights"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)

    def loss(place: Workplace, ranks: int, launch: int, step: int) -> torch.Tensor:
        """Of a global batch: the mean over its ranks."""
        return torch.stack([place.launches(r)[launch][step]["loss"] for r in range(ranks)]).mean()

    for step in range(SAVED_AT, NUM_STEPS):
        found = loss(killed, num_ranks, -1, step - SAVED_AT)
        torch.testing.assert_close(found, loss(whole, 2, 0, step), rtol=1e-5, atol=1e-6)
        # Another batch would be seen.
        assert abs(found - loss(whole, 2, 0, step - 1)) > 1e-5


def test_without_the_option_the_error_names_it(tmp_path: Path) -> None:
    place = Workplace(tmp_path / "run", PAGE)
    script = place.directory / "train.py"
    script.write_text(script.read_text().replace(", allow_changes=changes", ""))
    started = place.start(PAGE.command(ON_TWO), HOW_TO_WAIT_AT=f"{KILLED_AT}")
    place.wait_for_ranks(2, started)
    started.kill_tree()
    again = place.start(PAGE.command(ON_TWO.replace("=2", "=1")))
    assert again.status() != 0
    assert "allow_changes" in again.log.read_text()
