"""Copies of tensors on the host, for a save that goes on while training changes the tensors."""

import torch
from torch import Tensor

from parallelize.sharding import local_part, on_host


class HostCopies:
    """Copies of a GPU's tensors are pinned, and kept for the next save."""

    def __init__(self) -> None:
        self._pinned: dict[str, Tensor] = {}

    def of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies of the tensors, valid until the next call. The host waits for a GPU once, after all copies."""
        for name, tensor in tensors.items():
            if name in self._pinned:
                local_part(self._pinned[name])[1].copy_(local_part(tensor)[1], non_blocking=True)
            elif tensor.is_cuda:
                self._pinned[name] = on_host(tensor)
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        # Tensors on the host are copied after the wait, because the device may have been writing into them.
        return {name: self._pinned[name] if name in self._pinned else on_host(tensors[name]) for name in tensors}
