"""The live variables of the user's running functions: found in bytecode, read and set in frames."""

from resumekit.live.bytecode import (
    attribute_names,
    clock_names,
    is_in_comprehension,
    live_names,
    loaded_globals,
    operands,
)
from resumekit.live.enumerate_counts import (
    EnumerateCounts,
    Enumerations,
    check_counts,
    find_asked,
    is_counter,
)
from resumekit.live.frames import (
    LiveFrame,
    Site,
    digest_code,
    find_frames,
    is_library_file,
    is_on_stack,
    name_frames,
    state_variables,
    variables_by_path,
)
from resumekit.live.instructions import UnsupportedBytecodeError
from resumekit.live.operand_report import (
    count_line,
    has_operands,
    moved_ranges,
    operand_lines,
    range_positions,
)
from resumekit.live.value_stack import Operand

__all__ = [
    "EnumerateCounts",
    "Enumerations",
    "LiveFrame",
    "Operand",
    "Site",
    "UnsupportedBytecodeError",
    "attribute_names",
    "check_counts",
    "clock_names",
    "count_line",
    "digest_code",
    "find_asked",
    "find_frames",
    "has_operands",
    "is_counter",
    "is_in_comprehension",
    "is_library_file",
    "is_on_stack",
    "live_names",
    "loaded_globals",
    "moved_ranges",
    "name_frames",
    "operand_lines",
    "operands",
    "range_positions",
    "state_variables",
    "variables_by_path",
]
