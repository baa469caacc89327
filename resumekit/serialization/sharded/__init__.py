"""State whose tensors are spread over the ranks: each writes its parts, and reads what it needs.

torch says which part a rank holds and plans what is to be read; every byte goes through our own
data files and indices. See docs/design/0007-sharded-state.md.
"""

from resumekit.serialization.sharded.encode import LocalState, encode_local
from resumekit.serialization.sharded.index import ShardedIndex
from resumekit.serialization.sharded.plan import Assignment, Proposal, assign
from resumekit.serialization.sharded.read import Pairs, Source, read_sharded
from resumekit.serialization.sharded.write import ShardedPayload, index_name

__all__ = [
    "Assignment",
    "LocalState",
    "Pairs",
    "Proposal",
    "ShardedIndex",
    "ShardedPayload",
    "Source",
    "assign",
    "encode_local",
    "index_name",
    "read_sharded",
]
