"""The training script of ``python -m resumekit.testing.gpu``: one loop, and an option for each row.

It writes what the judge compares, read from the tensors by torch alone: losses as ``float.hex``,
and digests of the bytes of weights, buffers, optimizer state and user state.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from resumekit.adapters.torch import Checkpointer
from resumekit.testing.gpu_evidence import NUM_EPOCHS, SAVE_EVERY, STEPS_PER_EPOCH, Evidence

NUM_FEATURES, BATCH_SIZE = 16, 8
KILL_INSIDE_SAVE = -1
STALE_BYTES = 32 << 20  # one copy of the state of the wide model fits in
SLEEP_CYCLES = 200_000_000  # about 0.1 s

# torch 2.13 annotates and exports only a part of these.
_cuda: Any = torch.cuda
_optim: Any = torch.optim
_distributed: Any = torch.distributed

OPTIMIZERS: Mapping[str, Callable[[Any], Any]] = {
    "SGD": partial(_optim.SGD, lr=1e-4, momentum=0.9),
    "fused AdamW": partial(_optim.AdamW, lr=1e-3, fused=True),
    "capturable AdamW": partial(_optim.AdamW, lr=1e-3, capturable=True),
    "foreach AdamW": partial(_optim.AdamW, lr=1e-3, foreach=True),
    "NAdam": partial(_optim.NAdam, lr=1e-3),
}


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Random inputs, with noise that is drawn again each time one is read, and their squares."""

    def __init__(self, num_samples: int) -> None:
        self.inputs = torch.randn(num_samples, NUM_FEATURES)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * torch.randn(NUM_FEATURES)
        return self.inputs[index] + noise, self.inputs[index].square()


class Pending:
    """Work on the device that is not joined when a save begins: none."""

    def join(self) -> None:
        """Waits for it, in the order of the device."""

    def update(self) -> dict[str, Tensor]:
        """Launches it; what the buffers of the model will hold, in the order of the device."""
        return {}

    def end_step(self) -> None:
        """Called last in a step: the save comes next."""


class SideStream(Pending):
    """An average of a weight, and its copy into pinned memory, on a stream of their own.

    Both are buffers of the model. Each step joins them before it changes the weight; a save that
    begins before that step must wait for them by itself: they are done after all that the current
    stream has to do.
    """

    def __init__(self, model: nn.Module, weight: Tensor) -> None:
        self._weight, self._stream = weight, _cuda.Stream()
        self._average, self._expected = torch.zeros_like(weight), torch.zeros_like(weight)
        self._pinned = torch.empty_like(weight, device="cpu").pin_memory()
        model.register_buffer("average", self._average)
        model.register_buffer("expected", self._expected)
        model.register_buffer("pinned", self._pinned)

    def join(self) -> None:
        _cuda.current_stream().wait_stream(self._stream)

    @torch.no_grad()
    def update(self) -> dict[str, Tensor]:
        self._stream.wait_stream(_cuda.current_stream())
        with _cuda.stream(self._stream):
            sleep()
            self._average.lerp_(self._weight, 0.1)
            self._pinned.copy_(self._weight, non_blocking=True)
        self._expected.lerp_(self._weight, 0.1)
        return {"average": self._expected, "pinned": self._weight}


def make_pending(kind: str, model: nn.Module, weight: Tensor) -> Pending:
    """What a kind of training leaves to a save; see ``loop``."""
    if kind == "side stream":
        return SideStream(model, weight)
    return Stale() if kind == "stale" else Pending()


def sleep() -> None:
    """Lets the current stream of the device be late."""
    if _cuda.is_available():
        _cuda._sleep(SLEEP_CYCLES)  # noqa: SLF001  # as the tests of torch 2.13 do


def add_formats(model: nn.Module, device: torch.device) -> list[Tensor]:
    """Buffers whose bytes are not those of a contiguous float32 tensor."""
    values = partial(torch.randn, device=device)
    formats = {
        "conj": values(64, 33, dtype=torch.complex64).conj(),
        "neg": values(64, 33, dtype=torch.complex64).conj().imag,
        "channels_last": values(4, 8, 16, 16).to(memory_format=torch.channels_last),
        "transposed": values(65, 130).t(),
        "float8": values(1000).to(torch.float8_e4m3fn),
        "bfloat16": values(1001).to(torch.bfloat16),
        "scalar": values(()),
    }
    for name, tensor in formats.items():
        model.register_buffer(f"like_{name}", tensor)
    return list(formats.values())


@torch.no_grad()
def change(buffers: list[Tensor]) -> None:
    """Changes buffers of any dtype in place, so that each save has other values."""
    for buffer in buffers:
        wide = buffer if buffer.is_complex() else buffer.float()
        buffer.copy_((wide * 0.9 + 0.01).to(buffer.dtype))


class Stale(Pending):
    """Memory that is unmapped during a save and still registered, as some libraries leave it.

    The memory for the copy of the state may get its addresses, and cannot be registered then.
    """

    def __init__(self) -> None:
        self._address = 0

    def join(self) -> None:
        if self._address:  # else copies of the training may get these addresses and fail
            _cuda.cudart().cudaHostUnregister(self._address)

    def end_step(self) -> None:
        memory = mmap.mmap(-1, STALE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        assert int(_cuda.cudart().cudaHostRegister(self._address, STALE_BYTES, 0)) == 0
        memory.close()


def kill_inside_save(directory: Path) -> None:
    """Starts a thread that kills this process while a save after the first is being written."""

    def watch() -> None:
        while not (any(directory.glob("step-*")) and any(directory.glob(".staging/*/state/*"))):
            time.sleep(0.0002)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def train(
    directory: str,
    *,
    launch: str,
    device: str,
    kill: int = 0,
    framework: str = "",
    visible: str = "",
    kind: str = "",
    **options: Any,
) -> None:
    """One launch: starts, resumes or does nothing, as the directory says.

    Args:
        directory: of the run and of the evidence.
        launch: the name of the evidence.
        device: ``cpu`` or a CUDA device.
        kill: the step after which the process kills itself, or ``KILL_INSIDE_SAVE``.
        framework: ``trainer``, ``lightning`` or ``accelerate``, instead of the plain loop.
        visible: the value of ``CUDA_VISIBLE_DEVICES``.
        kind: see ``loop``; ``second run``: another run precedes it in this process.
        **options: of the loop.
    """
    os.environ.pop("RESUMEKIT_TRACE", None)  # a trace would wait for the device at each step
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    # An operation without a deterministic form shows as a difference before the kill.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    rank, run = os.environ.get("RANK", "0"), Path(directory, "run")
    path = Path(directory, "evidence", f"{launch}-rank-{rank}.txt")
    evidence = Evidence(path, kill=kill, is_deferred=kind in ("slow", "side stream"))
    if kill == KILL_INSIDE_SAVE and rank == "0":
        kill_inside_save(run)
    if framework in ("trainer", "lightning"):
        from resumekit.testing import gpu_frameworks

        getattr(gpu_frameworks, framework)(str(run), evidence, device)
        return
    options.update(kind=kind, is_accelerate=framework == "accelerate")
    if kind == "second run":
        loop(f"{run}-first", Evidence(path.with_suffix(".first")), torch.device(device), **options)
        gc.collect()
        torch.manual_seed(1)
    loop(str(run), evidence, torch.device(device), **options)


def loop(
    directory: str,
    evidence: Evidence,
    device: torch.device,
    *,
    kind: str,
    is_accelerate: bool,
    optimizer: str = "SGD",
    width: int = 64,
    dropout: float = 0.0,
    workers: int = 0,
    save_every: int = SAVE_EVERY,
    async_save: bool = True,
    layout: str = "",
    graph: str = "",
) -> None:
    """The plain loop, and Accelerate's.

    Args:
        directory: the run directory.
        evidence: for the judge.
        device: that trains.
        kind: ``slow``: the device is late, so that a save begins before the state is computed;
            ``side stream``: see ``SideStream``; ``stale``: see ``Stale``; ``formats``: see
            ``add_formats``; ``late``: the model stays on the CPU, and the loop uses the device for
            the first time; ``scaled``: a GradScaler whose scale overflows again and again;
            ``across``: the user's generator is the CPU's, whatever the device.
        is_accelerate: use an Accelerator.
        optimizer: a name of ``OPTIMIZERS``.
        width: features between the two layers.
        dropout: the fraction of them that is dropped.
        workers: of the loader, which pins its batches then.
        save_every: an option of the Checkpointer.
        async_save: another one.
        layout: ``ddp``, ``fsdp2`` or ``fsdp2 offload``.
        graph: ``captured``, or a mode of ``torch.compile``.
    """
    if layout:
        device = start_process_group(device)
    first, second = nn.Linear(NUM_FEATURES, width), nn.Linear(width, NUM_FEATURES)
    model = nn.Sequential(first, nn.LayerNorm(width), nn.GELU(), nn.Dropout(dropout), second)
    home = torch.device("cpu") if kind == "late" else device
    model.to(home)
    buffers = add_formats(model, device) if kind == "formats" else []
    pending = make_pending(kind, model, first.weight)
    module: Any = laid_out(model, layout, device)
    trained = OPTIMIZERS[optimizer](module.parameters())
    loader: Any = make_loader(workers, is_pinned=device.type == "cuda")
    scaler: Any = torch.amp.GradScaler(
        device.type, init_scale=2.0**28, growth_interval=2, enabled=kind == "scaled"
    )
    extras: dict[str, Any] = {"count": torch.zeros((), device=home), "recent": deque(maxlen=3)}
    trail = torch.zeros(8, device=home)
    noise = torch.Generator("cpu" if kind == "across" else home).manual_seed(1)
    options: Any = {"save_every": save_every, "async_save": async_save, "extras": extras}
    options.update(generators={"noise": noise}, transient={"evidence", "pending"})
    backward: Callable[[Tensor], Any] = torch.autograd.backward
    if is_accelerate:
        from accelerate import Accelerator  # type: ignore[import-untyped]  # accelerate 1.15

        from resumekit.adapters.accelerate import Checkpointer as AccelerateCheckpointer

        accelerator = Accelerator(cpu=device.type == "cpu")
        backward = accelerator.backward
        module, trained, loader = accelerator.prepare(module, trained, loader)
        ckpt: Any = AccelerateCheckpointer(accelerator, directory, **options)
    else:
        slots = {"model": module, "optimizer": trained, "grad_scaler": scaler}
        ckpt = Checkpointer(directory, **slots, **options)

    def advance(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.float16, enabled=scaler.is_enabled()):
            loss = nn.functional.mse_loss(module(inputs), targets)
        trained.zero_grad()
        backward(scaler.scale(loss))
        scaler.step(trained)
        scaler.update()
        return loss.detach()

    if graph == "captured":
        advance = captured(advance, device)
    elif graph:
        module = torch.compile(module, mode=graph)
    for inputs, targets in ckpt.batches(loader, epochs=NUM_EPOCHS):
        evidence.begin(ckpt.progress.step, state_of(model, trained, scaler, extras, trail))
        if kind == "slow":
            sleep()
        elif kind == "late":
            inputs = inputs + 0.1 * torch.randn(inputs.shape, device=device).cpu()
        pending.join()
        loss = advance(inputs.to(home), targets.to(home))
        change(buffers)
        drawn = torch.rand(8, device=noise.device, generator=noise)
        trail = 0.9 * trail + loss + drawn.to(home)
        extras["count"] = 0.9 * extras["count"] + 1  # equal on all ranks, as extras are
        extras["recent"].append(extras["count"])
        state = {**state_of(model, trained, scaler, extras, trail), **pending.update()}
        ckpt.step(loss=None if kind in ("slow", "side stream") else loss)
        evidence.end_step(ckpt.progress.step, loss, state)
        pending.end_step()
    if layout and "RANK" not in os.environ:
        _distributed.destroy_process_group()


def state_of(
    model: nn.Module, optimizer: Any, scaler: Any, extras: Mapping[str, Any], trail: Tensor
) -> dict[str, Any]:
    """The tensors to compare, and devices of the user's, by name."""
    found: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for number, state in enumerate(optimizer.state.values()):
        found.update({f"{number}/{name}": value for name, value in state.items()})
    recent = {f"recent {number}": value for number, value in enumerate(extras["recent"])}
    users = {"trail": trail, "count": extras["count"], **recent}
    found.update(users, scale=torch.tensor(scaler.get_scale()))
    return {**found, **{f"device of {name}": each.device.type for name, each in users.items()}}


def make_loader(workers: int, *, is_pinned: bool) -> Any:
    """The loader of this rank: eight batches."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    dataset = Samples(STEPS_PER_EPOCH * BATCH_SIZE * num_ranks)
    sampler: Any = DistributedSampler(dataset) if num_ranks > 1 else None
    options: Any = {"num_workers": workers, "pin_memory": workers > 0 and is_pinned}
    return DataLoader(dataset, BATCH_SIZE, shuffle=sampler is None, sampler=sampler, **options)


def captured(advance: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> Any:
    """The step as a CUDA graph, captured after three steps on random batches."""
    inputs = torch.randn(BATCH_SIZE, NUM_FEATURES, device=device)
    targets = torch.randn(BATCH_SIZE, NUM_FEATURES, device=device)
    stream = _cuda.Stream()
    stream.wait_stream(_cuda.current_stream())
    with _cuda.stream(stream):
        for _ in range(3):
            advance(inputs, targets)
    _cuda.current_stream().wait_stream(stream)
    graph = _cuda.CUDAGraph()
    with _cuda.graph(graph):
        loss = advance(inputs, targets)

    def replay(new_inputs: Tensor, new_targets: Tensor) -> Tensor:
        inputs.copy_(new_inputs)
        targets.copy_(new_targets)
        graph.replay()
        return loss  # the next replay overwrites it

    return replay


def start_process_group(device: torch.device) -> torch.device:
    """Joins the ranks with NCCL, or gloo on the CPU; this rank's device."""
    backend = "gloo"
    if device.type == "cuda":
        backend, device = "nccl", torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        _cuda.set_device(device)
    if "RANK" in os.environ:
        _distributed.init_process_group(backend)
    else:
        store = _distributed.HashStore()
        _distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    return device


def laid_out(model: nn.Module, layout: str, device: torch.device) -> nn.Module:
    """The model under DDP or FSDP2, or as it is."""
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        pinned = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        policy = pinned if layout == "fsdp2 offload" else OffloadPolicy()
        mesh = init_device_mesh(device.type, (_distributed.get_world_size(),))
        fully_shard(model, mesh=mesh, offload_policy=policy)
    return model
