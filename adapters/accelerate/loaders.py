"""Accelerate's loaders: what one draws from, and the state of those that no loop draws from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypedDict

from torch.utils.data import BatchSampler, IterableDataset

from resumekit.adapters.accelerate._private import IS_FIRST, ITERATION
from resumekit.capture.rng import GeneratorState, generator_state, set_generator_state
from resumekit.data.loader_traits import LoaderTraits, is_seeded_by_epoch
from resumekit.data.source import Source
from resumekit.state import AfterRng, Checked, Count, Resplit, Slot, WorldChange

KEY = f"{Slot.CALLBACKS.value}/loaders"


def origin_of(loader: Any) -> tuple[int, int | None]:
    """The id of what a loader draws from, and how many batches it skips; None where it cannot."""
    # accelerate 1.15 data_loader.py skip_first_batches makes a loader over the same batch sampler,
    # in a SkipBatchSampler, or, of a stream, over the same dataset, with `skip_batches`.
    sampler, dataset = getattr(loader, "sampler", None), getattr(loader, "dataset", None)
    is_batch_sampler = isinstance(sampler, BatchSampler)
    drawn: Any = sampler if is_batch_sampler else getattr(loader, "batch_sampler", None)
    found = [loader]
    while hasattr(drawn, "skip_batches"):
        found.append(drawn)
        drawn = drawn.batch_sampler
    counts = [each.skip_batches for each in found if hasattr(each, "skip_batches")]
    drawn = dataset if isinstance(dataset, IterableDataset) else drawn
    return id(drawn), sum(counts) if counts else None


class _PlainState(TypedDict):
    iteration: Count
    generators: dict[str, GeneratorState]


class _LoaderState(_PlainState, total=False):
    has_begun: bool  # of a stateful loader


_LoadersState = TypedDict(  # noqa: UP013 - only stored names
    "_LoadersState", {"num_loaders": Count, "beside": dict[str, _LoaderState]}
)


class OtherLoaders(Checked, AfterRng):
    """The number of iterations and the generators of loaders that no loop draws from.

    Both decide the next order. accelerate 1.15 data_loader.py: for several ranks
    ``prepare_data_loader`` gives a sampler that shuffles a generator of its own.

    Args:
        loaders: all that were prepared.
        sources: gives what the loops draw from.
    """

    schema = _LoadersState

    def __init__(self, loaders: list[Any], sources: Callable[[], Collection[Source]]) -> None:
        self._loaders = loaders
        self._sources = sources
        self._drawn_before: frozenset[int] = frozenset()  # in the interrupted run
        self._pending: dict[str, Any] | None = None  # until the RNG states are restored

    def state_dict(self) -> dict[str, Any]:
        """By the order in which they were prepared; without generators that a loop draws from."""
        if self._pending is not None:
            return self._pending
        others = {str(number): _state(*each) for number, *each in self._others()}
        return {"num_loaders": len(self._loaders), "beside": others}

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Keeps the state until ``after_rng_restore``: a script may evaluate before it trains."""
        self._pending = dict(state)
        numbers = {str(number) for number in range(state["num_loaders"])}
        self._drawn_before = frozenset(map(int, numbers - state["beside"].keys()))
        return ()

    def resplit_state_dict(self, states: Mapping[int, Any], change: WorldChange) -> Resplit:
        """The same rank's; a new rank gets rank 0's, as Accelerate synchronizes them."""
        return dict(states.get(change.rank, states[0])), ()

    def after_rng_restore(self) -> None:
        """Their next iteration has the order that it has in the interrupted run."""
        pending, self._pending = self._pending, None
        states = {} if pending is None else pending["beside"]
        for number, loader, generators in self._others():
            state = states.get(str(number))
            if state is not None:
                ITERATION.write(loader, state["iteration"])
                if IS_FIRST.of(loader) and state.get("has_begun", False):
                    loader.base_dataloader.load_state_dict({})  # drops the first iterator
                for name in generators.keys() & state["generators"].keys():
                    set_generator_state(generators[name], state["generators"][name])

    def _others(self) -> Iterator[tuple[int, Any, dict[str, Any]]]:
        """Number, loader and generators of each."""
        drawn = self._sources()
        taken = {id(each) for source in drawn for each in source.private.values()}
        for number, loader in enumerate(self._loaders):
            is_drawn = any(loader is source.loader for source in drawn)
            if not is_drawn and number not in self._drawn_before:
                yield number, loader, _generators(loader, taken)


def _generators(loader: Any, taken: Collection[int]) -> dict[str, Any]:
    """By name, without those that were taken or are seeded each time."""
    traits = LoaderTraits.of(loader)  # asked again: nothing says that it stays as it is
    seeded = [each for each in traits.samplers.values() if is_seeded_by_epoch(each)]
    others = {*taken, *(id(sampler.generator) for sampler in seeded)}
    found = traits.stateful_generators.items()
    return {name: each for name, each in found if id(each) not in others}


def _state(loader: Any, generators: Mapping[str, Any]) -> dict[str, Any]:
    states = {name: generator_state(each) for name, each in generators.items()}
    found = {"iteration": ITERATION.of(loader), "generators": states}
    return found if IS_FIRST.of(loader) in (None, True) else {**found, "has_begun": True}
