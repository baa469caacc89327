"""The live variables of the user's running functions: found in bytecode, read and set in frames."""

from resumekit.live.counts_and_operands import (
    EnumerateCounts,
    Enumerations,
    count_line,
    find_asked,
    has_operands,
    is_counter,
    moved_ranges,
    operand_lines,
    range_positions,
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

__all__ = [
    "EnumerateCounts",
    "Enumerations",
    "LiveFrame",
    "Site",
    "count_line",
    "digest_code",
    "find_asked",
    "find_frames",
    "has_operands",
    "is_counter",
    "is_library_file",
    "is_on_stack",
    "moved_ranges",
    "name_frames",
    "operand_lines",
    "range_positions",
    "state_variables",
    "variables_by_path",
]
