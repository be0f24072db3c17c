"""What a query of attention may see. Shapes are named as in layers.py; T is the number of keys."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Visible:
    """Which keys each query sees: those up to its own place, of its document, and inside the window.

    Keys stand in the order of the sequence. By default query i has the place of key T - S + i.
    """

    queries: int
    keys: int
    device: torch.device
    documents_BT: Tensor | None = None
    """Each key's document; None if all keys are of one document."""
    window: int | None = None
    """The most keys that a query sees, its own included; None for no window."""
    first: int | None = None
    """The place of the first query, the first key's being 0; None if the queries have the last places of the keys."""
    own_documents_BS: Tensor | None = None
    """Each query's document, if the queries are not among the keys."""
    padding: int = 0
    """Queries at the end that are padding, if logits are observed: they see what they would, and do not count."""
    padding_BS: Tensor | None = None
    """Which tokens of this rank are padding; None if none is."""
    dropout_keys_BS: Tensor | None = None
    """A random int64 key of each token of this rank, where adapters drop numbers; None outside of training."""
    sinks: bool = False
    """Each head has a sink beside its keys (models/steps.py)."""
    made: Any = None
    """What the kernel prepares from the fields above, once a forward, before the layers: a mask, for example."""

    @property
    def before(self) -> int:
        """The place of the first query, which is the number of keys before it."""
        return self.keys - self.queries if self.first is None else self.first

    @property
    def query_documents_BS(self) -> Tensor | None:
        """Each query's document; None if all keys and queries are of one document."""
        if self.documents_BT is None or self.own_documents_BS is not None:
            return self.own_documents_BS
        return self.documents_BT[:, self.before :]

    @property
    def is_causal(self) -> bool:
        """Whether the plain causal mask applies: a query for every key, no documents, no window."""
        return self.before == 0 and self.queries == self.keys and self.documents_BT is None and self.window is None

    def part(self, start: int, stop: int) -> "Visible":
        """Visible of the queries from start to stop alone, with the keys up to the last of these queries."""
        keys = self.keys - self.queries + stop
        documents_BT = None if self.documents_BT is None else self.documents_BT[:, :keys]
        padding = max(0, stop - start - max(0, self.queries - self.padding - start))
        options: Any = {"padding": padding, "sinks": self.sinks}
        return Visible(stop - start, keys, self.device, documents_BT, self.window, **options)

    def dense(self) -> Tensor:
        """(1, 1, S, T) bool, or with documents (B, 1, S, T): true where the query sees the key."""
        keys = torch.arange(self.keys, device=self.device)
        queries = torch.arange(self.before, self.before + self.queries, device=self.device)[:, None]
        seen = queries >= keys
        if self.window is not None:
            seen = seen & (queries - keys < self.window)
        own_BS = self.query_documents_BS
        if self.documents_BT is None or own_BS is None:
            return seen[None, None]
        return ((own_BS[:, :, None] == self.documents_BT[:, None, :]) & seen)[:, None]
