"""What is inside a checkpoint: nested state and tensors, without pickle, digested leaf by leaf."""

from __future__ import annotations

from resumekit.serialization.beside import FilesBeside
from resumekit.serialization.codec import Encoded, decode, encode
from resumekit.serialization.digests import Copy, copy_digests, leaf_digests, state_digest
from resumekit.serialization.dtypes import element_type
from resumekit.serialization.layout import arrange, header
from resumekit.serialization.leaves import Leaf, buffers_of
from resumekit.serialization.payload import Payload, read_payload
from resumekit.serialization.sharded import (
    Assignment,
    LocalState,
    Proposal,
    ShardedPayload,
    Source,
    assign,
    encode_local,
    index_name,
    read_sharded,
)
from resumekit.serialization.sharding import (
    WHOLE,
    Box,
    FlatPart,
    fill,
    is_sharded,
    local_part,
    part_like,
    sharded_like,
)

__all__ = [
    "WHOLE",
    "Assignment",
    "Box",
    "Copy",
    "Encoded",
    "FilesBeside",
    "FlatPart",
    "Leaf",
    "LocalState",
    "Payload",
    "Proposal",
    "ShardedPayload",
    "Source",
    "arrange",
    "assign",
    "buffers_of",
    "copy_digests",
    "decode",
    "element_type",
    "encode",
    "encode_local",
    "fill",
    "header",
    "index_name",
    "is_sharded",
    "leaf_digests",
    "local_part",
    "part_like",
    "read_payload",
    "read_sharded",
    "sharded_like",
    "state_digest",
]
