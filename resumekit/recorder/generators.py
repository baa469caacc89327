"""Where each random generator is in its sequence of numbers.

The digest of a state says whether two runs have the same one. The position says by how many draws
they differ: the words of a Mersenne Twister stay the same for 624 draws.
"""

from __future__ import annotations

import random
import struct

import numpy as np
import torch
import xxhash

from resumekit.record.trace import device_states

# torch 2.13 aten/src/ATen/CPUGeneratorImpl.cpp CPUGeneratorImplStateLegacy: seed, left, seeded,
# next, then the words.
_CPU_HEADER = struct.Struct("<QiiQ")
_NUM_WORDS = 624
_SEED_AND_OFFSET = struct.Struct("<QQ")


def rng_positions() -> dict[str, tuple[str, int]]:
    """A digest of each generator's words, and the index of the next one, by its name.

    Names are those of ``rng_digests``. Of CUDA's and XPU's generators it is the seed and the
    offset. A generator of another kind is left out.
    """
    _, words, _ = random.getstate()
    block = struct.pack(f"{_NUM_WORDS}I", *words[:-1])
    positions = {"python": (xxhash.xxh3_64_hexdigest(block), words[-1])}
    state = np.random.get_state(legacy=False)
    if state["bit_generator"] == "MT19937":
        inner = state["state"]
        positions["numpy"] = (xxhash.xxh3_64_hexdigest(inner["key"].tobytes()), int(inner["pos"]))
    cpu = torch.get_rng_state().numpy().tobytes()
    _, _, _, following = _CPU_HEADER.unpack_from(cpu)
    words_of_cpu = cpu[_CPU_HEADER.size : _CPU_HEADER.size + 8 * _NUM_WORDS]
    positions["torch"] = (xxhash.xxh3_64_hexdigest(words_of_cpu), following)
    for name, of_device in device_states().items():
        # CUDAGeneratorImpl.cpp, XPUGeneratorImpl.cpp: the seed and the offset, 8 bytes each.
        if len(of_device) == _SEED_AND_OFFSET.size:
            seed, offset = _SEED_AND_OFFSET.unpack(of_device)
            positions[name] = (str(seed), offset)
    return positions
