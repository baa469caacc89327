"""A checkpoint as files of other tools: its model alone, or all that continues the training.

Works for every checkpoint, however its model was sharded: needs no process group, no framework and
none of the run's code. Few tensors are in memory at once.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resumekit.errors import ConfigurationError
from resumekit.export.formats import IN_SHARDS, WRITERS
from resumekit.export.stored_run import ExportOptions, StoredRun
from resumekit.export.trainings import TRAININGS
from resumekit.export.weights import DTYPES, KINDS, MODEL, Weights
from resumekit.storage.manifest import StepReader

__all__ = ["DTYPES", "FORMATS", "KINDS", "TRAININGS", "export_model", "export_training"]

FORMATS = (*WRITERS,)
# The formats of a training that know an option.
OPTIONS = {
    "max_shard_bytes": (*IN_SHARDS, "trainer"),
    "ranks": ("deepspeed",),
    "stage": ("deepspeed",),
}


def export_model(
    step: StepReader,
    path: Path,
    *,
    to: str = "safetensors",
    weights: str = MODEL,
    key: str | None = None,
    dtype: str = "fp32",
    max_shard_bytes: int | None = None,
) -> tuple[str, ...]:
    """Writes the model of a checkpoint for other tools; it is there whole or not at all.

    A tensor with several names is written under each of them.

    Args:
        step: the checkpoint.
        path: what to write; it must not be there.
        to: ``"safetensors"``: one file, or with ``max_shard_bytes`` a directory of several, with
            an index. ``"pretrained"``: a directory that ``from_pretrained`` opens. ``"torch"``: a
            state dict for ``torch.load``. ``"dcp"``: a directory for
            ``torch.distributed.checkpoint.load``. The last two hold pickles, which their readers
            need; they take twice the size on the disk meanwhile.
        weights: ``"model"``: those with which the model is evaluated. ``"train"``: those that are
            trained, which are others with a schedule-free optimizer. ``"ema"``: the averaged
            weights, under the names of the model.
        key: of the component, where the checkpoint has several.
        dtype: ``"fp32"``: fp16 and bf16 become fp32, which loses nothing, and other types stay.
            ``"bf16"`` or ``"fp16"``: floating-point tensors are rounded to it. ``"as-trained"``:
            each has the type that it had in the module, also where fp32 weights were saved for it.
        max_shard_bytes: of the tensors of one file.

    Returns:
        The names of the tensors written.

    Raises:
        CheckpointError: damage, or an I/O error while reading.
        ConfigurationError: the path is there, is in a run directory, or cannot be written; there is
            no such type, or a value is too large for it.
        StateMismatchError: there is no such model, or each rank has one of its own.
    """
    for name, value, known in (("to", to, FORMATS), ("weights", weights, KINDS)):
        _require_one_of(name, value, known)
    _require_one_of("dtype", dtype, DTYPES)
    if max_shard_bytes is not None:
        _require_one_of("to with max_shard_bytes", to, IN_SHARDS)
    with _unfinished(step, path) as unfinished:
        chosen = Weights(step, weights, key, dtype)
        WRITERS[to](unfinished, chosen, max_shard_bytes)
    return (*chosen.sizes,)


def export_training(
    step: StepReader,
    path: Path,
    *,
    to: str,
    max_shard_bytes: int | None = None,
    ranks: int | None = None,
    stage: int | None = None,
) -> tuple[str, ...]:
    """Writes a checkpoint of another framework; it is there whole or not at all.

    A script of that framework continues from it without this library, as from one of its own. The
    files are pickles that load with ``weights_only=True``; they take twice the size of optimizer
    and averages on the disk meanwhile.

    Args:
        step: the checkpoint, of any framework and any number of ranks.
        path: what to write; it must not be there.
        to: ``"accelerate"``: a directory for ``accelerator.load_state``. ``"trainer"``: one for
            ``Trainer.train(resume_from_checkpoint=...)``. ``"lightning"``: a file for
            ``trainer.fit(ckpt_path=...)``. ``"deepspeed"``: a directory for
            ``engine.load_checkpoint``.
        max_shard_bytes: of the tensors of one file of weights, for ``"trainer"``.
        ranks: how many load it, for ``"deepspeed"``; as many as have saved, if None.
        stage: of ZeRO, 0 to 3, for ``"deepspeed"``; that of the checkpoint, if None.

    Returns:
        A line for each thing that a user has to know: what the format has no file for, and what the
        checkpoint lacks.

    Raises:
        CheckpointError: damage, or an I/O error while reading.
        ConfigurationError: the path is there, is in a run directory, or cannot be written; there is
            no such format.
        StateMismatchError: the format cannot have what the checkpoint has.
    """
    _require_one_of("to", to, (*TRAININGS,))
    options = ExportOptions(max_shard_bytes, ranks, stage)
    for name, formats in OPTIONS.items():
        if getattr(options, name) is not None:
            _require_one_of(f"to with {name}", to, formats)
    run = StoredRun(step)
    with _unfinished(step, path) as unfinished:
        TRAININGS[to](unfinished, run, options)
    return (*run.notes, *(f"{key}: no file of {to} has it" for key in run.left_out()))


@contextmanager
def _unfinished(step: StepReader, path: Path) -> Iterator[Path]:
    """Where to write what then is at this path, whole or not at all."""
    if path.exists():
        raise ConfigurationError(
            str(path), found="it exists", expected="a new path", remedy="Remove it first"
        )
    if path.resolve().is_relative_to(step.path.parent.resolve()):
        raise ConfigurationError(
            str(path), found="in the run directory", expected="a path outside of it"
        )
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        raise ConfigurationError(str(path), found=str(error), expected="a writable path") from None
    finally:
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        else:
            unfinished.unlink(missing_ok=True)


def _require_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigurationError(name, found=repr(value), expected=f"one of {', '.join(known)}")
