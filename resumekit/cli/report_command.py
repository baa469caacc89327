"""``report``, one HTML file about a run directory, and the page of ``prove``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resumekit.errors import ConfigurationError

if TYPE_CHECKING:
    from resumekit.prove import ProveResult


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The HTML file; default DIR's name plus .html."
        ),
    ] = None,
    png: Annotated[
        bool, typer.Option("--png", help="Also write a picture of the page; needs Chromium.")
    ] = False,
) -> None:
    """Write one self-contained HTML file about a run. Changes nothing in the run directory."""
    from resumekit.html_report import read_run, run_page

    if not directory.is_dir():
        found = "not a directory" if directory.exists() else "no such directory"
        raise ConfigurationError(str(directory), found=found, expected="a run directory")
    file = output or Path(f"{directory.resolve().name}.html")
    if file.resolve().is_relative_to(directory.resolve()):
        raise ConfigurationError(
            str(file), found="inside the run directory", expected="a file outside of it"
        )
    write_page(run_page(read_run(directory)), file, png=png)


def write_page(page: str, file: Path, *, png: bool) -> None:
    """Writes a page and, if asked, its picture; prints their paths.

    Raises:
        ConfigurationError: the page cannot be written there.
        MissingDependencyError: a picture is wanted, and there is no browser.
        ScreenshotError: the browser failed.
    """
    from resumekit.html_report import take_screenshot

    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            str(file), found=f"cannot be written ({error.strerror})", expected="a file path"
        ) from error
    typer.echo(str(file))
    if png:
        picture = file.with_suffix(".png")
        take_screenshot(file, picture)
        typer.echo(str(picture))


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
    from resumekit.html_report import comparison_page, of_prove

    write_page(comparison_page(of_prove(result, traces)), file, png=False)
