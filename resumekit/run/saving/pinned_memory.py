"""Host memory that the CUDA driver copies to by itself: registered as long as it is mapped."""

from __future__ import annotations

import errno
import os
import weakref
from typing import Any

import torch

from resumekit.log import logger
from resumekit.run.saving.gpus import used_gpus
from resumekit.storage import HostBuffer, address_of

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
        logger.warning(
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
