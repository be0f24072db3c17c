"""Layers shared by the model families, in plain single-device PyTorch.

Shapes are named by letters: B batch, S sequence, D model width, H heads, G key/value heads, K head size,
F feed-forward width, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.attention import AttentionCore, Visible
from models.config import ACTIVATIONS, HiddenAct, TransformerConfig
from models.divergence import divergence
from models.loss import Likeliest, Softmax, chunk_loss, likeliest, linear_loss, linear_scores, softmax
from models.objective import OBJECTIVES
from models.preference import weigh
from models.rotary import apply_rotary


class Sinks(nn.Module):
    """One learned logit per head, which belongs to no key."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads))

    def forward(self) -> Tensor:
        """The sinks (H,) of the heads that this rank computes."""
        return self.weight


class Attention(nn.Module):
    """Grouped-query attention with rotary positions (arXiv:2305.13245).

    With qk_norm, queries and keys are normalized before RoPE (arXiv:2302.05442), by norms of class `norm`.
    """

    def __init__(self, config: TransformerConfig, norm: type[nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.n_heads * self.head_dim, config.n_kv_heads * self.head_dim
        self.wq = nn.Linear(config.dim, queries, bias=config.qkv_bias)
        self.wk = nn.Linear(config.dim, keys, bias=config.qkv_bias)
        self.wv = nn.Linear(config.dim, keys, bias=config.qkv_bias)
        self.wo = nn.Linear(queries, config.dim, bias=config.output_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            widths = (queries, keys) if config.qk_norm == "all_heads" else (self.head_dim, self.head_dim)
            self.q_norm, self.k_norm = (norm(width, eps=config.norm_eps) for width in widths)
        self.norms_all_heads = config.qk_norm == "all_heads"
        self.sinks = Sinks(config.n_heads) if config.sinks else None
        self.query_factor = config.query_factor
        self.core = AttentionCore()

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, visible: Visible) -> Tensor:
        q, k, v = self.wq(x_BSD), self.wk(x_BSD), self.wv(x_BSD)
        if self.norms_all_heads:
            q, k = self._normed(q, k)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in (q, k, v))
        if not self.norms_all_heads:
            q, k = self._normed(q, k)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        if self.query_factor != 1:
            q = q * self.query_factor
        sinks_H = None if self.sinks is None else self.sinks()
        out_BHSK = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), visible, sinks_H)
        return self.wo(out_BHSK.transpose(1, 2).flatten(2))

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))


class FeedForward(nn.Module):
    """A feed-forward with a gate (arXiv:2002.05202): SwiGLU by default."""

    def __init__(self, dim: int, ffn_dim: int, hidden_act: HiddenAct = "silu", bias: bool = False) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[hidden_act]
        self.w1 = nn.Linear(dim, ffn_dim, bias=bias)
        self.w2 = nn.Linear(ffn_dim, dim, bias=bias)
        self.w3 = nn.Linear(dim, ffn_dim, bias=bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.w2(self.activation(self.w1(x_BSD)) * self.w3(x_BSD))


class Head(nn.Linear):
    """Projection to the vocabulary. Given labels, it computes the loss instead of logits."""

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.objective = OBJECTIVES["next_token"]
        self.softmax: Softmax = softmax
        """Computes the softmax of a chunk of logits; tensor parallel replaces this function."""
        self.likeliest: Likeliest = likeliest
        """Finds the largest logits; tensor parallel replaces this function."""
        self.scored: tuple[int, int, float] | None = None
        """(K, N, temperature): the head gives scores (models/loss.py) instead of the loss, with the K likeliest of the
        first N tokens of the vocabulary, of logits divided by the temperature."""
        self.divergence: Callable[..., Any] = divergence
        """Computes the divergence from a teacher; tensor parallel replaces this function."""
        self.whole: Callable[[Tensor], Tensor] = lambda part_BSC: part_BSC
        """Gathers whole sequences, of pairs alone; context parallel replaces this function."""
        self.chunk_loss: Callable[..., Any] = chunk_loss
        """Computes the loss of a chunk; compile replaces this function."""
        self.logged: Tensor | None = None
        """Sums of the numbers that the objective logs, over all tokens since the sums were last taken."""

    def forward(  # type: ignore[override]
        self, x_BSD: Tensor, labels_BS: Tensor | None = None, **columns: Tensor
    ) -> Tensor:
        """Logits (B, S, V), or the float32 sum of losses over labels that are not -100."""
        return super().forward(x_BSD) if labels_BS is None else self.loss(x_BSD, self.weight, labels_BS, columns)

    def loss(self, x_BSD: Tensor, weight_VD: Tensor, labels_BS: Tensor, columns: dict[str, Tensor]) -> Tensor:
        """The sum of losses, or scores, computed with weight_VD, which may be only this rank's rows of the head."""
        if self.scored is not None:
            return linear_scores(x_BSD, weight_VD, labels_BS, self.softmax, self.likeliest, *self.scored)
        objective = self.objective if torch.is_grad_enabled() else self.objective.validated
        pairs = None
        if objective.pairs is not None:
            found = linear_scores(x_BSD, weight_VD, labels_BS, self.softmax, self.likeliest)[..., 0]
            of_pairs = columns["sides"], columns.get("reference"), objective.pairs
            pairs = weigh(found, labels_BS, *of_pairs, self.whole)
            columns = {"weights": pairs.weights, "losses": pairs.losses}
        asked: dict[str, Any] = {"with_mean": True} if objective.with_mean else {}
        if objective.temperature:
            asked["divergence"] = partial(self.divergence, temperature=objective.temperature)
        of_chunk = partial(self.chunk_loss, softmax=self.softmax, terms=objective.terms, **asked)
        total, *logged = linear_loss(x_BSD, weight_VD, labels_BS, of_chunk, columns)
        if logged or pairs is not None:
            sums = torch.cat([each.double() for each in logged]) if pairs is None else pairs.logged
            self.logged = sums if self.logged is None else self.logged + sums
        return total
