"""A payload: what it writes, how much, and what of it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from resumekit.errors import CorruptCheckpointError, UnreadableCheckpointError
from resumekit.serialization.index import Index
from resumekit.serialization.reading import read_payload
from resumekit.serialization.writing import Payload
from resumekit.storage.commit import Staging
from resumekit.storage.files import BLOCK_BYTES, FileEntry


def states(num_elements: int = 10) -> dict[str, Any]:
    return {
        "model": {"a": torch.arange(num_elements), "b": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"lr": 0.1, "m": torch.full((num_elements,), 2.0)},
        "rng": {"python": (3, [1, 2])},
    }


@pytest.mark.parametrize(
    "value", [{}, {"model": {}}, {"rng": (1, None)}, states(), states(3 * BLOCK_BYTES // 8 + 1)]
)
def test_the_written_sizes_are_within_the_announced_ones(
    value: dict[str, Any], checkpoints: Any, same: Any
) -> None:
    payload = Payload.of_states("state", 0, value)
    written: list[FileEntry] = []

    def write(staging: Staging) -> list[FileEntry]:
        written.extend(payload.write(staging))
        return written

    step = checkpoints.commit(write)
    assert payload.num_files == len(written)
    num_bytes = sum(entry.size for entry in written)
    index_bytes = sum(entry.size for entry in written if entry.path.endswith(".json"))
    assert num_bytes <= payload.num_bytes <= num_bytes + 20 * index_bytes + 4096
    for entry in written:
        assert Path(step.path, entry.path).stat().st_size == entry.size
    assert same(read_payload(step, "state", 0), value)


def test_state_without_tensors_is_one_readable_file(checkpoints: Any) -> None:
    step = checkpoints.save({"progress": {"step": 5, "seen": {1, 2}}})
    assert [entry.path for entry in step.manifest.files] == ["state/rank-00000.json"]
    text = Path(step.path, "state/rank-00000.json").read_text("ascii")
    assert '"progress": {"step": 5, "seen": {"$set": [1, 2]}}' in text


def test_the_index_is_readable_in_lines(checkpoints: Any) -> None:
    value = {"words": list(range(700)), "model": states()["model"]}
    step = checkpoints.save({"state": value})
    lines = Path(step.path, "state/rank-00000.json").read_text("ascii").splitlines()
    assert '  "model.a": {"dtype": "int64", "shape": [10], "begin": 0, "end": 80},' in lines
    assert max(map(len, lines)) <= 101
    assert len(lines) < 100


def test_nothing_is_copied_before_it_is_written(checkpoints: Any) -> None:
    tensor = torch.zeros(3)
    payload = Payload.of_states("state", 0, {"model": {"w": tensor}})
    tensor += 1
    step = checkpoints.commit(payload.write)
    assert read_payload(step, "state", 0)["model"]["w"].tolist() == [1, 1, 1]


def test_every_rank_has_files_of_its_own(checkpoints: Any) -> None:
    def write(staging: Staging) -> list[FileEntry]:
        return [
            entry
            for rank in range(2)
            for entry in Payload.of_states("state", rank, {"rng": torch.tensor(rank)}).write(
                staging
            )
        ]

    step = checkpoints.commit(write)
    assert [entry.writer for entry in step.manifest.files] == [0, 0, 1, 1]
    for rank in range(2):
        assert read_payload(step, "state", rank)["rng"].item() == rank


def test_a_part_of_the_states_is_read_alone(checkpoints: Any, same: Any) -> None:
    value = states(3 * BLOCK_BYTES // 4)
    step = checkpoints.save(value)
    for keys in ([], ["rng"], ["model"], ["optimizer"], ["optimizer", "model"]):
        assert same(read_payload(step, "state", 0, keys), {key: value[key] for key in keys})


def test_what_is_not_wanted_is_not_read(checkpoints: Any) -> None:
    value = {"a": {"w": torch.zeros(2 * BLOCK_BYTES)}, "b": {"w": torch.ones(2 * BLOCK_BYTES)}}
    step = checkpoints.save(value)
    path = Path(step.path, "state/rank-00000.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert set(read_payload(step, "state", 0, keys=["a"])) == {"a"}
    for keys in (["b"], None):
        with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.safetensors"):
            read_payload(step, "state", 0, keys)


def test_an_index_is_the_same_after_reading_and_writing_it_again(checkpoints: Any) -> None:
    step = checkpoints.save(states())
    content = Path(step.path, "state/rank-00000.json").read_bytes()
    assert Index.from_bytes(content, where="index").to_bytes() == content


def test_a_file_that_cannot_be_read_is_not_called_damaged(checkpoints: Any) -> None:
    step = checkpoints.save(states())
    Path(step.path, "state/rank-00000.safetensors").unlink()
    with pytest.raises(UnreadableCheckpointError, match=r"rank-00000\.safetensors.*ENOENT"):
        read_payload(step, "state", 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, _: model.update(c=torch.ones(2)),
        lambda model, _: model.update(b=model["b"].double()),
        lambda model, _: model.update(a=model["a"].clone() + 1),
        lambda model, _: model.update(a=model["a"].view(2, 5)),
        lambda model, _: model.update(c=model["a"]),
        lambda _, losses: losses.append(0.5),
    ],
    ids=["parameter added", "dtype", "tensor replaced", "shape", "tied", "list that grew"],
)
def test_what_has_changed_since_the_save_before_is_in_the_next_one(
    change: Any, checkpoints: Any, same: Any
) -> None:
    losses = [0.25]
    value = {**states(), "losses": losses}
    checkpoints.save(value)
    change(value["model"], losses)
    assert same(read_payload(checkpoints.save(value), "state", 0), value)
