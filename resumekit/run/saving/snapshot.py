"""Host memory for a copy of what a rank writes: allocated once and reused by all its saves.

Where GPUs are in use it is pinned: registered with the driver as long as it is mapped. How much may
be taken depends on the control groups of the process and on the machine. The page cache counts as
available: the kernel drops it when memory is needed.

Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of Linux.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from resumekit.capture.global_rng import accelerator_in_use
from resumekit.errors import SaveError
from resumekit.log import logger, warn
from resumekit.serialization.writing import Payload
from resumekit.storage.io.direct import address_of
from resumekit.storage.io.pipeline import HostBuffer


def used_gpus() -> list[int]:
    """The CUDA devices on which this process has a context, by index; it creates none."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch 2.13
        return []
    # torch 2.13 c10/cuda/CUDAFunctions.h hasPrimaryContext, which torch asks before it pins memory.
    has_context = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]  # noqa: SLF001  # has no public name
    return [index for index in range(torch.cuda.device_count()) if has_context(index)]


def wait_for_devices() -> None:
    """Waits until all used devices have done what was launched, on whichever stream.

    Only then does host memory hold what was copied to it with ``non_blocking=True``.
    """
    for index in used_gpus():
        torch.cuda.synchronize(index)
    if accelerator_in_use(if_unknown=True) not in ("", "cuda"):
        # Of a plug-in that cannot do it; an error of the device is raised again by the next call.
        with suppress(RuntimeError):
            for index in range(torch.accelerator.device_count()):
                torch.accelerator.synchronize(index)


# ---------------------------------------------------------------- pinned memory

_ALREADY_REGISTERED = 712  # CUDA driver_types.h cudaErrorHostMemoryAlreadyRegistered; HIP's too
_MAX_ATTEMPTS = 8


class CudaDriver:
    """Registers host memory with the CUDA driver; results are CUDA error codes, 0 for success.

    Args:
        index: a GPU with a context: a call for another GPU creates one there, of hundreds of MB.
    """

    def __init__(self, index: int) -> None:
        self._index = index

    def register(self, memory: memoryview) -> int:
        """Lets the driver copy to this memory by itself."""
        with torch.cuda.device(self._index):
            return self._checked(_cudart().cudaHostRegister(address_of(memory), memory.nbytes, 0))

    def unregister(self, memory: memoryview) -> int:
        """Ends that."""
        with torch.cuda.device(self._index):
            return self._checked(_cudart().cudaHostUnregister(address_of(memory)))

    def _checked(self, result: Any) -> int:
        """The error code; after a failure CUDA's last error is cleared."""
        if int(result):
            # CUDA keeps the error until the next kernel launch of this thread raises it: here, not
            # in the training. torch 2.13 c10/cuda/CUDAException.h C10_CUDA_KERNEL_LAUNCH_CHECK.
            try:
                torch.ones(1, device=f"cuda:{self._index}")
            except RuntimeError as error:
                logger.debug("CUDA error %s: %s", int(result), error)
        return int(result)


class PinnedBuffer(HostBuffer):
    """Memory that a driver copies to by itself, until the buffer is released or collected.

    The driver keeps the pages of a registration, and would write to them after the system has given
    the address to other memory. So a registered mapping cannot end: the registration refers to it,
    and ends first, also at the exit of the process.

    Args:
        num_bytes: the size of ``view``.
        driver: that registers it.

    Attributes:
        error: the driver's error code, for memory that is not registered; else 0.

    Raises:
        OSError: ENOMEM, the system grants no such mapping.
    """

    def __init__(self, num_bytes: int, driver: CudaDriver) -> None:
        super().__init__(num_bytes)
        memory = self.view[:]
        self.error = driver.register(memory)
        self._end = weakref.finalize(self, _unregister, driver, memory, owner=os.getpid())
        if self.error:
            self._end.detach()

    def release(self) -> None:
        """As of every buffer; the driver copies nothing more to it by itself."""
        self._end()
        super().release()


def snapshot_buffer(num_bytes: int) -> HostBuffer:
    """Memory for a copy of the state: pinned, if this process uses a GPU and the driver permits it.

    Raises:
        OSError: as ``pinned_buffer``.
    """
    gpus = used_gpus()
    if not gpus:
        return HostBuffer(num_bytes)
    current = torch.cuda.current_device()
    return pinned_buffer(num_bytes, CudaDriver(current if current in gpus else gpus[0]))


def pinned_buffer(num_bytes: int, driver: CudaDriver) -> PinnedBuffer:
    """Memory that the driver registers, or refuses to, in which case saves block longer.

    Raises:
        OSError: ENOMEM, the system grants no such mapping, or none that is not registered already.
    """
    # Somebody unmapped memory at this address and left it registered: what the driver copies to it
    # is lost. Such a mapping is kept until there is another, or the system would give it again.
    unusable = []
    for _ in range(_MAX_ATTEMPTS):
        buffer = PinnedBuffer(num_bytes, driver)
        if buffer.error != _ALREADY_REGISTERED:
            break
        unusable.append(buffer)
    else:
        raise OSError(errno.ENOMEM, "CUDA still refers to memory that was unmapped")
    if buffer.error:
        warn(
            "RK-862",
            "saves block training longer: the copy is not in pinned memory (CUDA error %d)",
            buffer.error,
        )
    return buffer


def _unregister(driver: CudaDriver, memory: memoryview, *, owner: int) -> None:
    if os.getpid() != owner:  # a forked child has neither the memory nor CUDA
        return
    error = driver.unregister(memory)
    if error:  # the next registration at this address is refused, and other memory is used
        logger.debug("cudaHostUnregister: CUDA error %d", error)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch 2.13


# ---------------------------------------------------------------- available memory

_UNLIMITED = 1 << 60  # v1 writes the largest number of pages for no limit
_CGROUPS = "sys/fs/cgroup"


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that all processes of this control group may still take; None where it is unknown.

    Args:
        root: of the file system; tests have one of their own.
    """
    rooms = [room for room in (_machine(root), *_cgroups(root)) if room is not None]
    return max(min(rooms), 0) if rooms else None


def _machine(root: Path) -> int | None:
    fields = _fields(root / "proc/meminfo")
    return fields["MemAvailable"] << 10 if "MemAvailable" in fields else None


def _cgroups(root: Path) -> Iterator[int | None]:
    """What the limit of each control group above this process leaves."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            for directory in _with_parents(root / _CGROUPS, path):
                yield _room_v2(directory)
        elif "memory" in controllers.split(","):
            for directory in _with_parents(root / _CGROUPS / "memory", path):
                yield _room_v1(directory)


def _with_parents(mount: Path, path: str) -> Iterator[Path]:
    # In a container the path may be the one outside of it: then only the mount itself exists.
    below = PurePosixPath(path.lstrip("/"))
    for each in (below, *below.parents):
        yield mount / each


def _room_v2(directory: Path) -> int | None:
    cache = ("active_file", "inactive_file", "slab_reclaimable")
    return _room(directory, "memory.max", "memory.current", cache)


def _room_v1(directory: Path) -> int | None:
    cache = ("total_active_file", "total_inactive_file")
    return _room(directory, "memory.limit_in_bytes", "memory.usage_in_bytes", cache)


def _room(directory: Path, limit: str, usage: str, cache: tuple[str, ...]) -> int | None:
    most, used = _number(directory / limit), _number(directory / usage)
    if most is None or used is None or most >= _UNLIMITED:
        return None
    fields = _fields(directory / "memory.stat")
    return most - used + sum(fields.get(name, 0) for name in cache)


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _fields(path: Path) -> dict[str, int]:
    """The numbers of lines such as ``anon 4096`` and ``MemAvailable:  4 kB``, by name."""
    rows = (line.replace(":", " ").split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:  # another system, or a kernel that does not show it
        return ""


# ---------------------------------------------------------------- the copy of a save

_SPARE = 64  # a 64th more than needed: a list in the state that grows must not cost new pages
_LEFT_FREE = 10  # a tenth of the available memory stays free for the training


class Snapshot:
    """One copy of a rank's state at a time; its memory is reused, and grows with the state.

    The memory is allocated by the first ``take``. A forked child does not have it.

    Args:
        root: of the file system in which the limits of memory are read.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._buffer: HostBuffer | None = None
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (forget() or _nothing)())

    @property
    def num_bytes(self) -> int:
        """The memory that it takes up."""
        return 0 if self._buffer is None else self._buffer.num_bytes

    @staticmethod
    def needed_bytes(payloads: Sequence[Payload]) -> int:
        """The memory that a copy of them takes up."""
        return sum(each.image_bytes for each in payloads)

    def fits(self, num_bytes: int, others: int = 0) -> bool:
        """Whether there is memory for a copy, so that a tenth of what is available stays free.

        Args:
            num_bytes: of the copy.
            others: bytes by which the snapshots of the other ranks on this node will grow.
        """
        growth = self.growth(num_bytes) + others
        if growth == 0:
            return True
        available = available_memory(self._root)
        return available is not None and growth <= available - available // _LEFT_FREE

    def growth(self, num_bytes: int) -> int:
        """How many bytes more than now a copy of this size will take up."""
        return _with_spare(num_bytes) - self.num_bytes if num_bytes > self.num_bytes else 0

    def take(self, payloads: Sequence[Payload], *, num_threads: int = 1) -> None:
        """Copies them; the live state may change once this returns.

        Args:
            payloads: not written yet; those of the ``take`` before are written.
            num_threads: how many copy large tensors, the caller's thread among them.

        Raises:
            SaveError: there is no memory for the copy, or not all bytes were copied.
        """
        needed = self.needed_bytes(payloads)
        if needed > self.num_bytes:
            self.release()
            self._allocate(_with_spare(needed))
        view = memoryview(b"") if self._buffer is None else self._buffer.view
        begin = 0
        for each in payloads:
            end = begin + each.image_bytes
            each.copy_into(view[begin:end], num_threads=num_threads)
            begin = end

    def lend(self, num_bytes: int) -> HostBuffer:
        """Its memory for something else, until the next ``take``.

        Args:
            num_bytes: at least.

        Raises:
            SaveError: there is no memory.
        """
        if num_bytes > self.num_bytes:
            self.release()
            self._allocate(_with_spare(num_bytes))
        assert self._buffer is not None
        return self._buffer

    def release(self) -> None:
        """Gives the memory back, the part that is still in use with its last user."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.release()

    def _allocate(self, num_bytes: int) -> None:
        try:
            self._buffer = snapshot_buffer(num_bytes)
        except OSError as error:
            raise SaveError(
                "the snapshot of an asynchronous save",
                found=f"no {num_bytes:,} bytes of memory: {error.strerror}",
                remedy="Pass async_save=False",
            ) from error

    def _forget(self) -> None:
        # In a forked child, which does not have the memory: others may get its addresses.
        self._buffer = None


def _with_spare(num_bytes: int) -> int:
    return num_bytes + num_bytes // _SPARE


def _nothing() -> None:
    pass
