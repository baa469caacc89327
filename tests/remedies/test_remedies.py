"""The remedies in messages: each name in them exists, and a test follows each that it can.

Run as a script it prints every remedy of the sources with its file and line.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache, reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from resumekit.cli.commands import app

ROOT = Path(__file__).resolve().parents[2]
HOLE = "{}"  # for a value that is inserted


class Text(NamedTuple):
    """The constant parts of a text that a user sees."""

    path: str
    line: int
    text: str


# ---------------------------------------------------------------- the texts of the sources


def sources() -> Iterator[Path]:
    for folder in ("resumekit", "adapters"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.relative_to(ROOT).parts[:2] != ("resumekit", "adapters"):  # a link
                yield path


def _is_remedy(name: str) -> bool:
    return "remed" in name.lower()


class _Module:
    """The remedies in a module; a variable in one stands for all that is assigned to it."""

    def __init__(self, tree: ast.AST) -> None:
        self.tree = tree
        self.assigned: dict[str, list[ast.expr]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._note(target, node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._note(node.target, node.value)

    def _note(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            options = value.values if isinstance(value, ast.BoolOp) else [value]
            for option in options:
                if isinstance(option, ast.Tuple):
                    for one, each in zip(target.elts, option.elts, strict=False):
                        self._note(one, each)
        elif isinstance(target, (ast.Name, ast.Attribute)):
            name = target.id if isinstance(target, ast.Name) else target.attr
            self.assigned.setdefault(name, []).append(value)

    def remedies(self) -> Iterator[tuple[int, str]]:
        for name, values in self.assigned.items():
            if _is_remedy(name):
                for value in values:
                    yield from ((value.lineno, text) for text in self.texts(value))
        for node in ast.walk(self.tree):
            if isinstance(node, ast.keyword) and node.arg and _is_remedy(node.arg):
                yield from ((node.value.lineno, text) for text in self.texts(node.value))
            elif isinstance(node, ast.FunctionDef):
                defaults = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                for argument, default in defaults:
                    if default is not None and _is_remedy(argument.arg):
                        yield from ((node.lineno, text) for text in self.texts(default))

    def texts(self, node: ast.expr, seen: frozenset[str] = frozenset()) -> list[str]:
        """The texts that an expression may give."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else []
        if isinstance(node, ast.JoinedStr):
            return ["".join(_part(each) for each in node.values)]
        if isinstance(node, ast.IfExp):
            return self.texts(node.body, seen) + self.texts(node.orelse, seen)
        if isinstance(node, ast.BoolOp):
            return [text for each in node.values for text in self.texts(each, seen)]
        if isinstance(node, ast.BinOp):
            ends = self.texts(node.right, seen) or [HOLE]
            return [begin + end for begin in self.texts(node.left, seen) for end in ends]
        if isinstance(node, (ast.Dict, ast.Tuple)):
            items = node.values if isinstance(node, ast.Dict) else node.elts
            return [text for each in items if each for text in self.texts(each, seen)]
        if isinstance(node, ast.Call):  # dict.fromkeys(keys, text)
            return [text for each in node.args[1:] for text in self.texts(each, seen)]
        if isinstance(node, ast.Name) and node.id not in seen:
            values = self.assigned.get(node.id, [])
            return [text for each in values for text in self.texts(each, seen | {node.id})]
        return []


def _part(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else HOLE


def remedies_in(path: str, code: str) -> Iterator[Text]:
    for line, text in sorted(set(_Module(ast.parse(code)).remedies())):
        if re.search("[a-z]", text):
            yield Text(path, line, text)


@cache
def remedies() -> tuple[Text, ...]:
    return tuple(
        each
        for path in sources()
        for each in remedies_in(str(path.relative_to(ROOT)), path.read_text())
    )


# A message that says what to do: warnings, lines of the report, parts of longer remedies.
_INSTRUCTION = re.compile(
    r"\b(pass|use|call|leave|give|add|set|remove|raise|see)\b[^;:.]*?"
    r"(\b\w+=|\b\w+\(|(?<![\w-])--[a-z]|\bresumekit [a-z]|`|docs/)",
    re.IGNORECASE,
)


def instructions_in(path: str, code: str) -> Iterator[Text]:
    tree = ast.parse(code)
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    inner = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if id(node) in docstrings | inner:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(_part(each) for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if "\n" not in text and _INSTRUCTION.search(text):
            yield Text(path, node.lineno, text)


# ---------------------------------------------------------------- the names that exist


@cache
def commands() -> dict[str, frozenset[str]]:
    """The flags of each command, from the parser."""
    group: Any = typer.main.get_command(app)
    return {
        name: frozenset(flag for each in command.params for flag in each.opts)
        for name, command in group.commands.items()
    }


# What a package's messages may name: the command that the user has started.
_COMMAND_OF = {
    "resumekit/prove/": ("prove",),
    "resumekit/replay/": ("replay",),
    "resumekit/supervisor/": ("run",),
    "resumekit/attach/": ("run",),
    "resumekit/export.py": ("export",),
    "resumekit/fork.py": ("fork",),
}

# What frameworks have: of torch by object, of the others by the file that defines it,
# which is read where the framework is installed.
_OF_TORCH = {
    "backend=": "torch.distributed:new_group",
    "checkpoint_id=": "torch.distributed.checkpoint:save",
    "device=": "torch.nn:Module.to_empty",
    "init_process_group()": "torch.distributed:init_process_group",
    "join()": "torch.nn.parallel:DistributedDataParallel.join",
    "new_group()": "torch.distributed:new_group",
    "no_dist=": "torch.distributed.checkpoint:save",
    "num_workers=": "torch.utils.data:DataLoader",
    "persistent_workers=": "torch.utils.data:DataLoader",
    "redistribute()": "torch.distributed.tensor:DTensor.redistribute",
    "requires_grad_()": "torch.nn:Module.requires_grad_",
    "set_epoch()": "torch.utils.data:DistributedSampler.set_epoch",
    "shuffle=": "torch.utils.data:DataLoader",
    "state_dict()": "torch.nn:Module.state_dict",
    "to_empty()": "torch.nn:Module.to_empty",
    "use_orig_params=": "torch.distributed.fsdp:FullyShardedDataParallel",
}
_OF_FRAMEWORKS = {
    "load_lr_scheduler_states=": "deepspeed/runtime/engine.py",
    "dataloader_persistent_workers=": "transformers/training_args.py",
    "from_pretrained()": "transformers/modeling_utils.py",
    "cpu=": "accelerate/accelerator.py",
    "devices=": "lightning/pytorch/trainer/trainer.py",
    "num_nodes=": "lightning/pytorch/trainer/trainer.py",
    "use_cpu=": "transformers/training_args.py",
    "fsdp_version=": "accelerate/utils/dataclasses.py",
    "load_best_model_at_end=": "transformers/training_args.py",
    "prepare()": "accelerate/accelerator.py",
    "train()": "transformers/trainer.py",
    "use_vllm=": "trl/trainer/grpo_config.py",
}

# Keywords that the caller chooses.
_FREE = {"loss="}


@cache
def public_names() -> frozenset[str]:
    """What users may write: ``name=`` for an argument, ``name()`` for a function."""
    names = set[str]()
    for module in ("resumekit", "resumekit.testing", "resumekit.record.trace", "resumekit.prove"):
        for each in vars(importlib.import_module(module)).values():
            if callable(each) and getattr(each, "__module__", "").startswith("resumekit"):
                names |= _names_of(each)
    from resumekit import Checkpointer, StateComponent
    from resumekit.run.options import Options

    for kind in (Checkpointer, StateComponent, Options):
        names |= _names_of(kind)
    from resumekit.dcp import StorageWriter  # torch calls its methods

    names |= {
        "StorageWriter()",
        *(f"{name}=" for name in inspect.signature(StorageWriter).parameters),
    }
    for path in (ROOT / "adapters").rglob("*.py"):
        names |= _names_in_adapter(ast.parse(path.read_text()))
    return frozenset(names)


def _names_of(member: Any) -> set[str]:
    names = {f"{member.__name__}()"} if hasattr(member, "__name__") else set()
    try:
        names |= {f"{name}=" for name in inspect.signature(member).parameters}
    except (TypeError, ValueError):
        return names
    if inspect.isclass(member):
        for name, each in inspect.getmembers(member, inspect.isfunction):
            if not name.startswith("_"):
                names |= _names_of(each)
    return names


_PUBLIC = ("Checkpointer", "ResumeCallback")


def _names_in_adapter(tree: ast.AST) -> set[str]:
    """The arguments of an adapter's classes; the framework need not be installed."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in _PUBLIC:
            for each in node.body:
                is_public = isinstance(each, ast.FunctionDef) and (
                    each.name == "__init__" or not each.name.startswith("_")
                )
                if is_public:
                    assert isinstance(each, ast.FunctionDef)
                    arguments = [*each.args.args, *each.args.kwonlyargs]
                    names |= {f"{argument.arg}=" for argument in arguments} | {f"{each.name}()"}
    return names


def _exists(name: str) -> bool:
    """Whether an argument ``name=`` or a function ``name()`` exists."""
    bare = name.rstrip("=()")
    if name in public_names() | _FREE or (name.endswith("()") and hasattr(builtins, bare)):
        return True
    if name in _OF_TORCH:
        home, _, member = _OF_TORCH[name].partition(":")
        owner = reduce(getattr, member.split("."), importlib.import_module(home))
        return name.endswith("()") or bare in inspect.signature(owner).parameters  # type: ignore[arg-type]
    if name not in _OF_FRAMEWORKS:
        return False
    package, _, file = _OF_FRAMEWORKS[name].partition("/")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return True  # cannot be looked up here
    begin = rf"def {bare}\(" if name.endswith("()") else rf"^\s+{bare}:"
    return bool(re.search(begin, (Path(spec.origin).parent / file).read_text(), re.MULTILINE))


def wrong_names(text: Text) -> list[str]:
    """The names in a text that do not exist."""
    words = re.sub(r"\bpip install .*", "", text.text)
    wrong = [
        name
        for name in re.findall(r"(?<![\w.{-])([a-z]\w*=)(?!=)", words)
        if not _exists(name) and not re.search(rf"--\w*-?{name}", words)
    ]
    called = re.findall(r"\b(?:\w+\.)*([A-Za-z_]\w*)\((?!s\))", words)
    wrong += [f"{name}()" for name in called if not _exists(f"{name}()")]
    owners = next((c for path, c in _COMMAND_OF.items() if text.path.startswith(path)), None)
    for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", words):
        named = set(re.findall(r"\bresumekit ([a-z]+)", words))
        known = owners or commands()
        if not any(flag in commands()[each] for each in {*known, *named} & commands().keys()):
            wrong.append(flag)
    mentioned = re.findall(r"(?:`|: )resumekit ([a-z]+)|\bresumekit ([a-z]+) (?:--|`)", words)
    wrong += [f"resumekit {a or b}" for a, b in mentioned if (a or b) not in commands()]
    wrong += [
        page for page in re.findall(r"docs/[\w./-]+\.md", words) if not (ROOT / page).exists()
    ]
    return wrong


# ---------------------------------------------------------------- what no test follows

_REASONS = {
    "it changes what is installed": (
        "Install a newer resumekit",
        "Install it (apt-get install chromium), or print the page from your browser",
        'Install it with: pip install "{}>={}"',
        "Install it with: pip install pytest",
        "Install the torch that wrote the checkpoint, or a newer one",
        "Install the version of its library that wrote the checkpoint",
        "Install those",
        "Resume with the version of the framework that wrote the checkpoint",
    ),
    "a person does it outside of the run": (
        "Print the page from your browser instead",
        "Create it first",
        "Pass a local directory, and the URL as mirror=",
        "See the log of these ranks",
        "Its messages are on stderr",
        "Choose a directory that this job may write to",
        "Split the matrix",
        "Let the run keep more checkpoints: keep_latest",
        'If no other job ever uses it, pass lock="none"',
    ),
    "the next checkpoint is tried": (
        "The bytes are intact: the state was wrong when it was written",
    ),
    "tests/places/test_places.py follows it": (
        "Give each run other places, or continue that run in a new directory",
        "Keep the copies of each run in a place of their own",
        "Start again when it answers, or leave it out to start a new run",
    ),
    "tests/dcp/test_storage_writer.py follows it": (
        "Leave use_collectives out",
        "Make the planner without enable_plan_caching",
        'Pass checkpoint_id=f"step-{step}", or StorageWriter(path, step=step)',
        "Save under another number; no checkpoint is replaced",
        "Wait for the future of async_save before the next save",
    ),
    "tests/imports/test_imports.py follows it": (
        "Choose another run directory RUN, and import it first: {}",
        "Choose another run directory, or leave the import out to continue that run",
        "Load it in the program that wrote it, and save the state_dicts alone; or, if you trust "
        "who wrote it, run what it names: --trust, trust_import=True",
        "Make it the start of a run: {}",
        "Pass as many objects, under these names or, if they are numbers, in this order",
        "Pass import_from=PATH and trust_import=True in the script that has them",
        "Run `resumekit import` with --epoch {} or --epoch {}",
    ),
    "integration/torch/test_dcp_writer.py follows it": (
        'Pass process_group=dist.new_group(backend="gloo") to async_save and to StorageWriter',
        "Save on all ranks that hold a part, without no_dist=True",
    ),
    "the error needs a process that dies, a race or a slow disk": (
        "Start the job again: it continues from its newest checkpoint",
        "End this process, and start it again when nothing changes the checkpoint",
        "End this process, and correct load_state_dict or pass exclude={{}}",
        "Call wait() before",
        "Let only one job use the directory, and start this one again",
        "Let the dataset's __iter__ start faster, or pass persistent_workers=False",
    ),
    "another check comes first in every training that was tried": (
        "Give the optimizer the parameters that it had when the checkpoint was written",
        "Store it as a known type",
    ),
}
NOT_FOLLOWED = {text: reason for reason, texts in _REASONS.items() for text in texts}


# ---------------------------------------------------------------- tests


def test_every_name_in_a_remedy_exists() -> None:
    wrong = [
        f"{each.path}:{each.line}: {', '.join(names)}: {each.text}"
        for each in remedies()
        if (names := wrong_names(each))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_name_in_an_instruction_exists() -> None:
    wrong = [
        f"{each.path}:{each.line}: {', '.join(names)}: {each.text}"
        for path in sources()
        for each in instructions_in(str(path.relative_to(ROOT)), path.read_text())
        if (names := wrong_names(each))
    ]
    assert not wrong, "\n".join(wrong)


@cache
def followed() -> frozenset[str]:
    """The texts in the marks of tests that follow remedies, here and in integration/."""
    found = set[str]()
    for folder in ("tests", "integration"):
        for path in (ROOT / folder).rglob("test_remedies*.py"):
            if path.name != Path(__file__).name:
                found |= _constants(ast.parse(path.read_text()))
    return frozenset(found)


def _constants(tree: ast.AST) -> set[str]:
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {node.value for node in nodes if isinstance(node.value, str)}


def neither(texts: Iterable[Text]) -> list[str]:
    """The remedies that no test follows and that are not listed."""
    known = followed() | NOT_FOLLOWED.keys()
    return [f"{each.path}:{each.line}: {each.text}" for each in texts if each.text not in known]


def test_every_remedy_is_followed_by_a_test_or_listed_with_the_reason() -> None:
    left = neither(remedies())
    assert not left, "\n".join(["mark a test, or add to NOT_FOLLOWED:", *left])


def test_a_new_remedy_is_in_neither() -> None:
    new = [*remedies_in("doctored.py", 'E("a", remedy="Pass exclude={1}, and pray")')]
    assert len(neither(new)) == 1


def test_the_list_of_what_is_not_followed_has_no_more() -> None:
    texts = {each.text for each in remedies()}
    assert not NOT_FOLLOWED.keys() - texts, "no such remedy"
    assert not NOT_FOLLOWED.keys() & followed(), "a test follows it"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ('E("a", found="b", remedy="Pass allow_change={1}")', "allow_change="),
        ('E("a", found="b", remedy=f"Pass {x} or rekname={y}")', "rekname="),
        ('_REMEDY = "Call finish() first"', "finish()"),
        ('remedy = "Leave --with-resumekits out"', "--with-resumekits"),
        ('E("a", remedy=None if y else "See `resumekit proof`")', "resumekit proof"),
        ('E("a", remedy="Read " + other)\nother = "docs/missing.md"', "docs/missing.md"),
        ('found, remedy = reason or ("a", "Pass nname=1")', "nname="),
        ('TABLE_OF_REMEDIES = {1: dict.fromkeys((1, 2), "Pass kkeep=1")}', "kkeep="),
    ],
)
def test_a_wrong_name_in_a_remedy_is_found(code: str, name: str) -> None:
    assert [wrong_names(each) for each in remedies_in("doctored.py", code)] == [[name]]


def test_a_wrong_name_in_a_message_is_found() -> None:
    found = list(instructions_in("doctored.py", 'logger.warning("%s; use shufle=True", name)'))
    assert [wrong_names(each) for each in found] == [["shufle="]]


def test_a_flag_of_another_command_is_not_one_of_this() -> None:
    found = list(remedies_in("resumekit/prove/doctored.py", 'remedy = "Pass --max-restarts 0"'))
    assert [wrong_names(each) for each in found] == [["--max-restarts"]]


if __name__ == "__main__":
    for text in remedies():
        sys.stdout.write(f"{text.path}:{text.line}: {text.text}\n")
