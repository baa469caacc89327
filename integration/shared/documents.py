"""Reads the pages: their blocks, the whole programs among these, and the fragments of programs."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
START_PAGES = ("pytorch", "transformers", "accelerate", "lightning", "deepspeed")

_PROGRAM = re.compile(r"(?:#!.*\n)?# ([\w-]+\.(?:py|sbatch|yaml))\n")
_SAVED = re.compile(r"as `([\w-]+\.py)`:\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Document:
    """A page.

    Args:
        path: of its file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def text(self) -> str:
        """What its file has."""
        return self.path.read_text(encoding="utf-8")

    def blocks(self, language: str) -> list[str]:
        """Its blocks of code in one language; those without a language have an empty one."""
        found = re.findall(r"^```(\w*)\n(.*?)^```$", self.text, flags=re.DOTALL | re.MULTILINE)
        return [block for each, block in found if each == language]

    def programs(self) -> dict[str, str]:
        """Its blocks that are whole files, by the name in their first line or before them."""
        blocks = [block for each in ("python", "bash", "yaml") for block in self.blocks(each)]
        named = {found[1]: block for block in blocks if (found := _PROGRAM.match(block))}
        return named | dict(_SAVED.findall(self.text))

    def fragments(self) -> list[str]:
        """Its blocks of Python that are no whole programs, in order."""
        whole = self.programs().values()
        return [each for each in self.blocks("python") if each not in whole]

    def commands(self) -> list[str]:
        """The lines of its blocks that run resumekit, without comments."""
        lines = [line for block in self.blocks("bash") for line in block.splitlines()]
        prompts = [line for block in self.blocks("") for line in block.splitlines()]
        lines += [line[2:] for line in prompts if line.startswith("$ ")]
        parts = [part.strip() for line in lines for part in line.split("&&")]
        return [re.split(r"\s+#", part)[0] for part in parts if part.startswith("resumekit ")]


class StartPage(Document):
    """A page of ``docs/start`` about one framework: a whole script, killed and started again.

    Args:
        name: the framework.
    """

    def __init__(self, name: str) -> None:
        super().__init__(ROOT / "docs" / "start" / f"{name}.md")

    @property
    def script(self) -> str:
        """The block that the page saves as train.py."""
        return self.programs()["train.py"]

    @property
    def restart(self) -> str:
        """The command that starts it again: the last line of the block that kills it."""
        (block,) = (each for each in self.blocks("bash") if re.search(r"\bKILL\b|pkill", each))
        return block.strip().splitlines()[-1]
