"""What is inside a checkpoint: nested state and tensors, without pickle, digested leaf by leaf."""

from resumekit.payload.beside import FilesBeside
from resumekit.payload.codec import Encoded, decode, encode
from resumekit.payload.digests import Copy, copy_digests, leaf_digests, state_digest
from resumekit.payload.payload import Payload, read_payload

__all__ = [
    "Copy",
    "Encoded",
    "FilesBeside",
    "Payload",
    "copy_digests",
    "decode",
    "encode",
    "leaf_digests",
    "read_payload",
    "state_digest",
]
