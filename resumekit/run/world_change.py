"""Maps each rank to the per-rank state it loads, also after a world-size change."""

from __future__ import annotations

from resumekit.distributed import DataRanks, Groups, World, WorldChange
from resumekit.errors import StateMismatchError
from resumekit.run.agreement import ComponentGroups, recorded_data_ranks
from resumekit.state import SharingPattern
from resumekit.storage import ComponentRecord, Manifest

# One state for the job.
_OF_THE_JOB = frozenset({SharingPattern.GLOBAL.value, SharingPattern.REPLICATED.value})


class StateOrigins:
    """Who takes which of the states that the former ranks or groups wrote.

    They are numbered: ranks by their data-parallel rank, so that ranks which took the
    same data count as one; groups in their order; the only state of a job is number 0.

    Args:
        world: the ranks.
        data_ranks: the data-parallel rank of each rank.
        membership: the groups of the components that are known.
        may_change: whether the number of ranks may be another one.
    """

    def __init__(
        self, world: World, data_ranks: DataRanks, membership: ComponentGroups, *, may_change: bool
    ) -> None:
        self._world = world
        self._data_ranks = data_ranks
        self._membership = membership
        self._may_change = may_change

    def writers(self, record: ComponentRecord, manifest: Manifest) -> tuple[int, ...]:
        """The rank that wrote each state of a component, by its number.

        Raises:
            CorruptCheckpointError: the manifest's data-parallel ranks make no sense.
            StateMismatchError: the ranks are others, and that is not allowed.
        """
        if record.pattern != SharingPattern.PER_RANK.value:
            return record.writers
        if self._is_same_job(record, manifest):
            return tuple(range(manifest.world_size))
        return recorded_data_ranks(manifest).first_ranks

    def own_number(self, record: ComponentRecord, manifest: Manifest) -> int | None:
        """The number of the state that this rank takes.

        Returns:
            None where states have to be resharded, or where the component is not known yet.

        Raises:
            StateMismatchError: the ranks or groups are others, and that is not allowed.
        """
        if record.pattern in _OF_THE_JOB:
            return 0
        if record.pattern == SharingPattern.PER_RANK.value:
            if self._is_same_job(record, manifest):
                return self._world.rank
            change = self.change(record, manifest)
            return change.rank if change.world_size == change.former_world_size else None
        if record.key not in self._membership:
            return None
        self._require_same_groups(record, manifest)
        same_number = len(self._membership.groups(record.key)) == len(record.groups)
        return self._membership.ordinal(record.key) if same_number else None

    def readable(self, record: ComponentRecord, manifest: Manifest) -> tuple[int, ...]:
        """The numbers of the states of which this rank's state may be made."""
        if record.pattern == SharingPattern.PER_RANK.value:
            return self.change(record, manifest).readable
        return tuple(range(len(record.writers)))

    def change(self, record: ComponentRecord, manifest: Manifest) -> WorldChange:
        """What has become of the number of ranks or groups."""
        if record.pattern == SharingPattern.PER_RANK.value:
            own_rank = self._data_ranks.of_ranks[self._world.rank]
            return WorldChange(
                own_rank, self._data_ranks.number, recorded_data_ranks(manifest).number
            )
        groups = self._membership.groups(record.key)
        ordinal = self._membership.ordinal(record.key)
        return WorldChange(ordinal, len(groups), len(record.groups))

    def _is_same_job(self, record: ComponentRecord, manifest: Manifest) -> bool:
        now, then = self._world.world_size, manifest.world_size
        if now == then and self._data_ranks == recorded_data_ranks(manifest):
            return True
        if not self._may_change:
            raise StateMismatchError(
                record.key,
                found=f"a job of {_counted(now, self._data_ranks)}",
                expected=f"{_counted(then, recorded_data_ranks(manifest))}, as in the checkpoint",
                remedy=f"Launch it as it was, with {then} ranks, or pass "
                "allow_changes={'world_size'}",
            )
        return False

    def _require_same_groups(self, record: ComponentRecord, manifest: Manifest) -> None:
        groups = self._membership.groups(record.key)
        if manifest.world_size == self._world.world_size and groups != record.groups:
            raise StateMismatchError(
                record.key,
                found=f"the groups of ranks {_listed(groups)}",
                expected=f"{_listed(record.groups)}, as in the checkpoint",
                remedy="Form the groups as when it was saved",
            )


def _counted(world_size: int, data_ranks: DataRanks) -> str:
    words = f"{world_size} ranks"
    number = data_ranks.number
    return words if number == world_size else f"{words} that share {number} parts"


def _listed(groups: Groups) -> str:
    return ", ".join(str(list(group)) for group in groups)
