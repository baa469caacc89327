"""Any training function, with a copy of each step in the memory of the node."""

from __future__ import annotations

from typing import Any

from resumekit import Place
from resumekit.run.options import OptionKeywords, Options
from resumekit.testing.task import load_function


def train_with_memory(directory: str, *, function: str, options: dict[str, Any]) -> None:
    """Trains.

    Args:
        directory: the run directory.
        function: the target of the training function, whose adapter gets one option more.
        options: of it.
    """
    make = Options.from_keywords

    def with_memory(keywords: OptionKeywords) -> Options:
        return make({**keywords, "places": [Place("memory", save_every=1)]})

    Options.from_keywords = with_memory  # type: ignore[method-assign]
    load_function(function)(directory, **options)
