"""Tensors made of others: stored by their parts, and built again or refused."""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_classes import Refined, Rows, plain_parts
from torch import Tensor

from resumekit.errors import CorruptCheckpointError, StateMismatchError, UnsupportedValueError
from resumekit.serialization.digests import leaf_digests, state_digest
from resumekit.serialization.planning import Assignment, Proposal, assign, encode_local
from resumekit.serialization.reading import StoredSource, open_state, read_payload
from resumekit.serialization.subclasses import Builder, described
from resumekit.serialization.tensors import StoredSubclass
from resumekit.serialization.writing import Payload

INDEX = "state/rank-00000.json"


def values(seed: int = 0, shape: tuple[int, ...] = (4, 6)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def built(saved: Any, live: Any = None) -> Any:
    return Builder("value", lambda: live).build(saved)


def index_of(step: Any) -> dict[str, Any]:
    found = json.loads(Path(step.path, INDEX).read_text())
    assert isinstance(found, dict)
    return found


def are_equal(one: Any, other: Any) -> bool:
    """The same class, and the same bits of all inner tensors, by the means of torch."""
    mine, theirs = plain_parts(one), plain_parts(other)
    return (
        type(one) is type(other)
        and mine.keys() == theirs.keys()
        and all(mine[n].dtype == theirs[n].dtype for n in mine)
        and all(torch.equal(mine[n], theirs[n]) for n in mine)
    )


def test_a_class_in_a_class_is_read_back_with_its_parts_to_the_bit(checkpoints: Any) -> None:
    state = {"moment": Refined.of(values()), "step": 3}
    step = checkpoints.save({"value": state})
    saved = read_payload(step, "state", 0)["value"]
    assert isinstance(saved["moment"], StoredSubclass)
    found = built(saved)
    assert are_equal(found["moment"], state["moment"])
    assert found["moment"].rows.num_levels == 100
    assert found["step"] == 3
    names = {"moment.rows.codes", "moment.rows.scale", "moment.rest"}
    assert set(index_of(step)["tensors"]) == names


def test_the_comparison_sees_a_codec_that_stores_the_values(checkpoints: Any) -> None:
    moment = Refined.of(values())
    stored = checkpoints.round_trip({"moment": moment.dequantize()})["moment"]
    assert torch.equal(stored, moment.dequantize())
    assert not are_equal(Refined.of(stored), moment)


def test_containers_of_every_kind_keep_their_type(checkpoints: Any) -> None:
    rows = Rows.of(values())
    state = OrderedDict(a=[rows, 1], b=(rows, None), c=deque([rows], 4), d={3: rows}, e=[1] * 2000)
    found = built(checkpoints.round_trip(state))
    assert [type(each) for each in found.values()] == [list, tuple, deque, dict, list]
    assert type(found) is OrderedDict
    assert found["c"].maxlen == 4
    every = [found["a"][0], found["b"][0], found["c"][0], found["d"][3]]
    assert all(are_equal(each, rows) for each in every)
    assert every[0].codes.data_ptr() == every[1].codes.data_ptr()  # one tensor is one again


@pytest.mark.parametrize("is_common", [False, True])
def test_a_version_is_of_one_file_and_only_one_with_such_tensors_is_new(
    checkpoints: Any, is_common: bool
) -> None:
    def version(state: Any) -> int:
        if not is_common:
            return int(index_of(checkpoints.save({"value": state}))["format_version"])
        local = encode_local("value", state)
        plan = assign(local, [Proposal.of(local, 0)])
        assignment = Assignment.of(local, plan.choice, plan.positions[0], plan.tensors)
        payload = Payload.of_shards("state", 0, local, assignment)
        step = checkpoints.commit(payload.write)
        source = StoredSource(step, "state", "value", ("index.json",))
        assert open_state(source, lambda states: states[0]).state.keys() == state.keys()
        return int(json.loads(Path(step.path, "state/index.json").read_text())["format_version"])

    old = 2 if is_common else 1
    assert version({"a": Rows.of(values())}) == 3
    assert version({"a": values()}) == old
    # Nothing that a user may write looks like one.
    assert version({"$subclass": [values(), 1], "text": '{"$subclass": [1]}'}) == old


def test_such_a_tensor_in_an_old_version_is_damage(checkpoints: Any) -> None:
    index = index_of(checkpoints.save({"value": {"a": Rows.of(values(shape=(1, 1)))}}))
    data = json.dumps({**index, "format_version": 1}).encode()
    with pytest.raises(CorruptCheckpointError, match="subclass in version 1"):
        read_payload(checkpoints.forge(data), "state", 0)


@pytest.mark.parametrize("is_copied", [True, False])
def test_a_copy_for_a_save_in_the_background_has_the_parts_as_they_were(
    checkpoints: Any, is_copied: bool
) -> None:
    moment, expected = Refined.of(values()), Refined.of(values())
    payload = Payload.of_states("state", 0, {"value": {"moment": moment}})
    if is_copied:
        payload.copy_into(memoryview(bytearray(payload.image_bytes)))
    moment.set_to(values(1))
    saved = read_payload(checkpoints.commit(payload.write), "state", 0)["value"]
    # Without the copy it has the parts as they are now: the comparison sees them.
    assert are_equal(built(saved["moment"]), expected) is is_copied


# ---------------------------------------------------------------- refused at the save


class Preference(Enum):
    FAST = "fast"


class Settings:
    pass


class Strange(Tensor):
    """Has any context, and any parts."""

    @staticmethod
    def __new__(cls, parts: Mapping[str, Any], context: Any) -> Strange:
        return Tensor._make_wrapper_subclass(cls, (2,))

    def __init__(self, parts: Mapping[str, Any], context: Any) -> None:
        self.__dict__.update(parts)
        self.parts, self.context = parts, context

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.parts), self.context

    @classmethod
    def __tensor_unflatten__(
        cls, parts: Mapping[str, Any], context: Any, size: Any, stride: Any
    ) -> Strange:
        return cls(parts, context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's hint names a method of C
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(func)


REFUSED: dict[str, tuple[Callable[[], Strange], str]] = {
    "an object": (lambda: Strange({"a": values()}, {"k": Settings()}), "Settings"),
    "an enum": (lambda: Strange({"a": values()}, [Preference.FAST]), "FAST"),
    "a tensor": (lambda: Strange({"a": values()}, (values(),)), "tensor"),
    "no tensor": (lambda: Strange({"a": 5}, None), "whose a is no tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_load_could_not_build_again_is_refused_with_class_and_path(name: str) -> None:
    make, found = REFUSED[name]
    with pytest.raises(UnsupportedValueError, match=found) as caught:
        Payload.of_states("state", 0, {"model": {"weight": make()}})
    assert "model['weight']" in str(caught.value)
    assert "Strange" in str(caught.value)


def test_one_as_a_key_is_refused() -> None:
    with pytest.raises(UnsupportedValueError, match="as a key"):
        Payload.of_states("state", 0, {"extras": {Rows.of(values()): 1}})


# ---------------------------------------------------------------- hostile files


class Unknown(Rows):
    """Not among torch's safe globals."""


def stored(**changes: Any) -> StoredSubclass:
    """A tensor of ``Rows`` as a file has it, but for the changes."""
    rows = Rows.of(values())
    whole: dict[str, Any] = {
        "name": "tensor_classes.Rows",
        "context": {"num_levels": 100, "dtype": torch.float32},
        "parts": {"codes": rows.codes, "scale": rows.scale},
        "size": (4, 6),
        "strides": (6, 1),
    }
    return StoredSubclass(**{**whole, **changes})


PARTS = stored().parts
HOSTILE: dict[str, StoredSubclass] = {
    "another class": stored(name="tensor_classes.Refined"),
    "a class that is no tensor": stored(name="builtins.dict"),
    "a function": stored(name="os.system"),
    "a class that is not loaded": stored(name="torchao.Missing"),
    "a class that is not safe": stored(name=f"{Unknown.__module__}.{Unknown.__qualname__}"),
    "a sharded tensor": stored(name="torch.distributed.tensor.DTensor"),
    "no context": stored(context=None),
    "a context without a field": stored(context={"num_levels": 100}),
    "a context with a field more": stored(context={**stored().context, "more": 1}),
    "a context of another type": stored(context={**stored().context, "dtype": "float32"}),
    "a name less": stored(parts={"codes": PARTS["codes"]}),
    "a name more": stored(parts={**PARTS, "more": torch.ones(1)}),
    "other names": stored(parts={"code": PARTS["codes"], "scale": PARTS["scale"]}),
    "a part that is a class": stored(parts={"codes": stored(), "scale": stored(name="x.Y")}),
    "another outer shape": stored(size=(6, 4)),
    "no outer shape": stored(size=()),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_the_class_does_not_make_again_is_a_typed_error(name: str) -> None:
    assert are_equal(built(stored()), Rows.of(values()))
    with pytest.raises(StateMismatchError) as caught:
        built({"a": [HOSTILE[name]]})
    assert str(caught.value).startswith("value['a'][0]")
    assert caught.value.remedy


def test_a_class_of_a_live_tensor_is_known_and_its_name_alone_is_not() -> None:
    unknown = stored(name=f"{Unknown.__module__}.{Unknown.__qualname__}")
    with pytest.raises(StateMismatchError, match="add_safe_globals"):
        built(unknown)
    live = {"model": [Unknown.of(values(1))]}
    assert type(built(unknown, live)) is Unknown


TREE: Any = [
    "tensor_classes.Rows",
    {"num_levels": 100, "dtype": {"$torch": "float32"}},
    {"codes": {"$tensor": "a.codes"}, "scale": {"$tensor": "a.scale"}},
    [4, 6],
    [6, 1],
]
BODIES: dict[str, Any] = {
    "no list": {},
    "a field less": TREE[:-1],
    "a name that is no text": [1, *TREE[1:]],
    "parts that are no dict": [*TREE[:2], [], *TREE[3:]],
    "a part that is no tensor": [*TREE[:2], {"codes": 1}, *TREE[3:]],
    "a part that is not there": [*TREE[:2], {"codes": {"$tensor": "b"}}, *TREE[3:]],
    "a negative size": [*TREE[:3], [-4, 6], [6, 1]],
    "a size that is no number": [*TREE[:3], ["4"], [6, 1]],
    "an unknown tag in the context": [TREE[0], {"$call": 1}, *TREE[2:]],
}


@pytest.mark.parametrize("name", BODIES)
def test_another_tree_is_damage(checkpoints: Any, name: str) -> None:
    index, data = _files_of(checkpoints, BODIES[name])
    with pytest.raises(CorruptCheckpointError):
        read_payload(checkpoints.forge(index, data), "state", 0)


def test_a_tensor_in_a_tensor_without_end_is_damage(checkpoints: Any) -> None:
    body = TREE
    for _ in range(30):
        body = [TREE[0], None, {"codes": {"$subclass": body}}, [4, 6], [6, 1]]
    index, data = _files_of(checkpoints, body)
    with pytest.raises(CorruptCheckpointError):
        read_payload(checkpoints.forge(index, data), "state", 0)


def _files_of(checkpoints: Any, body: Any) -> tuple[bytes, bytes]:
    step = checkpoints.save({"value": {"a": Rows.of(values())}})
    index = index_of(step)
    assert index["states"]["value"]["a"]["$subclass"] == TREE
    index["states"]["value"]["a"]["$subclass"] = body
    data = Path(step.path, INDEX).with_suffix(".safetensors").read_bytes()
    return json.dumps(index).encode(), data


# ---------------------------------------------------------------- digests, descriptions, copies


def test_digests_are_of_the_parts_and_of_the_class_before_and_after_a_save(
    checkpoints: Any,
) -> None:
    state = {"moment": Refined.of(values())}
    live = leaf_digests(state)
    assert list(live) == [
        *("moment.class", "moment.rows.class", "moment.rows.codes", "moment.rows.scale"),
        "moment.rest",
    ]
    assert leaf_digests(checkpoints.round_trip(state)) == live
    moved = {"moment": Refined.of(values())}
    moved["moment"].rows.num_levels += 1
    differing = [name for name, digest in leaf_digests(moved).items() if live[name] != digest]
    assert differing == ["moment.rows.class"]
    assert state_digest(moved) != state_digest(state)


def test_a_description_differs_by_class_context_type_and_shape() -> None:
    rows = Rows.of(values())
    others = [
        Rows.of(values(), num_levels=50),
        Rows.of(values(shape=(6, 4))),
        Rows.of(values().double()),
        Refined.of(values()),
        Unknown.of(values()),
        Rows(rows.codes.to(torch.int16), rows.scale, 100, torch.float32),
    ]
    every = [described(each) for each in (rows, *others)]
    assert len(set(every)) == len(every)
    assert described(Rows.of(values(5))) == described(rows) == described(stored())
