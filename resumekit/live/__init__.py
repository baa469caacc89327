"""The live variables of the user's running functions: found in bytecode, read and set in frames."""

from resumekit.live.bytecode import (
    attribute_names,
    clock_names,
    is_in_comprehension,
    live_names,
    loaded_globals,
    operands,
)
from resumekit.live.frames import LiveFrame, Site, digest_code, find_frames, is_library_file
from resumekit.live.instructions import UnsupportedBytecodeError
from resumekit.live.operand_report import has_operands, operand_lines
from resumekit.live.value_stack import Operand

__all__ = [
    "LiveFrame",
    "Operand",
    "Site",
    "UnsupportedBytecodeError",
    "attribute_names",
    "clock_names",
    "digest_code",
    "find_frames",
    "has_operands",
    "is_in_comprehension",
    "is_library_file",
    "live_names",
    "loaded_globals",
    "operand_lines",
    "operands",
]
