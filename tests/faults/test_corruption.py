"""Damage of any kind is found before anything is used, and the error names the file."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from failpoints import failing

from crashlab.damage import (
    Damage,
    bookkeeping_damages,
    extra_files,
    files_of,
    flip,
    flip_positions,
    moved_steps,
    special_files,
    swapped_files,
    swapped_ranks,
    whole_file_damages,
)
from crashlab.training import NEWEST, OLDER, Live, make_run, resumed
from resumekit.cli import main
from resumekit.errors import CorruptCheckpointError, DirectoryError, NoUsableCheckpointError
from resumekit.serialization.reading import read_payload
from resumekit.serialization.writing import Payload
from resumekit.storage.directories import StepName
from resumekit.storage.io.file_system import LocalFileSystem
from resumekit.storage.manifest import Manifest
from resumekit.storage.store import Store

RecordProperty = Callable[[str, object], None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank with two checkpoints; tests damage copies."""
    return make_run(tmp_path_factory.mktemp("pristine") / "run")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another run of the same program."""
    return make_run(tmp_path_factory.mktemp("foreign") / "run", seed=7)


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with two checkpoints, each rank with a state of its own."""
    directory = tmp_path_factory.mktemp("pristine of two") / "run"
    store = Store(directory)
    store.acquire()
    for step in (2, 4):
        staging = store.stage(
            StepName(step), num_bytes=1, num_files=6, directories=["model", "state"]
        )
        files = Payload.of_states("model", 0, {"model": {"weight": torch.rand(40, 5)}}).write(
            staging
        )
        for rank in (0, 1):
            states = {"rng": {"state": torch.rand(9), "rank": rank}, "data": {"batch": rank}}
            files += Payload.of_states("state", rank, states).write(staging)
        store.commit(
            staging,
            Manifest(
                run_id=store.run_id,
                attempt=store.attempt,
                step=step,
                created="2026-01-31T12:00:00Z",
                world_size=2,
                progress={},
                components=(),
                files=tuple(files),
            ),
        )
    store.release()
    return directory


def _read(run: Path, step: str) -> None:
    """Opens a checkpoint and reads all states of all ranks, as a resume does."""
    reader = Store(run).open_step(StepName.from_text(step))
    for entry in reader.manifest.files:
        if entry.path.endswith(".json"):
            read_payload(reader, str(Path(entry.path).parent), entry.writer)


def _verify(run: Path, step: str) -> None:
    Store(run).open_step(StepName.from_text(step)).verify()


def _copies(run: Path, tmp_path: Path, damages: Iterator[Damage]) -> Iterator[tuple[Damage, Path]]:
    """A damaged copy of the run for every damage."""
    for number, damage in enumerate(damages):
        copy = tmp_path / str(number) / "run"
        shutil.copytree(run, copy)
        damage.do(copy)
        yield damage, copy
        shutil.rmtree(copy.parent)


def _all_damages(run: Path, foreign: Path) -> Iterator[Damage]:
    others = {"the older step": run / OLDER, "another run": foreign / NEWEST}
    yield from whole_file_damages(run, NEWEST)
    yield from swapped_files(run, NEWEST, others)
    yield from swapped_ranks(run, NEWEST)
    yield from special_files(run, NEWEST)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("apart", [pytest.param(1, marks=pytest.mark.full), 13])
def test_every_flipped_byte_is_found_and_the_file_named(
    apart: int,
    ranks: int,
    run: Path,
    run_of_two: Path,
    tmp_path: Path,
    record_property: RecordProperty,
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run if ranks == 1 else run_of_two, copy)
    num_flips = 0
    for path in files_of(copy, NEWEST):
        # Every byte of a manifest, which is found without reading anything else.
        size = (copy / path).stat().st_size
        is_manifest = path.endswith("manifest.json")
        for position in range(0, size, apart) if is_manifest else flip_positions(size)[::apart]:
            flip(copy / path, position)
            for use in (_read, _verify):
                with pytest.raises(CorruptCheckpointError) as error:
                    use(copy, NEWEST)
                assert path in str(error.value)
            flip(copy / path, position)
            num_flips += 1
    _read(copy, NEWEST)
    record_property(f"flipped byte of a checkpoint, ranks {ranks}", num_flips)


def test_every_other_damage_is_found_and_the_file_named(
    run: Path,
    run_of_two: Path,
    foreign: Path,
    tmp_path: Path,
    record_property: RecordProperty,
) -> None:
    num_damages = 0
    for pristine in (run, run_of_two):
        for damage, copy in _copies(pristine, tmp_path, _all_damages(pristine, foreign)):
            for use in (_read, _verify):
                with pytest.raises(CorruptCheckpointError) as error:
                    use(copy, NEWEST)
                assert damage.path in str(error.value), damage
            _read(copy, OLDER)
            num_damages += 1
    record_property("damaged file of a checkpoint", num_damages)
    assert num_damages > 100


def test_a_file_is_never_opened_through_a_link_or_a_directory_of_links(
    run: Path, tmp_path: Path
) -> None:
    class Watched(LocalFileSystem):
        def open(self, path: Path):
            assert path.resolve() == path
            return super().open(path)

    for _, copy in _copies(run, tmp_path, special_files(run, NEWEST)):
        with pytest.raises(CorruptCheckpointError):
            Store(copy, file_system=Watched()).open_step(StepName.from_text(NEWEST)).verify()


# ---------------------------------------------------------------- through the Checkpointer


@pytest.fixture(scope="module")
def older_state(run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the live objects after a resume from the older checkpoint."""
    copy = tmp_path_factory.mktemp("older") / "run"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / NEWEST)
    return resumed(copy)[1]


def _sample(run: Path, foreign: Path) -> Iterator[Damage]:
    """Each kind of damage and each file once; every pair of them is read above."""
    seen = set[str]()
    for damage in _every(run, foreign):
        traits = {damage.path, damage.name.replace(damage.path, "")}
        if not traits <= seen:
            seen |= traits
            yield damage


def _every(run: Path, foreign: Path) -> Iterator[Damage]:
    for path in files_of(run, NEWEST):
        middle = (run / path).stat().st_size // 2
        yield Damage(f"{path} flipped", path, lambda d, p=path, m=middle: flip(d / p, m))  # type: ignore[misc]
    yield from _all_damages(run, foreign)
    yield from moved_steps(run, NEWEST, OLDER, foreign)


def test_a_resume_passes_over_the_damaged_checkpoint_and_says_so(
    run: Path,
    foreign: Path,
    older_state: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    record_property: RecordProperty,
) -> None:
    num_damages = 0
    for damage, copy in _copies(run, tmp_path, _sample(run, foreign)):
        if "renamed to each other" in damage.name:
            continue  # then nothing is left to fall back to
        report, state = resumed(copy)
        assert (report.step, state) == (2, older_state), damage
        (rejection,) = report.rejected
        assert rejection.name == NEWEST
        assert damage.path in rejection.reason, damage
        assert rejection.reason.partition(" [RK-")[0] in capsys.readouterr().err
        is_foreign = "belongs to the run" in rejection.reason  # no damage: it is left in place
        put_aside = [path.name[: len(NEWEST)] for path in (copy / "quarantine").glob("*")]
        assert (copy / NEWEST).exists() == is_foreign, damage
        assert put_aside == ([] if is_foreign else [NEWEST] * 2), damage
        num_damages += 1
    record_property("resume past a damaged checkpoint", num_damages)


def test_a_resume_without_any_good_checkpoint_changes_nothing_live(
    run: Path, foreign: Path, tmp_path: Path, record_property: RecordProperty
) -> None:
    num_damages = 0
    for damage, copy in _copies(run, tmp_path, _sample(run, foreign)):
        if "renamed" not in damage.name:
            flip(copy / OLDER / "manifest.json", 100)
        live = Live.launch(copy, seed=99)
        before = live.digest()
        with live.checkpointer, pytest.raises(NoUsableCheckpointError) as error:
            live.checkpointer.resume()
        assert live.digest() == before, damage
        assert damage.path in str(error.value), damage
        assert OLDER in str(error.value)
        with pytest.raises(NoUsableCheckpointError):
            resumed(copy)  # never afresh over what was put aside
        num_damages += 1
    record_property("resume without a good checkpoint", num_damages)


def test_the_record_of_another_run_costs_no_checkpoint(
    run: Path, foreign: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.copy(foreign / "owner.json", copy / "owner.json")
    with pytest.raises(NoUsableCheckpointError, match="belongs to the run"):
        resumed(copy)
    assert not (copy / "quarantine").exists()
    shutil.copy(run / "owner.json", copy / "owner.json")
    assert resumed(copy)[0].step == 4


def test_a_quarantine_that_cannot_be_made_does_not_stop_a_resume(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "quarantine").write_text("in the way")
    (copy / NEWEST / "manifest.json").write_text("{}")
    assert resumed(copy)[0].step == 2
    assert "It stays where it is" in capsys.readouterr().err


@pytest.mark.parametrize("call", [2, 3, 4, 5, 6])
def test_a_checkpoint_that_cannot_be_read_now_is_passed_over_and_left_in_place(
    call: int,
    run: Path,
    older_state: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    monkeypatch.setattr("resumekit.storage.store.LocalFileSystem", failing(f"open:{call}=EIO"))
    report, state = resumed(copy, keep_latest=1)
    assert (report.step, state) == (2, older_state)
    assert [rejection.name for rejection in report.rejected] == [NEWEST]
    assert not (copy / "quarantine").exists()
    assert resumed(copy)[0].step == 2  # the same again
    monkeypatch.undo()
    assert resumed(copy)[0].step == 4


def test_the_verify_command_names_every_damaged_file_and_moves_nothing(
    run: Path, foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for damage, copy in _copies(run, tmp_path, _sample(run, foreign)):
        if damage.name == "another run's step":
            continue  # whole in itself; only a resume knows which run the directory belongs to
        with pytest.raises(SystemExit) as left:
            main(["verify", str(copy)])
        output = capsys.readouterr().out
        assert left.value.code == 1, damage
        assert damage.path in output, damage
        assert f"{NEWEST}  DAMAGED" in output
        assert (copy / NEWEST).exists() or (copy / NEWEST).is_symlink()
        assert not (copy / "quarantine").exists()


def test_a_checkpoint_that_is_not_damaged_is_resumed(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    report, _ = resumed(copy)
    assert (report.step, report.rejected) == (4, ())


def test_files_that_no_manifest_lists_cost_no_checkpoint(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], record_property: RecordProperty
) -> None:
    num_files = 0
    for extra, copy in _copies(run, tmp_path, extra_files(run, NEWEST)):
        _verify(copy, NEWEST)
        capsys.readouterr()
        report, _ = resumed(copy)
        assert (report.step, report.rejected) == (4, ()), extra
        assert not (copy / "quarantine").exists(), extra
        ignored = [
            line for line in capsys.readouterr().err.splitlines() if "not in its manifest" in line
        ]
        assert len(ignored) == 1, extra
        assert extra.path.removeprefix(f"{NEWEST}/") in ignored[0]
        num_files += 1
    record_property("file that no manifest lists", num_files)


def test_a_listed_file_that_is_missing_is_damage_whatever_else_is_there(
    run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / NEWEST / ".DS_Store").write_bytes(b"x")
    (copy / NEWEST / "state" / "rank-00000.json").rename(copy / NEWEST / "state" / "rank-00000~")
    assert resumed(copy)[0].step == 2
    assert [path.name[:13] for path in (copy / "quarantine").glob("*-????????????")] == [NEWEST]


def test_a_run_with_other_files_everywhere_continues_and_is_copied(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "quarantine").mkdir()
    for directory in (copy, copy / OLDER, copy / NEWEST, copy / "quarantine", copy / "journal"):
        (directory / ".DS_Store").write_bytes(b"\0\1")
        (directory / "notes.txt").write_text("mine")
        (directory / ".train.py.swp").symlink_to("/nonexistent")
        (directory / ".snapshot" / "inner").mkdir(parents=True)
    for words in (["verify"], ["list"], ["inspect"], ["diff", str(copy / OLDER)]):
        with pytest.raises(SystemExit) as left:
            main([*words, str(copy)])
        assert left.value.code == (1 if words[0] == "diff" else 0), words
    with pytest.raises(SystemExit) as left:
        main(["export", str(copy), str(tmp_path / "model.safetensors")])
    assert left.value.code == 0
    with pytest.raises(SystemExit) as left:
        main(["fork", str(copy), str(tmp_path / "forked")])
    assert left.value.code == 0
    assert files_of(tmp_path / "forked", NEWEST) == files_of(run, NEWEST)
    capsys.readouterr()
    assert resumed(tmp_path / "forked")[0].step == 4
    Live.launch(copy, keep_latest=1).train(until=9)
    assert sorted(path.name for path in copy.glob("step-*")) == ["step-00000008"]
    assert not list((copy / "quarantine").glob("step-*"))
    assert list((copy / ".staging").iterdir()) == []
    assert capsys.readouterr().err.count("files that are not in its manifest") == 1


# ---------------------------------------------------------------- beside the checkpoints


def test_no_damage_to_the_record_or_the_pointer_costs_a_checkpoint(
    run: Path, tmp_path: Path
) -> None:
    # A record that is a directory cannot be replaced by one rename; that is refused, see below.
    bookkeeping = [
        damage
        for path in ("owner.json", "latest", ".lock")
        for damage in bookkeeping_damages(run, path)
        if damage.name not in REFUSED
    ]
    for damage, copy in _copies(run, tmp_path, iter(bookkeeping)):
        assert resumed(copy)[0].step == 4, damage
        Live.launch(copy).train(until=7)
        assert sorted(path.name for path in copy.glob("step-*")) == [NEWEST, "step-00000006"]


REFUSED = {
    "owner.json is a directory",
    ".lock is a directory",
    ".lock is a link to its own content",
    ".lock is a dangling link",
    ".lock is a socket",
    ".staging is a link",
    ".staging is a file",
}


def test_a_run_directory_that_cannot_be_used_is_refused_and_left_as_it_is(
    run: Path, tmp_path: Path
) -> None:
    paths = ("owner.json", ".lock", ".staging")
    damages = [each for path in paths for each in bookkeeping_damages(run, path)]
    refused = [damage for damage in damages if damage.name in REFUSED]
    assert len(refused) == len(REFUSED)
    for damage, copy in _copies(run, tmp_path, iter(refused)):
        with pytest.raises(DirectoryError) as error:
            resumed(copy)
        assert damage.path.removesuffix(".json") in str(error.value), damage
        _read(copy, NEWEST)
        assert files_of(copy, NEWEST) == files_of(run, NEWEST)
