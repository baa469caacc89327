"""Hand-made checkpoints, compared: names, values, tensors, layouts, memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resumekit.diff import CheckpointDifference, ComponentDifference, compare_checkpoints
from resumekit.diff.checkpoints import changed_prefixes
from resumekit.diff.tensors import boxes_of_shape
from resumekit.errors import ConfigurationError, CorruptCheckpointError
from resumekit.serialization import reading

NAN = float("nan")


def component(found: CheckpointDifference, key: str = "model") -> ComponentDifference:
    (only,) = [each for each in found.components if each.key == key]
    return only


def state() -> dict[str, Any]:
    """A value of each kind that can be stored."""
    return {
        "weight": torch.arange(12.0).reshape(3, 4),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "small": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "nan": torch.tensor([NAN]),
        "flags": torch.tensor([True, False]),
        "float8": torch.ones(4).to(torch.float8_e4m3fn),
        "array": np.arange(3.0),
        "words": np.array(["a", "b"]),
        "numbers": list(range(50)),
        "lr": 0.1,
        "not a number": NAN,
        "nested": {"tuple": (1, "two", None, True), "set": {3, 1}, "bytes": b"abc"},
    }


def test_equal_states_are_equal(checkpoints: Any) -> None:
    found = compare_checkpoints(
        checkpoints.whole({"model": state()}), checkpoints.whole({"model": state()})
    )
    assert found.is_equal
    assert component(found).num_tensors == 8
    assert component(found).num_values == 59
    assert found.settings == ()


CHANGES: dict[str, tuple[Any, Any]] = {
    "lr": (0.1, 0.2),
    "kind": (1, 1.0),
    "truth": (1, True),
    "zero": (0.0, -0.0),
    "bytes": (b"abc", b"abd"),
    "set": ({1, 2}, {1, 3}),
    "words": (np.array(["a", "b"]), np.array(["a", "c"])),
    "numbers": ([0] * 50, [*[0] * 49, 1]),
    "none": (None, 0),
    "tensor": (torch.ones(1), 1.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_value_is_found(checkpoints: Any, name: str) -> None:
    sides = [checkpoints.whole({"extras": {**state(), name: each}}) for each in CHANGES[name]]
    found = component(compare_checkpoints(*sides), "extras")
    (difference,) = found.values
    assert difference.name.startswith(name)
    assert difference.first != difference.second
    assert found.tensors == found.only_first == found.only_second == ()


@pytest.mark.parametrize(
    ("name", "index"), [("weight", (2, 3)), ("half", (1,)), ("small", ()), ("array", (0,))]
)
def test_a_changed_element_is_found(checkpoints: Any, name: str, index: Any) -> None:
    changed = state()
    changed[name][index] += 0.5
    sides = checkpoints.whole({"model": state()}), checkpoints.whole({"model": changed})
    (difference,) = component(compare_checkpoints(*sides)).tensors
    assert difference.name == name
    assert difference.elements is not None
    assert (difference.elements.num_different, difference.elements.max_absolute) == (1, 0.5)


def test_types_and_shapes_are_compared(checkpoints: Any) -> None:
    first = {"shape": torch.ones(6), "float": torch.ones(2), "kind": torch.ones(2)}
    second = {
        "shape": torch.ones(2, 3),
        "float": torch.ones(2, dtype=torch.float16),
        "kind": torch.ones(2, dtype=torch.int32),
    }
    sides = checkpoints.whole({"model": first}), checkpoints.whole({"model": second})
    by_name = {each.name: each for each in component(compare_checkpoints(*sides)).tensors}
    assert by_name["shape"].shapes == ((6,), (2, 3))
    assert by_name["float"].dtypes == ("float32", "float16")
    assert by_name["float"].elements is not None
    assert by_name["float"].elements.num_different == 0
    assert by_name["kind"].elements is None


def test_names_and_components_on_one_side_are_listed(checkpoints: Any) -> None:
    first = checkpoints.whole({"model": {"a": torch.ones(1), "b": 1}, "ema": {}})
    second = checkpoints.whole({"model": {"a": torch.ones(1), "c": [1, 2]}, "extras": {}})
    found = compare_checkpoints(first, second)
    assert component(found).only_first == ("b",)
    assert component(found).only_second == ("c[0]", "c[1]")
    assert component(found, "ema").only_in == "first"
    assert component(found, "extras").only_in == "second"
    assert not found.is_equal


def test_one_component_is_chosen_by_key_or_slot(checkpoints: Any) -> None:
    states = {
        "model": {"a": 1},
        "model/attributes": {"b": 1},
        "callbacks/x": {"b": 1},
        "callbacks/y": {"c": 1},
    }
    first = checkpoints.whole(states)
    second = checkpoints.whole({**states, "model": {"a": 2}})
    assert compare_checkpoints(first, second, components=["callbacks"]).is_equal
    found = compare_checkpoints(first, second, components=["model"])
    assert [each.key for each in found.components] == ["model"]
    assert not found.is_equal
    with pytest.raises(ConfigurationError, match="expected one of model, model/attributes"):
        compare_checkpoints(first, second, components=["optimizer"])


def test_the_largest_difference_comes_first(checkpoints: Any) -> None:
    first = {name: torch.zeros(3) for name in "abcd"}
    sizes = {"a": 1.0, "b": 3.0, "c": NAN, "d": 2.0}
    second = {name: torch.full((3,), size) for name, size in sizes.items()}
    sides = checkpoints.whole({"model": first}), checkpoints.whole({"model": second})
    names = [each.name for each in component(compare_checkpoints(*sides)).tensors]
    assert names == ["c", "b", "d", "a"]


def test_settings_are_listed_and_do_not_decide(checkpoints: Any) -> None:
    first = checkpoints.whole({"model": {"a": 1}}, lr=0.1, old=1)
    second = checkpoints.whole({"model": {"a": 1}}, lr=0.2, new=2)
    found = compare_checkpoints(first, second)
    assert found.is_equal
    assert [(each.name, each.first, each.second) for each in found.settings] == [
        ("lr", "0.1", "0.2"),
        ("old", "1", "-"),
        ("new", "-", "2"),
    ]


def test_tied_and_overlapping_tensors_are_compared_by_value(checkpoints: Any) -> None:
    base = torch.arange(10.0)
    aliased = {"tied": base, "again": base, "view": base[2:5], "row": base.view(2, 5)[1]}
    alone = {name: tensor.clone() for name, tensor in aliased.items()}
    first, second = checkpoints.whole({"model": aliased}), checkpoints.whole({"model": alone})
    assert compare_checkpoints(first, second).is_equal
    alone["view"][0] += 1
    (difference,) = component(
        compare_checkpoints(first, checkpoints.whole({"model": alone}))
    ).tensors
    assert difference.name == "view"


@given(
    shape=st.lists(st.integers(0, 7), max_size=3),
    ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    data=st.data(),
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_layouts_do_not_matter(
    checkpoints: Any, shape: list[int], ranks: tuple[int, int], data: st.DataObject
) -> None:
    whole = {"weight": torch.randn(shape), "other": torch.arange(5)}
    first, second = (checkpoints.sharded(whole, number) for number in ranks)
    assert compare_checkpoints(first, second).is_equal
    assert compare_checkpoints(first, checkpoints.whole({"model": whole})).is_equal
    if whole["weight"].numel():
        flat = whole["weight"].flatten().clone()
        flat[data.draw(st.integers(0, len(flat) - 1))] += 1000
        changed = checkpoints.sharded({**whole, "weight": flat.view(shape)}, ranks[1])
        (difference,) = component(compare_checkpoints(first, changed)).tensors
        assert difference.elements is not None
        assert difference.elements.num_different == 1


def test_each_rank_of_its_own_is_compared_with_the_same_rank(checkpoints: Any) -> None:
    first = checkpoints.per_rank("rng", [{"seed": 1}, {"seed": 2}])
    second = checkpoints.per_rank("rng", [{"seed": 1}, {"seed": 3}, {"seed": 4}])
    found = component(compare_checkpoints(first, second), "rng")
    assert [each.name for each in found.values] == ["rank 1: seed"]
    assert found.only_second == ("rank 2",)


# Prefixes


def test_names_that_differ_by_a_prefix_are_matched(checkpoints: Any) -> None:
    def states(prefix: str) -> dict[str, Any]:
        names = [f"{prefix}0.weight", f"{prefix}0.bias", f"{prefix}1.weight"]
        shapes = [(2, 2), (2,), (3, 2)]
        weights = {n: torch.ones(s) for n, s in zip(names, shapes, strict=True)}
        moments = {n: {"exp_avg": w * 2} for n, w in weights.items()}
        optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": names}]}
        return {"model": weights, "optimizer": optimizer}

    for prefixes in (("", "module."), ("model.", ""), ("a.b.", "module.")):
        found = compare_checkpoints(*(checkpoints.whole(states(each)) for each in prefixes))
        assert found.is_equal
        assert found.prefixes == prefixes
    assert compare_checkpoints(*(checkpoints.whole(states("")) for _ in "ab")).prefixes is None


def test_only_names_of_parameters_lose_their_prefix(checkpoints: Any) -> None:
    first = {"model": {"m.a": torch.ones(1)}, "extras": {"m.b": 1, "path": "m.c"}}
    second = {"model": {"a": torch.ones(1)}, "extras": {"b": 1, "path": "c"}}
    found = compare_checkpoints(checkpoints.whole(first), checkpoints.whole(second))
    assert found.prefixes == ("m.", "")
    extras = component(found, "extras")
    assert (extras.only_first, extras.only_second) == (("m.b",), ("b",))
    assert [each.name for each in extras.values] == ["path"]


def test_names_that_look_alike_are_not_mixed_up(checkpoints: Any) -> None:
    states = [{"a.b": 1, "a": {"b": 2}}, {"a.b": 9, "a": {"b": 2}}]
    sides = [checkpoints.whole({"extras": state}) for state in states]
    (difference,) = component(compare_checkpoints(*sides), "extras").values
    assert (difference.name, difference.first, difference.second) == ("a.b", "1", "9")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"m.a": 1, "m.b": 2}, {"a": 1, "b": 3}),
        ({"m.a": 1, "n.b": 2}, {"a": 1, "b": 2}),
        ({"m.a": 1}, {"a": 1, "b": 2}),
        ({"m.a": 1}, {"a": 2}),
        ({"a": 1}, {"a": 2}),
        ({}, {}),
    ],
    ids=["other kind", "two prefixes", "more names", "one other kind", "equal names", "none"],
)
def test_a_match_that_is_not_one_to_one_is_none(first: Any, second: Any) -> None:
    assert changed_prefixes(first, second) is None


# Reading


def test_equal_digests_need_no_read(checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"model": {"big": torch.randn(3 << 20), "last": torch.ones(5)}}
    first, second = checkpoints.whole(value), checkpoints.whole(value)
    read: list[Any] = []

    def noted(wanted: Any) -> Any:
        read.extend(wanted)
        return reading.read_boxes(wanted)

    monkeypatch.setattr("resumekit.diff.tensors.read_boxes", noted)
    assert compare_checkpoints(first, second).is_equal
    assert read == []
    value["model"]["last"][0] = 7
    assert not compare_checkpoints(first, checkpoints.whole(value)).is_equal
    assert {tensor.name for tensor, _ in read} >= {"last"}


def test_damage_is_found_in_what_is_read(checkpoints: Any) -> None:
    first = checkpoints.whole({"model": {"a": torch.randn(100)}})
    second = checkpoints.whole({"model": {"a": torch.randn(100)}})
    (path,) = second.path.glob("state/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match="digest of its block"):
        compare_checkpoints(first, second)


def test_the_boxes_of_a_shape_tile_it() -> None:
    for shape in ((), (5,), (3, 4), (2, 3, 5), (1, 1, 9), (4, 0)):
        for limit in (1, 2, 7, 100):
            seen = torch.zeros(shape)
            for box in boxes_of_shape(shape, limit):
                assert 0 < box.num_elements <= limit
                seen[box.slices] += 1
            assert bool((seen == 1).all())


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of the memory from /proc")
def test_memory_does_not_grow_with_the_tensor(checkpoints: Any) -> None:
    num_bytes = 320 << 20
    whole = torch.zeros(num_bytes // 4)
    first = checkpoints.whole({"model": {"big": whole}})
    whole[::2] = 1
    second = checkpoints.whole({"model": {"big": whole}})
    del whole
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = resident("VmHWM")
    (difference,) = component(compare_checkpoints(first, second)).tensors
    assert difference.elements is not None
    assert difference.elements.num_different == num_bytes // 8
    assert resident("VmHWM") - before < num_bytes // 2


def resident(field: str) -> int:
    """A line of the process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [each for each in lines if each.startswith(field)]
    return int(line.split()[1]) << 10
