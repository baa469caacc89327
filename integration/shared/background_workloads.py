"""Any training function, with something that happens while a save is written in the background.

The functions here get the training function as a target, so that one of them serves all adapters.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from overwriting import overwrite_everything

from resumekit.run import save as saving
from resumekit.run.run import RunState
from resumekit.run.saving.background import drain
from resumekit.serialization.digests import leaf_digests
from resumekit.serialization.writing import Payload
from resumekit.state import StateComponent
from resumekit.storage import store
from resumekit.storage.commit import Staging
from resumekit.storage.files import FileEntry
from resumekit.storage.io.file_system import LocalFileSystem
from resumekit.testing.task import load_function

CHANGED = "changed-{rank}.json"  # the values that were overwritten, by component
_SLOW_SECONDS = 0.02


def in_background() -> bool:
    """Whether this thread is the one that writes saves."""
    return threading.current_thread() is not threading.main_thread()


# ---------------------------------------------------------------- overwritten


def save_once(
    directory: str,
    *,
    function: str,
    options: dict[str, Any],
    step: int,
    mode: str,
) -> None:
    """Trains up to the save of one step, and ends the process when that is durable.

    Args:
        directory: the run directory.
        function: the target of the training function.
        options: of it, but for ``async_save``.
        step: at which the save is made.
        mode: ``"synchronous"``; ``"background"``: everything that the process holds is overwritten
            as soon as the save has returned, and nothing is written before that; ``"not copied"``:
            the same without the copy of tensors, and with plain values of states that are not
            sharded encoded as late as they are written.
    """
    may_write = threading.Event()

    class Waiting(LocalFileSystem):
        """Writes nothing in the background before it may."""

        def create(self, path: Path) -> int:
            if in_background():
                may_write.wait(60)
            return super().create(path)

    store.LocalFileSystem = Waiting  # type: ignore[misc]

    class WithStates(Payload):
        """Keeps the states that it was made of; without copies it takes them when it is written."""

        made_of: Any = None
        frozen_names: Any = ()

        @classmethod
        def of_states(cls, *arguments: Any, **named: Any) -> WithStates:
            found = super().of_states(*arguments, **named)
            assert isinstance(found, WithStates)
            found.made_of, found.frozen_names = arguments, named["frozen"]
            made.append(found)
            return found

        def write(self, staging: Staging) -> list[FileEntry]:
            if mode != "not copied" or self.made_of is None:
                return super().write(staging)
            may_write.wait(60)
            return Payload.of_states(*self.made_of, frozen=self.frozen_names).write(staging)

    made: list[WithStates] = []
    saving.Payload = WithStates  # type: ignore[misc]
    if mode == "not copied":
        Payload.copy_into = lambda self, memory, **_: None  # type: ignore[method-assign]

    # No function of this script may call ``save``: a save reads the functions that are running.
    def end_after_save(run: RunState, event: str, **_: Any) -> None:
        if event != "checkpoint" or run.counters.step != step:
            made.clear()
            return
        try:
            if mode != "synchronous":
                assert run.in_flight.step == step, "the save was synchronous"
                changed = overwritten(run.components, *(each.made_of for each in made))
                rank = os.environ.get("RANK", "0")
                Path(directory, CHANGED.format(rank=rank)).write_text(json.dumps(changed))
                may_write.set()
                drain()
            os._exit(0)
        finally:  # after an error there is nothing left that could be saved
            traceback.print_exc()
            os._exit(1)

    RunState.trace_state = end_after_save  # type: ignore[assignment, method-assign]
    load_function(function)(directory, **options, async_save=mode != "synchronous")
    raise AssertionError(f"no save was made at step {step}")


def overwritten(components: Sequence[StateComponent], *others: Any) -> dict[str, list[str]]:
    """Overwrites everything; the names of the values of each component that changed.

    Args:
        components: of the run.
        *others: more objects to overwrite.
    """
    keys = [each.key for each in components]
    before = [_digests_of(each) for each in components]
    overwrite_everything(components, others)
    after = [_digests_of(each) for each in components]
    return {
        key: [name for name, digest in values.items() if now.get(name) != digest]
        for key, values, now in zip(keys, before, after, strict=True)
        if values
    }


def _digests_of(component: StateComponent) -> dict[str, str]:
    try:
        return dict(leaf_digests(component.stateful.state_dict()))
    except Exception as error:  # noqa: BLE001 - of objects that make no sense any more
        return {"": repr(error)}


# ---------------------------------------------------------------- interrupted


def train_until_interrupted(
    directory: str,
    *,
    function: str,
    options: dict[str, Any],
    after_seconds: float,
    rank: int,
    name: str,
) -> None:
    """Trains; one rank gets a signal while a later save than the first is written.

    Args:
        directory: the run directory.
        function: the target of the training function.
        options: of it.
        after_seconds: from the beginning of that save to the signal.
        rank: that gets it.
        name: of the signal; SIGKILL is for the workers of that rank too.
    """
    begun = threading.Event()

    class Slow(LocalFileSystem):
        """Takes long for the files of saves in the background; the second of these begins it."""

        def create(self, path: Path) -> int:
            if in_background():
                if committed(Path(directory)):
                    begun.set()
                time.sleep(_SLOW_SECONDS)
            return super().create(path)

    store.LocalFileSystem = Slow  # type: ignore[misc]
    if int(os.environ.get("RANK", "0")) == rank:
        arguments = (begun, after_seconds, signal.Signals[name])
        threading.Thread(target=_interrupt, args=arguments, daemon=True).start()
    load_function(function)(directory, **options)


def committed(where: Path) -> list[Path]:
    """The checkpoints of all run directories below a directory."""
    found = where.glob("**/step-*/manifest.json")
    return [path.parent for path in found if path.parents[1].name != ".staging"]


def _interrupt(begun: threading.Event, after_seconds: float, number: signal.Signals) -> None:
    begun.wait()
    time.sleep(after_seconds)
    if number is signal.SIGKILL:
        os.killpg(os.getpgrp(), number)
    os.kill(os.getpid(), number)
