"""Sentences of the pages that a new user reads are short: below 18 words on average, by page.

``python tests/project/test_sentences.py`` prints the average and the longest sentence of each.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    *sorted((ROOT / "docs" / "start").glob("*.md")),
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
]
MOST_WORDS = 18


def sentences(text: str) -> list[str]:
    """The sentences of a page, without code blocks, headings and the addresses of links.

    A cell of a table and an item of a list is one or several sentences of its own.
    """
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    paragraphs = re.split(r"\n\s*\n|^\s*[-*] |^\s*\d+\. |\|", text, flags=re.MULTILINE)
    found = []
    for paragraph in paragraphs:
        plain = " ".join(paragraph.replace("**", "").split())
        found += re.split(r"(?<=[.!?]) (?=[A-Z]|code)", plain)
    return [each for each in found if len(words(each)) > 2]


def words(sentence: str) -> list[str]:
    return re.findall(r"[A-Za-z0-9][\w'.-]*", sentence)


def average(page: Path) -> float:
    found = sentences(page.read_text(encoding="utf-8"))
    return sum(len(words(each)) for each in found) / len(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_sentences_are_short(page: Path) -> None:
    assert average(page) < MOST_WORDS


def test_a_long_sentence_is_counted_and_code_is_not() -> None:
    text = (
        "# A heading\n\nOne two three. Four five six.\n\n```\nno words of this\n```\n- and an item"
    )
    assert sentences(text) == ["One two three.", "Four five six.", "and an item"]


if __name__ == "__main__":
    for each in PAGES:
        found = sentences(each.read_text(encoding="utf-8"))
        longest = max(found, key=lambda sentence: len(words(sentence)))
        figures = f"{average(each):5.1f} {len(words(longest)):3d}"
        print(f"{figures}  {each.relative_to(ROOT)}: {longest[:80]}")
