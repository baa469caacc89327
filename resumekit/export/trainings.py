"""Checkpoints of other frameworks, which their own scripts continue without this library."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from resumekit.export.deepspeed import write_tag
from resumekit.export.formats import (
    mapped,
    model_files,
    one_file,
    save_state,
    write_bytes,
    write_model,
)
from resumekit.export.stored_run import ExportOptions, StoredRun
from resumekit.state import Slot


def _accelerate(path: Path, run: StoredRun, _: ExportOptions) -> None:
    """What ``accelerator.load_state`` opens.

    Source: accelerate 1.15 checkpointing.py load_accelerator_state, accelerator.py load_state.
    """
    path.mkdir()
    for number, key in enumerate(run.models):
        weights = run.weights(key)
        # safetensors load_model refuses a second name of a tensor.
        one_file(path / _numbered("model.safetensors", number), weights, weights.untied)
    counts = run.state("callbacks/accelerator") or {}
    registered = [key for key in counts.get("registered", []) if key in run]
    optimizers, schedulers = (
        [key for key in run.keys_of(slot) if key not in registered]
        for slot in (Slot.OPTIMIZER, Slot.LR_SCHEDULER)
    )
    scaler = run.only(Slot.GRAD_SCALER)
    keys = [*optimizers, *schedulers, *filter(None, [scaler]), *registered]
    with run.objects(path / "states", keys) as given:
        for name, several in (("optimizer.bin", optimizers), ("scheduler.bin", schedulers)):
            for number, key in enumerate(several):
                save_state(path / _numbered(name, number), given[key])
        if scaler:
            save_state(path / "scaler.pt", given[scaler])
        for number, key in enumerate(registered):
            save_state(path / f"custom_checkpoint_{number}.pkl", given[key])
    step = counts.get("step", run.progress["batch"])
    for rank in range(run.step.manifest.world_size):
        rng = run.rng(rank)
        devices = {f"torch_{kind}_manual_seed": each for kind, each in rng["devices"].items()}
        states = {
            "step": step,
            "random_state": rng["python"],
            "numpy_random_seed": rng["numpy"],
            "torch_manual_seed": rng["torch"],
            **devices,
        }
        save_state(path / f"random_states_{rank}.pkl", states)
    run.mark("data")
    loaders = run.state("callbacks/loaders")
    if loaders is not None and loaders["beside"]:
        run.notes.append("callbacks/loaders: orders of the other loaders are in no file")
    run.notes.append(
        f"data: load_state restores no position; continue in epoch {run.progress['epoch']} with "
        f"accelerator.skip_first_batches(loader, {run.progress['batch']})"
    )


def _trainer(path: Path, run: StoredRun, options: ExportOptions) -> None:
    """What ``Trainer.train(resume_from_checkpoint=...)`` opens.

    Source: transformers 5.23 trainer.py _load_from_checkpoint, _load_optimizer_and_scheduler,
    _load_rng_state, _load_scaler; trainer_callback.py TrainerState.
    """
    weights = run.only_model()
    write_model(path, weights, options.max_shard_bytes, model_files(weights))
    slots = {
        "optimizer.pt": Slot.OPTIMIZER,
        "scheduler.pt": Slot.LR_SCHEDULER,
        "scaler.pt": Slot.GRAD_SCALER,
    }
    files = {name: run.only(slot) for name, slot in slots.items()}
    with run.objects(path / "states", filter(None, files.values())) as given:
        for name, key in files.items():
            if key is not None:
                save_state(path / name, given[key])
    world_size = run.step.manifest.world_size
    for rank in range(world_size):
        rng = run.rng(rank)
        devices = {
            kind: each if world_size > 1 else each[rng["current"]]
            for kind, each in rng["devices"].items()
        }
        name = f"rng_state_{rank}.pth" if world_size > 1 else "rng_state.pth"
        states = {"python": rng["python"], "numpy": rng["numpy"], "cpu": rng["torch"], **devices}
        save_state(path / name, states)
    if not files["scheduler.pt"]:
        run.notes.append(
            "scheduler.pt: the checkpoint has no scheduler; without one the Trainer starts the "
            "optimizer afresh too"
        )
    state = json.dumps(_trainer_state(run), indent=2, sort_keys=True)
    write_bytes(path / "trainer_state.json", state.encode())
    run.mark("data")  # the Trainer finds the position by the step


def _trainer_state(run: StoredRun) -> dict[str, Any]:
    """``TrainerState``; a run of another framework has the counts alone."""
    progress = run.progress
    stored = run.state("callbacks/trainer_state") or {
        "epoch": float(progress["epoch"]),
        "global_step": progress["step"],
        "num_input_tokens_seen": progress["tokens"],
    }
    intervals = stored.get("intervals")
    if intervals is None:
        run.notes.append(
            "trainer_state.json: the checkpoint has no logging_steps, eval_steps and save_steps; "
            "the Trainer takes 500 for each, unless the log shows how often it was written"
        )
        num_batches = progress["micro_step"] * run.step.manifest.world_size
        intervals = {"train_batch_size": -(-progress["samples"] // max(num_batches, 1))}
        logged = [line["step"] for line in stored.get("log_history", ()) if "loss" in line]
        if len(logged) > 1:
            intervals["logging_steps"] = logged[-1] - logged[-2]
    # transformers 5.23 trainer.py _save_checkpoint looks up each callback that exports its state.
    keys = (key.partition("/")[2].rpartition("-")[0] for key in run.keys_of(Slot.CALLBACKS))
    exporting: dict[str, Any] = {"TrainerControl": {}, **{name: [] for name in keys if name}}
    state = {n: each for n, each in stored.items() if n != "intervals"}
    return {**state, **intervals, "stateful_callbacks": exporting}


def _lightning(path: Path, run: StoredRun, _: ExportOptions) -> None:
    """The file that ``trainer.fit(ckpt_path=...)`` and ``load_from_checkpoint`` open.

    Source: lightning 2.6 trainer/connectors/checkpoint_connector.py dump_checkpoint.
    """
    weights = run.only_model()
    hooks = run.state("callbacks/hooks") or {}
    saved = run.state("callbacks/lightning") or {}
    keys = {key: each for key, each in saved.get("state_keys", {}).items() if key in run}
    optimizers, schedulers = run.keys_of(Slot.OPTIMIZER), run.keys_of(Slot.LR_SCHEDULER)
    scaler, loops = run.only(Slot.GRAD_SCALER), _fit_loop(run)
    named = [*optimizers, *schedulers, *filter(None, [scaler]), *keys]
    states = path.with_name(f"{path.name}.states")
    with mapped(path, weights) as tensors, run.objects(states, named) as given:
        checkpoint = {
            "epoch": loops["epoch_progress"]["current"]["completed"],
            "global_step": _steps_of(loops),
            "pytorch-lightning_version": "2.6.0",  # of this layout
            "state_dict": tensors,
            "loops": {"fit_loop": loops},
            "callbacks": {keys[key]: _with_folder(given[key]) for key in keys},
            "optimizer_states": [given[key] for key in optimizers],
            "lr_schedulers": [given[key] for key in schedulers],
            **({"MixedPrecision": given[scaler]} if scaler else {}),
            **hooks.get("checkpoint", {}),
        }
        save_state(path, checkpoint)
    run.mark("data", Slot.RNG.value)
    run.notes.append(
        f"data: the loops continue at batch {run.progress['batch']} of epoch "
        f"{run.progress['epoch']}; a loader without state_dict() begins its order again"
    )
    run.notes.append("rng: Lightning's checkpoints have no RNG states")
    run.notes.append("hyper_parameters: not in the checkpoint; pass them to load_from_checkpoint")


def _steps_of(loops: Mapping[str, Any]) -> int:
    """The steps of the optimizers, whether Lightning or the module steps them."""
    automatic = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    manual = loops["epoch_loop.manual_optimization.optim_step_progress"]
    return max(int(each["total"]["completed"]) for each in (automatic, manual))


def _with_folder(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of a callback; of a ``ModelCheckpoint`` with its folder before its files."""
    saved = state.get("state")
    if not (isinstance(saved, Mapping) and "best_k_models" in saved):
        return state
    folder = Path(saved["dirpath"] or "")
    paths = {n: path and str(folder / path) for n, path in saved.items() if n.endswith("_path")}
    models = {str(folder / name): score for name, score in saved["best_k_models"].items()}
    return {**saved, **paths, "best_k_models": models}


def _fit_loop(run: StoredRun) -> dict[str, Any]:
    """The state of the loop as ``ModelCheckpoint`` saves it, at the end of a batch.

    There the batch is not counted as completed, nor as one that stepped, and Lightning counts it
    when it resumes. lightning 2.6 loops/training_epoch_loop.py advance, reset.
    """
    stored = run.state("callbacks/lightning")
    loops = _counted(run.progress) if stored is None else copy.deepcopy(stored["loops"])
    epochs, batches = loops["epoch_progress"]["current"], loops["epoch_loop.batch_progress"]
    if batches["current"]["ready"] and epochs["processed"] < epochs["started"]:
        for counts in (batches["total"], batches["current"]):
            counts["completed"] -= 1
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
    return loops


def _counted(progress: Mapping[str, int]) -> dict[str, Any]:
    """The state of a loop that has run up to there, of a run of another framework."""
    begun, done = progress["epoch"] + 1, progress["epoch"]
    steps, names = progress["step"], ("ready", "started", "processed", "completed")

    def counts(total: int, current: int, names: Iterable[str] = names) -> dict[str, Any]:
        names = [*names]
        return {"total": dict.fromkeys(names, total), "current": dict.fromkeys(names, current)}

    epochs = {"ready": begun, "started": begun, "processed": done, "completed": done}
    optimizer = {
        "step": counts(steps, 0, ("ready", "completed")),
        "zero_grad": counts(steps, 0, ("ready", "started", "completed")),
    }
    batches = counts(progress["micro_step"], progress["batch"])
    return {
        "epoch_progress": {"total": epochs, "current": dict(epochs)},
        "epoch_loop.batch_progress": {**batches, "is_last_batch": False},
        "epoch_loop.scheduler_progress": counts(steps, 0, ("ready", "completed")),
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": optimizer},
        "epoch_loop.manual_optimization.optim_step_progress": optimizer["step"],
        "epoch_loop.state_dict": {"_batches_that_stepped": steps},
    }


# What each format is written by: the path, the run, and what was given for it.
TRAININGS: Mapping[str, Callable[[Path, StoredRun, ExportOptions], None]] = {
    "accelerate": _accelerate,
    "trainer": _trainer,
    "lightning": _lightning,
    "deepspeed": write_tag,
}


def _numbered(name: str, number: int) -> str:
    stem, end = name.split(".")
    return name if number == 0 else f"{stem}_{number}.{end}"
