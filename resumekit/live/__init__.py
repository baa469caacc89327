"""The live variables of the user's running functions: found in bytecode, read and set in frames."""
