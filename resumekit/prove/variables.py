"""The environment variables by which a launcher talks to a process that it judges."""

# The directory that a process writes its trace into.
TRACE_VARIABLE = "RESUMEKIT_TRACE"

# "step:7" or "checkpoint:8": the process kills itself right after it has traced that.
KILL_VARIABLE = "RESUMEKIT_TRACE_KILL"

# Relocates every run directory under this one, so that no test run touches the user's own.
RUN_ROOT_VARIABLE = "RESUMEKIT_RUN_ROOT"

# Component keys or slots that are deliberately not restored, separated by commas.
INJECT_VARIABLE = "RESUMEKIT_INJECT"
