"""A rank that dies or stops at a random instant of a save: nothing is lost, and nobody hangs.

A rank that stopped wakes up again, when the others have gone. ``--full-matrix`` makes 20 trials of
each, and in the first of them lets it sleep for 60 seconds.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from agreement_workloads import save_and_lose
from preloads import TORCH

from resumekit.prove import compare
from resumekit.testing import Cell, Kit

PRELOAD = TORCH
PEERS_SECONDS = 90.0

NUM_TRIALS, ALL_TRIALS = 2, 20
STOPPED_SECONDS, LONG_STOP_SECONDS = 6, 60  # the others wait for 3


@pytest.mark.quick("SIGKILL-*")
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_the_others_end_with_an_error_and_the_run_continues_exactly(
    request: pytest.FixtureRequest, kit: Kit, name: str, async_save: bool
) -> None:
    chance = random.Random(name)
    plain = Cell(save_and_lose, {"async_save": async_save}, world_size=2)
    whole = kit.run_uninterrupted(plain)
    assert not whole.failure, whole.failure
    all_of_it = request.config.getoption("--full-matrix")
    for trial in range(ALL_TRIALS if all_of_it else NUM_TRIALS):
        rank = chance.randrange(2)
        stopped_seconds = LONG_STOP_SECONDS if all_of_it and trial == 0 else STOPPED_SECONDS
        options = {
            "name": name,
            "after_seconds": chance.uniform(0.0, 0.3),
            "stopped_seconds": stopped_seconds,
            "rank": rank,
            "async_save": async_save,
        }
        run = kit.run_again(kit.new_run(replace(plain, options=options)))
        what = f"trial {trial}: {options}"
        log = run.directory / f"launch-00000-rank-{1 - rank:05d}.log"
        assert "RankLostError" in log.read_text(), f"{what}: {log.read_text()[-1000:]}"
        if name == "SIGSTOP":  # it woke up alone, and ended in the same way
            woken = run.directory / f"launch-00000-rank-{rank:05d}.log"
            assert "RankLostError" in woken.read_text(), f"{what}: {woken.read_text()[-1000:]}"
            assert run.launches[0].seconds > stopped_seconds, what
        # The failure was meant; what counts is the launch that follows it.
        run = kit.run_again(replace(run, cell=plain))
        assert not run.launches[-1].failure, f"{what}: {run.launches[-1].failure}"
        verdict = compare(whole.trace, run.trace, expect_resume=True)
        assert verdict.exact, f"{what}: {verdict}"
