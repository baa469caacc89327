"""Which package may import which, and how much code one may have, read from the sources.

The rules keep the core free of frameworks, the store free of torch, and the bytes of a checkpoint
away from anything that could run them. Each test is one rule, and lists whatever breaks it.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from structure import modules_of

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "resumekit"
ADAPTERS = ROOT / "adapters"

FRAMEWORKS = frozenset(
    {"transformers", "accelerate", "lightning", "pytorch_lightning", "deepspeed", "datasets"}
)
NUMERICS = frozenset({"torch", "numpy", "safetensors", "xxhash"})
TERMINAL = frozenset({"rich", "typer"})
TEST_RUNNER = frozenset({"pytest"})

# What each package of resumekit may import of resumekit, the lowest first, also for type hints.
# "resumekit" is the root, which has the public names.
LAYERS: dict[str, set[str]] = {
    "version": set(),
    "printable": set(),
    "errors": {"printable"},
    "log": {"errors", "printable"},
    "progress_display": {"log", "printable"},
    "requirements": {"errors", "log"},
    "replay_plan": set(),
    "cadence": {"errors"},
    "state": {"errors"},
    "distributed": {"errors", "log", "state"},
    "storage": {"errors", "log", "state"},
    "serialization": {"errors", "log", "state", "storage"},
    "places": {"errors", "log", "progress_display", "cadence", "storage"},
    "live": {"errors", "state"},
    "capture": {
        *("errors", "log", "state", "live", "distributed", "serialization", "version"),
    },
    "data": {"errors", "log", "progress_display", "state", "distributed", "capture"},
    "record": {"errors", "log", "state", "serialization", "capture", "version"},
    "imports": {"errors", "state", "storage", "serialization", "capture"},
    "trackers": set(),
    "run": {
        *("errors", "log", "state", "distributed", "live"),
        *("storage", "serialization", "capture", "data", "record", "progress_display"),
        *("replay_plan", "cadence", "places", "imports", "trackers"),
    },
    "checkpointer": {"errors", "log", "state", "run"},
    "resumekit": {"version", "errors", "state", "record", "run", "checkpointer", "places"},
    "export": {"errors", "state", "storage", "serialization", "capture"},
    "diff": {"errors", "state", "storage", "serialization", "capture"},
    "dcp": {"errors", "log", "state", "distributed", "storage", "serialization", "capture"},
    "fork": {"errors", "state", "storage"},
    "shared_files": {"storage"},
    "prune": {"errors", "storage", "fork", "shared_files"},
    "replay": {"errors", "state", "storage", "record", "diff", "launcher", "replay_plan"},
    "frameworks": {
        *("errors", "log", "state", "distributed", "requirements"),
        *("live", "serialization", "capture", "data"),
    },
    "launcher": {"errors", "replay_plan"},
    "attach": {"errors", "log", "cadence", "storage", "record", "launcher", "imports"},
    "adapters": {
        *("errors", "log", "state", "distributed", "requirements", "resumekit"),
        *("storage", "capture", "data", "run", "frameworks", "attach"),
    },
    "recorder": {"record"},
    "prove": {
        *("errors", "log", "cadence", "serialization", "record", "launcher", "recorder"),
        "attach",
    },
    "supervisor": {"errors", "storage", "record", "launcher", "attach"},
    "doctor": {
        *("errors", "progress_display", "cadence", "state", "storage", "record", "run"),
        *("replay_plan", "replay", "attach"),
    },
    # "adapters": the checks for a GPU train as a user's script does
    "testing": {"errors", "log", "record", "storage", "launcher", "prove", "adapters"},
    "demo": {"errors", "log", "record", "prove", "demo_script"},
    "demo_script": {"adapters"},  # it is written as a user's script
    "html_report": {
        *("errors", "progress_display", "storage", "serialization", "record", "prove", "diff"),
        *("version", "shared_files", "replay"),
    },
    "cli": {
        *("errors", "log", "progress_display", "storage", "export", "prove", "demo", "version"),
        *("diff", "fork", "shared_files", "html_report", "attach", "supervisor", "replay"),
        *("printable", "places", "prune", "cadence", "doctor", "imports"),
    },
    "__main__": {"cli"},
}

# The modules of a package that other packages import by their names. The other packages export what
# others use from their `__init__`.
PUBLIC_MODULES: dict[str, str] = {
    "storage": (
        "commit committed directories file_reader files imported io.direct io.file_system "
        "io.pipeline io.shared_memory manifest ownership parts retention store"
    ),
    "serialization": (
        "deferral digests encoding index leaves planning reading sharding subclasses tensors "
        "writing"
    ),
    "capture": (
        "ddp_buckets fingerprint fsdp1 global_rng gradients model named_tensors nested_state "
        "objects optimizer rng scheduler slots stacking user_state.attributes "
        "user_state.exclusions user_state.table user_state.user_state user_state.value_types "
        "user_state.walk"
    ),
    "live": "counts_and_operands frames",
    "data": "keyed loader_traits position prefetching source",
    "record": "comparison conditions journal moments step_values trace",
    "run": "components discovery loop loops options progress report run steps_taken",
    "frameworks": "accelerate deepspeed training_identity",
    "launcher": "processes",
    "places": "copies memory mirror place",
    "imports": "content importing recognition",
    "prove": "causes",
    "html_report": "comparison_page diff_page replay_page run_page",
}

# Third-party imports by path: the first prefix that matches decides, the core's rule comes last.
THIRD_PARTY: tuple[tuple[str, frozenset[str]], ...] = (
    ("resumekit/errors.py", frozenset()),
    ("resumekit/state/", frozenset()),
    ("resumekit/launcher/processes.py", frozenset({"psutil"})),
    ("resumekit/launcher/", frozenset()),
    ("resumekit/live/", frozenset()),
    ("resumekit/storage/", frozenset({"xxhash"})),
    ("resumekit/trackers/", frozenset()),  # found in sys.modules
    ("resumekit/places/", frozenset({"fsspec"})),  # loaded when a URL is opened
    ("resumekit/progress_display.py", TERMINAL),  # loaded when a bar is drawn
    ("resumekit/cli", NUMERICS | TERMINAL),
    ("resumekit/html_report/", frozenset({"jinja2"})),
    ("resumekit/demo", NUMERICS | TERMINAL),
    ("resumekit/prove/report", NUMERICS | TERMINAL),
    # Test files inherit it. It is loaded when it is asked for, and pytest with it.
    ("resumekit/testing/suite.py", TEST_RUNNER),
    ("resumekit/testing/gpu_", NUMERICS | {"transformers", "accelerate", "lightning"}),
    ("resumekit/frameworks/deepspeed", NUMERICS | {"deepspeed"}),
    ("resumekit/", NUMERICS),
)
# Lightning comes in two packages; transformers brings safetensors, and trains peft's adapters.
SAME_FRAMEWORK = {"lightning": {"pytorch_lightning"}, "transformers": {"peft", "safetensors"}}

# Packages that must not import torch through another package either.
TORCH_FREE = (
    *("resumekit.errors", "resumekit.state", "resumekit.storage"),
    *("resumekit.launcher", "resumekit.attach", "resumekit.supervisor"),
    *("resumekit.live.counts_and_operands", "resumekit.places.copies"),
)

IMPORT_FUNCTIONS = frozenset({"__import__", "importlib.import_module", "import_module"})
COMPUTED = "<computed>"

# Modules that import what they compute, with the reason.
COMPUTES_IMPORTS = {
    "resumekit/__init__.py": "public names are loaded on first use, from a table of literals",
    "resumekit/launcher/startup.py": "the launcher names the functions to call",
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
DANGEROUS_ALLOWED: dict[str, dict[str, str]] = {
    "resumekit/export/deepspeed.py": {
        "pickle": "writes the names of DeepSpeed's classes, and reads nothing",
    },
    "resumekit/imports/reading.py": {
        "torch.load": "checkpoints of other programs, for an import alone",
        "weights_only": "True, unless the user asks for other objects of this source (--trust)",
        "pickle": "its errors; an unpickler that makes an empty class of every name, and one of "
        "the names in the metadata of DCP alone",
    },
}


# What starts a process, as the beginning of a dotted name. subprocess.run is left out: it waits for
# the end of its program, and leaves nothing to watch.
STARTERS = (
    *("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.system"),
    *("os.popen", "pty.", "psutil.Popen", "multiprocessing.Process"),
)
# Modules that start processes or read /proc, with the reason. Others use launcher/processes.py.
STARTS_PROCESSES = {
    "resumekit/launcher/processes.py": "the one starter",
    "resumekit/replay/mounts.py": "isolates its own process, and then becomes the command",
    "resumekit/testing/server.py": "a task is a fork of the warm process",
    "resumekit/testing/task.py": "a cold start makes a fork a fresh interpreter",
}
READS_PROC = {
    "resumekit/record/conditions.py": "model of the processor and version of the driver",
    "resumekit/replay/mounts.py": "mount points, and the user ids of a new namespace",
    "resumekit/run/saving/in_flight.py": "the start time of a rank, in ticks since the boot",
    "resumekit/storage/io/direct.py": "opens a file again by its descriptor, with other flags",
}


MAX_LINES = 600  # of a module: one idea, read from top to bottom

# Lines of code of each package, without docstrings, comments and blank lines; a new one begins with
# what it has. A change that raises a number gives its reason beside it.
BUDGET: dict[str, int] = {
    "version": 10,
    "printable": 10,
    "errors": 135,  # 15: links to the pages of a release
    "log": 60,
    "progress_display": 110,
    "requirements": 120,
    "replay_plan": 30,
    "cadence": 110,
    "state": 445,  # 140: the schema of a state and its check; 10: the progress in a state
    "distributed": 250,  # 10: restarts that torchrun may miss; 10: ranks that a framework misses
    # 70: unlisted files, deletion by a live run, reads that are retried; 115: commits in place;
    # 40: deletions on a full disk, drafts that are removed after an error; 60: commits of copies;
    # 60: pages of shared memory that are used again; 35: directories of an overlay that cannot be
    # renamed; 5: which states the job has once; 20: the newest checkpoint that can be opened, which
    # the commands and the reader of DCP had; 20: deletion by a command; 15: imports
    "storage": 3_110,
    # 10: how many parts an index may have; 180: tensors made of others; 40: digests that devices
    # compute, so that frozen weights are not fetched
    "serialization": 3_180,
    "places": 795,  # 75: memory; 20: a limit of the bandwidth
    "live": 1_050,  # 5: cells of notebooks
    # 300: the types of saved states; errors of objects' own loads; 5: integers too large for torch;
    # 5: one state of those that groups of ranks wrote, which diff had; 30: tensors made of others;
    # 55: objects in the state of an optimizer; 40: states that another program has saved; 45:
    # parameters of each rank beside sharded ones; 10: methods that a module finds in a submodule,
    # processes that are read
    "capture": 7_175,
    # 100: the types of saved positions; 20: loaders that skip what was used; 45: loaders that begin
    # with their first batch; 65: positions that another program has counted
    "data": 4_330,
    "record": 1_460,
    # 120: the check of what states hold; 50: full disks; 80: places; 135: copies in memory; 65:
    # what an imported step lacks; 20: trackers; 50: several objects of an imported step
    "run": 6_540,
    # readers of six formats, what each of them lacks, and the step; 125: DCP directories, whose
    # metadata is a pickle; 145: partitions of DeepSpeed; 75: shards, several objects, trust, PEFT;
    # 60: files of each rank, flattened states of optimizers, stage 0 of DeepSpeed in 16 bits
    "imports": 985,
    "__main__": 5,
    "checkpointer": 170,  # 10: types that are known before their objects
    # 200: a few tensors at a time; averages; shards, and what from_pretrained, torch and DCP open;
    # 400: checkpoints that scripts of Accelerate, the Trainer and Lightning continue from; 340:
    # those of DeepSpeed, whose partitions are made for any stage and number of ranks; 40: weights
    # of schedule-free optimizers
    "export": 1_095,
    "diff": 595,
    "dcp": 700,  # 350: the writer
    "fork": 140,
    "shared_files": 35,  # 15: what a deletion frees
    "prune": 85,
    # 20: to which step each thing was compared; 30: a command behind an overlay, for others too
    "replay": 630,
    "doctor": 105,
    # 10: the types of saved counts; 15: optimizer states of an import, by position
    "frameworks": 800,
    "launcher": 240,  # has the one starter of processes; 10: what a parent's end hides
    # 10: the processes that have a Checkpointer; 35: paths that scripts pass to their framework
    "attach": 410,
    # 160: the types of saved loop states; 15: ckpt_path; 15: the entry points of Lightning;
    # 5: what a framework logs with; 35: what an export has to know of a framework's objects;
    # 25: jobs of SLURM that Lightning requeues
    "adapters": 2_805,
    "trackers": 340,  # an adapter for each tracker, of 45 to 65 lines
    "recorder": 580,  # 5: tensors made of others; 5: steps that only make moments
    "prove": 2_195,  # has the likely causes, for the terminal and the page
    "supervisor": 330,  # 40: the end of a command whose supervisor was killed
    "testing": 1_670,
    "demo": 150,
    "demo_script": 90,
    "html_report": 1_045,  # 30: why an attempt ended, goodput
    # 50: checkpoints that a live run deletes meanwhile; 80: mirror, fetch, copies; 30: exports;
    # 95: prune; 85: history; 65: unbroken names, runs of a parent, JSON of verify; 40: import;
    # 25: doctor; 50: tables of 80 columns, JSON of report, damaged checkpoints that fetch replaces,
    # what a directory has that is none of a run; 3: where an imported run continues
    "cli": 1_350,
    "__init__": 50,
}


class Module(NamedTuple):
    """One source file, by its path in the repository."""

    path: str
    tree: ast.Module
    num_lines: int

    def __str__(self) -> str:
        return self.path


def _modules(folder: Path) -> Iterator[Module]:
    for parent, folders, files in os.walk(folder):  # does not follow links: adapters come once
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(parent, name)
                source = path.read_text(encoding="utf-8")
                name_in_root = path.relative_to(ROOT).as_posix()
                yield Module(name_in_root, ast.parse(source, str(path)), source.count("\n"))


CORE_MODULES = tuple(_modules(CORE))
ADAPTER_MODULES = tuple(_modules(ADAPTERS))
EVERY_MODULE = CORE_MODULES + ADAPTER_MODULES


@functools.cache
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


def starts_processes(tree: ast.AST) -> bool:
    """Whether a module uses a name of STARTERS, imports included."""
    used = {_dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return any(name.startswith(STARTERS) for name in imported(tree) | used)


def reads_proc(tree: ast.AST) -> bool:
    """Whether a module has a text that begins as a path in /proc."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return any(isinstance(text, str) and f"{text}/".startswith("/proc/") for text in texts)


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def package_of(path: str) -> str:
    """The package or the module of resumekit that a file belongs to, as LAYERS names it."""
    first, *rest = Path(path).with_suffix("").parts
    if first == "adapters":
        return first
    return "resumekit" if rest == ["__init__"] else rest[0]


def own_imports(tree: ast.AST, *, at_run_time: bool = False) -> set[str]:
    """What a module imports of resumekit, each as the module that is named, or `resumekit`."""
    names = imported(tree, at_run_time=at_run_time)
    return {_module_named(name) for name in names if name.split(".")[0] == "resumekit"}


def _module_named(name: str) -> str:
    """The longest part of a dotted name that is a module; what follows it is a name inside."""
    parts = name.split(".")
    while len(parts) > 1:
        path = ROOT.joinpath("adapters" if parts[1] == "adapters" else CORE / parts[1], *parts[2:])
        if path.is_dir() or path.with_suffix(".py").is_file():
            break
        parts.pop()
    return ".".join(parts)


def _framework_of(adapter: str) -> str:
    """The framework of an adapter's module: `adapters/_x_part.py` and `adapters/x/` are x's."""
    return Path(adapter).parts[1].removesuffix(".py").removeprefix("_").partition("_")[0]


def test_there_are_modules_to_read() -> None:
    assert len(CORE_MODULES) > 20
    assert len(ADAPTER_MODULES) > 5
    assert "resumekit/storage/io/file_system.py" in {module.path for module in CORE_MODULES}


def test_modules_and_packages_stay_small() -> None:
    assert not {module.path for module in EVERY_MODULE if module.num_lines > MAX_LINES}
    code: Counter[str] = Counter()
    for module in modules_of(ROOT):
        code[module.package] += len(module.code)
    assert code.keys() == BUDGET.keys()
    assert not {name: number for name, number in code.items() if number > BUDGET[name]}


def test_a_package_imports_only_the_packages_below_it() -> None:
    offenders = []
    for module in EVERY_MODULE:
        package = package_of(module.path)
        allowed = LAYERS.get(package, set()) | {package}
        for name in sorted(own_imports(module.tree)):
            if (name.split(".")[1:2] or ["resumekit"])[0] not in allowed:
                offenders.append(f"{module} imports {name}")
    assert not offenders


def test_no_module_imports_one_that_imports_it() -> None:
    """Through whatever others, also for type hints."""
    imports = {_name_of(module): own_imports(module.tree) for module in EVERY_MODULE}
    assert "resumekit.state" in imports["resumekit.run.run"]
    assert not [name for name in imports if name in _reached(imports[name], imports)]


def _name_of(module: Module) -> str:
    parts = Path(module.path).with_suffix("").parts
    return _module_named(".".join(parts if parts[0] == "resumekit" else ("resumekit", *parts)))


def _reached(names: set[str], imports: Mapping[str, set[str]]) -> set[str]:
    """The modules that these import, directly or not, and these."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += imports.get(name, ())
    return found


def test_every_package_has_its_row() -> None:
    assert {package_of(module.path) for module in EVERY_MODULE} <= set(LAYERS)


def test_other_packages_import_a_package_or_its_public_modules() -> None:
    found: dict[str, set[str]] = {package: set() for package in PUBLIC_MODULES}
    for module in EVERY_MODULE:
        for name in own_imports(module.tree):
            _, *parts = name.split(".", 2)
            if len(parts) == 2 and parts[0] not in ("adapters", package_of(module.path)):
                found.setdefault(parts[0], set()).add(parts[1])
    assert found == {package: set(names.split()) for package, names in PUBLIC_MODULES.items()}


def test_no_private_name_of_another_package_is_imported() -> None:
    offenders = []
    for module in EVERY_MODULE:
        package = package_of(module.path)
        for name in sorted(imported(module.tree)):
            parts = name.split(".")
            if parts[0] != "resumekit" or parts[1:2] == [package]:
                continue
            if any(part.startswith("_") and not part.startswith("__") for part in parts):
                offenders.append(f"{module} imports {name}")
    assert not offenders


def test_the_core_imports_only_the_libraries_that_its_package_may() -> None:
    offenders = []
    for module in CORE_MODULES:
        allowed = next(names for prefix, names in THIRD_PARTY if module.path.startswith(prefix))
        if third_party(module.tree) - allowed:
            offenders.append(f"{module} imports {third_party(module.tree) - allowed}")
    assert not offenders


def test_an_adapter_imports_torch_and_its_own_framework_only() -> None:
    offenders = []
    for module in ADAPTER_MODULES:
        framework = _framework_of(module.path)
        other = third_party(module.tree) - {"torch", framework, *SAME_FRAMEWORK.get(framework, ())}
        if other:
            offenders.append(f"{module} imports {other}")
    assert not offenders


def test_no_adapter_imports_another_adapter() -> None:
    offenders = []
    for module in ADAPTER_MODULES:
        framework = _framework_of(module.path)
        for name in sorted(own_imports(module.tree)):
            adapter = name.removeprefix("resumekit.").replace(".", "/")
            if adapter.startswith("adapters/") and _framework_of(adapter) != framework:
                offenders.append(f"{module} imports {name}")
    assert not offenders


def test_no_import_is_relative() -> None:
    names = {module.path: sorted(imported(module.tree)) for module in EVERY_MODULE}
    assert not [path for path, found in names.items() if found and found[0].startswith(".")]


def test_no_import_is_computed_without_a_reason() -> None:
    computed = {module.path for module in EVERY_MODULE if COMPUTED in imported(module.tree)}
    assert computed == set(COMPUTES_IMPORTS)


def test_nothing_can_run_bytes_that_came_from_storage() -> None:
    found = {module.path: dangerous_names(module.tree) for module in EVERY_MODULE}
    reasons = {path: set(names) for path, names in DANGEROUS_ALLOWED.items()}
    assert {path: names for path, names in found.items() if names} == reasons
    assert all(all(names.values()) for names in DANGEROUS_ALLOWED.values()), "each has a reason"


def test_only_these_modules_start_processes_or_read_proc() -> None:
    assert {each.path for each in EVERY_MODULE if starts_processes(each.tree)} == {
        *STARTS_PROCESSES
    }
    assert {each.path for each in EVERY_MODULE if reads_proc(each.tree)} == {*READS_PROC}


def test_the_reader_sees_each_way_to_start_a_process_and_each_path_below_proc() -> None:
    starting = (
        *("subprocess.Popen(c)", "from subprocess import Popen", "class A(subprocess.Popen): ..."),
        *("os.execvp(c, a)", "from os import posix_spawn", "os.posix_spawnp(c, a, e)", "os.fork()"),
    )
    for source in starting:
        assert starts_processes(ast.parse(source)), source
    for source in ("subprocess.run(c)", "os.register_at_fork()", "Launch(c, e).kill_all()"):
        assert not starts_processes(ast.parse(source)), source
    for source in ("Path('/proc') / 'stat'", "open(f'/proc/{pid}/stat')", "a = '/proc/self/fd'"):
        assert reads_proc(ast.parse(source)), source
    for source in ("'a file below /proc'", "'/processes'"):
        assert not reads_proc(ast.parse(source)), source


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


def test_the_reader_knows_packages_modules_and_the_names_inside() -> None:
    source = (
        "import resumekit\n"
        "from resumekit import Checkpointer\n"
        "from resumekit.state import Slot\n"
        "from resumekit.storage.io.file_system import FileSystem\n"
        "from resumekit.errors import ResumekitError\n"
    )
    names = (
        "resumekit",
        "resumekit.state",
        "resumekit.storage.io.file_system",
        "resumekit.errors",
    )
    assert own_imports(ast.parse(source)) == set(names)
    paths = ("resumekit/__init__.py", "resumekit/errors.py", "resumekit/storage/io/file_system.py")
    assert [package_of(path) for path in paths] == ["resumekit", "errors", "storage"]
    assert package_of("adapters/torch.py") == "adapters"
    adapters = ("adapters/x.py", "adapters/_x_part.py", "adapters/x/part.py")
    assert {_framework_of(path) for path in adapters} == {"x"}


def _modules_loaded_by(statement: str, *, whole_names: bool = False) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    names = set(done.stdout.split())
    return names if whole_names else {name.split(".")[0] for name in names}


# What a restart waits for: beyond torch itself, small modules only.
WITH_TORCH = ("numpy.random", "numpy.typing", "numpy._typing", "xxhash")


def test_the_adapter_for_torch_loads_nothing_large_that_torch_has_not_loaded() -> None:
    found = _modules_beyond_torch("import resumekit.adapters.torch")
    assert "resumekit.run.loop" in found
    assert not {name for name in found if not name.startswith(("resumekit", *WITH_TORCH))}
    assert "torch.distributed.tensor" in _modules_beyond_torch("import torch.distributed.tensor")


def _modules_beyond_torch(statement: str) -> set[str]:
    """Without the standard library and modules that Cython makes."""
    loaded = _modules_loaded_by(f"import torch; {statement}", whole_names=True)
    before = _modules_loaded_by("import torch", whole_names=True)
    known = sys.stdlib_module_names
    found = {name for name in loaded - before if name.split(".")[0] not in known}
    return {name for name in found if not name.startswith(("_cython", "cython_runtime"))}


def test_importing_resumekit_loads_no_framework_and_no_terminal_library() -> None:
    loaded = _modules_loaded_by("import resumekit")
    assert "resumekit" in loaded
    assert not loaded & (FRAMEWORKS | TERMINAL)


def test_what_a_process_of_an_attached_command_imports_does_not_load_psutil() -> None:
    modules = "resumekit.checkpointer, resumekit.attach, resumekit.recorder"
    loaded = _modules_loaded_by(f"import {modules}")
    assert "torch" in loaded
    assert "psutil" not in loaded


def test_the_conformance_kit_loads_no_test_runner_until_the_suite_is_asked_for() -> None:
    loaded = _modules_loaded_by("import resumekit.testing")
    assert "resumekit" in loaded
    assert not loaded & {"pytest", "_pytest"}
    assert "pytest" in _modules_loaded_by("from resumekit.testing import ConformanceSuite")


def test_a_torch_free_package_does_not_load_torch_through_another() -> None:
    # The parent package may import torch; what is asked is whether these packages need it.
    stub = (
        "import types; parent = types.ModuleType('resumekit'); "
        f"parent.__path__ = [{str(CORE)!r}]; sys.modules['resumekit'] = parent; "
        f"import {', '.join(TORCH_FREE)}"
    )
    assert not _modules_loaded_by(stub) & {"torch", "numpy"}
