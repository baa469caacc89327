"""Hooks of the site: files outside ``docs/`` that a page links to become files of the site.

A page of the repository links to scripts, records of measurements and documents at the root. The
site has them under ``source/``, so no link of it leaves the site, and each is checked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the files that pages link to; a record links to further ones."""
    waiting = list(DOCS.rglob("*.md"))
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for target in map(_outside(page), LINK.finditer(page.read_text(encoding="utf-8"))):
            if target is None or target in seen or not target.is_file():
                continue
            seen.add(target)
            files.append(File.generated(config, _address(target), abs_src_path=str(target)))
            waiting += [target] if target.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links that leave ``docs/`` to those files; a folder has no page and no link."""
    source = page.file.abs_src_path
    assert source is not None
    here = Path(source)

    def rewritten(link: re.Match[str]) -> str:
        target = _outside(here)(link)
        if target is None:
            return link[0]
        if not target.is_file():
            return "](#)"
        path = os.path.relpath(_address(target), os.path.dirname(page.file.src_uri))
        return f"{link[1]}{path}{link[3] or ''}{link[4]}"

    return LINK.sub(rewritten, markdown)


def _outside(page: Path) -> Callable[[re.Match[str]], Path | None]:
    def target_of(link: re.Match[str]) -> Path | None:
        if "://" in link[2] or link[2].startswith("mailto:"):
            return None
        target = Path(os.path.normpath(page.parent / link[2]))
        is_foreign = not page.is_relative_to(DOCS)
        is_inside = target.is_relative_to(DOCS)
        return target if is_foreign or not is_inside else None

    return target_of


def _address(path: Path) -> str:
    is_inside = path.is_relative_to(DOCS)
    return str(path.relative_to(DOCS)) if is_inside else f"source/{path.relative_to(ROOT)}"
