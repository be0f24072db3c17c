"""Random bits as a pure function of words (for example a seed and a name) and an index, without a generator."""

import hashlib

from torch import Tensor

_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of splitmix64, as signed 64-bit integers


def key_of(*words: object) -> int:
    """A signed 64-bit key: the hash of the words."""
    text = "/".join(map(str, words))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def mixed(indices: Tensor, key: int | Tensor) -> Tensor:
    """int64 numbers, one per int64 index, whose upper 32 bits are random. Overwrites the indices."""
    bits = indices.add_(key)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        bits.bitwise_xor_(shifted(bits, shift)).mul_(multiplier)
    return bits


def shifted(bits: Tensor, by: int) -> Tensor:
    """Logical right shift, which fills with zeros; >> alone would keep the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)
