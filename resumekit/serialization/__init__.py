"""The content of a checkpoint: nested state and tensors, without pickle, and their digests."""

from __future__ import annotations

from resumekit.serialization.decoding import decode
from resumekit.serialization.deferral import Deferral, LoadMemory
from resumekit.serialization.digests import (
    Copy,
    copy_digests,
    leaf_digests,
    leaves_of,
    state_digest,
)
from resumekit.serialization.encoding import encode
from resumekit.serialization.index import arrange, header, index_name, stem_of
from resumekit.serialization.leaves import ElementType, Leaf, buffers_of, element_type
from resumekit.serialization.planning import (
    Assignment,
    Choice,
    HolderPositions,
    LocalState,
    Proposal,
    SavePlan,
    assign,
    encode_local,
)
from resumekit.serialization.reading import (
    StoredSource,
    StoredState,
    StoredTensor,
    open_state,
    read_boxes,
    read_payload,
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
    sharded_dims,
    sharded_like,
    sharded_over,
)
from resumekit.serialization.tensors import StatePath, UniqueNames
from resumekit.serialization.writing import FrozenFiles, Payload

__all__ = [
    "WHOLE",
    "Assignment",
    "Box",
    "Choice",
    "Copy",
    "Deferral",
    "ElementType",
    "FlatPart",
    "FrozenFiles",
    "HolderPositions",
    "Leaf",
    "LoadMemory",
    "LocalState",
    "Payload",
    "Proposal",
    "SavePlan",
    "StatePath",
    "StoredSource",
    "StoredState",
    "StoredTensor",
    "UniqueNames",
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
    "leaves_of",
    "local_part",
    "open_state",
    "part_like",
    "read_boxes",
    "read_payload",
    "read_sharded",
    "sharded_dims",
    "sharded_like",
    "sharded_over",
    "state_digest",
    "stem_of",
]
