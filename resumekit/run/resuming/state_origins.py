"""Maps each rank to the per-rank state it loads, also after a world-size change."""

from __future__ import annotations

from dataclasses import dataclass

from resumekit.distributed import DataRanks, Groups, World
from resumekit.errors import StateMismatchError
from resumekit.run.agreement import ComponentGroups, recorded_data_ranks
from resumekit.run.options import Options, is_per_rank
from resumekit.state import SharingPattern, WorldChange
from resumekit.storage.manifest import ComponentRecord, Manifest

# In a manifest's details: the components that are per rank because of the option.
PER_RANK_KEYS = "per_rank"

# By whether the option ``per_rank`` names a component.
_STATES = {True: "one state for each rank", False: "one state for all ranks"}

# One state for the job.
_OF_THE_JOB = frozenset({SharingPattern.GLOBAL.value, SharingPattern.REPLICATED.value})


@dataclass(frozen=True)
class StateOrigin:
    """Which of the states of a component, as the former ranks or groups wrote them, a rank takes.

    Args:
        writers: the rank that wrote each state, by its number.
        readable: the numbers of the states of which this rank's state may be made.
        change: the ranks or groups then and now; None where the component is not known yet.
    """

    writers: tuple[int, ...]
    readable: tuple[int, ...]
    change: WorldChange | None = None

    @property
    def own_number(self) -> int | None:
        """The number of the state that this rank takes; None where states are resharded."""
        change = self.change
        if change is None or change.world_size != change.former_world_size:
            return None
        return change.rank


@dataclass(frozen=True)
class StateOrigins:
    """Who takes which of the states that the former ranks or groups wrote.

    They are numbered: ranks by their data-parallel rank, so that ranks which took the
    same data count as one; groups in their order; the only state of a job is number 0.

    Args:
        world: the ranks.
        data_ranks: the data-parallel rank of each rank.
        membership: the groups of the components that are known.
        options: whether the number of ranks may be another one, and ``per_rank``.
    """

    world: World
    data_ranks: DataRanks
    membership: ComponentGroups
    options: Options

    def of(self, record: ComponentRecord, manifest: Manifest) -> StateOrigin:
        """The origin of this rank's state of a component.

        Raises:
            CorruptCheckpointError: the manifest's data-parallel ranks make no sense.
            StateMismatchError: the ranks or groups are others, and that is not allowed.
        """
        was_named = self.check_option(record, manifest)
        if record.pattern in _OF_THE_JOB:
            return StateOrigin(record.writers, (0,), WorldChange(0, 1, 1))
        if record.pattern == SharingPattern.PER_RANK.value:
            return self._of_ranks(record, manifest, by_data=not was_named)
        numbers = tuple(range(len(record.writers)))
        if record.key not in self.membership:
            return StateOrigin(record.writers, numbers)
        groups = self.membership.groups(record.key)
        if manifest.world_size == self.world.world_size and groups != record.groups:
            raise StateMismatchError(
                record.key,
                found=f"the groups of ranks {_listed(groups)}",
                expected=f"{_listed(record.groups)}, as in the checkpoint",
                remedy="Form the groups as when it was saved",
            )
        ordinal = self.membership.ordinal(record.key)
        change = WorldChange(ordinal, len(groups), len(record.groups))
        return StateOrigin(record.writers, numbers, change)

    def check_option(self, record: ComponentRecord, manifest: Manifest) -> bool:
        """Checks that the option ``per_rank`` leaves no rank without its state.

        One state of all ranks is that of each rank, as long as their number is the same.

        Returns:
            Whether the option named the component when it was saved.

        Raises:
            StateMismatchError: a rank would have none.
        """
        recorded = manifest.details.get(PER_RANK_KEYS)
        was_named = isinstance(recorded, list) and record.key in recorded
        if not was_named and record.pattern not in _OF_THE_JOB:
            return False
        now, then = self.world.world_size, manifest.world_size
        is_named = is_per_rank(self.options.per_rank, record.key)
        fits = is_named and now == then if was_named else not is_named or now in (1, then)
        if not fits:
            option = f" and pass per_rank={{{record.key!r}}}" if was_named else ""
            raise StateMismatchError(
                record.key,
                found=f"a job of {now} ranks with {_STATES[is_named]}",
                expected=f"{then} ranks with {_STATES[was_named]}, as in the checkpoint",
                remedy=f"Launch with {then} ranks{option}, or pass "
                f"exclude={{{record.key!r}}} to keep its live state",
            )
        return was_named

    def _of_ranks(
        self, record: ComponentRecord, manifest: Manifest, *, by_data: bool
    ) -> StateOrigin:
        now, then = self.world.world_size, manifest.world_size
        former = recorded_data_ranks(manifest)
        if now == then and (self.data_ranks == former or not by_data):
            every = tuple(range(then))
            return StateOrigin(every, every, WorldChange(self.world.rank, now, then))
        if "world_size" not in self.options.allow_changes:
            raise StateMismatchError(
                record.key,
                found=f"a job of {_counted(now, self.data_ranks)}",
                expected=f"{_counted(then, former)}, as in the checkpoint",
                remedy=f"Launch it as it was, with {then} ranks, or pass "
                "allow_changes={'world_size'}",
            )
        own_rank = self.data_ranks.of_ranks[self.world.rank]
        change = WorldChange(own_rank, self.data_ranks.number, former.number)
        return StateOrigin(former.first_ranks, change.readable, change)


def _counted(world_size: int, data_ranks: DataRanks) -> str:
    words = f"{world_size} ranks"
    number = data_ranks.number
    return words if number == world_size else f"{words} that share {number} parts"


def _listed(groups: Groups) -> str:
    return ", ".join(str(list(group)) for group in groups)
