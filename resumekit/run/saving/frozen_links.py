"""Which earlier files of frozen tensors a new checkpoint links to, instead of writing them again.

A save links to the checkpoint before the last, never to the last. So two consecutive checkpoints
have separate copies, and damage of one copy leaves every other checkpoint intact. An earlier launch
is never linked to: nobody has read its files since. After a save that has failed, two are written
again: where only its last sync failed, its checkpoint stays, and may share a file. With
``keep_latest=1`` no second copy would stay, and nothing is linked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from resumekit.serialization import ExtraFiles, FrozenFiles, Payload, ShardedPayload
from resumekit.storage import FileEntry, RetentionPolicy, Staging, StepName

AnyPayload = Payload | ShardedPayload | ExtraFiles | FrozenFiles


class FrozenLinks:
    """The files of frozen tensors in the last two checkpoints of this launch, on one rank.

    Args:
        retention: of the run.
    """

    def __init__(self, retention: RetentionPolicy) -> None:
        self._is_enabled = retention.keep_latest is None or retention.keep_latest > 1
        self._committed: deque[tuple[StepName, Mapping[str, FileEntry]]] = deque(maxlen=2)
        self._is_open = False  # a save has begun, and is not durable yet

    @contextmanager
    def compared(
        self, step: int, payloads: Sequence[AnyPayload], *, num_threads: int
    ) -> Iterator[None]:
        """Compares frozen tensors with earlier files during the body, which links equal ones.

        Args:
            step: of the new checkpoint.
            payloads: of this rank; those without frozen tensors are left alone.
            num_threads: that digest.
        """
        if self._is_open:  # that save has failed, and may have left its checkpoint all the same
            self._committed.clear()
        self._is_open = True
        frozen = [each for each in payloads if isinstance(each, FrozenFiles)]
        try:
            for each in frozen:
                source = self._source(step, each.path)
                if source is not None:
                    each.compare(*source, num_threads=num_threads)
            yield
        finally:
            for each in frozen:
                each.stop()

    def committed(self, name: StepName, files: Iterable[FileEntry]) -> None:
        """A checkpoint is durable.

        Args:
            name: of the checkpoint.
            files: that this rank has written or linked.
        """
        self._is_open = False
        self._committed.append((name, {entry.path: entry for entry in files}))

    def _source(self, step: int, path: str) -> tuple[StepName, FileEntry] | None:
        if not self._is_enabled or len(self._committed) < 2:
            return None
        (name, before), (last, latest) = self._committed
        entry = before.get(path)
        # The same step saved again replaces the last checkpoint, and its copy.
        if entry is None or entry != latest.get(path) or last.step == step:
            return None
        return name, entry


def finish_comparing(payloads: Iterable[AnyPayload]) -> None:
    """Waits for the comparisons: only then is it known which files need memory."""
    for each in payloads:
        if isinstance(each, FrozenFiles):
            each.finish_comparing()


def link(staging: Staging, payloads: Iterable[AnyPayload]) -> None:
    """Links the files that are equal; one that cannot be linked will be written."""
    for each in payloads:
        if isinstance(each, FrozenFiles):
            each.link(staging)


def with_frozen(payloads: Sequence[Payload | ShardedPayload | ExtraFiles]) -> list[AnyPayload]:
    """The payloads, then the files of their frozen tensors, which are digested meanwhile."""
    frozen = [each.frozen for each in payloads if not isinstance(each, ExtraFiles)]
    return [*payloads, *(each for each in frozen if each is not None)]
