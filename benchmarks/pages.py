"""Pictures of the README and of pages of the site, on a phone and on a desk, light and dark.

    python benchmarks/pages.py [--record]

Needs Chromium. One picture for each width and colour scheme: the first screens of all pages side
by side. It fails where a page is wider than the screen. The README is drawn in a column of 900
pixels, as a repository shows it.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import os
import subprocess
import sys
import tempfile
import threading
from datetime import date
from pathlib import Path

import markdown
from PIL import Image

from resumekit.html_report import find_browser

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    "README",
    "",
    "start/pytorch",
    "start/transformers",
    "how-to/slurm",
    "how-to/troubleshooting",
    "explanation/why",
    "reference/api",
)
WIDTHS = {"phone": (390, 1700), "desk": (1280, 1700)}
STYLE = """
body { max-width: 900px; margin: 1rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif }
img { max-width: 100% } code { overflow-wrap: anywhere }
table { display: block; overflow-x: auto; border-collapse: collapse }
td, th { border: 1px solid #8886; padding: .3rem .6rem } pre { overflow-x: auto; padding: 1rem }
@media (prefers-color-scheme: dark) {
  body { background: #0d1117; color: #e6edf3 } a { color: #4493f8 }
}
"""
# In the frame of a page: how much wider it is than the screen.
WIDER = """<script>onload = () => { const frame = document.querySelector("iframe");
document.title = frame.contentDocument.documentElement.scrollWidth - frame.clientWidth }</script>"""


def site(folder: Path) -> None:
    """Builds the site, and the README as a page of it."""
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/images", "](../images")
    body = markdown.markdown(text, extensions=["tables", "fenced_code"])
    page = folder / "README" / "index.html"
    page.parent.mkdir()
    viewport = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    page.write_text(
        f"<html><head>{viewport}<style>{STYLE}</style></head><body>{body}</body></html>"
    )


def serve(folder: Path) -> str:
    """Serves a folder from a thread; the address."""
    handler = functools.partial(Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Without a line for each request."""

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def shot(
    address: str, page: str, frame: Path, picture: Path, size: tuple[int, int], *, dark: bool
) -> None:
    """A picture of a page in a frame of this size: Chromium itself is never this narrow."""
    width, height = size
    style = f"width:{width}px;height:{height}px;border:0"
    inner = f'<iframe src="{address}/{page}/" style="{style}"></iframe>'
    frame.write_text(f'<body style="margin:0">{inner}{WIDER}</body>', encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    command = [str(find_browser()), *options, *scheme, "--virtual-time-budget=15000"]
    command += [f"--window-size={max(width, 500)},{height}"]
    for what in (f"--screenshot={picture}", "--dump-dom"):
        done = subprocess.run(
            [*command, what, f"{address}/{frame.name}"], check=True, capture_output=True, text=True
        )
    title = done.stdout.partition("<title>")[2].partition("</title>")[0]
    if title != "0":
        raise SystemExit(f"/{page} is {title or 'unknown'} pixels wider than {width}")
    with Image.open(picture) as image:
        image.crop((0, 0, width, height)).save(picture)


def main() -> None:
    """Draws, and says where the pictures are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        site(work / "site")
        address = serve(work / "site")
        for name, (width, height) in WIDTHS.items():
            for scheme in ("light", "dark"):
                sheet = Image.new("RGB", (width * len(PAGES), height))
                for number, page in enumerate(PAGES):
                    picture, frame = work / "page.png", work / "site" / "frame.html"
                    is_dark = scheme == "dark"
                    shot(address, page, frame, picture, (width, height), dark=is_dark)
                    with Image.open(picture) as image:
                        sheet.paste(image, (width * number, 0))
                file = (
                    RESULTS if options.record else Path.cwd()
                ) / f"{date.today()}-pages-{name}-{scheme}.webp"
                sheet.save(file, quality=35)
                print(f"{file}, {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
