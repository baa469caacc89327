"""Accelerate: finds what was prepared and registered; the loop is the one of plain PyTorch.

Example:
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    checkpointer = Checkpointer(accelerator, "runs/a", save_every=500)
    for batch in checkpointer.batches(loader, epochs=3):
        with accelerator.accumulate(model):
            loss = train_on(batch)
        checkpointer.step(loss=loss)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from resumekit import Checkpointer as _Checkpointer
from resumekit.adapters.accelerate._private import LOADERS, accelerator_faults
from resumekit.adapters.accelerate.loaders import origin_of
from resumekit.adapters.accelerate.prepared import prepared_components
from resumekit.adapters.accelerate.save_state import SavedStates
from resumekit.data.position import DEFAULT_NAME, PASS_WHOLE_LOADER, SkippedLoader
from resumekit.errors import ConfigurationError
from resumekit.frameworks.accelerate import ENGINE, MODELS
from resumekit.log import warn
from resumekit.requirements import check_tested, require
from resumekit.run.loop import Loop
from resumekit.run.options import Options, checked_extras, require_order
from resumekit.run.run import RunState
from resumekit.run.steps_taken import StepsTaken

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from resumekit.run.options import OptionKeywords

__all__ = ["Checkpointer"]

require("accelerate")


class Checkpointer(_Checkpointer):
    """A Checkpointer for what an Accelerator has prepared; made after ``prepare``.

    It saves the prepared models, optimizers and schedulers, the gradient scaler, and what was given
    to ``register_for_checkpointing``. One object of a slot is stored under the slot's name, several
    under class and ordinal, e.g. ``model/Linear-0``. ``step()`` is optional: without it, a step is
    counted when every optimizer has taken one.

    Args:
        accelerator: the ``accelerate.Accelerator``.
        directory: the run directory.
        lr_scheduler: schedulers that were neither prepared nor registered: one, or a dict of them.
        ema: an ``AveragedModel``, any object with ``state_dict``, or a dict of them.
        extras: a live dict of your own values.
        generators: private random generators by name.
        **options: see ``resumekit.run.options.Options``.

    Raises:
        ConfigurationError: nothing was prepared, or in a way that cannot be resumed yet.
        InexactError: ``strict=True``, and this version of Accelerate lacks what the adapter needs.
    """

    def __init__(
        self,
        accelerator: Any,
        directory: str | Path,
        *,
        lr_scheduler: Any = None,
        ema: Any = None,
        extras: dict[str, Any] | None = None,
        generators: Mapping[str, Any] | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        require_order(accelerator, directory, call='Checkpointer(accelerator, "runs/a")')
        if not MODELS.of(accelerator):
            raise ConfigurationError(
                "accelerator",
                found="no model was prepared",
                remedy="Make the Checkpointer after accelerator.prepare(model, optimizer, ...)",
            )
        check_tested(
            "accelerate",
            "torch",
            found=accelerator_faults(accelerator),
            strict=Options.from_keywords(options).strict,
            warns=accelerator.is_main_process,
        )
        extras = checked_extras(extras)
        super().__init__(
            directory,
            components=prepared_components(
                accelerator,
                lr_scheduler=lr_scheduler,
                ema=ema,
                extras=extras,
                sources=lambda: self._sources,
            ),
            extras=extras,
            generators=generators,
            make_loop=partial(PreparedLoop, accelerator=accelerator),
            **options,
        )
        self._run.trackers.holders = lambda: accelerator.trackers
        wrapped = ENGINE.of(accelerator)
        # accelerate 1.15 utils/deepspeed.py: the engine steps inside of accelerator.backward().
        engine = None if wrapped is None else wrapped.engine
        # With several, as in adversarial training, a step is complete when each has taken one.
        self._loop.steps_taken = StepsTaken(needs_all=True, engine=engine)
        self._states = SavedStates(
            accelerator, save=self._save_state, resume_up_to=self._resume_up_to
        )

    def close(self) -> None:
        """Makes a save that is due, and releases the run directory. Collective, idempotent."""
        super().close()
        self._states.detach()

    def _save_state(self) -> dict[str, Any] | None:
        """In ``accelerator.save_state``: this step is saved when all of its code has run."""
        if self._loop.outermost is None:
            return None
        self.save()
        is_counted = self._loop.stepped or self.finished is not None
        step = self.progress.step if is_counted else self.progress.step + 1
        return {"run_id": self._run.run_id, "step": step}

    def _resume_up_to(self, step_of: Callable[[str], int | None]) -> bool:
        """In ``accelerator.load_state``: whether the run resumes from a checkpoint."""
        if not self._loop.find(step_of):
            return False
        self.resume()
        return True


class PreparedLoop(Loop):
    """A loop over prepared loaders, with the steps of an Accelerator.

    Args:
        run: the run.
        accelerator: the ``accelerate.Accelerator``.
    """

    def __init__(self, run: RunState, *, accelerator: Any) -> None:
        super().__init__(run)
        self._accelerator = accelerator

    def whole_loader(self, loader: Any, name: str | None) -> Any:
        """A loader; where the script skips batches of it, with their number.

        Warns where it was not prepared.

        Args:
            loader: a loader, or a dict of loaders.
            name: what the run calls it, if the user gave it one.

        Raises:
            ConfigurationError: it skips batches of a loader that is not known.
        """
        if isinstance(loader, Mapping):
            return {key: self.whole_loader(each, key) for key, each in loader.items()}
        name, prepared = DEFAULT_NAME if name is None else name, LOADERS.of(self._accelerator)
        is_known = any(loader is each for each in prepared)
        origin, num_skipped = origin_of(loader)
        if num_skipped is not None and (num_skipped or not is_known):
            whole = [each for each in prepared if origin_of(each) == (origin, 0)]
            if len(whole) == 1:
                return SkippedLoader(whole[0], num_skipped)
            # Else one that the script has made as Accelerate does, and that skips nothing.
            if num_skipped or whole or not hasattr(loader, "skip_batches"):
                fits = f"fits {len(whole)} prepared ones"
                raise ConfigurationError(
                    f"batches(name={name!r})",
                    found=f"a loader from skip_first_batches() that {fits}",
                    expected="one of a prepared loader",
                    remedy=PASS_WHOLE_LOADER,
                )
        is_alone = isinstance(loader, DataLoader) and not is_known
        if is_alone and self._accelerator.is_main_process:
            warn(
                "RK-824",
                "batches(name=%r): the loader was not prepared, so each rank goes through all of "
                "it; pass it to accelerator.prepare()",
                name,
            )
        return loader

    def at_step_boundary(self) -> bool:
        """Not inside an accumulation window."""
        return bool(self._accelerator.sync_gradients)
