"""The files that commands write, HTML or JSON."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from resumekit.errors import ConfigurationError
from resumekit.printable import printable

if TYPE_CHECKING:
    from resumekit.prove import ProveResult


def require_file_path(file: Path, *, without: Iterable[Path]) -> None:
    """Raises ConfigurationError where a file cannot be written, as far as that is known now.

    Args:
        file: the file.
        without: directories that a command does not change.

    Raises:
        ConfigurationError: it is inside one of them, or its directory does not exist.
    """
    if any(file.resolve().is_relative_to(directory.resolve()) for directory in without):
        raise ConfigurationError(
            str(file), found="inside the run directory", expected="a file outside of it"
        )
    if not file.parent.is_dir():
        raise ConfigurationError(
            str(file),
            found="cannot be written (its directory does not exist)",
            expected="a file path",
        )


def write_file(text: str, file: Path, *, png: bool = False, to_stderr: bool = False) -> None:
    """Writes a file and prints its path.

    Args:
        text: its content.
        file: where to.
        png: whether to write a picture of it, too.
        to_stderr: where to print, for a command whose output is read by a program.

    Raises:
        ConfigurationError: the file cannot be written there.
        MissingDependencyError: a picture is wanted, and there is no browser.
        ScreenshotError: the browser failed.
    """
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            str(file), found=f"cannot be written ({error.strerror})", expected="a file path"
        ) from error
    typer.echo(printable(str(file)), err=to_stderr)
    if png:
        from resumekit.html_report import take_screenshot

        picture = file.with_suffix(".png")
        take_screenshot(file, picture)
        typer.echo(printable(str(picture)), err=to_stderr)


@contextmanager
def traces_for(page: Path | None, keep: Path | None) -> Iterator[Path | None]:
    """The directory that ``prove`` keeps its runs in, for a page that is made from their traces.

    Args:
        page: the page that is wanted, or None.
        keep: the user's directory, which stays; without one a temporary directory.
    """
    if page is None or keep is not None:
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="resumekit-prove-") as name:
        yield Path(name)


def write_comparison(result: ProveResult, traces: Path, file: Path) -> None:
    """Writes the page about a result of ``prove``.

    Raises:
        ConfigurationError: the page cannot be written there.
    """
    from resumekit.html_report import comparison_page

    write_file(comparison_page(result, traces), file)
