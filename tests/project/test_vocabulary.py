"""The words of this project: names, docstrings, comments, messages and pages use the field's terms.

Run as a script, ``test_vocabulary.py [PATH ...]``, it prints each finding as
``file:line: text -> term``.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Set
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCANNED = (
    "resumekit",
    "adapters",
    "tests",
    "integration",
    "benchmarks",
    "examples",
    "docs",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "noxfile.py",
)

TEXT, NAME, FILE = "text", "name", "file"
EVERYWHERE = frozenset({TEXT, NAME, FILE})
NAMES = frozenset({NAME, FILE})


class Rule(NamedTuple):
    """One word or phrase that has a better term."""

    pattern: str
    term: str
    where: Set[str] = EVERYWHERE
    unless: str = ""  # allowed where this occurs in the same docstring, comment or paragraph


# A blank in a pattern is any white space. Names are read as words: `put_back` as "put back".
RULES = (
    Rule(r"(come|comes|came|coming) back", "resume, restore, return"),
    Rule(
        r"(go|goes|going|went) on(?! (the|a|an|one|each|every|this|that|both|CPU|GPU|\d))",
        "continue, resume",
    ),
    Rule(r"(put|puts|putting) ((it|them|each|all) )?back", "restore"),
    Rule(r"anew", "again; recreate, reinitialise"),
    Rule(r"(tell|tells|telling|told)", "warn, log, report; pass; distinguish"),
    Rule(
        r"(say|says|said|report|reports|reported|refuse|refuses|refused|warn|warns) "
        r"(\w+ ){0,2}by name",
        "name, report",
    ),
    Rule(  # a place is a further location of a run, see docs/how-to/places.md, and nothing else
        r"at (a|an|the|its|their|this|that|one|each|every|some|which) place"
        r"|own places?|place in the",
        "position, offset, point",
    ),
    Rule(r"where ([\w`'.]+ ){1,5}stands?", "position"),
    Rule(r"spread(s|ing)?", "shard, distribute; shared by all ranks"),
    Rule(r"in parts", "sharded"),
    Rule(r"stretch(es|ed)?", "shard, range"),
    Rule(r"(share|shares|shared|sharing) ((it|them|the \w+) )?out", "shard, partition"),
    Rule(r"(a|its|their|the|own|rank's) shares?", "shard, part; data-parallel rank", {TEXT}),
    Rule(r"shares", "shards, data-parallel ranks", NAMES),
    # "on the host" is the CPU's side of a device, which is a term.
    Rule(
        r"(?<!on the )(hosts|loop host|(a|per|another|other|same|each|several|the) host)"
        r"(?! (memory|names?|tensors?|RAM|and port|devices?|steps?))",
        "node",
    ),
    Rule(r"(draw|draws|drawn|drawing|drew) ((it|them|once) )?through", "replay"),
    Rule(r"(un)?settl(e|es|ed|ing)", "safe point; finish, wait for"),
    Rule(r"windows?", "accumulation window", {TEXT}, unless=r"accumulat|[Ss]liding|Windows"),
    Rule(r"first[ -]FSDP", "FSDP1"),
    Rule(r"held", "user state, kept", NAMES),
    Rule(r"held against", "compared with", {TEXT}),
    Rule(r"besides?", "user state; next to", NAMES),
    Rule(
        r"(state|states|kept|keeps|lies|lie|lives|stands|what \w+ (is|has|keeps)) beside",
        "user state, state outside the state_dict; next to",
        {TEXT},
    ),
    Rule(r"what nobody", "unsaved state", {TEXT}),
    Rule(r"wish(es|ed)?", "request"),
    Rule(r"turns", "rank order, rounds", NAMES),
    Rule(r"(?<!curve )fitting", "compatibility check"),
    Rule(r"belongings?", "compatibility check, run identity"),
    Rule(r"remark(s|ed)?", "warning, note"),
    Rule(r"ways? (in|out)(?! (which|that))", "startup, shutdown, entry point, load, save"),
    Rule(r"own", "own_<noun>, or what it is", NAMES | {"whole"}),
    Rule(r"of one's own", "custom", {TEXT}),
    Rule(r"(user|script|library|framework|one)'s own(?=[.,;:)])", "user code, user state", {TEXT}),
    Rule(
        r"patience",
        "progress output",
        unless=r"[Ee]arly ?[Ss]topping|Plateau|patience([=:]| counter)",
    ),
    Rule(r"torso", "incomplete checkpoint"),
    Rule(r"those who", "the ranks that"),
    Rule(r"gone through", "iterated", {TEXT}),
    Rule(r"(let|lets|letting|is let) go", "release"),
    Rule(r"without a look", "without a check", {TEXT}),
    Rule(r"whoever", "the code that, the caller", {TEXT}),
    Rule(
        r"(?<=the )house|(storage|data|capture|engine|other|another|each|between|these) rooms?"
        r"|the rooms|doors?",
        "package",
        {TEXT},
    ),
    Rule(r"random numbers (that it keeps|of (a|the) (rank|process|worker))", "RNG state", {TEXT}),
    Rule(r"(keep|keeps|save|saves|restore|restores) (the|its|their) random numbers", "RNG state"),
    Rule(
        r"ahead|beside|belonging|crossing|declared|elsewhere|fitting|found|held|hidden|inheritance"
        r"|kinds|known|outer|own|patience|plain|rebuilt|sealed|shares|sources|spread"
        r"|spreading|stages|states|turns|unchanged|wishes|wrapped",
        "a file name that says what is inside",
        {FILE, "whole"},
    ),
)


class Finding(NamedTuple):
    """A word that has a better term."""

    path: str
    line: int
    word: str
    term: str

    def __str__(self) -> str:
        """The line that the command prints."""
        return f"{self.path}:{self.line}: {self.word} -> {self.term}"


def _compiled(rule: Rule) -> re.Pattern[str]:
    body = rule.pattern.replace(" ", r"\s+")
    body = re.sub(r"\(\?<[=!]([^)]*)\)", lambda found: found[0].replace(r"\s+", r"\s"), body)
    if "whole" in rule.where:
        return re.compile(rf"^(?:test )?(?:{body})$", re.IGNORECASE)
    return re.compile(rf"\b(?:{body})\b", re.IGNORECASE)


_RULES = [(_compiled(rule), rule) for rule in RULES]
_CODE = re.compile(r"``.*?``|`[^`]*`|https?://\S+|\]\([^)]*\)", re.DOTALL)


def findings(path: Path) -> list[Finding]:
    """The findings of one file, in line order."""
    source = path.read_text(encoding="utf-8")
    shown = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    found = [Finding(shown, 1, word, term) for _, word, term in _judge(_words(path.stem), 1, FILE)]
    for line, kind, text in _UNITS[path.suffix](source):
        found += [Finding(shown, at, word, term) for at, word, term in _judge(text, line, kind)]
    return sorted(set(found), key=lambda each: (each.line, each.word))


def _judge(text: str, line: int, kind: str) -> Iterator[tuple[int, str, str]]:
    plain = _CODE.sub(lambda code: re.sub(r"[^\n]", "\0", code[0]), text) if kind == TEXT else text
    for pattern, rule in _RULES:
        if kind not in rule.where or (rule.unless and re.search(rule.unless, text)):
            continue
        for match in pattern.finditer(plain):
            yield line + plain.count("\n", 0, match.start()), " ".join(match[0].split()), rule.term


def _words(name: str) -> str:
    """``put_back`` and ``PutBack`` as "put back"."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name)
    return re.sub(r"[_\W]+", " ", spaced).strip().lower()


def _python(source: str, first: int = 1) -> Iterator[tuple[int, str, str]]:
    """Names that are defined, docstrings, comments and messages, each with its line."""
    offset = first - 1
    for line, text in _comments(source):
        yield line + offset, TEXT, text
    nodes = list(ast.walk(ast.parse(source)))
    inside = {id(part) for node in nodes for part in getattr(node, "values", ())}
    for node in nodes:
        for name in _defined(node):
            yield getattr(node, "lineno", 1) + offset, NAME, _words(name)
        if id(node) in inside and isinstance(node, ast.Constant):
            continue  # a part of an f-string, which is read as one
        text = _text(node)
        if "\n" in text and _is_code(text):
            yield from _python(text, node.lineno + offset)  # type: ignore[attr-defined]
        elif len(re.findall(r"[A-Za-z]{2,}", text)) > 1 and re.search(r"\s", text):
            yield node.lineno + offset, TEXT, text  # type: ignore[attr-defined]


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
    return ""


def _is_code(text: str) -> bool:
    try:
        return any(not isinstance(each, ast.Expr) for each in ast.parse(text).body)
    except (SyntaxError, ValueError):
        return False


def _defined(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
        yield from [node.attr] if isinstance(node.ctx, ast.Store) else []


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Blocks of comments that follow each other line by line."""
    block: list[str] = []
    began = ended = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] == ended + 1:
            block.append(token.string)
        else:
            if block:
                yield began, "\n".join(each.lstrip("# ") for each in block)
            block, began = [token.string], token.start[0]
        ended = token.start[0]
    if block:
        yield began, "\n".join(each.lstrip("# ") for each in block)


def _markdown(source: str) -> Iterator[tuple[int, str, str]]:
    """Paragraphs, and the comments in blocks of code."""
    paragraph: list[str] = []
    began, fenced = 1, False
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            line = ""
        if fenced:
            line = line.partition("# ")[2]
        if not line.strip():
            if paragraph:
                yield began, TEXT, "\n".join(paragraph)
            paragraph = []
            continue
        if not paragraph:
            began = number
        paragraph.append(line)


def _toml(source: str) -> Iterator[tuple[int, str, str]]:
    """Comments, and the names of mutants, which the record of their run prints."""
    for number, line in enumerate(source.splitlines(), 1):
        if line.startswith(("#", "name = ")):
            yield number, TEXT, line


_UNITS = {".py": _python, ".md": _markdown, ".toml": _toml}


def files(paths: list[Path]) -> Iterator[Path]:
    """The Python files, pages and lists of mutants below the paths, without links and this file."""
    for path in paths:
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        for each in found:
            linked = "resumekit/adapters/" in each.as_posix()
            if each.suffix in _UNITS and not linked and each != Path(__file__).resolve():
                yield each


def test_names_docstrings_comments_messages_and_pages_use_the_terms_of_the_field() -> None:
    found = [each for path in files([ROOT / name for name in SCANNED]) for each in findings(path)]
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ('"""What comes\n    back."""', "comes back"),
        ("def put_back(): ...", "put back"),
        ("class WishRound: ...", "wish"),
        ("self.own_place = 1", "own place"),
        ("# the user is told", "told"),
        ('raise ValueError(f"{x}: it stands at a place")', "at a place"),
        ('"""Ends a window."""', "window"),
        ('S = """import torch\ntold = 1\n"""', "told"),
    ],
)
def test_a_word_is_found_in_every_kind_of_text(source: str, word: str, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(source)
    assert [each.word for each in findings(module)] == [word]


def test_a_word_is_found_in_the_name_of_a_mutant(tmp_path: Path) -> None:
    mutants = tmp_path / "mutants.toml"
    mutants.write_text('[[mutant]]\nname = "copies are spread"\nbefore = "spread = 1"\n')
    assert [(each.line, each.word) for each in findings(mutants)] == [(2, "spread")]


@pytest.mark.parametrize(
    "source",
    [
        '"""Loaded in place, which takes place in host memory; see `place`."""',
        '"""An accumulation window. A window is open."""',
        "inplace = in_place = placement = 1",
        "EarlyStopping(patience=3)",
        "for part in parts: pass",
        'KEY = "place"',
    ],
)
def test_ordinary_english_is_no_finding(source: str, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(source)
    assert findings(module) == []


if __name__ == "__main__":
    wanted = [Path(each).resolve() for each in sys.argv[1:]] or [ROOT / name for name in SCANNED]
    listed = [each for path in files(wanted) for each in findings(path)]
    sys.stdout.write("".join(f"{each}\n" for each in listed))
    sys.exit(bool(listed))
