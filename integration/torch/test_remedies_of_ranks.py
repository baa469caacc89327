"""The remedies for ranks that do not agree, and for another number of them, followed."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from followed_remedies import Remedy
from preloads import TORCH
from remedy_workloads import train

from resumekit.testing import Cell, Kit

PRELOAD = TORCH


def launch(kit: Kit, where: Path, *, world_size: int = 2, **arguments: Any) -> str:
    """The log of rank 0; empty where the launch ends as it should."""
    cell = Cell(train, {"where": str(where), **arguments}, world_size=world_size)
    run = kit.run_again(kit.new_run(cell))
    logs = [path.read_text() for path in sorted(run.directory.glob("launch-*.log"))]
    return "\n".join(logs) if run.failure else ""


@pytest.mark.parametrize(
    "about",
    [
        pytest.param(about, marks=pytest.mark.remedy(text), id=about)
        for about, text in (
            ("option", "Give every rank the same arguments"),
            ("directory", "Choose a run directory that all ranks see"),
            ("step", "Call step() once for each optimizer step, on every rank"),
            ("replicas", "Synchronise it, or {}"),
            ("group", "Give every rank the group of the ranks that take different data"),
            (
                "interface",
                "Set GLOO_SOCKET_IFNAME to the network interface between the nodes, "
                "as NCCL_SOCKET_IFNAME",
            ),
            ("no group", "Call init_process_group before the Checkpointer is made"),
        )
    ],
)
def test_ranks_that_do_as_the_remedy_says_train(
    kit: Kit, tmp_path: Path, remedy: Remedy, about: str
) -> None:
    assert remedy.in_text(launch(kit, tmp_path / "a", about=about))
    assert not launch(kit, tmp_path / "b")


@pytest.mark.remedy("Launch it as it was, with {} ranks, or pass allow_changes={'world_size'}")
def test_another_number_of_ranks_is_allowed_or_undone(
    kit: Kit, tmp_path: Path, remedy: Remedy
) -> None:
    for name in "ab":
        assert not launch(kit, tmp_path / name, leave_after=3)
    text = remedy.in_text(launch(kit, tmp_path / "a", world_size=1))
    assert not launch(kit, tmp_path / "a", world_size=int(re.findall(r"with (\d+)", text)[0]))
    name, value = re.findall(r"(\w+)=(\{.*?\})", text)[0]
    options = {name: sorted(ast.literal_eval(value))}
    assert not launch(kit, tmp_path / "b", world_size=1, options=options)
