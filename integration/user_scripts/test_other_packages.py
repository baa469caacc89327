"""Optimizers and loaders of other packages: killed in mid-epoch and resumed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from preloads import TORCH
from script_judge import Script, ScriptJudge

PRELOAD = TORCH
PACKAGES = {
    "galore": "galore_torch",
    "apollo": "apollo_torch",
    "webdataset": "webdataset",
    "litdata": "litdata",
    "grain": "grain",
}
WITHOUT = dict.fromkeys(PACKAGES, "data") | {"galore": "optimizer", "apollo": "optimizer"}
KINDS = pytest.mark.parametrize("kind", PACKAGES)


def script(kind: str, workers: int = 0) -> Script:
    """Killed in both epochs; each resume repeats a step or two."""
    if not find_spec(PACKAGES[kind]):
        pytest.skip(f"{PACKAGES[kind]} is not installed")
    words = ("--kind", kind, "--workers", str(workers))
    return Script("other_packages.py", words, kills=(5, 8, 14))


@pytest.mark.full
@KINDS
def test_a_killed_run_is_exact(judge: ScriptJudge, kind: str) -> None:
    judge.assert_exact(script(kind))


@pytest.mark.full
@KINDS
def test_without_their_state_it_differs(judge: ScriptJudge, kind: str) -> None:
    judge.assert_differs(script(kind), without=WITHOUT[kind])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["webdataset", "litdata", "grain"])
def test_with_workers_it_is_exact_or_the_start_says_why_not(judge: ScriptJudge, kind: str) -> None:
    case = script(kind, workers=2)
    lines = judge.run_uninterrupted(case).require_success().messages
    if any("unknown" in line for line in lines):
        judge.assert_strict_refuses(case, "data")
    else:
        judge.assert_exact(case)
