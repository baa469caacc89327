"""The entry points by which Lightning asks each installed package for callbacks.

lightning 2.6 fabric/utilities/registry.py ``_load_external_callbacks`` calls them for each new
Trainer, of any script. They need only the standard library unless ``resumekit run`` started it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# As resumekit/launcher/environment.py, which is not needed to find out that it is not set.
_VARIABLE = "PYTHONRESUMEKIT"


def callbacks() -> list[Any]:
    """What a new Trainer gets: nothing, unless a command is to be attached. Raises nothing."""
    if _VARIABLE not in os.environ:
        return []
    try:
        from resumekit.adapters.lightning.attaching import attaching_callbacks

        return attaching_callbacks()
    except Exception as error:  # noqa: BLE001 - the program must run as without us
        text = f"resumekit: nothing is attached ({type(error).__name__}: {error})"
        print(text, file=sys.stderr)  # noqa: T201 - no logger is configured yet
        return []
