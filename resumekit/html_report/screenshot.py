"""PNG pictures of a page, taken by headless Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from resumekit.errors import MissingDependencyError, ResumekitError

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_HEIGHT = re.compile(r'<html[^>]* data-height="(\d+)"')
_MAX_HEIGHT = 16_000  # Chromium's limit for one picture
_TIMEOUT_SECONDS = 60


class ScreenshotError(ResumekitError, OSError):
    """The browser did not take a picture."""

    code = "RK-708"


def find_browser() -> str:
    """The path of Chromium or Chrome.

    Raises:
        MissingDependencyError: there is none.
    """
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        raise MissingDependencyError(
            "--png",
            found="no Chromium or Chrome on PATH",
            remedy="Install it (apt-get install chromium), or print the page from your browser",
        )
    return found


def take_screenshot(
    page: Path, picture: Path, *, width: int = 1100, options: Sequence[str] = ()
) -> None:
    """Writes the whole page as a PNG file.

    Args:
        page: the HTML file.
        picture: the PNG file to write.
        width: in CSS pixels.
        options: further options of Chromium.

    Raises:
        MissingDependencyError: there is no browser.
        ScreenshotError: the browser failed.
    """
    browser = find_browser()
    size = f"--window-size={width},1000"
    opened = browse(browser, page, [size, *options, "--dump-dom"])
    match = _HEIGHT.search(opened.stdout)
    height = min(int(match[1]) if match else 1000, _MAX_HEIGHT)
    size = f"--window-size={width},{height}"
    done = browse(browser, page, [size, "--hide-scrollbars", *options, f"--screenshot={picture}"])
    if not picture.is_file():
        lines = done.stderr.strip().splitlines()
        raise ScreenshotError(
            str(picture),
            found=f"{browser} took no picture ({lines[-1] if lines else 'no output'})",
            remedy="Print the page from your browser instead",
        )


def browse(browser: str, page: Path, options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Opens a page in a fresh profile without a display.

    Raises:
        ScreenshotError: the browser cannot be started, or does not end.
    """
    with tempfile.TemporaryDirectory(prefix="resumekit-browser-") as profile:
        words = [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *(f"--user-data-dir={profile}", *options, page.absolute().as_uri()),
        ]
        try:
            return subprocess.run(
                words, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ScreenshotError(browser, found=f"failed ({error})") from error
