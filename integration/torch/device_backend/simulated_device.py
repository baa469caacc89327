"""A device of torch's PrivateUse1 type, as the plug-ins of vendors register theirs.

``python simulated_device.py FOLDER`` compiles ``backend.cpp``. With FOLDER in ``PYTHONPATH``, torch
registers the device by an entry point when it is imported.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME = "simulated"
NUM_DEVICES = 2
ENTRY_POINTS = f"[torch.backends]\n{NAME} = simulated_device:register\n"
METADATA = "Metadata-Version: 2.1\nName: simulated-device\nVersion: 1.0\n"


def install(folder: Path) -> None:
    """Compiles the library into a folder, with this module and its entry point."""
    from torch.utils.cpp_extension import load

    here, source = Path(__file__), Path(__file__).with_name("backend.cpp")
    options: Any = {"extra_cflags": ["-O0"], "is_python_module": False}
    load(NAME, [str(source)], build_directory=str(folder), **options)
    shutil.copy(here, folder)
    described = folder / "simulated_device-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(METADATA)
    (described / "entry_points.txt").write_text(ENTRY_POINTS)


def register() -> None:
    """Makes ``torch.device("simulated")`` usable in this process."""
    torch.ops.load_library(Path(__file__).with_name(f"{NAME}.so"))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()


def _module() -> ModuleType:
    module: Any = ModuleType(f"torch.{NAME}")
    operators: Any = getattr(torch.ops, NAME)
    module.device_count = lambda: NUM_DEVICES
    module.is_available = module.is_initialized = lambda: True
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.float16]

    def get_rng_state(device: int = 0) -> torch.Tensor:
        return operators.get_rng_state(device)

    def set_rng_state(state: torch.Tensor, device: int = 0) -> None:
        operators.set_rng_state(state, device)

    def manual_seed_all(seed: int) -> None:
        for index in range(NUM_DEVICES):
            operators.manual_seed(seed, index)

    module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state
    module.manual_seed_all = manual_seed_all
    return module


if __name__ == "__main__":
    install(Path(sys.argv[1]))
