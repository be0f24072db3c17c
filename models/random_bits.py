"""Random bits that are a pure function of words (as a seed and a name) and of a number: nothing is drawn."""

import hashlib

from torch import Tensor

_MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # splitmix64's two, as signed 64-bit integers


def key_of(*words: object) -> int:
    """A signed 64-bit key."""
    text = "/".join(map(str, words))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def mixed(indices: Tensor, key: int | Tensor) -> Tensor:
    """int64 whose upper 32 bits are random, for int64 indices, which are overwritten."""
    bits = indices.add_(key)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        bits.bitwise_xor_(shifted(bits, shift)).mul_(multiplier)
    return bits


def shifted(bits: Tensor, by: int) -> Tensor:
    """Shifted right, zeros coming in: >> alone keeps the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)
