"""The digest of a file: xxh3-128 of the xxh3-128 digests of its blocks.

Blocks are verified one by one as they are read, in any order and by several threads, and one short
line in the manifest covers every byte. It detects damage and mix-ups, not an attacker.

Source: the XXH3 128-bit hash of https://github.com/Cyan4973/xxHash in its canonical (big-endian)
form, seed 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import xxhash

BLOCK_BYTES = 4 << 20
ALGORITHM = "xxh3-128/4MiB"

_DIGEST = re.compile(r"[0-9a-f]{32}")


def is_digest(text: str) -> bool:
    """Whether this is a digest: 32 lower-case hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


def combine(blocks: Iterable[bytes]) -> str:
    """The file digest of these raw block digests, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(b"".join(blocks))


def digest_of_block(parts: Iterable[memoryview]) -> bytes:
    """The raw digest of one block, whose bytes are those of these parts."""
    digester = xxhash.xxh3_128()
    for part in parts:
        digester.update(part)
    return digester.digest()


class BlockDigester:
    """The digest of a file whose bytes arrive piece by piece."""

    def __init__(self) -> None:
        self._full: list[bytes] = []
        self._open = xxhash.xxh3_128()
        self._open_bytes = 0

    def update(self, buffer: memoryview) -> None:
        """Takes the next bytes (flat, unsigned bytes)."""
        offset = 0
        while offset < buffer.nbytes:
            piece = buffer[offset : offset + BLOCK_BYTES - self._open_bytes]
            offset += piece.nbytes
            self._open.update(piece)
            self._open_bytes += piece.nbytes
            if self._open_bytes == BLOCK_BYTES:
                self._full.append(self._open.digest())
                self._open.reset()
                self._open_bytes = 0

    @property
    def blocks(self) -> list[bytes]:
        """The raw digest of every block so far; the last one may be short."""
        return [*self._full, self._open.digest()] if self._open_bytes else list(self._full)

    def hexdigest(self) -> str:
        """The file digest of all bytes so far, as 32 hexadecimal digits."""
        return combine(self.blocks)
