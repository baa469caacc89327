"""Tensors are restored bit for bit and share memory as before, and stock tools read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from resumekit.serialization.encoding import encode
from resumekit.serialization.index import Index
from resumekit.serialization.leaves import (
    CHUNK_BYTES,
    ELEMENT_TYPES,
    buffers_of,
    dense_strides,
    element_type,
    retyped,
)
from resumekit.serialization.reading import read_payload

# torch warns once in a process that complex32 is experimental.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

Same = Callable[[Any, Any], bool]
DTYPES = [item.torch_dtype for item in ELEMENT_TYPES.values() if item.torch_dtype is not None]


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bytes seen as this type: NaNs with every payload among them."""
    size = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(size)
    content = torch.randint(
        0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator
    )
    if dtype is torch.bool:
        content %= 2
    return retyped(content, dtype, 0, shape, dense_strides(shape))


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return b"".join(buffers_of(tensor))


def data_file(step: Any) -> Path:
    return Path(step.path, "state", "rank-00000.safetensors")


def test_every_dtype_of_this_torch_is_known_or_quantised() -> None:
    dtypes = {item for item in vars(torch).values() if isinstance(item, torch.dtype)}
    unknown = {str(dtype) for dtype in dtypes if element_type(dtype) is None}
    assert {name.removeprefix("torch.").lstrip("qui") for name in unknown} <= {
        "nt8", "nt32", "nt4x2", "nt2x4",
    }  # fmt: skip
    assert all(str(dtype).startswith("torch.q") for dtype in dtypes if element_type(dtype) is None)
    assert all(element_type(dtype).num_bytes == dtype.itemsize for dtype in DTYPES)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_every_dtype_is_restored_bit_for_bit(
    dtype: torch.dtype, checkpoints: Any, same: Same
) -> None:
    tensor = random_tensor(dtype, 4, 6)
    value = {
        "whole": tensor,
        "scalar": random_tensor(dtype),
        "empty": random_tensor(dtype, 0, 3),
        "transposed": random_tensor(dtype, 3, 5).t(),
        "with holes": random_tensor(dtype, 6, 8)[::2, 1::3],
        "row": tensor[1],
    }
    found = checkpoints.round_trip(value)
    assert same(found, value)
    assert found["transposed"].stride() == (1, 5)


def test_parameters_are_restored_as_plain_tensors_without_grad(checkpoints: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    computed = parameter * 2
    found = checkpoints.round_trip([parameter, computed])
    assert [type(tensor) for tensor in found] == [torch.Tensor, torch.Tensor]
    assert not found[0].requires_grad
    assert found[1].is_leaf
    assert found[1].tolist() == [2, 2]


def test_lazily_conjugated_and_negated_tensors_are_restored_by_value(
    checkpoints: Any, same: Same
) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    value = [tensor.conj(), tensor.conj().imag, tensor]
    assert value[0].is_conj()
    assert value[1].is_neg()
    found = checkpoints.round_trip(value)
    assert same(found, [tensor.conj().resolve_conj(), torch.tensor([-2.0, 4.0]), tensor])


def test_the_default_device_has_no_say(checkpoints: Any, same: Same) -> None:
    value = {"w": torch.ones(2, 3), "t": torch.ones(2, 3).t(), "view": torch.ones(3).expand(2, 3)}
    with torch.device("meta"):
        found = checkpoints.round_trip(value)
    assert same(found, value)
    assert {tensor.device.type for tensor in found.values()} == {"cpu"}


def test_the_order_of_dimensions_in_memory_is_kept(checkpoints: Any) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    holes = torch.randn(2, 3, 4, 5).permute(3, 1, 0, 2)[::2]
    found = checkpoints.round_trip([image, holes, torch.ones(1, 5).t()])
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    assert found[1].stride() == torch.empty_like(holes).stride()
    assert found[2].shape == (5, 1)


@pytest.mark.parametrize("num_bytes", [1, CHUNK_BYTES - 1, 3 * CHUNK_BYTES + 5, 40 << 20])
def test_tensors_larger_than_a_chunk_or_a_block_are_restored(
    num_bytes: int, checkpoints: Any, same: Same
) -> None:
    small = torch.arange(5)
    value = {"a": small, "b": random_tensor(torch.uint8, num_bytes), "c": small.clone()}
    assert same(checkpoints.round_trip(value), value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(9 << 19).view(-1, 9).t(),
        lambda: torch.arange(9 << 19).view(3, -1, 3).permute(1, 2, 0),
        lambda: torch.arange(5 << 20)[::2],
        lambda: torch.arange(5 << 20)[::2].numpy(),
        lambda: torch.arange(9 << 19).view(-1, 3, 3).numpy().transpose(1, 2, 0),
        lambda: np.array([b"a" * (9 << 19), b"b\0c\0"])[::-1],
        lambda: np.zeros((3, 2), [("text", "U1200000"), ("number", "i8")]).T[1:],
    ],
)
def test_what_is_not_contiguous_is_copied_in_small_chunks(
    make: Callable[[], Any], checkpoints: Any, same: Same
) -> None:
    value = make()
    (leaf,) = encode(value, where="a").tensors.values()
    sizes = [buffer.nbytes for buffer in leaf.buffers()]
    assert sum(sizes) == leaf.num_bytes
    assert max(sizes) <= CHUNK_BYTES
    assert len(sizes) < 100
    assert same(checkpoints.round_trip(value), value)


# Sharing memory


def test_tied_weights_are_stored_once_and_are_tied_again(checkpoints: Any) -> None:
    weight = torch.nn.Parameter(torch.randn(100, 10))
    value = {"wte.weight": weight, "lm_head.weight": weight.detach()}
    encoded = encode(value, where="model")
    assert list(encoded.tensors) == ["wte.weight"]
    assert encoded.ties == {"lm_head.weight": "wte.weight"}
    found = checkpoints.round_trip(value)
    found["wte.weight"][3, 4] = 7
    assert found["lm_head.weight"][3, 4] == 7


def _views() -> dict[str, Callable[[], dict[str, torch.Tensor]]]:
    def base() -> torch.Tensor:
        return torch.arange(24.0)

    def pair(**parts: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        def make() -> dict[str, torch.Tensor]:
            tensor = base()
            return {name: part(tensor) for name, part in parts.items()}

        return make

    return {
        "base and part": pair(a=lambda t: t, b=lambda t: t[4:8]),
        "part and base": pair(a=lambda t: t[4:8], b=lambda t: t),
        "overlapping parts": pair(a=lambda t: t[2:9], b=lambda t: t[5:20]),
        "transposed": pair(a=lambda t: t.view(4, 6), b=lambda t: t.view(4, 6).t()),
        "only transposed": pair(a=lambda t: t.view(4, 6).t(), b=lambda t: t.view(4, 6).t()[2:]),
        "interleaved": pair(a=lambda t: t.view(4, 6)[:, ::2], b=lambda t: t.view(4, 6)[:, 1::2]),
        "other type": pair(a=lambda t: t, b=lambda t: t.view(torch.int32)[3:5]),
        "odd offset": pair(
            a=lambda t: t.view(torch.uint8)[3:], b=lambda t: t.view(torch.float64)[1:]
        ),
        "expanded": pair(a=lambda t: t[:3].expand(5, 3), b=lambda t: t[1:3]),
        "only expanded": pair(a=lambda t: t[:3].expand(5, 3)),
        "two parts of a whole": pair(a=lambda t: t, b=lambda t: t[2:4], c=lambda t: t[10:12]),
        "three": pair(a=lambda t: t[1:4], b=lambda t: t[3:8], c=lambda t: t[7:9]),
    }


@pytest.mark.parametrize("make", _views().values(), ids=_views())
def test_views_share_memory_after_a_load_as_they_did_before(
    make: Callable[[], dict[str, torch.Tensor]], checkpoints: Any, same: Same
) -> None:
    value = make()
    found = checkpoints.round_trip(value)
    assert same(found, value)
    for name, tensor in found.items():
        # What is done to one of them is seen in the others, in the same elements.
        for state in (value, found):
            state[name][(0,) * tensor.dim()] = 77
        assert same(found, value)
        assert tensor.stride() == value[name].stride()


def test_views_side_by_side_are_stored_under_their_own_names_without_what_is_between() -> None:
    flat = torch.zeros(1000)
    encoded = encode({"w": flat[:10].view(2, 5), "b": flat[900:]}, where="model")
    assert {name: leaf.shape for name, leaf in encoded.tensors.items()} == {
        "w": (2, 5),
        "b": (100,),
    }


def test_two_components_of_one_payload_share_memory_again(checkpoints: Any) -> None:
    tensor = torch.zeros(3)
    step = checkpoints.save({"model": {"w": tensor}, "ema": {"w": tensor[1:], "n": torch.ones(1)}})
    found = read_payload(step, "state", 0)
    found["model"]["w"][1] = 5
    assert found["ema"]["w"].tolist() == [5, 0]
    alone = read_payload(step, "state", 0, keys=["ema"])
    assert alone == {"ema": {"w": alone["ema"]["w"], "n": alone["ema"]["n"]}}
    assert alone["ema"]["w"].tolist() == [0, 0]


def test_a_loaded_tensor_owns_its_memory_and_can_be_resized(checkpoints: Any) -> None:
    found = checkpoints.round_trip({"a": torch.ones(1 << 21), "b": torch.ones(3)})
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in found.values())
    assert found["a"].resize_(1 << 22).shape == (1 << 22,)


def test_a_save_leaves_live_tensors_resizable_as_fsdp_needs_them(checkpoints: Any) -> None:
    value = {"a": torch.ones(3), "b": torch.ones(2, 3).t(), "c": torch.ones(3, dtype=torch.int8)}
    checkpoints.save({"model": value})
    for tensor in value.values():
        tensor.untyped_storage().resize_(0)


# Stock tools


class TinyGPT(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = torch.nn.Embedding(50, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril())
        self.head = torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.wte.weight


def test_stock_safetensors_reads_the_model_by_its_parameter_names(checkpoints: Any) -> None:
    model = TinyGPT()
    path = data_file(checkpoints.save({"model": model.state_dict()}))
    expected = dict(model.state_dict())
    tied = expected.pop("head.weight")
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(expected)
        assert all(torch.equal(file.get_tensor(name), expected[name]) for name in expected)
        assert file.metadata() == {"format": "pt", "head.weight": "wte.weight"}
    fresh = TinyGPT()
    missing, unexpected = safetensors.torch.load_model(fresh, path)
    assert not missing
    assert not unexpected
    assert torch.equal(fresh.head.weight, tied)


def test_the_names_of_several_components_begin_with_their_keys(checkpoints: Any) -> None:
    states = {"model": {"a.b": torch.ones(1)}, "optimizer": {"state": {0: {"m": torch.ones(2)}}}}
    with safe_open(data_file(checkpoints.save(states)), framework="pt") as file:
        assert set(file.keys()) == {"model.a.b", "optimizer.state[0].m"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stock_safetensors_reads_every_dtype_or_its_bytes(
    dtype: torch.dtype, checkpoints: Any, same: Same
) -> None:
    value = {"odd": torch.ones(3, dtype=torch.uint8), "t": random_tensor(dtype, 2, 3)}
    found = safetensors.torch.load_file(data_file(checkpoints.save({"model": value})))
    assert set(found) == set(value)
    if element_type(dtype).code is None:  # type: ignore[union-attr]
        assert found["t"].shape == (2, 3, dtype.itemsize)
        assert tensor_bytes(found["t"]) == tensor_bytes(value["t"])
    else:
        assert same(found["t"], value["t"])


def test_names_that_would_collide_are_made_distinct(checkpoints: Any, same: Same) -> None:
    value = {
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
        "__metadata__": torch.tensor(3),
        "": torch.tensor(4),
        "\ud800": torch.tensor(5),
        "list": [torch.tensor(6), {0: torch.tensor(7)}],
    }
    step = checkpoints.save({"model": value})
    with safe_open(data_file(step), framework="pt") as file:
        assert len(set(file.keys())) == 7
    assert same(checkpoints.round_trip(value), value)


def test_the_data_begins_on_a_page_and_every_tensor_on_its_own_alignment(checkpoints: Any) -> None:
    value = {str(dtype): random_tensor(dtype, 3) for dtype in reversed(DTYPES)}
    step = checkpoints.save({"model": value})
    content = data_file(step).read_bytes()
    assert (8 + int.from_bytes(content[:8], "little")) % 4096 == 0
    index = Index.from_bytes(data_file(step).with_suffix(".json").read_bytes(), where="index")
    assert len(index.records) == len(value)
    assert not [r for r in index.records if r.begin % r.element.num_bytes]


def test_overlapping_tensors_of_one_storage_are_stored_together_and_the_others_alone(
    checkpoints: Any,
) -> None:
    base, other = torch.arange(12.0), torch.arange(3.0)
    state = {"a": base[:4], "b": base[6:9], "x": other, "c": base[2:6], "d": base[8:]}
    found = encode(state, where="state")
    assert list(found.tensors) == ["a.storage", "b.storage", "x"]
    step = checkpoints.save({"state": state})
    restored = read_payload(step, "state", 0)["state"]
    assert all(torch.equal(restored[name], value) for name, value in state.items())
    restored["c"][0] = -1.0
    assert restored["a"][2] == -1.0
    assert restored["b"][0] == 6.0
