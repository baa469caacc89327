"""Small JSON files that end with their own digest: the manifest, the owner record.

The last line holds the digest of all bytes before it in a fixed spelling, so that a change of any
byte is detected::

    {
      "format": "resumekit checkpoint",
      "files": [
        {"path": "state/rank-00000.json", "size": 512, "digest": "…", "writer": 0}
      ],
      "digest": "xxh3-128:0123456789abcdef0123456789abcdef"
    }

A digest does not prove that the content is well-formed, so the parser is strict too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NoReturn

import xxhash

from resumekit.errors import CorruptCheckpointError, UnsupportedValueError
from resumekit.storage.files import is_digest

MAX_JSON_BYTES = 64 << 20
MAX_DEPTH = 64
_MAX_VALUES = 4_000_000
_MAX_DIGITS = 1000
_INTEGER_END = 10 ** (_MAX_DIGITS - 1)

_LAST_LINE = b'  "digest": "xxh3-128:%s"\n}\n'
_LAST_LINE_BYTES = len(_LAST_LINE) - 2 + 32


def seal(fields: Mapping[str, Any]) -> bytes:
    """These fields as readable JSON that ends with its digest.

    Raises:
        UnsupportedValueError: a value that JSON would change; names the path to it.
    """
    lines = [f"  {json.dumps(key)}: {_text(key, value)},\n" for key, value in fields.items()]
    body = ("{\n" + "".join(lines)).encode("ascii")
    return body + _LAST_LINE % xxhash.xxh3_128_hexdigest(body).encode("ascii")


def unseal(data: bytes, *, where: str) -> dict[str, Any]:
    """The fields of a file that ``seal`` made, without the digest.

    Args:
        data: the whole file.
        where: what error messages call it.

    Raises:
        CorruptCheckpointError: the digest differs, or the content is not strict JSON.
    """
    body, last_line = data[:-_LAST_LINE_BYTES], data[-_LAST_LINE_BYTES:]
    digest = last_line[-36:-4].decode("ascii", "replace")
    if not is_digest(digest) or last_line != _LAST_LINE % digest.encode("ascii"):
        raise CorruptCheckpointError(
            where, found=f"{len(data)} bytes without the line that seals them"
        )
    found = xxhash.xxh3_128_hexdigest(body)
    if found != digest:
        raise CorruptCheckpointError(
            where, found=f"its digest is {found}", expected=f"{digest} as its last line says"
        )
    fields = parse_json(data, where=where)
    if not isinstance(fields, dict) or fields.pop("digest", None) is None:
        raise CorruptCheckpointError(where, found="not a sealed JSON object")
    return fields


def parse_json(data: bytes, *, where: str) -> Any:
    """The value of strict JSON: UTF-8, no duplicate keys, no NaN, limited size.

    Args:
        data: the whole text.
        where: what error messages call it.

    Raises:
        CorruptCheckpointError: names what is wrong with it.
    """
    if len(data) > MAX_JSON_BYTES:
        raise CorruptCheckpointError(
            where, found=f"{len(data)} bytes of JSON", expected=f"at most {MAX_JSON_BYTES}"
        )
    _check_structure(data, where)
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_int=_integer,
            parse_float=_finite,
        )
    except ValueError as error:  # also what json and the UTF-8 decoder raise
        raise CorruptCheckpointError(where, found=f"not strict JSON: {error}") from error


_STRING = re.compile(rb'"[^"]*"?')
_NOT_STRUCTURE = bytes(set(range(256)) - set(b"[]{},"))
_DEPTH_CHANGE = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1, ord(","): 0}


def _check_structure(data: bytes, where: str) -> None:
    # Before json parses it: deep nesting causes a RecursionError or, with a raised recursion limit,
    # a crash, and very many tiny values take many times the memory of their text.
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    _check_number(unescaped.count(b'"') // 2, where)  # first: each match below takes memory
    structure = _STRING.sub(b"", unescaped).translate(None, _NOT_STRUCTURE)
    _check_number(len(structure), where)
    if max(accumulate(map(_DEPTH_CHANGE.__getitem__, structure)), default=0) > MAX_DEPTH:
        raise CorruptCheckpointError(
            where, found="nested too deeply", expected=f"at most {MAX_DEPTH} levels"
        )


def _check_number(num_values: int, where: str) -> None:
    if num_values > _MAX_VALUES:
        raise CorruptCheckpointError(
            where, found="too many values", expected=f"at most {_MAX_VALUES}"
        )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key[:80]!r} is there twice")
        result[key] = value
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _text(key: str, value: Any) -> str:
    """JSON of one top-level field, with one line for each object of a list."""
    value = to_plain(value, where=key)
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        lines = ",\n".join("    " + json.dumps(item) for item in value)
        return f"[\n{lines}\n  ]"
    return json.dumps(value, indent=2).replace("\n", "\n  ")


def to_plain(value: Any, *, where: str) -> Any:
    """The value as JSON would return it; tuples become lists.

    Raises:
        UnsupportedValueError: JSON would change or refuse it; names the path to it.
    """
    return _plain(value, where, ())


def _plain(value: Any, where: str, path: tuple[object, ...]) -> Any:
    # The path becomes text only for an error: a manifest may list tens of thousands of files.
    if len(path) > MAX_DEPTH - 2:
        raise UnsupportedValueError(_named(where, path), found="nested too deeply")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and abs(value) < _INTEGER_END:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, list | tuple):
        return [_plain(item, where, (*path, index)) for index, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str(key): _plain(item, where, (*path, key)) for key, item in value.items()}
    raise UnsupportedValueError(
        _named(where, path),
        found=f"{value!r:.80} of type {type(value).__name__}",
        expected="None, bool, int, finite float, str, or lists and dicts with string keys of these",
    )


def _named(where: str, path: tuple[object, ...]) -> str:
    return where + "".join(f"[{key!r}]" for key in path)
