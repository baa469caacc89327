"""What training changes in a module and no ``state_dict`` holds: flags, counters, buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from resumekit.capture.attribute_values import AttributeValues, tensors_of, without_fractions
from resumekit.capture.devices import device_of, off_host
from resumekit.capture.inplace import Restorer
from resumekit.capture.mismatch import require_fields
from resumekit.capture.named import by_key
from resumekit.capture.names import clean_name, clean_names, wrapped_attribute
from resumekit.capture.user_state.library_code import attributes_set_by
from resumekit.contract import Fidelity, SharingPattern, Slot, StateComponent
from resumekit.layout import WorldChange
from resumekit.payload import state_digest
from resumekit.sharding import is_sharded

_SUFFIX = "attributes"

# torch 2.13 nn/modules/module.py Module.__init__: the book-keeping of every module.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# Its own modules are state of the framework's, which its adapter knows.
_LIBRARIES = frozenset({"lightning", "pytorch_lightning"})

# deepspeed 0.19 runtime/zero/parameter_offload.py: what stage 3 notes in every module.
_OF_ZERO = frozenset(
    {
        "_external_params",
        "_original_parameters",
        "applied_pre_backward_ref_cnt",
        "ds_external_parameters",
        "ds_grads_remaining",
        "ds_id",
        "ds_inflight_param_registry",
        "ds_recompute_parameters",
    }
)

# torchmetrics 1.9 metric.py Metric: `_defaults` names what it sums up; the rest follows from that.
_UPDATES = "_update_count"

_NUM_NAMED = 3


class ModuleAttributes:
    """What is in a module beside its ``state_dict``, as far as it is not as the script made it.

    That is which parameters are frozen, which modules train and which evaluate, buffers that were
    registered with ``persistent=False``, and attributes that hold plain values or tensors: counters
    of user code, the ``p`` of a dropout, the momentum of a batch norm. A module with
    ``get_extra_state`` says itself which of its attributes are state.

    Args:
        module: the model, wrapped or not, as the script has made it.
        key: the component's key, for errors.
    """

    def __init__(self, module: nn.Module, *, key: str) -> None:
        self._root = module
        self.key = key
        self._trained = {name: each.requires_grad for name, each in self._parameters()}
        self._training = {name: each.training for name, each in self._modules()}
        self._buffers = {name: state_digest(each) for name, each in self._loose_buffers()}
        self._values = {name: _values_of(each) for name, each in self._modules()}
        self._pending: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """What is not as it was when this object was made; live tensors, not copies."""
        if self._pending is not None:
            return dict(self._pending)
        trained = {name: each.requires_grad for name, each in self._parameters()}
        training = {name: each.training for name, each in self._known()}
        changed = {name: each.changed() for name, each in self._values.items()}
        values = {name: each for name, each in changed.items() if each}
        return {
            "trained": _others(trained, self._trained),
            "training": _others(training, self._training),
            "buffers": {
                name: each
                for name, each in self._loose_buffers()
                if self._buffers.get(name) != state_digest(each)
            },
            "values": values,
            "first": {name: self._values[name].first(each) for name, each in values.items()},
            "lost": [name for name, each in self._values.items() if each.lost()],
            "off_host": {name: off_host(each, tensors_of) for name, each in values.items()},
        }

    @property
    def fidelity(self) -> tuple[Fidelity, str]:
        """LOST once a value has changed beside something that cannot be saved."""
        lost = [
            f"{name}.{attribute}".lstrip(".")
            for name, each in self._values.items()
            for attribute in each.lost()
        ]
        if not lost:
            return Fidelity.EXACT, ""
        return Fidelity.LOST, (
            f"{_listed(lost)}: changed in training beside an attribute that cannot be saved, so a "
            "resume begins with what the script makes of it; keep it in a buffer, in extras=, or "
            "give its module get_extra_state() and set_extra_state()"
        )

    def comparable_state(self) -> dict[str, Any]:
        """The state without fractions: they may be times, and where they count a loss tells."""
        state = self.state_dict()
        values = {name: without_fractions(each) for name, each in state["values"].items()}
        return {**state, "values": values, "first": {}}

    def check_state_dict(self, state: Any) -> None:
        """Returns when ``state`` can be kept; changes nothing.

        Raises:
            StateMismatchError: it is no state of a module's attributes.
        """
        fields = ("trained", "training", "buffers", "values", "first", "off_host")
        require_fields(self.key, state, {**dict.fromkeys(fields, dict), "lost": list})

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Keeps the state until ``put_back_with_random``: the script may set first what it likes.

        What the script itself begins with another plain value than the former one did stays the
        script's.

        Returns:
            What of the state is not put back.
        """
        others = {
            name: each.begun_otherwise(state["first"].get(name, {}))
            for name, each in self._values.items()
        }
        values = {
            name: {own: value for own, value in each.items() if own not in others.get(name, ())}
            for name, each in state["values"].items()
        }
        self._pending = {**state, "values": values}
        kept = [_path(name, own) for name, each in others.items() for own in sorted(each)]
        known = {*self._trained, *self._training}
        gone = sorted({*state["trained"], *state["training"], *state["values"]} - known)
        remarks = {
            "begun otherwise by this script, which counts": kept,
            "not in this model, and left out": gone,
        }
        return tuple(f"{self.key}: {w}: {_listed(names)}" for w, names in remarks.items() if names)

    def start_fresh(self) -> tuple[str, ...]:
        """A checkpoint that has none was written when nothing had changed."""
        return ()

    def resplit_state_dict(
        self, states: Mapping[int, Mapping[str, Any]], change: WorldChange
    ) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """What one former rank had."""
        return states[change.model_rank], ()

    def put_back_with_random(self) -> None:
        """Makes everything what it was, once: also what this launch alone has changed so far."""
        if self._pending is None:
            return
        saved, self._pending = self._pending, None
        device = device_of([self._root])
        for name, parameter in self._parameters():
            # Weights in 8 or 4 bits have no gradient, and may not even be told so.
            wanted = saved["trained"].get(name, self._trained.get(name, parameter.requires_grad))
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)
        for name, module in self._known():
            module.training = saved["training"].get(name, self._training[name])
            if name not in saved["lost"]:
                self._values[name].put_back(
                    saved["values"].get(name, {}),
                    off_host=saved["off_host"].get(name, ()),
                    device=device,
                )
        self._put_back_buffers(saved["buffers"])

    def _put_back_buffers(self, saved: Mapping[str, Tensor]) -> None:
        restore = Restorer()
        for name, module in self._modules():
            for own in module._non_persistent_buffers_set:
                value = saved.get(_path(name, own))
                if value is not None:
                    module._buffers[own] = restore(module._buffers.get(own), value)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        parameters = dict(self._root.named_parameters())
        names = clean_names(self._root, parameters)
        return ((names[raw], each) for raw, each in parameters.items())

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Those that wrap no other, by wrapper-free name."""
        for raw, module in self._root.named_modules():
            if wrapped_attribute(module) is None:
                # Of something inside, for only then its own wrappers are stepped over.
                inside = clean_name(self._root, _path(raw, _SUFFIX))
                yield inside.removesuffix(_SUFFIX).removesuffix("."), module

    def _known(self) -> Iterator[tuple[str, nn.Module]]:
        """Those that were there when this object was made."""
        return ((name, each) for name, each in self._modules() if name in self._values)

    def _loose_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, module in self._modules():
            for own in sorted(module._non_persistent_buffers_set):
                buffer = module._buffers.get(own)
                if buffer is not None and not (buffer.is_meta or is_sharded(buffer)):
                    yield _path(name, own), buffer


def attribute_components(model: Any) -> tuple[StateComponent, ...]:
    """The attributes of modules as components: each rank has its own.

    Args:
        model: a module, or a dict of named ones, as the script has made them.
    """
    return tuple(
        StateComponent(
            f"{key}/{_SUFFIX}",
            ModuleAttributes(module, key=f"{key}/{_SUFFIX}"),
            SharingPattern.PER_RANK,
            required=False,
        )
        for key, module in by_key(Slot.MODEL, model).items()
    )


def _values_of(module: nn.Module) -> AttributeValues:
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        return AttributeValues(module, only=())
    sums: Any = getattr(module, "_defaults", None)
    if sums is not None and hasattr(module, _UPDATES):
        return AttributeValues(module, only={*sums, _UPDATES})
    of_libraries = attributes_set_by(_LIBRARIES, type(module))
    return AttributeValues(module, left_out=_OF_EVERY_MODULE | _OF_ZERO | of_libraries)


def _others(now: Mapping[str, bool], then: Mapping[str, bool]) -> dict[str, bool]:
    return {name: value for name, value in now.items() if then.get(name, value) != value}


def _path(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own


def _listed(names: list[str]) -> str:
    more = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
