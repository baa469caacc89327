"""A disk in memory: inodes, and directories that name them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePath

ROOT = 0


@dataclass
class FileNode:
    """An inode with bytes, which copies of the disk share."""

    data: bytes = b""

    def flip(self, position: int, mask: int = 1) -> None:
        """Changes bits of one byte."""
        changed = bytearray(self.data)
        changed[position] ^= mask
        self.data = bytes(changed)


@dataclass
class DirectoryNode:
    """An inode with names."""

    entries: dict[str, int] = field(default_factory=dict)


Node = FileNode | DirectoryNode


@dataclass
class Disk:
    """Every inode of one machine, reachable or not. Inode 0 is the root directory."""

    nodes: dict[int, Node] = field(default_factory=lambda: {ROOT: DirectoryNode()})

    def add(self, node: Node) -> int:
        """The number of a new inode that no directory names yet."""
        number = max(self.nodes) + 1
        self.nodes[number] = node
        return number

    def directory(self, number: int) -> DirectoryNode:
        """The directory with this inode number."""
        node = self.nodes[number]
        assert isinstance(node, DirectoryNode)
        return node

    def file(self, number: int) -> FileNode:
        """The file with this inode number."""
        node = self.nodes[number]
        assert isinstance(node, FileNode)
        return node

    def find(self, path: PurePath) -> int:
        """The inode at an absolute path.

        Raises:
            FileNotFoundError, NotADirectoryError: as the kernel would.
        """
        number = ROOT
        for part in path.parts[1:]:
            node = self.nodes[number]
            if not isinstance(node, DirectoryNode):
                raise _error(errno.ENOTDIR, path)
            if part not in node.entries:
                raise _error(errno.ENOENT, path)
            number = node.entries[part]
        return number

    def find_directory(self, path: PurePath) -> int:
        """The directory at an absolute path."""
        number = self.find(path)
        if not isinstance(self.nodes[number], DirectoryNode):
            raise _error(errno.ENOTDIR, path)
        return number

    def make_directories(self, path: Path) -> int:
        """The directory at this path, made with its parents; part of the disk from the start."""
        number = ROOT
        for part in path.parts[1:]:
            entries = self.directory(number).entries
            if part not in entries:
                entries[part] = self.add(DirectoryNode())
            number = entries[part]
        return number

    def walk(self, number: int = ROOT, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Every reachable path below a directory with its inode, names sorted."""
        for name, child in sorted(self.directory(number).entries.items()):
            path = f"{prefix}/{name}"
            yield path, child
            if isinstance(self.nodes[child], DirectoryNode):
                yield from self.walk(child, path)

    def copy(self) -> Disk:
        """The same disk, sharing nothing."""
        copied = Disk({})
        for number, node in self.nodes.items():
            if isinstance(node, FileNode):
                copied.nodes[number] = FileNode(node.data)
            else:
                copied.nodes[number] = DirectoryNode(dict(node.entries))
        return copied

    def files(self) -> dict[str, bytes]:
        """The bytes of every reachable file by path."""
        return {
            path: node.data
            for path, number in self.walk()
            if isinstance(node := self.nodes[number], FileNode)
        }


def _error(number: int, path: PurePath) -> OSError:
    return OSError(number, os.strerror(number), str(path))
