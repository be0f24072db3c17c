"""The keys that each query of attention sees. Shapes are named as in layers.py; T is the number of keys."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Visible:
    """Which keys each query sees: those up to the query's position, in its document and inside the window.

    Keys are in the order of the sequence. By default, query i has the position of key T - S + i.
    """

    queries: int
    keys: int
    device: torch.device
    documents_BT: Tensor | None = None
    """Each key's document; None if all keys belong to one document."""
    window: int | None = None
    """The most keys that a query sees, its own included; None for no window."""
    first: int | None = None
    """Position of the first query, if the first key is at 0. None: queries have the last positions of the keys."""
    own_documents_BS: Tensor | None = None
    """Each query's document; set if the queries are not among the keys."""
    padding: int = 0
    """Number of padding queries at the end. They attend as usual, but AttentionCore.largest_logit ignores them."""
    padding_BS: Tensor | None = None
    """True for this rank's padding tokens; None if there are none."""
    dropout_keys_BS: Tensor | None = None
    """A random int64 key per token of this rank, for the dropout of adapters; None outside of training."""
    sinks: bool = False
    """Each head has a sink beside its keys (models/steps.py)."""
    made: Any = None
    """Prepared by the kernel from the fields above, once per forward, before the layers; for example a mask."""

    @property
    def before(self) -> int:
        """Position of the first query: the number of keys before it."""
        return self.keys - self.queries if self.first is None else self.first

    @property
    def query_documents_BS(self) -> Tensor | None:
        """Each query's document; None if all keys and queries belong to one document."""
        if self.documents_BT is None or self.own_documents_BS is not None:
            return self.own_documents_BS
        return self.documents_BT[:, self.before :]

    @property
    def is_causal(self) -> bool:
        """Whether the plain causal mask applies: one query per key, no documents, no window that hides a key."""
        hides = self.window is not None and self.window < self.keys
        return self.before == 0 and self.queries == self.keys and self.documents_BT is None and not hides

    def part(self, start: int, stop: int) -> "Visible":
        """The Visible of queries start to stop, with the keys up to the last of these queries."""
        keys = self.keys - self.queries + stop
        documents_BT = None if self.documents_BT is None else self.documents_BT[:, :keys]
        padding = max(0, stop - start - max(0, self.queries - self.padding - start))
        options: Any = {"padding": padding, "sinks": self.sinks}
        return Visible(stop - start, keys, self.device, documents_BT, self.window, **options)

    def dense(self) -> Tensor:
        """Boolean mask, True where the query sees the key: (1, 1, S, T), or (B, 1, S, T) with documents."""
        keys = torch.arange(self.keys, device=self.device)
        queries = torch.arange(self.before, self.before + self.queries, device=self.device)[:, None]
        seen = queries >= keys
        if self.window is not None:
            seen = seen & (queries - keys < self.window)
        query_documents_BS = self.query_documents_BS
        if self.documents_BT is None or query_documents_BS is None:
            return seen[None, None]
        return ((query_documents_BS[:, :, None] == self.documents_BT[:, None, :]) & seen)[:, None]
