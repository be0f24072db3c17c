"""The table of contents of a checkpoint (torch's .metadata, a pickle), read without executing anything of it.

The reader maps each allowed class name to an empty class of its own, so nothing in the file can call or change a real
class. The result is checked before torch's objects are made from it.
"""

import io
import math
import pickle
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)


class _Record:
    """Stands for an object of any class: keeps what the file says of it."""

    arguments: tuple = ()
    state: Any = None

    def __new__(cls, *arguments: Any) -> "_Record":
        record = super().__new__(cls)
        record.arguments = arguments
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Knows only the classes below; their stand-ins are made anew for each file."""

    _SIZES = ("ChunkStorageMetadata", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")
    _KNOWN: ClassVar = {
        "torch.serialization": ("_get_layout",),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.distributed.checkpoint.metadata": (
            *("Metadata", "MetadataIndex", "BytesStorageMetadata", "StorageMeta"),
            *_SIZES,
        ),
        "pathlib": ("PosixPath",),  # where the checkpoint was written: torch notes it, and nothing here reads it
    }

    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw))
        self.made: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            if name == "Size":
                return tuple
            if isinstance(dtype := getattr(torch, name, None), torch.dtype):
                return dtype
        elif name in self._KNOWN.get(module, ()):
            return self.made.setdefault(name, type(name, (_Record,), {}))
        raise pickle.UnpicklingError(f"its .metadata asks for {module}.{name}, which no checkpoint needs")


def parse(raw: bytes) -> Metadata:
    """The table of contents. Raises pickle.UnpicklingError if raw is no table, or has more than numbers and names."""
    try:
        fields = _fields(_Unpickler(raw).load(), "Metadata")
        tensors = {_text(name): _entry(value) for name, value in fields["state_dict_metadata"].items()}
        places = dict(map(_place, fields["storage_data"].items()))
        for name, tensor in tensors.items():
            _check_places(name, tensor, places)
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a hostile pickle may raise any error
        reason = f"its .metadata is no table of contents: {type(error).__name__}: {error}"
        raise pickle.UnpicklingError(reason) from error
    return Metadata(tensors, storage_data=places)


def files_of(metadata: Metadata) -> Iterator[str]:
    """The files that a table of contents names."""
    yield from dict.fromkeys(place.relative_path for place in metadata.storage_data.values())


def _fields(record: Any, kind: str) -> dict[str, Any]:
    if not isinstance(record, _Record) or type(record).__name__ != kind or not isinstance(record.state, dict):
        raise ValueError(f"a {kind} is expected")
    return record.state


def _entry(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(record, _Record) and type(record).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(record, "TensorStorageMetadata")
    size, dtype = _sizes(fields["size"]), fields["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError("a dtype is expected")
    chunks = []
    for record in fields["chunks"]:
        chunk = _fields(record, "ChunkStorageMetadata")
        chunks.append(ChunkStorageMetadata(_sizes(chunk["offsets"]), _sizes(chunk["sizes"])))
        ends = [first + length for first, length in zip(chunks[-1].offsets, chunks[-1].sizes, strict=True)]
        if any(end > full for end, full in zip(ends, size, strict=True)):
            raise ValueError("a part of a tensor is outside of it")
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ValueError("the parts of a tensor are not the whole of it")
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _place(item: tuple[Any, Any]) -> tuple[MetadataIndex, "filesystem._StorageInfo"]:
    key, value = _fields(item[0], "MetadataIndex"), _fields(item[1], "_StorageInfo")
    if value.get("transform_descriptors"):
        raise ValueError("compressed tensors are not read")
    offset, position = key.get("offset"), key.get("index")
    index = MetadataIndex(_text(key["fqn"]), None if offset is None else _sizes(offset), position and _count(position))
    return index, filesystem._StorageInfo(
        _text(value["relative_path"]), _count(value["offset"]), _count(value["length"])
    )


def _check_places(name: str, entry: TensorStorageMetadata | BytesStorageMetadata, places: dict) -> None:
    for chunk in entry.chunks if isinstance(entry, TensorStorageMetadata) else ():
        if MetadataIndex(name, chunk.offsets) not in places:
            raise ValueError(f"no file is named for a part of {name}")


def _sizes(value: Any) -> torch.Size:
    if type(value) is not tuple:
        raise TypeError("sizes are expected")
    return torch.Size(_count(number) for number in value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a size")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("a name is expected")
    return value
