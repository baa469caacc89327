from __future__ import annotations

import threading
from itertools import pairwise

import pytest

from resumekit.storage.io.direct import address_of
from resumekit.storage.io.pipeline import CHUNK_BYTES, Slots


@pytest.mark.parametrize("num_bytes", [CHUNK_BYTES, CHUNK_BYTES // 2])
def test_threads_that_run_at_once_have_memory_of_their_own(num_bytes: int) -> None:
    meeting = threading.Barrier(3, timeout=20)

    def begin_of(_: int, slot: memoryview) -> int:
        meeting.wait()
        assert slot.nbytes == num_bytes
        return address_of(slot)

    with Slots(num_bytes) as slots:
        begins = sorted(slots.map(begin_of, range(3)))
    assert min(after - before for before, after in pairwise(begins)) >= num_bytes
