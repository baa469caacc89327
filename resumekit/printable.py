"""Text of other origin, made safe to print: file names, values of a manifest."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""The text in one line, with escapes such as ``\x1b`` for characters that are not printable.

    These are all control characters, line breaks, characters that change the direction of the text
    or have no width, and bytes of a file name that are no text.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii")
        for each in text
    )
