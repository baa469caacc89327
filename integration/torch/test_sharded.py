"""State that is sharded over the ranks: killed and resumed in one layout, taken over by others."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from preloads import TORCH
from sharded_workloads import drift, take_over, train

from resumekit.prove import compare
from resumekit.record.moments import CHECKPOINT, read_trace
from resumekit.serialization.sharding import Layout
from resumekit.testing import Cell, KillPoint, Kit, Run

PRELOAD = TORCH

LAYOUTS = (
    ("fsdp", 2),
    ("fsdp", 4),
    ("offloaded", 2),
    ("offloaded", 4),
    ("hsdp", 4),
    ("tp", 2),
    ("tp", 4),
    ("fsdp x tp", 4),
    ("fsdp1", 2),
    ("fsdp1", 3),
    ("fsdp1", 4),
    ("fsdp1 in bf16", 2),
    ("hsdp1", 4),
)

# Sums in another order differ in their last bits, and training widens that: by up to 2.4e-7 over 20
# steps of this model, with losses between 1.7 and 0.01.
LOSS_TOLERANCE = 2e-6


@pytest.mark.quick("fsdp-2", "offloaded-2", "tp-2", "fsdp x tp-4")
@pytest.mark.parametrize(("layout", "num_ranks"), LAYOUTS)
def test_a_killed_run_continues_exactly_in_its_layout(
    kit: Kit, layout: str, num_ranks: int
) -> None:
    options = {"layout": layout, "dropout": 0.1}
    kit.assert_exact(Cell(train, options, num_ranks, (KillPoint.step(5),)))


@pytest.mark.quick(
    "{'optimizer': 'fused*", "{'optimizer': 'by rows*", "{'layout': 'fsdp1', 'optimizer': 'sgd*"
)
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "sgd", "tied": True},
        {"optimizer": "adam with groups", "dropout": 0.1},
        {"optimizer": "fused", "ema": True},
        {"optimizer": "by rows"},
        {"batch_norm": True},
        {"layout": "fsdp1", "optimizer": "sgd", "tied": True, "batch_norm": True},
        {"layout": "fsdp1", "optimizer": "fused", "dropout": 0.1},
    ],
    ids=str,
)
def test_every_way_to_train_continues_exactly(kit: Kit, options: dict[str, Any]) -> None:
    kills = (KillPoint.checkpoint(3), KillPoint.step(7))
    kit.assert_exact(Cell(train, {"layout": "fsdp", **options}, 2, kills))


PULLED = [("fsdp", 2), ("fsdp x tp", 4), ("fsdp1", 2)]


@pytest.mark.quick("in place-fsdp-2")
@pytest.mark.parametrize(("layout", "num_ranks"), PULLED)
@pytest.mark.parametrize("pull", ["in place", "replaced"])
def test_averages_by_hand_continue_exactly(
    kit: Kit, layout: str, num_ranks: int, pull: str
) -> None:
    kills = (KillPoint.checkpoint(3), KillPoint.step(7))
    kit.assert_exact(Cell(train, {"layout": layout, "pull": pull}, num_ranks, kills))


@pytest.mark.quick("in place")
@pytest.mark.parametrize("pull", ["in place", "replaced"])
def test_averages_by_hand_that_are_left_out_are_caught(kit: Kit, pull: str) -> None:
    options = {"layout": "fsdp", "pull": pull, "transient": ["averages"]}
    cell = Cell(train, options, 2, (KillPoint.step(5),))
    kit.assert_caught(cell, "loss", inject=False)


@pytest.mark.quick("optimizer")
@pytest.mark.parametrize("component", ["model", "optimizer", "ema"])
def test_a_component_left_out_is_caught_and_named(kit: Kit, component: str) -> None:
    cell = Cell(train, {"layout": "fsdp", "ema": True}, 2, (KillPoint.step(5),))
    kit.assert_caught(cell, component)


def test_moments_of_their_own_shape_take_another_number_of_ranks(kit: Kit) -> None:
    chain = (("fsdp", 2), ("fsdp", 3), ("plain", 1))
    notes = launched(kit, chain, num_beyond=0, optimizer="by rows")
    for before, after in itertools.pairwise(notes):
        assert after["state_found"] == before["state_saved"]


def test_moments_of_their_own_shape_left_out_are_caught_and_named(kit: Kit) -> None:
    options = {"layout": "fsdp", "optimizer": "by rows"}
    kit.assert_caught(Cell(train, options, 2, (KillPoint.step(5),)), "optimizer")


@pytest.mark.quick("optimizer")
@pytest.mark.parametrize("component", ["model", "optimizer"])
def test_one_left_out_under_fsdp1_is_caught_and_named(kit: Kit, component: str) -> None:
    kit.assert_caught(Cell(train, {"layout": "fsdp1"}, 2, (KillPoint.step(5),)), component)


def launched(kit: Kit, chain: tuple[tuple[str, int], ...], **options: Any) -> list[dict[str, Any]]:
    """What each launch of a run noted; every launch has a layout of its own."""
    run = None
    for layout, num_ranks in chain:
        cell = Cell(take_over, {"layout": layout, **options}, num_ranks)
        run = kit.new_run(cell) if run is None else replace(run, cell=cell)
        run = kit.run_again(run)
        assert not run.failure, f"{cell}: {run.failure}"
    assert run is not None
    return [json.loads(line) for line in (run.directory / "notes.jsonl").read_text().splitlines()]


CHAINS: dict[str, tuple[tuple[str, int], ...]] = {
    "fewer and more ranks": (("fsdp", 4), ("fsdp", 2), ("fsdp", 1), ("fsdp", 3), ("fsdp", 4)),
    "offloaded and not": (("offloaded", 2), ("fsdp", 3), ("offloaded", 2), ("plain", 1)),
    "both generations of FSDP": (
        ("fsdp1", 2),
        ("fsdp", 3),
        ("plain", 1),
        ("fsdp1", 3),
        ("fsdp1", 1),
        ("hsdp1", 4),
        ("fsdp1", 2),
    ),
    "whole and sharded": (
        ("ddp", 4),
        ("fsdp", 2),
        ("plain", 1),
        ("fsdp x tp", 4),
        ("hsdp", 4),
        ("fsdp", 2),
        ("tp", 2),
        ("ddp", 2),
        ("fsdp", 3),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("chain", CHAINS)
def test_another_layout_takes_the_same_bits_over(kit: Kit, chain: str) -> None:
    notes = launched(kit, CHAINS[chain])
    for before, after in itertools.pairwise(notes):
        where = f"{before['layout']} -> {after['layout']}"
        assert after["resumed"], where
        assert after["state_found"] == before["state_saved"], where
        expected, found = before["losses"][-20:], after["losses"][:20]
        assert found == pytest.approx(expected, abs=LOSS_TOLERANCE), where


@pytest.mark.quick("{'optimizer': 'sgd', 'tied': True}")
@pytest.mark.parametrize(
    "options", [{"optimizer": "sgd", "tied": True}, {"optimizer": "groups", "ema": True}], ids=str
)
def test_tied_frozen_grouped_and_averaged_parameters_change_their_layout(
    kit: Kit, options: dict[str, Any]
) -> None:
    notes = launched(kit, (("ddp", 2), ("fsdp", 3), ("plain", 1)), num_beyond=0, **options)
    for before, after in itertools.pairwise(notes):
        assert after["state_found"] == before["state_saved"]


WRAPPED = {
    "whole and sharded": (("ddp", 2), ("wrapped fsdp", 3), ("plain", 1)),
    "out and back": (("plain", 1), ("wrapped fsdp", 2), ("fsdp", 3), ("wrapped ddp", 2)),
    "both generations of FSDP": (("wrapped fsdp1", 2), ("fsdp", 2), ("fsdp1", 3)),
    "every dimension": (("ddp", 2), ("wrapped fsdp x tp", 4), ("hsdp", 4), ("wrapped tp", 2)),
}


@pytest.mark.quick("whole and sharded")
@pytest.mark.parametrize("chain", WRAPPED)
def test_another_layout_takes_the_same_bits_over_under_other_names(kit: Kit, chain: str) -> None:
    notes = launched(kit, WRAPPED[chain], num_beyond=0, ema="FSDP" not in chain)
    for before, after in itertools.pairwise(notes):
        where = f"{before['layout']} -> {after['layout']}"
        assert after["resumed"], where
        assert after["state_found"] == before["state_saved"], where


@pytest.mark.quick("None")
@pytest.mark.parametrize("inject", [None, "optimizer"])
def test_ddp_continues_exactly_inside_another_class(kit: Kit, inject: str | None) -> None:
    options = {"layout": "ddp", "dropout": 0.1, "batch_norm": True}
    whole = kit.run_uninterrupted(Cell(train, options, 3))
    run = kit.run_again(kit.new_run(Cell(train, options, 3), inject=inject), kill=KillPoint.step(4))
    cell = Cell(train, {**options, "layout": "wrapped ddp"}, 3)
    run = kit.run_again(replace(run, cell=cell))
    assert not run.failure, run.failure
    found, expected = digests(run), digests(whole)
    assert len(expected) == 4
    assert (found == expected) == (inject is None)
    log = (run.directory / "launch-00001-rank-00000.log").read_text()
    assert "parameter names: * -> model.*" in log
    assert "gradient_buckets" not in log  # as where they are not restored


def digests(run: Run) -> dict[int, list[str]]:
    """The digests of the model's tensors at each save, without their names."""
    return {
        record.step: sorted(record.components["model"].values())
        for attempt in read_trace(run.trace)[0]
        for record in attempt.records
        if record.kind == CHECKPOINT
    }


def test_each_rank_writes_its_share_and_stock_tools_read_it(kit: Kit) -> None:
    from safetensors.torch import load_file

    run = kit.run_again(kit.new_run(Cell(take_over, {"layout": "fsdp", "num_beyond": 0}, 4)))
    assert not run.failure, run.failure
    (step,) = Path(run.directory, "training").glob("step-*")
    for directory in ("model", "optimizer"):
        files = sorted((step / directory).glob("*.safetensors"))
        sizes = [file.stat().st_size - 4096 * 2 for file in files]
        assert len(files) == 4
        assert max(sizes) < sum(sizes) * 0.3
        index = json.loads((step / directory / "index.json").read_text())
        for rank, file in enumerate(files):
            for name, tensor in load_file(file).items():
                layout = index["layouts"][index["tensors"][name]["layout"]]
                chunks = Layout.from_json(layout, max_values=1000, max_parts=1000)
                assert (rank, tensor.shape) in [(each.writer, each.box.sizes) for each in chunks]


def test_damage_to_one_ranks_file_sends_all_ranks_to_the_checkpoint_before(kit: Kit) -> None:
    cell = Cell(train, {"layout": "fsdp"}, 2)
    run = kit.run_again(kit.new_run(cell), kill=KillPoint.step(8))
    path = Path(run.directory, "training/step-00000006/optimizer/rank-00001.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    run = kit.run_again(run)
    assert not run.failure, run.failure
    assert [each.name for each in path.parents[2].glob("quarantine/step-*")] != []
    assert compare(kit.run_uninterrupted(cell).trace, run.trace, expect_resume=True).exact


@pytest.mark.quick("another model")
@pytest.mark.parametrize(
    ("options", "words"),
    [({"tied": True}, "once_more.weight"), ({"optimizer": "sgd"}, "AdamW")],
    ids=("another model", "another optimizer"),
)
def test_what_does_not_fit_is_refused_by_every_rank(
    kit: Kit, options: dict[str, Any], words: str
) -> None:
    run = kit.run_again(kit.new_run(Cell(take_over, {"num_beyond": 0}, 2)))
    assert not run.failure, run.failure
    run = kit.run_again(replace(run, cell=Cell(take_over, {"num_beyond": 0, **options}, 2)))
    assert "StateMismatchError" in run.failure
    assert words in run.failure
    assert len((run.directory / "notes.jsonl").read_text().splitlines()) == 1


COPIES = (
    ("tp", 2, "norm.weight", "model: norm.weight"),
    ("tp", 2, "squeeze.bias:exp_avg", "optimizer: state.squeeze.bias.exp_avg [0:34]"),
    ("hsdp", 4, "expand.weight", "model: expand.weight [26:52, 0:64]"),
    ("hsdp1", 4, "head.bias:exp_avg", "optimizer: state.head.bias.exp_avg [0:10]"),
)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "num_ranks", "tensor", "where"), COPIES)
def test_copies_that_have_drifted_apart_are_caught_and_named(
    kit: Kit, layout: str, num_ranks: int, tensor: str, where: str
) -> None:
    options = {"layout": layout, "tensor": tensor, "validate": "digest"}
    run = kit.run_again(kit.new_run(Cell(drift, options, num_ranks)))
    ranks = [f"rank {num_ranks // 2 - 1}: ", f"; rank {num_ranks - 1}: "]
    logs = [path.read_text() for path in run.directory.glob("launch-*.log")]
    assert len(logs) == num_ranks
    for text in logs:
        assert f"RankDisagreementError: {where}: copies that differ ({ranks[0]}" in text
        assert ranks[1] in text
    assert not list(Path(run.directory, "training").glob("step-*"))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp", "fsdp1"])
def test_a_rank_that_cannot_store_its_part_ends_the_save_on_all(kit: Kit, layout: str) -> None:
    options = {"layout": layout, "tensor": "head.bias:unstorable", "validate": "off"}
    run = kit.run_again(kit.new_run(Cell(drift, options, 2)))
    logs = [path.read_text() for path in run.directory.glob("launch-*.log")]
    assert len(logs) == 2
    assert all("head.bias" in text and "UnsupportedValueError" in text for text in logs)
    assert not list(Path(run.directory, "training").glob("step-*"))


@pytest.mark.full
def test_copies_are_not_compared_where_that_is_turned_off(kit: Kit) -> None:
    options = {"layout": "tp", "tensor": "norm.weight", "validate": "off"}
    run = kit.run_again(kit.new_run(Cell(drift, options, 2)))
    assert not run.failure, run.failure
    assert list(Path(run.directory, "training").glob("step-*"))
