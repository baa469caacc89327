"""When the random state of a run is restored, and which generators keep what they were drawn to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resumekit.run.randomness import RandomState


@pytest.mark.parametrize("is_redrawn", [True, False])
def test_a_named_generator_that_redrew_its_order_stays_where_that_brought_it(
    is_redrawn: bool,
) -> None:
    """The user may have named the generator of a loader, whose workers now fetch less ahead."""
    generator = torch.Generator().manual_seed(1)
    loaders: Any = SimpleNamespace(
        sources={},
        restore_generators=lambda: None,
        drawn_again=lambda: [generator] if is_redrawn else [],
    )
    state = RandomState({"loader": generator}, loaders)
    state.load_state_dict(state.state_dict())
    saved = generator.get_state()
    torch.rand(3, generator=generator)
    redrawn = generator.get_state()
    assert torch.equal(state.state_dict()["generators"]["loader"], saved), "not restored yet"
    state.restore()
    assert torch.equal(generator.get_state(), redrawn if is_redrawn else saved)
