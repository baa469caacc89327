"""Training loops as text: a head that all have, and what the analysis finds for the rest."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest

from resumekit.analysis import LoopCarried, LoopNode, Program, loop_carried
from resumekit.analysis.scopes import own_nodes

HEAD = """
import copy, random, time
import torch
from torch import nn
from torch.utils.data import DataLoader
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader([])
def evaluate(model):
    model.eval()
    return model(1).item()
def update(loss):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def _analysed(body: str) -> LoopCarried:
    """What is found for the innermost loop whose line ends with ``# LOOP``."""
    source = textwrap.dedent(HEAD) + textwrap.dedent(body)
    line = next(n for n, text in enumerate(source.splitlines(), 1) if text.endswith("# LOOP"))
    program = Program.parse(source)
    for function in program.functions.values():
        for node in own_nodes(function.body):
            if isinstance(node, LoopNode) and node.lineno == line:
                return loop_carried(program, function, node)
    raise AssertionError("no loop")


@pytest.fixture
def analysed() -> Callable[[str], LoopCarried]:
    """The analysis of a loop that stands below ``HEAD``."""
    return _analysed


@pytest.fixture
def names() -> Callable[[str], set[str]]:
    """The names that the analysis reports for a loop that stands below ``HEAD``."""
    return lambda body: {each.name for each in _analysed(body).variables}
