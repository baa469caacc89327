"""Who may import what, read from the sources: the rooms of the house and their doors.

The rules keep the core free of frameworks, the store free of torch, and the bytes of a checkpoint
away from anything that could run them.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "resumekit"
ADAPTERS = ROOT / "adapters"

FRAMEWORKS = frozenset(
    {"transformers", "accelerate", "lightning", "pytorch_lightning", "deepspeed", "datasets"}
)
NUMERICS = frozenset({"torch", "numpy", "safetensors", "xxhash"})
TERMINAL = frozenset({"rich", "typer"})
TEST_RUNNER = frozenset({"pytest"})

# Third-party imports by path: the first prefix that matches decides, the core's rule comes last.
ALLOWED: tuple[tuple[str, frozenset[str]], ...] = (
    ("resumekit/errors.py", frozenset()),
    ("resumekit/state.py", frozenset()),
    ("resumekit/layout.py", frozenset()),
    ("resumekit/analysis/", frozenset()),
    ("resumekit/storage/mirror.py", frozenset({"xxhash", "fsspec"})),
    ("resumekit/storage/", frozenset({"xxhash"})),
    ("resumekit/cli", NUMERICS | TERMINAL),
    ("resumekit/demo", NUMERICS | TERMINAL),
    ("resumekit/prove/report", NUMERICS | TERMINAL),
    # Test files inherit it. It is loaded when it is asked for, and pytest with it.
    ("resumekit/testing/suite.py", TEST_RUNNER),
    # Each its own framework; nothing but adapters and its neighbours may import them.
    ("resumekit/frameworks/accelerate.py", NUMERICS),
    ("resumekit/frameworks/deepspeed.py", NUMERICS | {"deepspeed"}),
    ("resumekit/frameworks/deepspeed_steps.py", {"deepspeed"}),
    ("resumekit/frameworks/zero.py", NUMERICS | {"deepspeed"}),
    ("resumekit/", NUMERICS),
)

# The core never imports the adapters. A demonstration script stands where a user's script stands.
IMPORTS_ADAPTERS = frozenset({"resumekit/demo_script.py"})

# Rooms that must not import torch through a neighbour either.
TORCH_FREE = ("resumekit.errors", "resumekit.state", "resumekit.layout", "resumekit.storage")

IMPORT_FUNCTIONS = frozenset({"__import__", "importlib.import_module", "import_module"})
COMPUTED = "<computed>"

# Modules that import what they compute, with the reason.
COMPUTES_IMPORTS = {
    "resumekit/__init__.py": "public names are loaded on first use, from a table of literals",
    "resumekit/testing/server.py": "the caller of the kit names the modules to preload",
    "resumekit/testing/task.py": "the caller of the kit names the training function",
}

# What could run bytes or text as code.
DANGEROUS = frozenset(
    {
        "pickle",
        "cPickle",
        "_pickle",
        "cloudpickle",
        "dill",
        "joblib",
        "marshal",
        "shelve",
        "eval",
        "exec",
        "torch.load",
        "numpy.load",
        "weights_only",
        "allow_pickle",
    }
)
# By path, each name with its reason.
DANGEROUS_ALLOWED: dict[str, dict[str, str]] = {}


class Module(NamedTuple):
    """One source file, by its path in the repository."""

    path: str
    tree: ast.Module

    def __str__(self) -> str:
        return self.path


def _modules(folder: Path) -> Iterator[Module]:
    for parent, folders, files in os.walk(folder):  # does not follow links: adapters come once
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(parent, name)
                source = path.read_text(encoding="utf-8")
                yield Module(path.relative_to(ROOT).as_posix(), ast.parse(source, str(path)))


CORE_MODULES = tuple(_modules(CORE))
ADAPTER_MODULES = tuple(_modules(ADAPTERS))
EVERY_MODULE = CORE_MODULES + ADAPTER_MODULES


def imported(tree: ast.AST, *, at_run_time: bool = False) -> set[str]:
    """The dotted names that a module imports anywhere, `from a import b` as `a.b`.

    Args:
        tree: the module.
        at_run_time: leave out what stands under `if TYPE_CHECKING:`.
    """
    left_out = _type_checking_nodes(tree) if at_run_time else set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            names.update(f"{prefix}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _dotted(node.func) in IMPORT_FUNCTIONS:
            argument = node.args[0] if node.args else None
            known = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            names.add(str(argument.value) if known else COMPUTED)  # type: ignore[union-attr]
    return names


def third_party(tree: ast.AST) -> set[str]:
    """The top-level names imported that are neither the standard library's nor our own."""
    tops = _tops(imported(tree))
    if "typing_extensions" not in _tops(imported(tree, at_run_time=True)):
        tops.discard("typing_extensions")  # what only a type checker imports needs no dependency
    return tops - sys.stdlib_module_names - {"resumekit", COMPUTED}


def _tops(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def _type_checking_nodes(tree: ast.AST) -> set[ast.AST]:
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and _dotted(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    ]
    return {inner for block in blocks for part in block.body for inner in ast.walk(part)}


def dangerous_names(tree: ast.AST) -> set[str]:
    """The names of DANGEROUS that a module uses, imports included."""
    aliases = {"np": "numpy"}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in DANGEROUS:
            found.add(node.arg)
        elif isinstance(node, ast.Name) and node.id in DANGEROUS:
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            dotted = _dotted(node)
            head, _, rest = dotted.partition(".")
            found.update({dotted, f"{aliases.get(head, head)}.{rest}"} & DANGEROUS)
    for name in imported(tree):
        found.update({name, name.split(".")[0]} & DANGEROUS)
    return found


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def _allowed(path: str) -> frozenset[str]:
    return next(names for prefix, names in ALLOWED if path.startswith(prefix))


def test_there_are_modules_to_read() -> None:
    assert len(CORE_MODULES) > 20
    assert "resumekit/storage/io.py" in {module.path for module in CORE_MODULES}
    assert "adapters/torch.py" in {module.path for module in ADAPTER_MODULES}


@pytest.mark.parametrize("module", CORE_MODULES, ids=str)
def test_the_core_imports_only_what_its_room_may(module: Module) -> None:
    assert third_party(module.tree) <= _allowed(module.path)


@pytest.mark.parametrize("module", CORE_MODULES, ids=str)
def test_the_core_never_imports_the_adapters(module: Module) -> None:
    if module.path in IMPORTS_ADAPTERS:
        return
    names = imported(module.tree)
    assert not [n for n in names if n.startswith(("resumekit.adapters", "adapters"))]


@pytest.mark.parametrize("module", CORE_MODULES, ids=str)
def test_only_adapters_import_what_belongs_to_one_framework(module: Module) -> None:
    if not module.path.startswith("resumekit/frameworks/"):
        names = imported(module.tree)
        assert not [n for n in names if n.startswith("resumekit.frameworks")]


@pytest.mark.parametrize("module", EVERY_MODULE, ids=str)
def test_no_import_is_computed_or_relative(module: Module) -> None:
    names = imported(module.tree)
    assert not [name for name in names if name.startswith(".")]
    assert (COMPUTED in names) == (module.path in COMPUTES_IMPORTS)


# Lightning comes in two packages; transformers brings safetensors, and trains peft's adapters.
SAME_FRAMEWORK = {"lightning": ("pytorch_lightning",), "transformers": ("peft", "safetensors")}


@pytest.mark.parametrize("module", ADAPTER_MODULES, ids=str)
def test_an_adapter_imports_torch_its_own_framework_and_public_names_only(module: Module) -> None:
    # A larger one has private modules beside it: `_transformers_plan` belongs to `transformers`.
    own = Path(module.path).stem.removeprefix("_").partition("_")[0]
    assert third_party(module.tree) <= {"torch", own, *SAME_FRAMEWORK.get(own, ())}
    for name in imported(module.tree):
        if name.startswith("resumekit.") and not name.startswith(f"resumekit.adapters._{own}_"):
            assert not name.startswith("resumekit.adapters"), f"{own} imports another adapter"
            private = [part for part in name.split(".") if part.startswith("_")]
            assert not private, f"{name} is not public"


@pytest.mark.parametrize("module", EVERY_MODULE, ids=str)
def test_nothing_can_run_bytes_that_came_from_storage(module: Module) -> None:
    reasons = DANGEROUS_ALLOWED.get(module.path, {})
    assert all(reasons.values()), "every exception needs its reason"
    assert dangerous_names(module.tree) == set(reasons)


def test_the_reader_sees_each_kind_of_import_and_each_dangerous_name() -> None:
    tree = ast.parse(
        "import a.b as c\n"
        "from d import e\n"
        "def f():\n"
        "    import g\n"
        "    importlib.import_module('h.i')\n"
        "    importlib.import_module(name)\n"
        "from . import j\n"
    )
    assert imported(tree) == {"a.b", "d.e", "g", "h.i", COMPUTED, "..j"}
    guarded = ast.parse("if TYPE_CHECKING:\n    import torch, typing_extensions\n")
    assert third_party(guarded) == {"torch"}
    assert third_party(ast.parse("import typing_extensions")) == {"typing_extensions"}
    cases = {
        "import pickle": {"pickle"},
        "from pickle import loads": {"pickle"},
        "torch.load(p)": {"torch.load"},
        "from torch import load": {"torch.load"},
        "load(p, weights_only=False)": {"weights_only"},
        "np.load(p, allow_pickle=True)": {"numpy.load", "allow_pickle"},
        "eval('1')": {"eval"},
        "exec('1')": {"exec"},
        "model.eval()": set(),
        "safetensors.torch.load(b)": set(),
        "json.loads(t)": set(),
    }
    assert {source: dangerous_names(ast.parse(source)) for source in cases} == cases


def _modules_loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    return {name.split(".")[0] for name in done.stdout.split()}


def test_importing_resumekit_loads_no_framework_and_no_terminal_library() -> None:
    loaded = _modules_loaded_by("import resumekit")
    assert "resumekit" in loaded
    assert not loaded & (FRAMEWORKS | TERMINAL)


def test_the_conformance_kit_loads_no_test_runner_until_the_suite_is_asked_for() -> None:
    loaded = _modules_loaded_by("import resumekit.testing")
    assert "resumekit" in loaded
    assert not loaded & {"pytest", "_pytest"}
    assert "pytest" in _modules_loaded_by("from resumekit.testing import ConformanceSuite")


@pytest.mark.parametrize("name", TORCH_FREE)
def test_a_torch_free_room_does_not_load_torch_through_a_neighbour(name: str) -> None:
    # The parent package may import torch; what is asked is whether this room itself needs it.
    stub = (
        "import types; parent = types.ModuleType('resumekit'); "
        f"parent.__path__ = [{str(CORE)!r}]; sys.modules['resumekit'] = parent; import {name}"
    )
    assert not _modules_loaded_by(stub) & {"torch", "numpy"}
