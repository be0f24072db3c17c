"""Counts the bytes of live tensors, on any device and through any wrapper."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Memory(TorchDispatchMode):
    """Bytes of all live tensors, after each operation. Sizes are asked anew each time: FSDP resizes its buffers."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self.live: dict[int, StorageWeakRef] = {}
        self.peak = 0
        self.keep(tensors)

    def keep(self, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                storage = getattr(value, "_local_tensor", value).untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage)

    def bytes(self) -> int:
        self.live = {key: ref for key, ref in self.live.items() if not ref.expired()}
        # Another thread may free one in between.
        storages = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.live.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again, as what it does to local tensors
        result = function(*args, **(kwargs or {}))
        self.keep(result)
        self.peak = max(self.peak, self.bytes())
        return result
