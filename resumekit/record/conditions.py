"""The conditions of an attempt: what two of them must have in common to be comparable."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from resumekit.version import __version__

FORMAT = "resumekit journal"
FORMAT_VERSION = 1

# Changes that divide the same samples into other steps.
WORLD_SIZE, GEOMETRY = "world size", "batch geometry"
OPTION = "option"
CHANGED_BETWEEN = "the run was changed in between"

# The entry of ``Header.code`` that is no source file.
COMMAND = "command line"

# The entry of ``Header.environment`` with the GPUs that the rank sees, if it trains on one.
GPUS = "gpus"


def initialize_vector_math() -> None:
    """Lets this thread alone make the first call of torch's vector math on the CPU.

    Its first call fills a global variable without a lock. Where two threads make it at once, as in
    the first step of Adam, one of them may compute its part with a kernel of low accuracy, and this
    process gets other bits than all others.

    Source: MKL 2024.2 in torch 2.13, mkl_vml_serv_cpu_detect. Its acos, asin, atan, cos, erf, erfc,
    erfinv, exp, log, sin, sqrt and tan read the variable; 64 of 5,800 first calls of sqrt by two
    threads gave other bits, and none of 2,900 after this one.
    """
    torch.ones(1).sqrt()


@dataclass(frozen=True)
class Header:
    """What two attempts must have in common for their records to be comparable.

    Args:
        run_id: the run.
        attempt: the id of the attempt, as in the manifests that it wrote.
        number: counts the attempts of the run from 1.
        rank: the rank that wrote the file.
        world_size: the ranks of the attempt.
        share: which part of the data this rank takes; the ranks of one tensor-parallel group or
            pipeline take the same.
        writes_share: whether it is the first of the ranks that take this part.
        lineage: the attempt that started fresh and that this one descends from, then each attempt
            on the way that changed the run on purpose (another world size, another option).
        resumed_step: the step that the attempt resumed from; None for a fresh start.
        options: options and loop settings that change what a step does.
        geometry: batch geometry by loader.
        code: digests of the source files that the run has loaded, by path, and of the command line.
        environment: device type, thread count, versions, settings of GPUs: what the bits of a loss
            depend on.
        excluded: components that the resume did not load, because ``exclude`` names them or the
            checkpoint lacks them.
        fed_by: the class of a model that training changes and a replayed stream uses, so that no
            step of it counts as repeated; empty without one.
    """

    run_id: str
    attempt: str
    number: int
    rank: int
    world_size: int
    share: int
    writes_share: bool
    lineage: tuple[str, ...]
    resumed_step: int | None
    options: Mapping[str, Any] = field(default_factory=dict)
    geometry: Mapping[str, Any] = field(default_factory=dict)
    code: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    fed_by: str = ""

    def to_bytes(self) -> bytes:
        """The header as JSON."""
        content = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Header | None:
        """The header; None if it is damaged or of a newer format version."""
        try:
            content = json.loads(data)
            is_known = (content.pop("format"), content.pop("format_version")) == (
                FORMAT,
                FORMAT_VERSION,
            )
            if not is_known:
                return None
            tuples = {name: tuple(content[name]) for name in ("lineage", "excluded")}
            return cls(**{**content, **tuples})
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


def changes(then: Header, now: Header) -> tuple[str, ...]:
    """What has changed between two attempts so that their steps need not be equal, in words."""
    found = []
    if then.world_size != now.world_size:
        found.append(f"{WORLD_SIZE} {then.world_size} -> {now.world_size}")
    if changed_values(then.geometry, now.geometry):
        found.append(GEOMETRY)
    found += [f"{OPTION} {name}" for name, *_ in changed_values(then.options, now.options)]
    if now.excluded:
        found.append(f"{', '.join(now.excluded)} not restored")
    code = [name for name, *_ in changed_values(then.code, now.code)]
    found += [name if name == COMMAND else f"source of {name}" for name in code]
    return tuple(found)


def may_be_without_effect(change: str) -> bool:
    """Whether steps can be equal after a change, as the number of workers often has no effect."""
    return change.startswith((GEOMETRY, OPTION, CHANGED_BETWEEN))


def divides_otherwise(then: Header, now: Header) -> bool:
    """Whether the samples are divided into other steps, and nothing else has changed."""
    words = changes(then, now)
    return bool(words) and all(word.startswith((WORLD_SIZE, GEOMETRY)) for word in words)


def loss_is_comparable(then: Header, now: Header) -> str:
    """Why a difference in the loss alone proves nothing; empty if it does prove something."""
    different = changed_values(then.environment, now.environment)
    if different:
        name, before, after = different[0]
        return f"{name} {before} -> {after}"
    is_cpu = str(now.environment.get("device")) == "cpu"
    if not (is_cpu or now.environment.get("deterministic")):
        return "this device repeats bits only with torch.use_deterministic_algorithms(True)"
    return ""


def same_device(then: Header, now: Header) -> bool:
    """Whether both attempts used the same devices; each has its own generator.

    A journal that does not name the GPUs has another order of their states.
    """
    names = ("device", GPUS)
    return all(then.environment.get(name) == now.environment.get(name) for name in names)


def changed_values(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """The names on both sides whose values differ, with both values.

    A name on one side only is no difference: loaders and source files that the former attempt had
    opened by its first step may come later in one that resumed elsewhere in the loop.
    """
    common = ((name, then[name], now[name]) for name in then if name in now)
    return [each for each in common if each[1] != each[2]]


# ---------------------------------------------------------------- conditions of an attempt

_LIBRARIES = (
    "transformers",
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "deepspeed",
    "datasets",
    "trl",
    "peft",
)
_MAX_SOURCES = 64
_INSTALLED = ("site-packages", "dist-packages")
_SHORT = 8  # hexadecimal digits of a digest in a header


def code_digests() -> dict[str, str]:
    """Digests of the user's source files that are loaded, by path, and of the command line.

    Without a file behind the program (a notebook, a shell) nothing equals what ran before.
    """
    found = {COMMAND: _short_digest(json.dumps(sys.argv).encode())}
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if not main:
        found["<interactive>"] = os.urandom(_SHORT // 2).hex()
        return found
    root = Path(main).resolve().parent
    for path in sorted(_own_sources())[:_MAX_SOURCES]:
        try:
            content = Path(path).read_bytes()
        except OSError:
            continue
        found[os.path.relpath(path, root)] = _short_digest(content)
    return found


def _own_sources() -> set[str]:
    standard = os.path.dirname(os.__file__)
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {
        os.path.abspath(name)
        for name in files
        if name
        and name.endswith(".py")
        and not name.startswith((standard + os.sep, here + os.sep))
        and not any(folder in name for folder in _INSTALLED)
    }


def environment(optimizers: Iterable[Any]) -> dict[str, Any]:
    """What the bits of a loss depend on beside code and data."""
    devices = {
        parameter.device.type
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if isinstance(parameter, torch.Tensor)
    }
    device = "+".join(sorted(devices)) or "cpu"
    of_gpus = {}
    if "cuda" in devices:
        device = f"cuda ({torch.cuda.get_device_name()})"
        of_gpus = gpu_settings()
    is_warning = torch.is_deterministic_algorithms_warn_only_enabled()  # and nothing else
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled() and not is_warning,
        "processor": _processor(),
        **_versions(),
        **of_gpus,
    }


# cuBLAS and NCCL choose their algorithms by these; the number of ranks on a node decides how NCCL
# sums over them.
_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO", "LOCAL_WORLD_SIZE")


def gpu_settings() -> dict[str, Any]:
    """What the bits of a result on a GPU depend on beside the device and the versions."""
    devices = range(torch.cuda.device_count())
    gpus = Counter(torch.cuda.get_device_name(index) for index in devices)
    cudnn = torch.backends.cudnn
    found: dict[str, Any] = {
        GPUS: ", ".join(f"{number} x {name}" for name, number in sorted(gpus.items())),
        "driver": _driver(),
        "cudnn": str(cudnn.version()),  # type: ignore[no-untyped-call]  # torch 2.13
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        **float32_precisions(),
        **{name: os.environ.get(name, "") for name in _VARIABLES},
    }
    if dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend_config():
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch 2.13
        found["NCCL"] = ".".join(map(str, version))
    return found


_FLOAT32_BACKENDS = (
    "cuda.matmul",
    "cudnn.conv",
    "cudnn.rnn",
    "mkldnn.matmul",
    "mkldnn.conv",
    "mkldnn.rnn",
)


def float32_precisions() -> dict[str, Any]:
    """The precision of products of float32 numbers, by the settings' names: torch 2.9's, or former.

    Once a script has set a new one, torch 2.13 raises RuntimeError where a former one is read.
    """
    if hasattr(torch.backends, "fp32_precision"):
        names = [f"{backend}.fp32_precision" for backend in _FLOAT32_BACKENDS]
        return {f"torch.backends.{name}": attrgetter(name)(torch.backends) for name in names}
    return {
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.backends.cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
    }


@cache
def _driver() -> str:
    """The version of the NVIDIA driver; empty where the system does not show it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    match = re.search(r"\d+\.\d+[.\d]*", text)
    return match[0] if match else ""


def _versions() -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "numpy": np.__version__,
        "resumekit": __version__,
    }
    for name in _LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


@cache
def _processor() -> str:
    """Its vector instructions decide the order of sums."""
    capability = torch.backends.cpu.get_cpu_capability()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} {capability}"


def settings_digest(fingerprint: Mapping[str, Any]) -> str:
    """A digest of the components' settings as the script gives them."""
    others = ("versions", "git", "command", "world_size")
    kept = {name: value for name, value in fingerprint.items() if name not in others}
    return _short_digest(json.dumps(kept, sort_keys=True, default=str).encode())


def _short_digest(content: bytes) -> str:
    """A digest that is long enough to see a change."""
    return xxhash.xxh3_64_hexdigest(content)[:_SHORT]
