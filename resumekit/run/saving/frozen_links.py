"""Which earlier files of frozen tensors a new checkpoint links to, instead of writing them again.

A save links to the checkpoint before the last, never to the last. So two consecutive checkpoints
have separate copies, and damage of one copy leaves every other checkpoint intact. An earlier launch
is never linked to: nobody has read its files since. With ``keep_latest=1`` no second copy would
stay, and nothing is linked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

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

    def find(self, step: int, payloads: Iterable[AnyPayload]) -> None:
        """Marks the files that are the same as before: they take up no space again.

        Args:
            step: of the new checkpoint.
            payloads: of this rank; the others are left alone.
        """
        for each in payloads:
            if isinstance(each, FrozenFiles):
                source = self._source(step, each.path)
                if source is not None:
                    each.compare(*source)

    def link(self, staging: Staging, payloads: Iterable[AnyPayload]) -> None:
        """Links the files that ``find`` has marked; a file that cannot be linked is written."""
        for each in payloads:
            if isinstance(each, FrozenFiles):
                each.link(staging)

    def committed(self, name: StepName, files: Iterable[FileEntry]) -> None:
        """A checkpoint is durable.

        Args:
            name: of the checkpoint.
            files: that this rank has written or linked.
        """
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


def with_frozen(payloads: Sequence[Payload | ShardedPayload | ExtraFiles]) -> list[AnyPayload]:
    """The payloads, each followed by the files of its frozen tensors."""
    found: list[AnyPayload] = []
    for each in payloads:
        found.append(each)
        if not isinstance(each, ExtraFiles) and each.frozen is not None:
            found.append(each.frozen)
    return found
