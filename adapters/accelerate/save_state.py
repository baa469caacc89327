"""An Accelerator's own ``save_state`` and ``load_state``, in the run of a Checkpointer.

``save_state`` writes what it always does. A small file in its folder names the run and the step,
and the Checkpointer saves that step as well, with all that ``save_state`` leaves out.
``load_state`` then resumes from there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from resumekit.adapters.accelerate._private import LOAD_STATE
from resumekit.capture.objects import AttributeState
from resumekit.state import Count, Slot

# In the folder of a save_state, which Accelerate fills.
MARK = "resumekit.json"


class SavedStates:
    """Replaces ``load_state`` of one Accelerator, and is a hook of its ``save_state``.

    Args:
        accelerator: the ``accelerate.Accelerator``; a former Checkpointer is detached from it.
        save: saves the current step, and gives what names it; None outside of a run.
        resume_up_to: resumes from the run's checkpoints, where it has one, and says whether it did.
            Collective. Its argument gives the newest step that may be used for the run's id, or
            None.
    """

    def __init__(
        self,
        accelerator: Any,
        *,
        save: Callable[[], dict[str, Any] | None],
        resume_up_to: Callable[[Callable[[str], int | None]], bool],
    ) -> None:
        former = vars(accelerator).get("load_state")
        if isinstance(former, SavedStates):
            former.detach()
        self._accelerator = accelerator
        self._save = save
        self._resume_up_to = resume_up_to
        self._hook = accelerator.register_save_state_pre_hook(self._mark)
        self._load: Callable[..., None] = LOAD_STATE.of(accelerator)
        LOAD_STATE.write(accelerator, self)

    def detach(self) -> None:
        """Restores the Accelerator's ``load_state``, and no longer marks folders."""
        self._hook.remove()
        if vars(self._accelerator).get("load_state") is self:
            del self._accelerator.load_state

    def _mark(self, models: Any, weights: Any, output_dir: str) -> None:
        """Writes the run's step into the folder of ``save_state``. Called on every rank."""
        mark = self._save()
        if mark is not None and self._accelerator.is_main_process:
            Path(output_dir, MARK).write_text(json.dumps(mark), encoding="utf-8")

    def __call__(self, input_dir: Any = None, *arguments: Any, **keywords: Any) -> None:
        """Resumes from the Checkpointer's run; where it has none yet, loads as Accelerate does."""
        folder = None if input_dir is None else Path(os.path.expanduser(input_dir))
        is_there = folder is None or folder.is_dir()
        if not (is_there and self._resume_up_to(lambda run: marked_step(folder, run))):
            self._load(input_dir, *arguments, **keywords)


def marked_step(folder: Path | None, run_id: str) -> int | None:
    """The step of this run that a folder of ``save_state`` belongs to, or None."""
    try:
        mark = None if folder is None else json.loads((folder / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(mark, dict) or mark.get("run_id") != run_id:
        return None
    step = mark.get("step")
    return step if isinstance(step, int) else None


_SYNC, _WINDOW, _WINDOW_AT_START = "sync_gradients", "window", "window_at_start"
_REGISTERED = "registered"


class _OptionalCounts(TypedDict, total=False):
    sync_gradients: bool
    window: Count
    window_at_start: Count
    registered: list[str]


class _CountsState(_OptionalCounts):
    step: Count


class AcceleratorCounts(AttributeState):
    """The accumulation window; numbers of ``save_state`` folders continue.

    accelerate 1.15 accelerator.py: ``accumulate`` ends its windows where ``step`` says, and
    ``zero_grad()`` at the top of a loop asks whether the last batch ended one. A window of another
    length, as training sets it, is kept unless the script begins with another one. The folder of a
    new process would be named checkpoint_0 again, which is an error, and with ``total_limit`` the
    newest ones would be deleted as the oldest.

    Attributes:
        registered: the components of what was registered, for an export: ``load_state`` finds the
            state of each by its position.
    """

    schema = _CountsState

    def __init__(self, accelerator: Any) -> None:
        super().__init__(accelerator, ["step"], key=f"{Slot.CALLBACKS.value}/accelerator")
        self._accelerator = accelerator
        self._window_at_start: int = accelerator.gradient_accumulation_steps
        self.registered: list[str] = []

    def check_state_dict(self, state: Any) -> None:
        super().check_state_dict({n: each for n, each in state.items() if n != _REGISTERED})

    def state_dict(self) -> dict[str, Any]:
        """The count, and what is not as in a new process."""
        found, accelerator = super().state_dict(), self._accelerator
        if self.registered:
            found[_REGISTERED] = self.registered
        if not accelerator.sync_gradients:
            found[_SYNC] = False
        now, then = accelerator.gradient_accumulation_steps, self._window_at_start
        return found if now == then else {**found, _WINDOW: now, _WINDOW_AT_START: then}

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Sets the accumulation window, and the next folder's number to one that is not taken."""
        self._accelerator.sync_gradients = state.get(_SYNC, True)
        if state.get(_WINDOW_AT_START) == self._window_at_start:
            self._accelerator.gradient_accumulation_steps = state[_WINDOW]
        project = self._accelerator.project_configuration
        if project.automatic_checkpoint_naming:
            project.iteration = max(project.iteration, _next_number(Path(project.project_dir)))
        return super().load_state_dict(state)


def _next_number(project_dir: Path) -> int:
    folders = (project_dir / "checkpoints").glob("checkpoint_*")
    numbers = [path.name.removeprefix("checkpoint_") for path in folders]
    return max((int(each) + 1 for each in numbers if each.isdecimal()), default=0)
