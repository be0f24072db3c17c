"""What a query of attention may see. Shapes are named as in layers.py; T is the number of keys."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Visible:
    """Which keys each query sees: those up to its own place, of its document, and inside the window.

    Keys stand in the order of the sequence. The queries have the last S places: query i has the place of key T - S + i.
    """

    queries: int
    keys: int
    device: torch.device
    documents_BT: Tensor | None = None
    """Each key's document; None if all keys are of one document."""
    window: int | None = None
    """The most keys that a query sees, its own included; None for no window."""
    made: Any = None
    """What the kernel prepares from the fields above, once a forward, before the layers: a mask, for example."""

    @property
    def is_causal(self) -> bool:
        """Whether the plain causal mask applies: a query for every key, no documents, no window."""
        return self.queries == self.keys and self.documents_BT is None and self.window is None

    def part(self, start: int, stop: int) -> "Visible":
        """Visible of the queries from start to stop alone, with the keys up to the last of these queries."""
        keys = self.keys - self.queries + stop
        documents_BT = None if self.documents_BT is None else self.documents_BT[:, :keys]
        return Visible(stop - start, keys, self.device, documents_BT, self.window)

    def dense(self) -> Tensor:
        """(1, 1, S, T) bool, or with documents (B, 1, S, T): true where the query sees the key."""
        keys = torch.arange(self.keys, device=self.device)
        queries = keys[self.keys - self.queries :, None]
        seen = queries >= keys
        if self.window is not None:
            seen = seen & (queries - keys < self.window)
        if self.documents_BT is None:
            return seen[None, None]
        own_BS = self.documents_BT[:, self.keys - self.queries :]
        return ((own_BS[:, :, None] == self.documents_BT[:, None, :]) & seen)[:, None]
