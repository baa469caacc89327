"""What the processes of a command are to attach: a file and a distribution on their path."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from resumekit.attach.frameworks import NOTED_MODULES
from resumekit.cadence import parse_cadence
from resumekit.launcher import VARIABLE, Activation, prepared_environment

_FILE = "attach.json"

_NOTE_LOOP = "resumekit.attach:note_loop"  # only a command that attaches has it

_ACTIVATIONS = (
    # The module that has the class: transformers itself loads its modules on demand.
    Activation("transformers.trainer", "resumekit.adapters.transformers.attaching:attach", {}),
)

# Lightning asks the installed distributions for callbacks. One on the path of the command is for
# an interpreter in which resumekit itself is not installed, and has no entry points.
_NAME = "resumekit-attach"
_METADATA = f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: 0\n"
_ENTRY_POINTS = "".join(
    f"[{package}.callbacks_factory]\nresumekit = resumekit.adapters.lightning_callbacks:callbacks\n"
    for package in ("lightning.pytorch", "pytorch_lightning")
)


@dataclass(frozen=True)
class AttachSettings:
    """How the Trainers of a command save.

    Args:
        directory: the run directory, an absolute path.
        save_every: as in ``Options``; None where the user did not give it.
        per_rank: as in ``Options``.

    Raises:
        ConfigurationError: a value that has no meaning.
    """

    directory: str
    save_every: int | str | None = None
    per_rank: Sequence[str] = ()

    def __post_init__(self) -> None:
        parse_cadence(self.save_every)

    @property
    def options(self) -> dict[str, Any]:
        """The options of ``ResumeCallback`` that the user gave."""
        given = {"save_every": self.save_every, "per_rank": frozenset(self.per_rank)}
        return {name: value for name, value in given.items() if value}


def attached_environment(
    environment: Mapping[str, str], private: Path, settings: AttachSettings
) -> dict[str, str]:
    """The environment with which a command trains with a ``ResumeCallback`` in its Trainers.

    Args:
        environment: of the command otherwise.
        private: an absolute path, see ``prepared_environment``.
        settings: for all its processes.
    """
    information = private / f"{_NAME.replace('-', '_')}-0.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text(_METADATA)
    (information / "entry_points.txt").write_text(_ENTRY_POINTS)
    (private / _FILE).write_text(json.dumps(asdict(settings)))
    loop = Activation("resumekit.checkpointer", _NOTE_LOOP, {"private": str(private)})
    environment = prepared_environment(environment, private, (*_ACTIVATIONS, loop))
    return observed_environment(environment, private)


def observed_environment(environment: Mapping[str, str], private: Path) -> dict[str, str]:
    """The environment with which a command only records what it has imported.

    Args:
        environment: of the command otherwise.
        private: an absolute path, see ``prepared_environment``.
    """
    notes = [
        Activation(name, "resumekit.attach:note_import", {"private": str(private), "module": name})
        for name in NOTED_MODULES
    ]
    return prepared_environment(environment, private, notes)


def private_directory() -> Path | None:
    """The launcher's directory, in a process of the command; None in any other."""
    listed = Path(os.environ.get(VARIABLE, ""))
    activations = json.loads(listed.read_text()) if listed.is_file() else []
    found = [each["settings"]["private"] for each in activations if each["call"] == _NOTE_LOOP]
    return Path(found[-1]) if found else None


def read_settings(private: Path) -> AttachSettings:
    """The settings of this command."""
    return AttachSettings(**json.loads((private / _FILE).read_text()))
