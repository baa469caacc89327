"""The fixed-size record that the journal holds for each optimizer step."""

from __future__ import annotations

import struct
import zlib
from enum import IntFlag
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

RECORD_BYTES = 96

# Kinds of records.
STEP = 1  # an optimizer step
SAVE = 2  # the random state at a safe point that saves; ``num_samples`` is the micro-step
LOSS = 3  # the loss of an earlier step, which its device had not computed in time


class Has(IntFlag):
    """The fields of a record that hold a value."""

    IDS = 1  # ids, ids_sum and num_samples
    COUNT = 2  # num_samples
    RNG = 4  # rng_torch and rng_host
    DEVICE_RNG = 8
    LR = 16  # lr and lr_digest
    LOSS = 32
    IDS_OF_ALL_RANKS = 64  # ids_sum and num_samples are summed over the data-parallel ranks


class Record(NamedTuple):
    """One record.

    Args:
        step: the optimizer step, counted from 1 over all attempts.
        samples: of the run so far, over the data-parallel ranks; between saves an estimate.
        ids: digest of the sample ids of this step on this rank, in their order.
        ids_sum: sum of a hash of each id modulo 2**64; it does not depend on the order, so the
            sums of the data-parallel ranks can be added.
        rng_torch: digest of torch's CPU random state.
        rng_host: digest of the states of Python's and NumPy's global generators and of the
            generators that the user named.
        rng_devices: digest of the random state of every CUDA device.
        lr_digest: digest of the learning rates of all param groups.
        lr: the learning rate of the first param group.
        loss: the loss that was given to ``step()``.
        epoch: counted from 0.
        num_samples: the samples of this step on this rank.
        has: which fields hold a value.
        kind: ``STEP``, ``SAVE`` or ``LOSS``.
    """

    step: int
    samples: int = 0
    ids: int = 0
    ids_sum: int = 0
    rng_torch: int = 0
    rng_host: int = 0
    rng_devices: int = 0
    lr_digest: int = 0
    lr: float = 0.0
    loss: float = 0.0
    epoch: int = 0
    num_samples: int = 0
    has: int = 0
    kind: int = STEP

    def to_bytes(self) -> bytes:
        """The record as it is in the file."""
        body = _BODY.pack(*self)
        return body + _CHECKSUM.pack(zlib.crc32(body))


_BODY = struct.Struct("<8Q2d2I2H")
_CHECKSUM = struct.Struct("<I")
_BODY_BYTES = _BODY.size
assert _BODY_BYTES + _CHECKSUM.size == RECORD_BYTES

_DTYPE = np.dtype(
    [(name, "<f8" if name in ("lr", "loss") else "<u8") for name in Record._fields[:10]]
    + [("epoch", "<u4"), ("num_samples", "<u4"), ("has", "<u2"), ("kind", "<u2"), ("crc", "<u4")]
)
assert _DTYPE.itemsize == RECORD_BYTES


def as_array(data: bytes) -> NDArray[Any]:
    """The records in a part of a file as a structured array; a torn last record is left out."""
    whole = len(data) // RECORD_BYTES
    return np.frombuffer(data, dtype=_DTYPE, count=whole)


def valid_records(rows: NDArray[Any]) -> list[Record]:
    """The records whose checksum is right, in their order."""
    found = []
    for row in rows:
        data = row.tobytes()
        body, checksum = data[:_BODY_BYTES], data[_BODY_BYTES:]
        if _CHECKSUM.unpack(checksum)[0] == zlib.crc32(body):
            found.append(Record(*_BODY.unpack(body)))
    return found
