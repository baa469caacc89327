"""Lightning: with one callback the same ``trainer.fit`` starts, resumes, or is done.

Example:
    saving = ResumeCallback("runs/a", save_every=500)
    L.Trainer(max_epochs=3, callbacks=[saving]).fit(module, loader)
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resumekit import Checkpointer
from resumekit.adapters.lightning import _private as private
from resumekit.adapters.lightning._private import (
    Callback,
    Trainer,
    callbacks,
    strategies,
    trainer_faults,
)
from resumekit.adapters.lightning.fit_components import fit_components, prepare, prepare_epoch
from resumekit.adapters.lightning.loader import LoaderInStep, refuse
from resumekit.adapters.lightning.loop_state import LoopState
from resumekit.attach import asked_step, refuse_checkpoint, step_names
from resumekit.distributed import require_all_ranks
from resumekit.errors import ConfigurationError, Preempted
from resumekit.log import logger, warn
from resumekit.requirements import check_tested
from resumekit.run.loops import FrameworkLoop
from resumekit.run.options import Options, checked_extras, checked_names, run_directory

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from resumekit.run.options import OptionKeywords

__all__ = ["ResumeCallback"]

_STRATEGIES = (
    strategies.SingleDeviceStrategy,
    strategies.DDPStrategy,  # DeepSpeedStrategy derives from it
    strategies.ModelParallelStrategy,
)

# lightning 2.6 tuner/lr_finder.py, tuner/batch_size_scaling.py: checkpoints that tuners restore.
OF_TUNERS = (".lr_find_", ".scale_batch_size_")


class ResumeCallback(Callback):
    """Saves the whole state of a fit; ``fit`` resumes it in the same directory.

    Args:
        directory: the run directory.
        ema: an ``AveragedModel``, any object with ``state_dict``, or a dict of them.
        extras: a live dict of your own values.
        generators: private random generators by name.
        **options: see ``resumekit.run.options.Options``.

    Raises:
        ConfigurationError: an option is wrong; when ``fit`` begins, a setting of the Trainer.
        InexactError: ``strict=True``, and this version of Lightning lacks what the adapter needs.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        ema: Any = None,
        extras: dict[str, Any] | None = None,
        generators: Mapping[str, Any] | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        self._options = Options.from_keywords(options)
        self._extras = checked_extras(extras)
        given: dict[str, Any] = {
            "extras": self._extras,
            "generators": checked_names("generators", generators),
            **options,
        }
        self.directory = run_directory(directory)
        self._make_checkpointer = partial(Checkpointer, self.directory, **given)
        self._ema = ema
        self._checkpointer: Checkpointer | None = None  # during a fit
        self._loop: FrameworkLoop | None = None
        self._asked: dict[str, Any] = {}  # the step that a fit is to resume

    def save(self) -> None:
        """Makes a save due before the next batch; outside a fit nothing. Collective."""
        if self._checkpointer is not None:
            self._checkpointer.save()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Becomes the last callback, and replaces the loader that Lightning iterates."""
        if stage == "fit" and not trainer.fast_dev_run:
            check(trainer, pl_module)
            check_tested(
                "lightning",
                "torch",
                found=trainer_faults(trainer),
                strict=self._options.strict,
                warns=trainer.is_global_zero,
            )
            alike = sum(isinstance(each, ResumeCallback) for each in trainer.callbacks)
            refuse(f"{alike} of them in one Trainer", alike > 1, "expected one")
            # What the others make in on_fit_start is to be restored.
            trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), self]
            source = private.TRAIN_SOURCE.of(trainer)
            private.DATALOADER.write(source, partial(self._request, trainer, source))
            private.ON_TRAIN_END.write(trainer, partial(self._finish, trainer))
            private.RESUME_START.write(trainer, partial(self._resume_start, trainer))
            self._asked = {}

    def _resume_start(
        self, trainer: Any, checkpoint_path: Any = None, *rest: Any, **named: Any
    ) -> None:
        """A fit reads no checkpoint of Lightning's own, unless a tuner has written it."""
        fits = trainer.state.fn == "fit"
        if checkpoint_path and fits and not Path(checkpoint_path).name.startswith(OF_TUNERS):
            asked = asked_step(checkpoint_path, self.directory)
            if asked is None:
                self._pass_over(trainer, checkpoint_path, *rest, **named)
            self._asked, checkpoint_path = asked or {}, None
            # lightning 2.6 strategies/strategy.py restore_checkpoint_after_setup: in on_fit_start
            # the run has resumed, and this comes after it.
            resumed = None if self._loop is None else self._loop.resume().path
            name = self._asked.get("resume_from")
            is_late = name is not None and resumed is not None and resumed.name != name
            where = f"fit(ckpt_path={name!r}) with {type(trainer.strategy).__name__}"
            refuse(where, is_late, f"pass resume_from={name!r} to ResumeCallback")
        connector = private.CONNECTOR.of(trainer)
        type(connector).resume_start(connector, checkpoint_path, *rest, **named)

    def _pass_over(self, trainer: Any, path: Any, *rest: Any, **named: Any) -> None:
        """Raises ConfigurationError unless the checkpoint is what ``"last"`` means for the script.

        Raises:
            ConfigurationError: it is another one, or the run directory has none.
        """
        last_paths = {getattr(each, "ckpt_path", None) for each in trainer.callbacks}
        for each in trainer.checkpoint_callbacks:
            last_paths |= private.LAST_CHECKPOINTS.of(each)(trainer)
        if not step_names(self.directory) or path not in last_paths:
            refuse_checkpoint(
                "ckpt_path",
                path,
                self.directory,
                framework="Lightning",
                call="trainer.fit()",
                weights="load_from_checkpoint(that path)",
            )
        if trainer.is_global_zero:
            logger.info("ckpt_path=%s is not read: fit() resumes from %s", path, self.directory)

    def _request(self, trainer: Any, source: Any) -> LoaderInStep:
        """Asks for the training loaders, for all epochs or for some."""
        ask = partial(type(source).dataloader, source)
        given = ask() if self._loop is None else self._loops.request(ask)
        # lightning 2.6 loops/fit_loop.py setup_data makes them, and for any epoch but the first one
        # loops/training_epoch_loop.py on_run_start once more.
        return LoaderInStep(
            given,
            is_followed=lambda: any(each is self for each in trainer.callbacks),
            loop=lambda: self._loop,
            begin=self._begin_epoch,
            draws_twice=self._loop is not None and self._loops.epoch_of_request > 0,
        )

    def _begin_epoch(self, loader: Any) -> Any:
        """The batches of an epoch; Lightning asks for the first one, and all else has run."""
        loop = self._driven_loop()
        is_over = loop.finished is not None
        why = "give it a directory of its own"
        refuse("an epoch more for a run that has finished", is_over, why)
        self._loops.before_first_batch()
        loop.next_epoch(loader)
        return loop.batches(loader)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Every object exists."""
        if not trainer.fast_dev_run:
            self._loops = LoopState(trainer, self._driven_loop)
            components = fit_components(trainer, self._loops, self._ema, self._extras)
            self._checkpointer = self._make_checkpointer(components=components, **self._asked)
            source = private.VALIDATION_SOURCE.of(trainer)
            ask = partial(type(source).dataloader, source)
            private.DATALOADER.write(source, partial(self._loops.request_validation, ask))
            limits = {unit: limit for unit, (limit, _) in limits_of(trainer).items() if limit > 0}
            self._loop = self._checkpointer.drive(one_at_a_time=True, **limits)
            self._loop.set_log_holders(lambda: [*trainer.loggers, *trainer.callbacks])
            if not limits:
                self._loop.accept_horizon()
            prepare(trainer, components, self._loop.progress.epoch, self._loop.saved)
            self._loop.resume()
            if self._loops.was_requested:  # before it was known for which epoch
                private.TRAIN_LOADER.write(trainer, None)
            self._global_step = trainer.global_step

    def _driven_loop(self) -> FrameworkLoop:
        assert self._loop is not None, "a fit asks for a batch after on_fit_start"
        return self._loop

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Restores the run's signal handlers; Lightning's own one calls a collective."""
        if self._checkpointer is not None:
            private.SIGNALS.of(trainer)()
            prepare_epoch(trainer)
            loop = self._loop
            if loop is not None and loop.goes_on_after_end and loop.progress.batch == 0:
                loop.end_resume()  # the hooks that begin the epoch were not called yet
            private.TRAIN_LOADER.of(trainer).follow(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """There may be new loaders."""
        if self._checkpointer is not None:
            private.TRAIN_LOADER.of(trainer).follow(trainer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """An optimizer-step boundary, if a step was taken."""
        if self._checkpointer is not None and trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._checkpointer.step(loss=(outputs or {}).get("loss"))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """The callbacks before this one have counted the epoch."""
        if self._checkpointer is not None:
            self._loops.end_epoch()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Metrics of the current step."""
        reports = self._options.best_metric is not None and not trainer.sanity_checking
        if self._checkpointer is not None and reports:
            self._checkpointer.report(**trainer.callback_metrics)

    def _finish(self, trainer: Any) -> None:
        """The run is over, at its horizon or because it was stopped."""
        type(trainer.strategy).on_train_end(trainer.strategy)
        if self._loop is not None:
            limits = limits_of(trainer).items()
            reached = [f"{unit}={limit}" for unit, (limit, done) in limits if 0 < limit <= done]
            self._loop.finish(", ".join(reached) or f"stopped at step {trainer.global_step}")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Nothing new is saved; a SIGTERM before the first step gives its exit status."""
        if trainer.received_sigterm and isinstance(exception, SystemExit) and not exception.code:
            # lightning 2.6 utilities/exceptions.py SIGTERMException has no code: status 0.
            exception.code = 128 + signal.SIGTERM
        vars(trainer.strategy).pop("on_train_end", None)
        if self._checkpointer is not None:
            self._checkpointer.__exit__(type(exception), exception, None)
        self._checkpointer = self._loop = None
        if isinstance(exception, Preempted):
            requeue(trainer, exception.signal_number)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Releases the run directory, and ends the loader's workers."""
        vars(trainer.strategy).pop("on_train_end", None)
        if self._checkpointer is not None:
            self._checkpointer.close()
        self._checkpointer = self._loop = None


def requeue(trainer: Any, signal_number: int) -> None:
    """Requeues the SLURM job on Lightning's signal for it, as the replaced handler would.

    Source: lightning 2.6 trainer/connectors/signal_connector.py _slurm_sigusr_handler_fn.
    """
    cluster = private.CLUSTER.of(trainer)
    job, task = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if not (job and trainer.is_global_zero and getattr(cluster, "auto_requeue", False)):
        return
    if signal_number == cluster.requeue_signal:
        name = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}" if task else job
        try:
            status = subprocess.run(["scontrol", "requeue", name], check=False).returncode
        except OSError:  # as a shell reports a missing program
            status = 127
        if status:
            warn("RK-864", "scontrol requeue %s: status %d", name, status)
        else:
            logger.info("scontrol requeue %s", name)


def check(trainer: Any, module: Any) -> None:
    """Raises ConfigurationError unless a fit with these settings can be resumed exactly.

    Raises:
        ConfigurationError: names the setting that is not supported.
    """
    is_same_package = issubclass(type(trainer), Trainer)
    if not is_same_package:
        package = type(trainer).__module__.partition(".")[0]
        raise ConfigurationError(
            "ResumeCallback",
            found=f"a Trainer of {package}",
            expected=f"one of {Trainer.__module__.partition('.')[0]}, which was imported first",
            remedy=f"Import {package} alone, before resumekit.adapters.lightning",
        )
    require_all_ranks(
        "Trainer", trainer.world_size, remedy="Set devices= and num_nodes= to those of the launcher"
    )
    strategy = trainer.strategy
    name = type(strategy).__name__
    why = "it needs a GPU and is untested here; use ModelParallelStrategy, which is FSDP2"
    refuse(name, isinstance(strategy, strategies.FSDPStrategy), why)
    why = "unknown how it distributes state; use DDP, ModelParallelStrategy or DeepSpeedStrategy"
    refuse(name, not isinstance(strategy, _STRATEGIES), why)
    why = "ranks of one tensor-parallel group take the same data, which is not supported"
    refuse(f"tensor parallelism ({name})", (private.TENSOR_PARALLEL.of(strategy) or 1) > 1, why)
    parameters = inspect.signature(module.training_step).parameters
    why = "the module fetches batches itself, between the safe points"
    refuse("training_step(dataloader_iter)", "dataloader_iter" in parameters, why)
    why = "it replaces parameters during the run"
    for each in trainer.callbacks:
        refuse(type(each).__name__, isinstance(each, callbacks.ModelPruning), why)


def limits_of(trainer: Any) -> dict[str, tuple[Any, int]]:
    """The horizon of the fit and its progress; a limit below 1 is none."""
    steps = (trainer.max_steps, trainer.global_step)
    return {"epochs": (trainer.max_epochs, trainer.current_epoch), "steps": steps}
