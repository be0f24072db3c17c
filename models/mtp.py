"""Multi-token prediction (arXiv:2412.19437, section 2.2): D further layers predict tokens further ahead.

Layers are counted from 1. At position i, layer k joins the output of layer k - 1 and the embedding of token i + k.
Layer 0 is the model with its last norm. Layer k predicts token i + k + 1 by the model's own head. Its parts have the
names of DeepSeek's files. Shapes are named as in models/layers.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

IGNORED = -100


class Mtp(nn.Module):
    """The parts of a layer of multi-token prediction beside its Block: two inputs are joined, the output normalized."""

    def __init__(self, dim: int, norm_eps: float, norm: type[nn.Module]) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.norm = (norm(dim, eps=norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, pair_BSE: Tensor) -> Tensor:
        """(B, S, 2 D), as `pair` makes it, -> the layer's residual stream (B, S, D)."""
        hidden_BSD, embedded_BSD = pair_BSE.chunk(2, dim=-1)
        return self.eh_proj(torch.cat((self.enorm(embedded_BSD), self.hnorm(hidden_BSD)), dim=-1))


def pair(hidden_BSD: Tensor, embedded_BSD: Tensor) -> Tensor:
    """The input (B, S, 2 D) of a layer of multi-token prediction; one tensor, because layers take one."""
    return torch.cat((hidden_BSD, embedded_BSD), dim=-1)


def mtp_columns(layer: int) -> tuple[str, str]:
    """Names of the columns with the tokens and the labels of layer k."""
    return f"mtp_tokens_{layer}", f"mtp_labels_{layer}"


def look_ahead(batch: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Adds the columns (B, S) of each layer of multi-token prediction to a batch of whole sequences.

    A label is IGNORED if it is untrained, padding, after the sequence, or in another document (document_ids). The last
    label of a sequence counts as its last token's document. Tokens after the sequence are 0: no label depends on them.
    Validations have no such layers: without gradients the batch stays as it is.
    """
    if not (layers and torch.is_grad_enabled()):
        return batch
    columns, documents = dict(batch), batch.get("document_ids")
    for layer in range(1, layers + 1):
        tokens, labels = (_shifted(batch[name], layer, empty) for name, empty in (("tokens", 0), ("labels", IGNORED)))
        if documents is not None:
            own = torch.ones_like(documents, dtype=torch.bool)
            for distance in (layer, layer + 1):
                own &= _shifted(documents, distance, -1).eq(documents) | _is_after(documents, distance)
            labels = labels.where(own, IGNORED)
        columns |= zip(mtp_columns(layer), (tokens, labels), strict=True)
    return columns


def _shifted(column_BS: Tensor, distance: int, empty: int) -> Tensor:
    """The value `distance` positions later; `empty` after the sequence."""
    distance = min(distance, column_BS.shape[1])
    return torch.nn.functional.pad(column_BS[:, distance:], (0, distance), value=empty)


def _is_after(column_BS: Tensor, distance: int) -> Tensor:
    """(S,): whether the position `distance` later is after the sequence."""
    length = column_BS.shape[1]
    return torch.arange(length, device=column_BS.device) + distance >= length


def stack(
    hidden: Sequence[Tensor], labels: Sequence[Tensor], columns: dict[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Joins the model's tokens and those of N layers of multi-token prediction, for one call of the head.

    Hidden states (B, S, D) become ((1 + N) B, S, D); labels and columns (B, S) become ((1 + N) B, S). The column
    mtp_share is 0 for the model's tokens, and 1 / N for the others.
    """
    layers = len(hidden) - 1
    columns = {name: column.repeat(1 + layers, 1) for name, column in columns.items()}
    shares = [torch.full_like(each, bool(layer) / layers, dtype=torch.float32) for layer, each in enumerate(labels)]
    return torch.cat([*hidden]), torch.cat([*labels]), columns | {"mtp_share": torch.cat(shares)}
