"""Copies of tensors on the host, for a save that goes on while training changes the tensors."""

import torch
from torch import Tensor

from parallelize.sharding import local_part


class HostCopies:
    """Copies of a GPU's tensors are pinned, and kept for the next save."""

    def __init__(self) -> None:
        self._pinned: dict[str, Tensor] = {}

    def of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Valid until the next call. The host waits for a GPU once, after all copies."""
        copies = {}
        for name, tensor in tensors.items():
            if name in self._pinned:
                copies[name] = self._pinned[name]
                local_part(copies[name])[1].copy_(local_part(tensor)[1], non_blocking=True)
                continue
            copies[name] = tensor.to("cpu", copy=True)
            if tensor.is_cuda:
                local = local_part(copies[name])[1]
                local.set_(local.pin_memory())  # type: ignore[call-overload]
                self._pinned[name] = copies[name]
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        return copies
