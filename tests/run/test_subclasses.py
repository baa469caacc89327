"""Tensors made of others in a run of one process: in place, refused, and under every command."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_classes import CodedMomentum, Refined, Rows, plain_parts
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from crashlab.content import edit, mutations, reseal
from resumekit.adapters.torch import Checkpointer
from resumekit.capture.model import ModelState
from resumekit.capture.nested_state import Restorer, fits, is_same
from resumekit.capture.optimizer import OptimizerState
from resumekit.cli import main
from resumekit.dcp import StorageReader
from resumekit.errors import NoUsableCheckpointError, ResumekitError, StateMismatchError
from resumekit.recorder.digests import tensor_digest
from resumekit.serialization.deferral import PendingState

Inner = dict[str, Tensor]


class Program:
    """A model with a weight of a class, moments and an extra of a class in a class."""

    def __init__(self, directory: Path, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
        self.weight = Rows.of(torch.randn(4, 6), **options)
        self.model[0].weight = nn.Parameter(self.weight, requires_grad=False)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = CodedMomentum(trained)
        self.extras: dict[str, Any] = {"average": [Refined.of(torch.randn(3, 2))]}
        self.checkpointer = Checkpointer(
            directory, model=self.model, optimizer=self.optimizer, extras=self.extras
        )

    def train(self) -> Program:
        self.model(torch.randn(5, 6)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def inner(self) -> Inner:
        """All inner tensors, copied, by means of torch."""
        found = plain_parts(self.extras["average"][0], "average")
        for name, parameter in self.model.named_parameters():
            found |= plain_parts(parameter.detach(), name)
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found |= plain_parts(torch.tensor(value) if key == "step" else value, name + key)
        return {name: each.clone() for name, each in found.items()}


def are_equal(one: Inner, other: Inner) -> bool:
    same_names = one.keys() == other.keys()
    return same_names and all(torch.equal(each, other[name]) for name, each in one.items())


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Inner]:
    """A run directory, and what it was saved from."""
    directory = tmp_path / "run"
    program = Program(directory).train()
    with program.checkpointer:
        program.checkpointer.save()
    return directory, program.inner()


@pytest.mark.parametrize("has_moments", [False, True])
def test_a_resume_fills_the_live_tensors_and_makes_the_moments_that_are_not_there(
    saved: tuple[Path, Inner], has_moments: bool
) -> None:
    directory, expected = saved
    program = Program(directory, seed=5)
    if has_moments:
        program.train().train()
    live = [*program.model.parameters(), program.weight.codes]
    live += [each["momentum"] for each in program.optimizer.state.values()]
    assert not are_equal(program.inner(), expected)
    with program.checkpointer:
        program.checkpointer.resume()
    assert are_equal(program.inner(), expected)
    now = [*program.model.parameters(), program.weight.codes]
    now += [each["momentum"] for each in program.optimizer.state.values()]
    assert [*map(id, now)][: len(live)] == [*map(id, live)]


def test_their_own_copy_would_not_restore_them() -> None:
    source, target = Refined.of(torch.randn(3, 2)), Refined.of(torch.zeros(3, 2))
    target.copy_(source)
    assert not are_equal(plain_parts(target), plain_parts(source))
    again = Restorer()(target, source)
    assert again is target
    assert are_equal(plain_parts(target), plain_parts(source))
    made = Restorer()(None, source)
    assert are_equal(plain_parts(made), plain_parts(source))
    assert made.rest.data_ptr() != source.rest.data_ptr()


@pytest.mark.parametrize("available", [0, 1 << 40], ids=["two passes", "buffer"])
def test_they_are_built_where_large_tensors_are_read_into_live_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int
) -> None:
    monkeypatch.setattr("resumekit.run.saving.snapshot.available_memory", lambda root: available)
    read = PendingState.read
    passes: list[object] = []
    monkeypatch.setattr(PendingState, "read", lambda *given: passes.append(1) or read(*given))  # type: ignore[func-returns-value]

    def made(seed: int) -> tuple[nn.Sequential, Checkpointer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 4, bias=False))
        model[1].weight = nn.Parameter(Rows.of(torch.randn(4, 200)), requires_grad=False)
        optimizer = torch.optim.SGD(model[0].parameters())
        return model, Checkpointer(tmp_path, model=model, optimizer=optimizer)

    model, first = made(0)
    with first:
        first.save()
    again, second = made(1)
    with second:
        second.resume()
    for name, parameter in model.named_parameters():
        assert are_equal(plain_parts(parameter), plain_parts(again.get_parameter(name)))
    assert bool(passes) == (available == 0)


def test_a_large_weight_that_is_not_trained_is_in_the_file_of_such_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1200, 1200, bias=False), nn.Linear(1200, 2))
    model[0].weight = nn.Parameter(Rows.of(torch.randn(1200, 1200)), requires_grad=False)
    optimizer = torch.optim.SGD(model[1].parameters())
    with Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpointer:
        checkpointer.save()
    (index,) = tmp_path.glob("step-*/model/rank-00000.frozen.json")
    assert set(json.loads(index.read_bytes())["tensors"]) == {"0.weight.codes", "0.weight.scale"}


# ---------------------------------------------------------------- refused before anything changes


def _set(path: tuple[Any, ...], value: Any) -> Callable[[Path], None]:
    def change(step: Path) -> None:
        whole = ("model", "0.weight", "$subclass", *path)
        edit(step, whole, lambda parent, key: parent.__setitem__(key, value), MODEL)

    return change


def _of_moment(path: tuple[Any, ...], value: Any) -> Callable[[Path], None]:
    def change(step: Path) -> None:
        whole = ("optimizer", "state", "0.bias", "momentum", "$subclass", *path)
        edit(step, whole, lambda parent, key: parent.__setitem__(key, value), OPTIMIZER)

    return change


MODEL, OPTIMIZER = "model/rank-00000.json", "optimizer/rank-00000.json"
TENSOR = {"$tensor": "0.weight.scale"}
HOSTILE: dict[str, Callable[[Path], None]] = {
    "an unknown class": _set((0,), "os.system"),
    "another known class": _set((0,), "tensor_classes.Refined"),
    "another context": _set((1, "num_levels"), 50),
    "a context of another kind": _set((1,), [100]),
    "other names": _set((2,), {"code": {"$tensor": "0.weight.codes"}, "scale": TENSOR}),
    "a name less": _set((2,), {"scale": TENSOR}),
    "a name more": _set((2, "more"), TENSOR),
    "another part": _set((2, "codes"), TENSOR),
    "another outer shape": _set((3,), [6, 4]),
    "a moment of an unknown class": _of_moment((0,), "torchao.optim.Missing"),
    "a moment of another class": _of_moment((0,), "tensor_classes.Rows"),
    "a moment without a part": _of_moment((2,), {}),
    "a moment of another context": _of_moment((1,), {"more": 1}),
    "a moment of other shapes": _of_moment((3,), [9]),
}


@pytest.mark.parametrize("has_moments", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_a_typed_error_before_anything_changes(
    saved: tuple[Path, Inner], name: str, has_moments: bool
) -> None:
    directory, _ = saved
    HOSTILE[name](next(directory.glob("step-*")))
    program = Program(directory, seed=5)
    if has_moments:
        program.train()
    before = program.inner()
    with program.checkpointer, pytest.raises(ResumekitError) as caught:
        program.checkpointer.resume()
    assert isinstance(caught.value, StateMismatchError | NoUsableCheckpointError)
    assert are_equal(program.inner(), before)


def test_another_class_or_context_of_the_live_tensor_is_refused_by_its_name(
    saved: tuple[Path, Inner],
) -> None:
    directory, _ = saved
    program = Program(directory, num_levels=50)
    before = program.inner()
    with program.checkpointer, pytest.raises(StateMismatchError, match=r"0\.weight") as caught:
        program.checkpointer.resume()
    assert '"num_levels": 100' in str(caught.value)
    assert '"num_levels": 50' in str(caught.value)
    assert are_equal(program.inner(), before)


def test_a_moment_that_was_plain_or_of_another_class_is_refused_by_its_name() -> None:
    model = nn.Linear(3, 2)

    def stepped(change: Callable[[Tensor], Any]) -> OptimizerState:
        optimizer = CodedMomentum(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        for each in optimizer.state.values():
            each["momentum"] = change(each["momentum"].dequantize())
        return OptimizerState(optimizer, {"model": model})

    live = stepped(Refined.of)
    live.check_state_dict(stepped(Refined.of).state_dict())
    for other in (Rows.of, torch.clone):
        for mine, theirs in ((live, stepped(other)), (stepped(other), live)):
            with pytest.raises(StateMismatchError, match="momentum"):
                mine.check_state_dict(copy.copy(theirs.state_dict()))


def test_tied_weights_of_a_class_stay_tied_and_untied_ones_are_refused() -> None:
    def model(*, tied: bool) -> nn.Module:
        made = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        for layer in made:
            layer.weight = nn.Parameter(Rows.of(torch.randn(3, 3)), requires_grad=False)
        if tied:
            made[1].weight = made[0].weight
        return made

    tied = ModelState(model(tied=True))
    tied.check_state_dict(ModelState(model(tied=True)).state_dict())
    for mine, theirs in ((True, False), (False, True)):
        with pytest.raises(StateMismatchError, match="tie"):
            ModelState(model(tied=mine)).check_state_dict(
                ModelState(model(tied=theirs)).state_dict()
            )


def test_equality_is_that_of_the_parts() -> None:
    rows, values = Rows.of(torch.randn(3, 2)), torch.randn(3, 2)
    assert is_same(rows, Rows(rows.codes.clone(), rows.scale, 100, torch.float32))
    assert not is_same(rows, Rows(rows.codes + 1, rows.scale, 100, torch.float32))
    assert not is_same(rows, Rows(rows.codes, rows.scale, 99, torch.float32))
    assert not is_same(rows, rows.dequantize())
    assert not is_same(rows.dequantize(), rows)
    assert fits(rows, Rows.of(values))
    assert not fits(rows, values)
    assert not fits(values, rows)


# ---------------------------------------------------------------- commands and other programs


def command(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_commands_see_the_inner_tensors(
    saved: tuple[Path, Inner], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    directory, expected = saved
    (step,) = directory.glob("step-*")
    assert command("verify", directory) == 0
    assert command("inspect", step) == 0
    file = tmp_path / "model.safetensors"
    assert command("export", directory, file, "--dtype", "bf16") == 0
    exported = load_file(file)
    assert torch.equal(exported["0.weight.codes"], expected["0.weight.codes"])
    assert torch.equal(exported["0.weight.scale"], expected["0.weight.scale"])
    assert exported["0.bias"].dtype == torch.bfloat16

    other = Program(tmp_path / "other").train()
    other.weight.codes[0, 0] += 1
    with other.checkpointer:
        other.checkpointer.save()
    capsys.readouterr()
    assert command("diff", directory, tmp_path / "other") == 1
    printed = capsys.readouterr().out
    assert "0.weight.codes" in printed
    assert "0.weight.scale" not in printed
    assert command("diff", directory, directory) == 0


def test_damage_of_an_inner_tensor_is_found(saved: tuple[Path, Inner]) -> None:
    directory, _ = saved
    (data,) = directory.glob("step-*/optimizer/*.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    assert command("verify", directory) == 1


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_dcp_load_gives_the_inner_tensors_and_names_the_outer_one(
    saved: tuple[Path, Inner],
) -> None:
    directory, expected = saved
    state = {"model": {"0.weight.codes": torch.zeros(4, 6, dtype=torch.int8)}}
    dcp.load(state, storage_reader=StorageReader(directory), no_dist=True)
    assert torch.equal(state["model"]["0.weight.codes"], expected["0.weight.codes"])
    asked = {"model": {"0.weight": torch.zeros(4, 6)}}
    with pytest.raises(CheckpointException, match=r"model\.0\.weight"):
        dcp.load(asked, storage_reader=StorageReader(directory), no_dist=True)


def test_a_file_of_a_newer_version_is_refused_as_newer_and_stays(saved: tuple[Path, Inner]) -> None:
    directory, _ = saved
    (step,) = directory.glob("step-*")
    _as_version(step, 4)
    with (
        Program(directory).checkpointer as checkpointer,
        pytest.raises(NoUsableCheckpointError, match="format version 4, expected at most 3"),
    ):
        checkpointer.resume()
    assert [*directory.glob("step-*")] == [step]
    assert not (directory / "quarantine").exists()


def _as_version(step: Path, version: int) -> None:
    index = json.loads((step / MODEL).read_bytes())
    assert index["format_version"] == 3
    reseal(step, MODEL, json.dumps({**index, "format_version": version}).encode())


# ---------------------------------------------------------------- every mutation


@pytest.mark.parametrize(("first", "apart"), [(3, 13), pytest.param(0, 1, marks=pytest.mark.full)])
def test_every_mutation_of_such_a_tensor_is_a_typed_error_or_no_change(
    saved: tuple[Path, Inner], tmp_path: Path, first: int, apart: int
) -> None:
    directory, expected = saved
    (step,) = directory.glob("step-*")
    chosen = [each for each in mutations(step) if _is_of_subclass(each.path)][first::apart]
    assert len(chosen) > 20
    refused = 0
    for number, mutation in enumerate(chosen):
        copied = tmp_path / f"copy-{number}"
        shutil.copytree(directory, copied)
        mutation.apply(next(copied.glob("step-*")))
        program = Program(copied, seed=5).train()
        before = program.inner()
        try:
            with program.checkpointer:
                program.checkpointer.resume()
        except ResumekitError:
            refused += 1
            assert are_equal(program.inner(), before), str(mutation)
        else:
            assert are_equal(program.inner(), expected), str(mutation)
        shutil.rmtree(copied)
    assert refused > len(chosen) * 0.9


def _is_of_subclass(path: tuple[Any, ...]) -> bool:
    """Of the weight or of one moment; another tensor of the same shape is another good value."""
    is_one = path[:2] == ("model", "0.weight") or path[:3] == ("optimizer", "state", "0.bias")
    return is_one and "$subclass" in path and path[-1] != "$tensor"


# ---------------------------------------------------------------- the recorder


def test_the_recorder_digests_the_parts() -> None:
    moment = Refined.of(torch.randn(3, 2))
    before = tensor_digest(moment)
    same = Refined(
        Rows(moment.rows.codes.clone(), moment.rows.scale, 100, torch.float32), moment.rest
    )
    assert tensor_digest(same) == before
    moment.rows.codes[0, 0] += 1
    assert tensor_digest(moment) != before
    assert tensor_digest(moment.rows) != tensor_digest(moment)
