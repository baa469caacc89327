from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resumekit.errors import CorruptCheckpointError, FormatVersionError, UnsupportedValueError
from resumekit.storage.directories import StepName, seal
from resumekit.storage.files import FileEntry
from resumekit.storage.manifest import ComponentRecord, Manifest

MakeManifest = Callable[..., Manifest]

PLAIN = st.dictionaries(
    st.text(max_size=8),
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False) | st.lists(st.integers(), max_size=3),
    max_size=4,
)  # fmt: skip
IDS = st.text("0123456789abcdef", min_size=32, max_size=32)
FILES = st.lists(
    st.builds(
        FileEntry,
        path=st.from_regex(r"(state|model)/[a-z]{1,8}\.json", fullmatch=True),
        size=st.integers(0, 2**63 - 1),
        digest=IDS,
        writer=st.integers(0, 3),
    ),
    max_size=5,
    unique_by=lambda entry: entry.path,
)
COMPONENTS = st.lists(
    st.builds(
        ComponentRecord,
        key=st.from_regex(r"[a-z]{1,6}(/[a-z]{1,6})?", fullmatch=True),
        pattern=st.sampled_from(["global", "replicated", "per_rank", "sharded"]),
        fidelity=st.sampled_from(["exact", "equivalent", "lost"]),
        reason=st.text(max_size=10),
        directory=st.sampled_from(["state", "model/generator"]),
        writers=st.sampled_from([(0,), (0, 1, 2, 3), ()]),
    ),
    max_size=4,
    unique_by=lambda component: component.key,
)
METRICS = st.none() | st.fixed_dictionaries(
    {
        "name": st.text(max_size=8),
        "mode": st.sampled_from(["min", "max"]),
        "value": st.floats().map(float.hex),
    }
)
MANIFESTS = st.builds(
    Manifest,
    run_id=IDS,
    attempt=IDS,
    step=st.integers(0, 2**63 - 1),
    revision=st.integers(0, 999_999),
    created=st.just("2026-01-31T12:00:00+00:00"),
    parent=st.none() | st.just("step-00000400-r2"),
    world_size=st.just(4),
    progress=PLAIN,
    finished=st.none() | st.text(max_size=8),
    metric=METRICS,
    capture=PLAIN,
    fingerprint=PLAIN,
    details=PLAIN,
    components=COMPONENTS.map(tuple),
    files=FILES.map(tuple),
    format_version=st.just(1),
)


@given(MANIFESTS)
def test_a_manifest_is_read_back(manifest: Manifest) -> None:
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_a_flip_of_any_byte_is_found(make_manifest: MakeManifest) -> None:
    data = make_manifest(files=[FileEntry("state/a", 3, "0" * 32, 0)]).to_bytes()
    for position in range(len(data)):
        for mask in (0x01, 0x20, 0xFF):
            damaged = bytearray(data)
            damaged[position] ^= mask
            with pytest.raises(CorruptCheckpointError, match=r"digest|line that seals"):
                Manifest.from_bytes(bytes(damaged))


def test_a_cut_or_lengthened_manifest_is_found(make_manifest: MakeManifest) -> None:
    data = make_manifest().to_bytes()
    for wrong in [data[:size] for size in range(len(data))] + [data + b"\n", b" " + data, data * 2]:
        with pytest.raises(CorruptCheckpointError):
            Manifest.from_bytes(wrong)


def test_it_can_be_read_by_a_person_and_any_json_parser(make_manifest: MakeManifest) -> None:
    entry = FileEntry("state/rank-00000.json", 12, "0" * 32, 0)
    text = make_manifest(files=[entry]).to_bytes().decode()
    assert max(len(line) for line in text.splitlines()) < 200
    assert json.loads(text)["files"][0]["path"] == "state/rank-00000.json"


def _fields(manifest: Manifest) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(manifest.to_bytes())
    del fields["digest"]
    return fields


def _file(**changes: Any) -> dict[str, Any]:
    return {"path": "state/a", "size": 1, "digest": "0" * 32, "writer": 0} | changes


def _component(**changes: Any) -> dict[str, Any]:
    return {
        "key": "rng", "pattern": "per_rank", "fidelity": "exact", "reason": "",
        "directory": "state", "writers": [0],
    } | changes  # fmt: skip


WRONG_FIELDS: dict[str, list[Any]] = {
    "format": ["other", None],
    "format_version": [0, -1, "1", True, 1.0, None],
    "digest_algorithm": ["md5"],
    "run_id": ["A" * 32, "../" * 8, "a" * 33, None],
    "attempt": [5, ""],
    "step": [-1, 2**63, 10**900, 1.0, True, "500"],
    "revision": [-1, 10**6, None],
    "created": ["yesterday", "2026-01-31T12:00:00+09:00", 0],
    "parent": ["../step", "", 5],
    "world_size": [0, 10**9, 1.5],
    "progress": [[], None],
    "finished": [False],
    "metric": [
        {},
        {"name": "loss"},
        {"name": "loss", "mode": "best", "value": "0x1.0000000000000p+0"},
        {"name": "loss", "mode": "min", "value": "0.5"},
        {"name": "loss", "mode": "min", "value": 0.5},
        {"name": "loss", "mode": "min", "value": "0x1p+99999"},
        {"name": 5, "mode": "min", "value": "inf"},
    ],
    "capture": [1],
    "fingerprint": ["x"],
    "details": [None],
    "files": [{}, None, [1], [[]], [{}]],
    "components": [7, [1], [{}]],
    "extra": [1],
}
WRONG_FILES: dict[str, list[Any]] = {
    "path": [
        "/etc/passwd", "../x", "state/../../x", "state//a", "a\\b", "a\0b", "", 5, "manifest.json",
        "\ud800",
    ],
    "size": [-1, 2**63, 1.5, None],
    "digest": ["0" * 31, "0" * 31 + "G", 0],
    "writer": [-1, 1, None],
    "extra": [1],
}  # fmt: skip
WRONG_COMPONENTS: dict[str, list[Any]] = {
    "key": ["", "a//b", 5],
    "pattern": ["everywhere", []],
    "fidelity": ["nearly", None],
    "reason": [None],
    "directory": ["..", "/tmp", 5],
    "writers": [[1, 0], [0, 0], [1], [-1], [True], "0"],
    "extra": [1],
}


def _each(wrong: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [{name: value} for name, values in wrong.items() for value in values]


@pytest.mark.parametrize(
    "changes",
    [
        *_each(WRONG_FIELDS),
        *({"files": [_file(**changes)]} for changes in _each(WRONG_FILES)),
        *({"components": [_component(**changes)]} for changes in _each(WRONG_COMPONENTS)),
        {"files": [_file(), _file()]},
        {"files": [_file(), _file(path="state/A")]},
        {"files": [_file(), _file(path="state/a/b")]},
        {"components": [_component(), _component()]},
    ],
    ids=lambda changes: repr(changes)[:80],
)
def test_hostile_fields_under_a_right_digest_are_refused(
    make_manifest: MakeManifest, changes: dict[str, Any]
) -> None:
    data = seal(_fields(make_manifest()) | changes)
    with pytest.raises(CorruptCheckpointError, match=r"step-00000500/manifest\.json"):
        Manifest.from_bytes(data, where="step-00000500/manifest.json")


def test_a_missing_field_is_named(make_manifest: MakeManifest) -> None:
    for name in _fields(make_manifest()):
        fields = _fields(make_manifest())
        del fields[name]
        with pytest.raises(CorruptCheckpointError, match=name):
            Manifest.from_bytes(seal(fields))


def test_a_newer_format_is_distinguished_from_damage(make_manifest: MakeManifest) -> None:
    newer = seal({"format": "resumekit checkpoint", "format_version": 2, "anything": "else"})
    with pytest.raises(FormatVersionError, match="format version 2, expected at most 1"):
        Manifest.from_bytes(newer)
    with pytest.raises(CorruptCheckpointError):
        Manifest.from_bytes(newer.replace(b"else", b"elSe"))


@pytest.mark.parametrize(
    "changes",
    [
        {"details": {1: 2}},
        {"details": {"a": float("nan")}},
        {"progress": {"a": {1, 2}}},
        {"step": -1},
        {"run_id": "short"},
        {"world_size": 0},
        {"created": "now"},
        {"files": (FileEntry("..", 1, "0" * 32, 0),)},
        {"metric": {"name": "x", "mode": "min", "value": "0.10"}},
        {"components": (ComponentRecord("a", "per_rank", "exact", "", "state", (3,)),)},
    ],
    ids=repr,
)
def test_what_could_not_be_read_back_is_refused_before_it_is_written(
    make_manifest: MakeManifest, changes: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedValueError):
        replace(make_manifest(), **changes).to_bytes()


def test_tuples_among_plain_values_become_lists(make_manifest: MakeManifest) -> None:
    manifest = make_manifest(details={"a": (1, (2, 3))})
    assert Manifest.from_bytes(manifest.to_bytes()).details == {"a": [1, [2, 3]]}


def test_it_knows_the_name_of_its_directory(make_manifest: MakeManifest) -> None:
    assert make_manifest(name=StepName(7, 2)).name == StepName(7, 2)
