"""Hostile files whose digests are right, so that only their content can give them away."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from resumekit.storage.directories import MANIFEST, unseal
from resumekit.storage.files import BLOCK_BYTES, combine

# Clears the screen, sets the title, forges a line, reverses the direction of the text.
CONTROL = "evil\x1b[2J\x1b]0;t\x07\nforged  ok\r\x08\u202e\u2066\x9b31m\u2028"

Change = Callable[[Any], object]


def sealed(body: bytes) -> bytes:
    """A file that ends with its digest, whatever it holds."""
    body = b"{\n" + body
    return body + b'  "digest": "xxh3-128:%s"\n}\n' % xxhash.xxh3_128_hexdigest(body).encode()


def sealed_fields(fields: dict[str, Any]) -> bytes:
    """These fields as a sealed file."""
    lines = (f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in fields.items())
    return sealed("".join(lines).encode())


def reseal(step: Path) -> None:
    """Makes the manifest of a step directory say what its files are now."""
    manifest = unseal((step / MANIFEST).read_bytes(), where=MANIFEST)
    for row in manifest["files"]:
        data = (step / row["path"]).read_bytes()
        blocks = range(0, len(data), BLOCK_BYTES)
        digests = [xxhash.xxh3_128_digest(data[at : at + BLOCK_BYTES]) for at in blocks]
        row |= {"size": len(data), "digest": combine(digests)}
    (step / MANIFEST).write_bytes(sealed_fields(manifest))


def change_json(path: Path, change: Change, step: Path) -> None:
    """Changes a JSON file of a step directory, and seals it again."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    reseal(step)


def hostile_manifests(fields: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Manifests of up to 1 MB, made of a good one.

    Args:
        fields: of the good one, without the digest.
    """
    component, file = fields["components"][0], fields["files"][0]
    row = {"reason": CONTROL, "fidelity": CONTROL}
    fork = dict.fromkeys(("run_id", "checkpoint", "manifest_digest", "forked"), CONTROL)
    changes: dict[str, dict[str, Any]] = {
        "control characters in progress": {"progress": {CONTROL: CONTROL, "epoch": CONTROL}},
        "control characters in finished": {"finished": CONTROL},
        "control characters in the metric": {
            "metric": {"name": CONTROL, "mode": "min", "value": (0.5).hex()}
        },
        "control characters in a component": {
            "components": [{**component, "reason": CONTROL, "key": f"model/{CONTROL}"}]
        },
        "control characters in the report": {"capture": {CONTROL: row}},
        "control characters in the settings": {"fingerprint": {CONTROL: CONTROL}},
        "control characters in details": {
            "details": {
                CONTROL: CONTROL,
                "journal": {"verdict": CONTROL, "num_steps": CONTROL},
                "lineage": [{**fork, "only_weights": False}] * 50,
            }
        },
        "control characters in a path": {"files": [{**file, "path": CONTROL}]},
        "control characters in a field": {CONTROL: 1},
        "control characters in the run": {"run_id": CONTROL},
        "a path out of the directory": {"files": [{**file, "path": "../../etc/passwd"}]},
        "an absolute path": {"files": [{**file, "path": "/etc/passwd"}]},
        "a huge step": {"step": 10**900},
        "a huge size": {"files": [{**file, "size": 2**62}]},
        "huge counts": {"progress": dict.fromkeys(fields["progress"], 10**900)},
        "a long text": {"finished": "A" * 900_000},
        "many settings": {"fingerprint": {str(number): 1 for number in range(60_000)}},
        "many components": {
            "components": [{**component, "key": f"model/{number}"} for number in range(5000)]
        },
        "many files": {"files": [{**file, "path": f"a/{number}"} for number in range(8000)]},
        "many directories": {
            "files": [
                {**file, "path": f"{number}/" + "/".join("a" * 100)} for number in range(2800)
            ]
        },
        "many forks": {"details": {"lineage": [{**fork, "only_weights": False}] * 2500}},
        "many ranks": {
            "world_size": 1 << 24,
            "components": [{**component, "writers": list(range(100_000))}],
        },
        "many empty lists": {"details": {"x": [[]] * 240_000}},
        "bytes that are no text": {"fingerprint": {"\udcff": "\ud800"}},
        "no component": {"components": []},
        "settings of another type": {"fingerprint": {"model": {"trained_in": [1], "in_fp32": 5}}},
    }
    for name, change in changes.items():
        yield name, sealed_fields({**fields, **change})
    for name, value in {
        "deep nesting": b"[" * 400_000 + b"]" * 400_000,
        "a long number": b"9" * 900_000,
        "a flood of commas": b"[" + b"," * 900_000 + b"]",
        "a flood of quotes": b'"' + b'\\"' * 400_000 + b'"',
        "not UTF-8": b'"\xff\xfe"',
        "not a number": b"NaN",
    }.items():
        yield name, sealed(b'  "a": ' + value + b",\n")


def hostile_indices() -> dict[str, Change]:
    """Changes of the index of a sharded model by which few characters ask for much."""

    def parts(number: int) -> Change:
        def change(index: Any) -> None:
            runs = {"offsets": [[[0, 1, number]]], "sizes": [[[1, 0, number]]]}
            index["layouts"] = [{"writers": [[0, 0, number]], **runs}]
            for row in index["tensors"].values():
                row |= {"shape": [number], "layout": 0}

        return change

    def large(index: Any) -> None:
        whole = {"offsets": [[[0, 0, 1]]], "sizes": [[[1 << 40, 0, 1]]]}
        index["layouts"] = [{"writers": [[0, 0, 1]], **whole}]
        for row in index["tensors"].values():
            row |= {"shape": [1 << 40], "layout": 0}

    def state(value: Any) -> Change:
        def change(index: Any) -> None:
            index["states"] = dict.fromkeys(index["states"], value)

        return change

    deep: Any = 1
    for _ in range(50):
        deep = {"a": deep}
    return {
        "a million parts": parts(1_000_000),
        "ten million parts": parts(10_000_000),
        "a tensor of 4 TB": large,
        "a deep state": state(deep),
        "a wide state": state({str(number): [] for number in range(60_000)}),
        "a long integer": state({"$int": "f" * 900_000}),
        "a name with control characters": lambda index: index["tensors"].update(
            {CONTROL: {"dtype": "float32", "shape": [1], "layout": 0}}
        ),
        "a format with control characters": lambda index: index.update(format=CONTROL),
    }
