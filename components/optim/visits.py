"""Optimizer states that may wait in the host's memory and visit the device for the update, a bucket at a time.

Three streams overlap: one bucket is updated while the next arrives and the previous one goes back. Three buffers on the
device stay for the whole run. On a CPU the same copies are made one after another.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from components.optim.rounding import as_rows
from parallelize.sharding import local_part, on_host

BUCKET = 1 << 23
"""Maximum number of elements in a bucket. A copy takes milliseconds, so the time to start the copy does not matter."""
_ROWS = 64
"""A piece has a multiple of 64 rows, because the CPU's vector kernels round a tensor's last numbers differently."""
_ALIGNED_BYTES = 256
_BUFFERS = 3


class Piece(NamedTuple):
    """Rows of this rank's shard of a parameter, and their optimizer state, on the parameter's device."""

    parameter: Tensor
    rows: slice
    """Rows of the shard, seen as (rows, columns)."""
    state: Mapping[str, Tensor]
    """0-dimensional tensors, such as the step, belong to the whole parameter; only its last piece changes them."""
    last: bool

    def of(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor that is sharded like the parameter; with slice(None), the shard in its own shape."""
        local = local_part(tensor)[1].detach()
        return local if self.rows == slice(None) else as_rows(local)[self.rows]


class _Buffer:
    """Bytes on the device, and the events of the bucket that is in them."""

    def __init__(self, size: int, device: torch.device) -> None:
        events = torch.get_device_module(device).Event
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self.arrived, self.updated, self.left = events(), events(), events()


class _Bucket(NamedTuple):
    buffer: _Buffer
    pieces: list[Piece]
    copies: list[tuple[Tensor, Tensor]]
    """The same numbers in the host's memory, and in the buffer."""


class Visits:
    """Buckets of pieces, to iterate to the end once a step. A bucket is on the device until the next is requested."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        states: Mapping[Tensor, dict[str, Any]],
        new_state: Callable[[Tensor], dict[str, Tensor]],
        offload: bool,
    ) -> None:
        """parameters: in the order of the update; those without a state get one.

        offload: whether states wait on the host; otherwise there is one bucket, in which each piece is a whole shard.
        """
        for parameter in parameters:
            if not states[parameter]:
                new = new_state(parameter)
                states[parameter] |= {key: on_host(new[key]) if offload and new[key].ndim else new[key] for key in new}
        self._whole = [Piece(parameter, slice(None), states[parameter], True) for parameter in parameters]
        self._buckets: list[_Bucket] = []
        self.staged_bytes = 0
        """Bytes of the buffers on the device."""
        if offload and parameters:
            self._prepare(_cut(self._whole), parameters[0].device)

    def _prepare(self, cut: list[list[Piece]], device: torch.device) -> None:
        streams = torch.get_device_module(device)
        self._on, self._arriving, self._leaving = streams.stream, streams.Stream(), streams.Stream()
        size = max(sum(_room(kept) for piece in pieces for kept in _vectors(piece).values()) for pieces in cut)
        buffers = [_Buffer(size, device) for _ in cut[:_BUFFERS]]
        self.staged_bytes = size * len(buffers)
        # The buffers' memory may still be in use by earlier operations of the current stream.
        self._arriving.wait_stream(streams.current_stream())
        for pieces, buffer in zip(cut, itertools.cycle(buffers)):
            bucket, place = _Bucket(buffer, [], []), 0
            for piece in pieces:
                here = dict(piece.state)
                for key, kept in _vectors(piece).items():
                    here[key] = buffer.bytes[place : place + kept.nbytes].view(kept.dtype).view(kept.shape)
                    bucket.copies.append((kept, here[key]))
                    place += _room(kept)
                bucket.pieces.append(piece._replace(state=here))
            self._buckets.append(bucket)

    def __iter__(self) -> Iterator[list[Piece]]:
        if not self._buckets:
            yield self._whole
            return
        self._bring(self._buckets[0])
        for bucket, following in itertools.zip_longest(self._buckets, self._buckets[1:]):
            if following:
                self._bring(following)
            bucket.buffer.arrived.wait()
            yield bucket.pieces
            bucket.buffer.updated.record()
            self._return(bucket)
        # The current stream waits for the copies to the host, so a later wait for the device covers these copies too.
        bucket.buffer.left.wait()

    def _bring(self, bucket: _Bucket) -> None:
        with self._on(self._arriving):
            bucket.buffer.left.wait()
            for home, here in bucket.copies:
                here.copy_(home, non_blocking=True)
            bucket.buffer.arrived.record()

    def _return(self, bucket: _Bucket) -> None:
        with self._on(self._leaving):
            bucket.buffer.updated.wait()
            for home, here in bucket.copies:
                home.copy_(here, non_blocking=True)
            bucket.buffer.left.record()


def _cut(whole: list[Piece]) -> list[list[Piece]]:
    """Cuts shards into pieces, and groups pieces into buckets of at most BUCKET elements, or of one piece."""
    buckets: list[list[Piece]] = []
    room = 0
    for piece in whole:
        rows, columns = as_rows(piece.of(piece.parameter)).shape
        step = max(1, BUCKET // max(1, columns) // _ROWS) * _ROWS
        for start in range(0, max(1, rows), step):
            end = min(start + step, rows)
            size = (end - start) * columns
            if size > room or not buckets:
                buckets.append([])
                room = BUCKET
            buckets[-1].append(piece._replace(rows=slice(start, end), last=end == rows))
            room -= size
    return buckets


def _vectors(piece: Piece) -> dict[str, Tensor]:
    """The piece's rows of each state tensor that has a value per element, or per block of elements."""
    return {key: as_rows(piece.of(kept)) for key, kept in piece.state.items() if kept.ndim}


def _room(kept: Tensor) -> int:
    return -(-kept.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
