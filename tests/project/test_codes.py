"""Every error and every warning has a code, and the page on troubleshooting a section for each."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from resumekit import errors
from resumekit.cli import main
from resumekit.errors import ConfigurationError, CorruptCheckpointError, ResumekitError, SaveError
from resumekit.html_report.screenshot import ScreenshotError
from resumekit.log import warn
from resumekit.run.options import Options
from resumekit.run.report import WARNINGS
from resumekit.state import Fidelity
from resumekit.version import __version__

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "troubleshooting.md"
SOURCES = [*(ROOT / "resumekit").rglob("*.py"), *(ROOT / "adapters").rglob("*.py")]
CLASSES = [
    each
    for each in (*vars(errors).values(), ScreenshotError)
    if isinstance(each, type) and issubclass(each, ResumekitError) and each is not ResumekitError
]


def sections() -> list[str]:
    return re.findall(r"^## (RK-\d+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def codes_of_warnings() -> set[str]:
    calls = (
        re.findall(r'warn,?\(?\s*"(RK-\d+)"', file.read_text(encoding="utf-8")) for file in SOURCES
    )
    return {code for found in calls for code in found} | set(WARNINGS.values())


def test_no_other_module_has_a_class_of_errors() -> None:
    names = "|".join(each.__name__ for each in (*CLASSES, ResumekitError))
    found = [
        name
        for file in SOURCES
        if file.name != "errors.py"
        for name in re.findall(rf"class (\w+)\([^)]*\b(?:{names})\b", file.read_text("utf-8"))
    ]
    assert found == ["ScreenshotError"]


def test_each_class_has_a_code_of_its_own() -> None:
    codes = [vars(each)["code"] for each in CLASSES]
    assert len(codes) == len(set(codes)) > 30


def test_the_page_has_a_section_for_each_code_and_no_other() -> None:
    expected = {each.code for each in CLASSES} | codes_of_warnings()
    assert len(codes_of_warnings()) > 15
    assert sections() == sorted(expected)


def test_the_page_names_the_class_of_each_error() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for each in CLASSES:
        section = text.split(f"## {each.code}\n", 1)[1].split("\n## ", 1)[0]
        assert f"(`{each.__name__}`)" in section, each


def test_every_warning_goes_through_one_function() -> None:
    others = {
        file.relative_to(ROOT).as_posix()
        for file in SOURCES
        if re.search(r"logger\.(warning|log)\(", file.read_text(encoding="utf-8"))
    }
    assert others == {"resumekit/log.py"}


def test_every_fidelity_but_exact_has_a_warning() -> None:
    assert set(WARNINGS) == set(Fidelity) - {Fidelity.EXACT}


def test_a_message_ends_with_one_code_whatever_it_quotes(caplog: pytest.LogCaptureFixture) -> None:
    inner = CorruptCheckpointError("a", found="a wrong digest")
    assert str(inner) == "a: a wrong digest. [RK-403]"
    outer = SaveError("b", found=f"rank 1: {inner}")
    assert str(outer) == "b: rank 1: a: a wrong digest. [RK-301]"
    with caplog.at_level(logging.WARNING, logger="resumekit"):
        warn("RK-831", "passed over: %s", inner)
    assert caplog.messages == ["passed over: a: a wrong digest. [RK-831]"]


def explained(code: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["explain", code])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_explain_prints_each_section(capsys: pytest.CaptureFixture[str]) -> None:
    for code in sections():
        printed = explained(code, capsys)
        assert len(printed) > 60
        assert "](" not in printed
        for path in re.findall(r"\((docs/[^)#]+)", printed):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("written", ["[RK-501]", "501", "rk-501"])
def test_a_code_may_be_written_in_several_ways(
    written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explained(written, capsys) == explained("RK-501", capsys)


def test_explain_refuses_another_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", "RK-999"])
    assert ended.value.code == 2
    assert "not a code" in capsys.readouterr().err


ADDRESS = "https://host.example/owner/resumekit"
PAGES = f"{ADDRESS}/blob/v{__version__}/docs"
Install = Callable[[str], Path]


@pytest.fixture
def install(
    tmp_path: Path, noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Install]:
    """Writes the metadata of a release that an address is given for, where Python finds it."""

    def write(address: str) -> Path:
        tree = tmp_path / "tree"
        (tree / "resumekit").mkdir(parents=True)
        for name in ("README.md", "CHANGELOG.md", "pyproject.toml", "resumekit/version.py"):
            shutil.copy(ROOT / name, tree / name)
        noxfile._address_links(tree, address)
        urls = noxfile.nox.project.load_toml(tree / "pyproject.toml")["project"]["urls"]
        lines = [f"Project-URL: {name}, {url}" for name, url in urls.items()]
        installed = tmp_path / "installed" / f"resumekit-{__version__}.dist-info"
        installed.mkdir(parents=True)
        head = ["Metadata-Version: 2.4", "Name: resumekit", f"Version: {__version__}"]
        (installed / "METADATA").write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
        monkeypatch.syspath_prepend(str(installed.parent))
        errors._address_of_pages.cache_clear()
        return installed.parent

    yield write
    errors._address_of_pages.cache_clear()


def test_an_error_of_a_release_ends_with_the_link_to_its_section(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    assert str(CorruptCheckpointError("a", found="torn")) == "a: torn. [RK-403]"
    install(ADDRESS)
    link = f"{PAGES}/how-to/troubleshooting.md#rk-403"
    inner = CorruptCheckpointError("a", found="torn")
    assert str(inner) == f"a: torn. [RK-403] {link}"
    outer = SaveError("b", found=f"rank 1: {inner}", remedy="Try again")
    section = f"{PAGES}/how-to/troubleshooting.md#rk-301"
    assert str(outer) == f"b: rank 1: a: torn. Try again. [RK-301] {section}"
    with caplog.at_level(logging.WARNING, logger="resumekit"):
        warn("RK-831", "passed over: %s It was moved", inner)
    assert caplog.messages == ["passed over: a: torn. It was moved [RK-831]"]


def test_a_link_leads_to_a_heading_of_its_page(install: Install) -> None:
    install(ADDRESS)
    for each in CLASSES:
        address, _, anchor = str(each("a", found="b")).rpartition(" ")[2].partition("#")
        page = ROOT / "docs" / address.removeprefix(f"{PAGES}/")
        assert f"\n## {anchor.upper()}\n" in page.read_text(encoding="utf-8")


def test_a_page_in_a_remedy_is_a_link_too(install: Install) -> None:
    unknown: Any = {"zzz": 1}
    with pytest.raises(ConfigurationError, match=r" docs/reference/options\.md and help"):
        Options.from_keywords(unknown)
    install(ADDRESS)
    with pytest.raises(ConfigurationError, match=f" {PAGES}/reference/options.md and help"):
        Options.from_keywords(unknown)


def test_the_command_prints_the_link(install: Install, tmp_path: Path) -> None:
    installed = install(ADDRESS)
    run = subprocess.run(
        [sys.executable, "-m", "resumekit", "verify", str(tmp_path / "missing")],
        env={"PYTHONPATH": f"{installed}:{ROOT}"},
        cwd=tmp_path,  # not ROOT: its egg-info, without an address, would be found first
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert re.fullmatch(
        rf"error: .* \[RK-(\d+)\] {PAGES}/how-to/troubleshooting\.md#rk-\1\n", run.stderr
    )
