"""Objects with state that no attribute shows, and classes that only have a library's name."""

from __future__ import annotations

import contextvars
import functools
import io
import json
import operator
import os
import struct
import subprocess
import sys
import threading
from collections import OrderedDict, UserDict, defaultdict
from pathlib import Path
from types import GenericAlias
from typing import Any

import numpy as np
import pytest
import torch

from resumekit.capture.user_state.user_state import UserState
from resumekit.errors import StateMismatchError
from resumekit.state import Fidelity


class Keeper:
    """An object of the user's.

    Args:
        value: with hidden state.
    """

    def __init__(self, value: Any = None) -> None:
        self.value = value


class Marked(torch.Tensor):
    """A tensor of a class of its own."""


class Score(float):
    """A number with an attribute."""


def of(keeper: Keeper) -> UserState:
    return UserState({"keeper": keeper}, key="callbacks/attributes")


def resumed(make: Any, change: Any, doctor: Any = lambda state: state) -> Any:
    """The value of a second launch, which restores what the first one saved after a change."""
    first = Keeper(make())
    state = of(first)
    change(first)
    saved = state.state_dict()
    second = Keeper(make())
    state = of(second)
    doctored = doctor(saved)
    state.check_state_dict(doctored)
    state.load_state_dict(doctored)
    state.restore_now()
    return second.value


def write(keeper: Keeper) -> None:
    keeper.value.write("more")


def replace(keeper: Keeper) -> None:
    keeper.value = type(keeper.value)(2.5)


def test_a_text_in_memory_has_its_position_again() -> None:
    found = resumed(lambda: io.StringIO("some"), write)
    assert (found.getvalue(), found.tell()) == ("more", 4)


def test_a_masked_array_keeps_its_mask() -> None:
    def change(keeper: Keeper) -> None:
        keeper.value[1] = np.ma.masked

    found = resumed(lambda: np.ma.array([1.0, 2.0]), change)
    assert found.mask.tolist() == [False, True]


def test_a_tensor_keeps_its_class() -> None:
    def change(keeper: Keeper) -> None:
        keeper.value = torch.ones(3).as_subclass(Marked)

    found = resumed(lambda: torch.zeros(2).as_subclass(Marked), change)
    assert type(found) is Marked
    assert found.tolist() == [1, 1, 1]


def test_a_number_of_a_class_is_replaced() -> None:
    found = resumed(lambda: Score(1.0), replace)
    assert (type(found), found) == (Score, 2.5)


def test_what_cannot_be_copied_is_reported() -> None:
    keeper = Keeper(contextvars.ContextVar("count"))
    lines = [str(each) for each in of(keeper).findings()]
    assert len(lines) == 1
    assert lines[0].startswith("keeper.value: unknown (a ContextVar that cannot be copied")


def test_what_training_puts_into_an_object_of_a_library_is_saved_or_reported() -> None:
    keeper = Keeper(UserDict(count=0))
    state = of(keeper)
    keeper.value["count"] = 1
    assert not state.findings()
    keeper.value["key"] = operator.attrgetter("a")
    (line,) = state.findings()
    assert (line.key, line.fidelity) == ("keeper.value.data", Fidelity.LOST)


@pytest.mark.parametrize(
    "value", [{}.keys(), memoryview(b""), torch.finfo(torch.float32), struct.Struct("i"), np.sin]
)
def test_what_has_no_state_of_its_own_is_not_reported(value: Any) -> None:
    assert of(Keeper(value)).findings() == ()


@pytest.mark.parametrize("maker", ["os.system", "builtins.eval", "subprocess.Popen", "os.getcwd"])
def test_a_checkpoint_cannot_name_what_makes_an_object(maker: str, tmp_path: Path) -> None:
    """Only callables that make a live object, or a class with hidden state, are called."""
    trap = tmp_path / "trap"

    def doctor(saved: dict[str, Any]) -> dict[str, Any]:
        nodes = json.loads(saved["nodes"])
        number = next(index for index, node in enumerate(nodes) if node[0] == "reduced")
        nodes[number][2] = maker
        nodes.append(["tuple", [f"touch {trap}"], None])
        nodes[number][3][0] = [len(nodes) - 1]
        return {**saved, "nodes": json.dumps(nodes)}

    with pytest.raises(StateMismatchError):
        resumed(lambda: io.StringIO("some"), write, doctor)
    assert not trap.exists()


class Table(defaultdict[str, Any]):
    """A table of the user's; its factory is an argument of its class."""


class Limits(OrderedDict[str, int]):
    """A class that the live object's module defines."""


@pytest.mark.parametrize(
    ("value", "is_restored"),
    [
        (Table(int, count=1), True),
        (Table(list), True),
        (Table(Limits, first=Limits(a=1)), True),
        (Table(Keeper), False),
        (Table(functools.partial(list)), False),
        (GenericAlias(dict, (str, int)), True),
        (GenericAlias(Keeper, (str,)), False),
    ],
)
def test_an_object_that_training_makes_is_made_again_or_reported(
    value: Any, *, is_restored: bool
) -> None:
    """A class that is an argument has to be found again by its name."""

    def change(keeper: Keeper) -> None:
        keeper.value = value

    keeper = Keeper(None)
    state = of(keeper)
    change(keeper)
    assert [each.key for each in state.findings()] == ([] if is_restored else ["keeper.value"])
    found = resumed(lambda: None, change)
    assert (type(found), found) == ((type(value), value) if is_restored else (type(None), None))
    assert getattr(found, "default_factory", None) is (
        getattr(value, "default_factory", None) if is_restored else None
    )


class Cache(OrderedDict[str, int]):
    """A cache whose class needs an argument that copy and pickle do not give."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.last = ""

    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key, value)
        self.last = key
        if len(self) > self.size:
            self.popitem(last=False)


class Groups(defaultdict[str, Any]):
    """A table whose class gives the factory itself."""

    def __init__(self) -> None:
        super().__init__(list)
        self.name = "groups"


@pytest.mark.parametrize("made", [lambda: Cache(3), Groups])
def test_an_object_of_the_launch_is_filled_where_its_class_cannot_make_one(made: Any) -> None:
    def change(keeper: Keeper) -> None:
        for key in "abca":
            keeper.value[key] = ord(key)
        keeper.value.pop("b")
        keeper.value.step = 3

    expected = Keeper(made())
    change(expected)
    found = resumed(made, change)
    assert (type(found), [*found.items()]) == (type(expected.value), [*expected.value.items()])
    assert vars(found) == vars(expected.value)


@pytest.mark.parametrize("made", [lambda: Cache(2), Groups])
def test_an_object_that_its_class_cannot_make_is_reported(made: Any) -> None:
    def change(keeper: Keeper) -> None:
        keeper.value = made()

    keeper = Keeper(None)
    state = of(keeper)
    change(keeper)
    (line,) = state.findings()
    assert (line.key, line.fidelity) == ("keeper.value", Fidelity.LOST)
    assert resumed(lambda: None, change) is None


SCRIPT = """
from types import SimpleNamespace

from {module} import Keeper
from resumekit.capture.user_state.user_state import UserState

own = SimpleNamespace(keeper=Keeper())
state = UserState({{"own": own}}, key="callbacks/attributes")
own.keeper.count += 1
print("own.keeper.count" in state.digests())
"""
KEEPER = "class Keeper:\n    count = 0\n"


def digests_in_a_script(folder: Path, module: str, files: dict[str, str], path: str) -> str:
    """What a script in a folder of its own prints, which imports its class from a module."""
    for name, content in {**files, "tools/script.py": SCRIPT.format(module=module)}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    root, given = Path(__file__).parents[2], [str(folder / each) for each in path.split()]
    done = subprocess.run(
        [sys.executable, "tools/script.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*given, str(root)])},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("module", "file", "path"),
    [
        ("datasets", "tools/datasets.py", "tools"),
        ("datasets", "lib/datasets.py", "lib"),
        ("evaluate.keepers", "evaluate/keepers.py", "."),
        ("swanlab.keepers", "swanlab/keepers.py", "."),
    ],
    ids=["next to the script", "in another folder", "a folder", "a folder of what is missing"],
)
def test_a_module_of_the_users_is_no_library(
    tmp_path: Path, module: str, file: str, path: str
) -> None:
    """Many projects have a ``datasets.py``, which is not Hugging Face's."""
    assert digests_in_a_script(tmp_path, module, {file: KEEPER}, path) == "True"


def test_a_library_that_was_installed_to_be_edited_is_one(tmp_path: Path) -> None:
    metadata = "Metadata-Version: 2.1\nName: datasets\nVersion: 9.0\n"
    files = {"src/datasets.py": KEEPER, "site/datasets-9.0.dist-info/METADATA": metadata}
    assert digests_in_a_script(tmp_path, "datasets", files, "site src") == "False"


def test_a_library_may_be_installed_into_any_folder(tmp_path: Path) -> None:
    """By ``pip install --target``; a script of the user's in that folder is none."""
    libs, project = tmp_path / "libs", tmp_path / "project"
    (project / "keepers").mkdir(parents=True)
    (project / "keepers/__init__.py").write_text(KEEPER)
    (project / "pyproject.toml").write_text('[project]\nname = "keepers"\nversion = "1"\n')
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-build-isolation"]
    subprocess.run([*install, "--target", str(libs), str(project)], check=True)
    (libs / "script.py").write_text(
        "import keepers\nfrom resumekit.live.frames import is_library_file\n"
        "print(is_library_file(keepers.__file__), is_library_file(__file__))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(libs / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_attributes_of_the_present_thread_are_restored() -> None:
    def made() -> threading.local:
        here = threading.local()
        here.scale = 1.0
        return here

    def change(keeper: Keeper) -> None:
        keeper.value.scale *= 0.5

    assert resumed(made, change).scale == 0.5
    assert made().scale == 1.0
