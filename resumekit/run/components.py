"""The components of a run: those that are given, those derived from them, and the core's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar
from weakref import WeakMethod

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from resumekit.capture.ddp_buckets import bucket_components
from resumekit.capture.gradients import AccumulatedGradients, gradient_states, require_gradients
from resumekit.capture.objects import Extras
from resumekit.capture.optimizer import OptimizerState
from resumekit.capture.slots import parameter_components, stack_own_tensors
from resumekit.capture.stacking import StackedByRank
from resumekit.capture.user_state.attributes import Holder, ValueSlot
from resumekit.capture.user_state.user_state import UserState
from resumekit.capture.user_state.value_types import (
    Kind,
    class_of,
    is_user_object,
    kind_of,
    top_package,
)
from resumekit.data.keyed import SEED, RunSeed
from resumekit.data.position import DataPosition, Feed
from resumekit.data.source import user_objects
from resumekit.distributed import World
from resumekit.errors import ConfigurationError
from resumekit.record.trace import injected_components
from resumekit.run.loop_variables import LoopVariables
from resumekit.run.options import Options, is_per_rank, names_component
from resumekit.run.progress import BestSelection, Counters
from resumekit.run.randomness import RandomState
from resumekit.serialization.planning import encode_local
from resumekit.state import (
    ComponentState,
    SharingPattern,
    Slot,
    StateComponent,
    Stateful,
    check_components,
    states_of,
)

T = TypeVar("T")

_PER_RANK = SharingPattern.PER_RANK

# The user states that follow functions, classes and globals: of a loop of the user's, which is the
# first of them, or of a framework's.
_LEADERS = (Slot.VARIABLES.value, f"{Slot.CALLBACKS.value}/attributes")
# The slots whose states the script's constructors determine, but for their tensors and numbers.
_BUILT = (Slot.OPTIMIZER.value, Slot.LR_SCHEDULER.value)
_GIVEN = (*_BUILT, Slot.MODEL.value, Slot.GRAD_SCALER.value, Slot.EMA.value)
_MAX_CONTENT = 4 * 10**6  # bytes of what a loader is built from in each epoch; more is compared


def weakly(method: Callable[..., T], otherwise: T) -> Callable[..., T]:
    """A bound method that does not keep its object.

    A run that refers to itself would outlive the loop that abandoned it until the next garbage
    collection, with the lock of its directory and the workers of its loaders.

    Args:
        method: the bound method.
        otherwise: what a call gives when the object has gone.
    """
    found = WeakMethod(method)

    def call(*arguments: Any) -> T:
        alive = found()
        return otherwise if alive is None else alive(*arguments)

    return call


class RunComponents:
    """Makes the components of a run, and adds those of state that appears during training.

    Args:
        options: of the run.
        extras: the user's live dict.
        generators: private random generators by name.
        rank: of this process.
        num_ranks: of the job; in one process the option ``per_rank`` changes nothing.

    Attributes:
        all: the components as they are now.
        per_rank: the keys of those that are per rank because of the option.
        counters: the component ``progress``.
        seed: of keyed randomness, or None.
        position: the component ``data``.
        rng: the component ``rng``.
        selection: the component ``best_metric``.
        variables: the component ``variables``.
    """

    def __init__(
        self,
        options: Options,
        extras: dict[str, Any],
        generators: Mapping[str, Any],
        *,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self._options = options
        self._ranks = StackedByRank(rank, num_ranks)
        self.per_rank: set[str] = set()
        self._extras, self._generators = extras, generators
        self.counters = Counters()
        self.seed = RunSeed(generators.values()) if options.randomness == "keyed" else None
        self.position = DataPosition(self.seed, allowed_changes=options.allow_changes)
        self.rng = RandomState(generators, self.position)
        self.selection = BestSelection(options.best_metric, options.mode)
        self.all: tuple[StateComponent, ...] = ()
        self._loader_state = UserState(
            {}, key="data/attributes", grows=True, foreign=weakly(self._objects_of_others, [])
        )
        self._stream_states: dict[frozenset[str], UserState] = {}  # by the objects' names
        self._gradients: tuple[AccumulatedGradients, ...] = ()  # saved where they are needed
        self.variables = LoopVariables(
            options.loop_variables,
            foreign=weakly(self._saved_elsewhere, []),
            named=weakly(self._given_objects, {}),
        )
        self.variables.saved_twice = self._loader_state.saved_parts
        self.position.follow_content = weakly(self._follow_content, None)
        per_rank, job = _PER_RANK, SharingPattern.GLOBAL
        self._core = [
            *([] if self.seed is None else [StateComponent(SEED, self.seed, job)]),
            StateComponent(Slot.DATA.value, self.position, per_rank),
            self._loader_state.component(),
            StateComponent(Slot.RNG.value, self.rng, per_rank),
            StateComponent(Slot.PROGRESS.value, self.counters, job),
            StateComponent(Slot.BEST_METRIC.value, self.selection, job),
            StateComponent(Slot.EXTRAS.value, Extras(extras), job),
            self.variables.component(),
        ]

    def leave_out_variables(self) -> None:
        """No component ``variables``: the loop is not the user's."""
        self._core = [each for each in self._core if each.stateful is not self.variables]
        self.variables.turn_off()

    def set_given(
        self, components: Sequence[StateComponent], *, gradients: Collection[str] = ()
    ) -> None:
        """Makes ``all`` from the components that an adapter gives.

        Args:
            components: of the adapter.
            gradients: the keys of gradients that the checkpoint holds.

        Raises:
            ConfigurationError: ``per_rank`` names a component that is sharded as a whole.
        """
        options, given = self._options, {each.key for each in components}
        derived = (*bucket_components(components), *parameter_components(components))
        added = tuple(each for each in derived if each.key not in given)
        for user_state in states_of((*components, *self._core), UserState):
            user_state.configure(options.transient, options.user_state_limit)
        if options.saves_gradients:
            require_gradients(components)
        summed = gradient_states([*components, *added], self.counters.is_within_window)
        self._gradients = tuple(each for each in summed if each.key not in given)
        is_every = options.saves_gradients
        needed = (each for each in self._gradients if is_every or each.key in gradients)
        added += tuple(each.component() for each in needed)
        self.all = self._with_option(check_components([*components, *added, *self._core]))
        extras = [each for each in self.all if each.key == Slot.EXTRAS.value]
        for leader in (each for each in states_of(self.all, UserState) if each.key in _LEADERS):
            # A framework's adapter names the objects of its components itself.
            is_loop = leader.key == Slot.VARIABLES.value
            roots = _roots_of(components, with_objects=is_loop) | _roots_of(extras)
            leader.declared = {**leader.declared, **{n: (n.partition("[")[0],) for n in roots}}
            leader.lead(roots, weakly(self._code_of_others, []))
        left_out = frozenset(options.exclude) | injected_components()
        for each in states_of(self.all, UserState):
            each.leave_alone(partial(names_component, left_out))

    def check_named(self) -> None:
        """Checks that each name in the option ``per_rank`` is that of a component.

        Raises:
            ConfigurationError: one is not; lists the components.
        """
        keys = [each.key for each in self.all]
        for name in self._options.per_rank:
            if not any(names_component((name,), key) for key in keys):
                raise ConfigurationError(
                    "per_rank",
                    found=f"no component of this run is called {name!r}",
                    expected=f"some of {', '.join(keys)}",
                )

    def check_storable(self) -> None:
        """Checks that a save can store what the script has built: optimizers, schedulers, extras.

        The states of objects in extras are left to the save: some streams begin when asked for one.

        Raises:
            UnsupportedValueError: a value cannot be stored; names its path.
        """
        given = {k: each for k, each in self._extras.items() if not isinstance(each, Stateful)}
        encode_local(Slot.EXTRAS.value, {"values": given})
        for each in self.all:
            if each.slot in _BUILT and each.sharing_pattern is not SharingPattern.SHARDED:
                encode_local(each.key, each.state.state_dict())

    def add_late(self, world: World) -> bool:
        """Adds the components of state that came into being after the start. Collective.

        Returns:
            Whether there are any.
        """
        found: dict[str, StateComponent] = {}

        def find() -> list[str]:
            known = {each.key for each in self.all}
            late = [p for p in parameter_components(self.all) if p.key not in known]
            self._gradients += gradient_states(late, self.counters.is_within_window)
            gradients = (each.component() for each in self._gradients)
            found.update({each.key: each for each in (*late, *gradients)})
            needed = (each.key for each in self._gradients if each.is_needed)
            return [key for key in (*(each.key for each in late), *needed) if key not in known]

        keys = dict.fromkeys(key for keys_of_rank in world.everywhere(find) for key in keys_of_rank)
        if keys:
            late = (found[key] for key in keys if key in found)
            self.all = self._with_option(check_components([*self.all, *late]))
        return bool(keys)

    def _with_option(self, components: Iterable[StateComponent]) -> tuple[StateComponent, ...]:
        """The components; of those that ``per_rank`` names each rank has its own state.

        Of a sharded one each rank has its own values of what is not sharded.

        Raises:
            ConfigurationError: one of them is sharded as a whole, or shared within groups.
        """
        found: list[StateComponent] = []
        for each in components:
            pattern = each.sharing_pattern
            if not is_per_rank(self._options.per_rank, each.key) or pattern is _PER_RANK:
                found.append(each)
                continue
            is_whole = pattern in (SharingPattern.GLOBAL, SharingPattern.REPLICATED)
            if not (is_whole or stack_own_tensors(each, self._ranks)):
                raise ConfigurationError(
                    "per_rank",
                    found=f"{each.key} is {SharingPattern(pattern).value}",
                    expected="components with one state for all ranks, or unsharded parameters",
                    remedy="Leave it out: each rank or group saves its part",
                )
            if self._ranks.num_ranks > 1:
                self.per_rank.add(each.key)
                # The files of a model describe one state of all ranks.
                pattern = _PER_RANK if is_whole else pattern
                each = replace(each, sharing_pattern=pattern, files=None)
            found.append(each)
        return tuple(found)

    # ---------------------------------------------------------------- gradients

    def observe_gradients(self) -> None:
        """A step boundary: looks whether the gradients outlive their step."""
        for each in self._gradients:
            each.watch.observe()

    def gradients_resumed(self, restored: Collection[str]) -> None:
        """A checkpoint was loaded: it needed no gradients but those of these keys."""
        for each in self._gradients:
            if self.counters.step and each.key not in restored:
                each.watch.inherit()

    def gradients_saved(self) -> None:
        """A checkpoint was written; within an accumulation window the gradients outlive it."""
        if not self.counters.is_within_window():
            for each in self._gradients:
                each.watch.saved()

    # ---------------------------------------------------------------- user objects

    def follow(self, feed: Feed, *, streams: bool) -> None:
        """Takes the objects of a loader as user state.

        Args:
            feed: the loader, or several.
            streams: whether what its streams read is taken as well.
        """
        for source in feed.sources:
            self._loader_state.add(user_objects(source), self.variables.first_of)
            if streams:
                source.follow_objects(self._follow_stream)
                source.watch_models(self._trained_parameters)

    def _follow_stream(self, objects: Mapping[str, Holder], *, is_kept: bool = True) -> UserState:
        """The user state of what a loader reads; modules are not set to what they were then.

        Args:
            objects: by name.
            is_kept: a loader that is built again in each epoch keeps the baseline of the first one:
                a resumed process has made no other.
        """
        names = frozenset(objects)
        if is_kept and names in self._stream_states:
            self._stream_states[names].replace(objects)
            return self._stream_states[names]
        state = UserState({}, key=Slot.DATA.value, foreign=weakly(self._modules_of_others, []))
        state.configure(self._options.transient, self._options.user_state_limit)
        state.add(objects, self._first_of)
        if is_kept:
            self._stream_states[names] = state
        else:  # what user state sets before the objects are set to what they were
            state.always = self._loader_state.waiting_paths()
        return state

    def _first_of(self, owner: Any, slot: ValueSlot) -> Any:
        """The digest that a slot had at first, where a component has restored it already."""
        others = (e for e in states_of(self.all, UserState) if e is not self._loader_state)
        return next(filter(None, (each.first_of(owner, slot) for each in others)), None)

    def _follow_content(self, loader: Any) -> UserState | None:
        """The user state of what a loader is built from that the script has built in the epoch."""
        former = self.variables.objects_before_epoch()
        if former is None or id(loader) in former or type(loader) is not DataLoader:
            return None
        parts = {name: getattr(loader, name) for name in ("dataset", "sampler", "batch_sampler")}
        state = UserState(
            {},
            key=Slot.DATA.value,
            foreign=lambda: former.values(),
            transient=self._options.transient,
            limit_bytes=min(_MAX_CONTENT, self._options.user_state_limit),
        )
        objects = {n: each for n, each in parts.items() if is_user_object(each)}
        state.extend_baseline(objects, is_script=False)
        return state

    def _trained_parameters(self) -> dict[int, str]:
        """The class of the model by the id of each parameter that training may change."""
        states = (e.state for e in self.all if not isinstance(e.stateful, UserState))
        saved = (e for each in states for e in each.live_objects() if isinstance(e, nn.Module))
        modules = [*self._modules_of_others(), *saved]  # submodules first
        return {id(p): type(m).__name__ for m in modules for p in m.parameters() if p.requires_grad}

    def _modules_of_others(self) -> list[Any]:
        return [each for each in self._objects_of_others() if isinstance(each, nn.Module)]

    def _objects_of_others(self) -> list[Any]:
        """What other components with user state follow: a dataset may share it with a module."""
        left_out = ("data/attributes", Slot.VARIABLES.value)
        others = (each for each in states_of(self.all, UserState) if each.key not in left_out)
        return [each for state in others for each in state.objects.values()]

    def _code_of_others(self) -> list[Any]:
        """The functions and classes that other components with user state have met."""
        return [code for state in states_of(self.all, UserState) for code in state.code]

    def _saved_elsewhere(self) -> list[Any]:
        """The objects that other components save."""
        others = [each.state for each in self.all if each.state is not self.variables]
        return [*self._generators.values(), *(o for each in others for o in each.live_objects())]

    def _given_objects(self) -> dict[str, Any]:
        """Models, optimizers, schedulers and the like, by the keys of their components."""
        given = (each for each in self.all if each.slot in _GIVEN)
        return {
            each.key: found
            for each in given
            if not isinstance(each.stateful, UserState)
            for found in islice(each.state.live_objects(), 1)
        }

    def optimizers(self) -> list[Any]:
        """Every optimizer with param groups."""
        given = [each.optimizer for each in states_of(self.all, OptimizerState)]
        return [each for each in given if hasattr(each, "param_groups")]

    def learning_rates(self) -> list[Any]:
        """The learning rate of every param group of every optimizer."""
        return [group["lr"] for each in self.optimizers() for group in each.param_groups]

    def recorded_generators(self) -> dict[str, Any]:
        """The generators that the journal digests; those of loaders depend on prefetching."""
        sources = self.position.sources.values()
        others = {id(each) for source in sources for each in source.private.values()}
        return {name: each for name, each in self.rng.generators.items() if id(each) not in others}


def _roots_of(
    components: Iterable[StateComponent], *, with_objects: bool = True
) -> dict[str, Holder]:
    """What is saved by a ``state_dict``, which may lack some of the attributes."""
    found: dict[str, Holder] = {}
    for component in components:
        saved = [*component.state.live_objects()]
        for number, each in enumerate(saved):
            if isinstance(each, (Optimizer, LRScheduler)):
                state = getattr(each, "state", None)
                # That of a wrapper may give the ``state`` of the optimizer inside it instead.
                is_saved = not isinstance(component.stateful, OptimizerState) or any(
                    value is state for value in saved
                )
                holder = Holder(each, attributes_only=True, is_saved=is_saved)
                found.setdefault(component.key, holder)
            elif with_objects and _is_given(component, each):
                name = f"{component.key}[{number}]" if number else component.key
                found.setdefault(name, Holder(each, attributes_only=True, is_trusted=True))
    return found


def _is_given(component: StateComponent, value: Any) -> bool:
    """Whether it is an object with ``state_dict`` that a component saves by that."""
    is_object = kind_of(value) is Kind.STATEFUL and top_package(class_of(value)) != "torch"
    # A ComponentState says what its state is, also of another number of ranks.
    is_declared = isinstance(component.stateful, UserState) or isinstance(value, ComponentState)
    return is_object and not is_declared
