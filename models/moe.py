"""Mixture of experts: a router sends each token to a few of many feed-forward layers (arXiv:1701.06538).

Shapes are named as in models/layers.py. Further letters: T tokens, E experts, C chosen experts per token, R rows. A row
is one pair of a token and a chosen expert; rows are sorted by expert.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from models.config import TransformerConfig
from models.grouped import FromRows, ToRows, grouped_feed_forward
from models.hugging_face import FIELDS, NAMES, Part
from models.layers import FeedForward
from models.parameters import BIAS, KINDS, MATRIX, OUTPUT_MATRIX, Kind
from models.transformer import Block, Transformer
from models.visible import Visible


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(TransformerConfig):
    """Sizes of a model whose layers have experts instead of one feed-forward."""

    hf_fields: ClassVar[dict[str, str]] = FIELDS | {
        "n_experts": "num_experts",
        "top_k": "num_experts_per_tok",
        "expert_dim": "moe_intermediate_size",
        "normalised": "norm_topk_prob",
    }

    positive: ClassVar[tuple[str, ...]] = (
        *TransformerConfig.positive,
        *("n_experts", "top_k", "expert_dim", "route_scale", "n_groups", "top_groups"),
    )
    counts: ClassVar[tuple[str, ...]] = (*TransformerConfig.counts, "n_dense_layers", "n_shared")

    n_dense_layers: int = 0
    """Number of first layers, which have a feed-forward of width ffn_dim instead of experts."""
    n_experts: int
    top_k: int
    """Experts per token."""
    expert_dim: int
    """Feed-forward width of an expert."""
    n_shared: int = 0
    """Shared experts, which every token passes through: one feed-forward of width n_shared * expert_dim."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's logits to a token's scores (E,)."""
    normalised: bool = True
    """The scores of a token's chosen experts are divided by their sum."""
    route_scale: float = 1.0
    """Factor of the chosen experts' scores."""
    n_groups: int = 1
    """Groups of neighbouring experts; a token's experts come from top_groups of the groups. A group's score is that of
    its best expert (softmax: arXiv:2405.04434), or the sum of its two best (sigmoid: arXiv:2412.19437)."""
    top_groups: int = 1
    """Groups per token."""
    router_bias: bool = False
    """The router's logits have biases."""
    expert_bias: bool = False
    """The experts' matrix products have biases."""
    activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    """Activation of the experts (models/grouped.py)."""

    @property
    def shared_dim(self) -> int:
        """Feed-forward width of the shared experts."""
        return self.n_shared * self.expert_dim

    @property
    def tp_columns(self) -> dict[str, int]:
        shared = {"n_shared x expert_dim": self.shared_dim} if self.n_shared else {}
        return ({"ffn_dim": self.ffn_dim} if self.n_dense_layers else {}) | shared | self.mtp_columns

    def __post_init__(self) -> None:
        """Raises ValueError if the router could not learn, or if the experts of a token do not fit into its groups."""
        super().__post_init__()
        if self.top_k == 1 and self.normalised:
            raise ValueError(
                "top_k = 1, normalised = True: a score divided by itself is 1, and the router would learn nothing; "
                "use top_k of 2 or more, or normalised = False"
            )
        if self.n_experts % self.n_groups or self.top_k > self.n_experts // self.n_groups * self.top_groups:
            raise ValueError(
                f"top_k = {self.top_k}, top_groups = {self.top_groups}: do not fit {self.n_experts} experts in "
                f"{self.n_groups} groups; use n_groups that divides n_experts, and top_k of at most "
                "n_experts / n_groups * top_groups"
            )
        if self.n_groups > 1 and self.score == "sigmoid" and self.n_groups * 2 > self.n_experts:
            raise ValueError(
                f"n_groups = {self.n_groups}: the score of a group is the sum of its two best experts, and "
                f"{self.n_experts} experts give a group less than two; use at most {self.n_experts // 2}"
            )
        if self.top_groups > self.n_groups:
            raise ValueError(f"top_groups = {self.top_groups}: only {self.n_groups} groups exist; use fewer")


_TINY = 1e-20
"""Added to sums of scores, as in transformers, because all sigmoids of a token may be 0."""
EXPERT = Kind("expert")
BALANCE = Kind("router", multiplied=0, trained=False, zero=True)


class Balance(NamedTuple):
    """Auxiliary losses of a router, which are added to the training loss. They are equal at every layout."""

    sequence_loss: float
    """Factor of each sequence's loss (E / C) sum_e f_e P_e, where f_e is expert e's share of rows, and P_e its mean
    share of the scores (arXiv:2412.19437, section 2.1.2)."""
    z_loss: float
    """Factor of each token's squared log-sum-exp of logits (arXiv:2202.08906)."""
    length: int
    """Tokens of a sequence, over all ranks."""
    summed: Callable[[Tensor], Tensor] = lambda counts: counts
    """Sums counts over the ranks that hold parts of the same sequences."""


class _Attach(torch.autograd.Function):
    """Return the tensor unchanged; in backward, the loss gets the gradient 1, as if added to the training loss."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        context.save_for_backward(loss)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        return gradient, torch.ones_like(context.saved_tensors[0])


class Router(nn.Module):
    """Scores all experts and chooses those of each token, in float32, because many scores are equal in bfloat16."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.dim, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(config.n_experts, dtype=torch.float32), requires_grad=False)
        """Added to scores only for the choice of experts (arXiv:2408.15664)."""
        if config.router_bias:
            self.logit_bias = nn.Parameter(torch.empty(config.n_experts, dtype=torch.float32))
        self.balance: Balance | None = None
        self.observed = False
        """Whether each forward sets `entropy`."""
        self.entropy: Tensor | None = None
        """Sum, over the tokens of the last forward, of the entropy of a token's normalized scores, in nats."""

    def forward(self, x_TD: Tensor, sequences_T: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """Indices of each token's experts, (T, C) int64 in ascending order, and their weights, (T, C) float32.

        sequences_T: index of each token's sequence, below `batch`.
        """
        return self.route(x_TD, sequences_T, batch, dict(self.named_parameters()))

    def route(
        self, x_TD: Tensor, sequences_T: Tensor, batch: int, parameters: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """`forward` with the given parameters."""
        config = self.config
        parameters = {name: parameter.to(x_TD.device) for name, parameter in parameters.items()}
        logits_TE = F.linear(x_TD.float(), parameters["weight"], parameters.get("logit_bias"))
        scores_TE = logits_TE.softmax(-1) if config.score == "softmax" else logits_TE.sigmoid()
        if self.observed:
            shares = (scores_TE / (scores_TE.sum(-1, keepdim=True) + _TINY)).detach()
            self.entropy = torch.special.entr(shares).sum(dtype=torch.float64)
        chosen_TC = self.choose(scores_TE.detach() + parameters["bias"])
        weights_TC = scores_TE.gather(1, chosen_TC)
        if self.balance is not None and torch.is_grad_enabled():
            weights_TC = _Attach.apply(weights_TC, self._loss(logits_TE, scores_TE, chosen_TC, sequences_T, batch))
        if config.normalised:
            weights_TC = weights_TC / (weights_TC.sum(-1, keepdim=True) + _TINY)
        return chosen_TC, weights_TC * config.route_scale

    def _loss(self, logits_TE: Tensor, scores_TE: Tensor, chosen_TC: Tensor, sequences_T: Tensor, batch: int) -> Tensor:
        """The auxiliary loss of these tokens, by the factors of self.balance."""
        assert self.balance is not None
        factor, z_factor, length, summed = self.balance
        loss = z_factor * logits_TE.logsumexp(-1).square().sum()
        if factor:
            experts = scores_TE.shape[1]
            bins_TC = sequences_T[:, None] * experts + chosen_TC
            counts = torch.zeros((batch, experts), dtype=torch.int64, device=scores_TE.device)
            counts.view(-1).index_add_(0, bins_TC.flatten(), torch.ones_like(bins_TC).flatten())
            shares_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + _TINY)
            rows_TE = summed(counts)[sequences_T]
            loss = loss + factor * experts / (chosen_TC.shape[1] * length**2) * (rows_TE * shares_TE).sum()
        return loss

    def choose(self, scores_TE: Tensor) -> Tensor:
        """Indices (T, C) of the experts with the highest scores, out of the groups with the highest scores."""
        config = self.config
        if config.n_groups > 1:
            grouped = scores_TE.unflatten(1, (config.n_groups, -1))
            best = grouped.topk(1 if config.score == "softmax" else 2, dim=-1).values.sum(-1)
            kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(config.top_groups).indices, True)
            scores_TE = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        return scores_TE.topk(config.top_k, dim=-1).indices.sort(-1).values


class Experts(nn.Module):
    """Feed-forward layers of equal size, with stacked matrices, which one grouped product multiplies."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.activation = config.activation
        wide, narrow = (config.n_experts, config.expert_dim), (config.n_experts, config.dim)
        self.w1 = nn.Parameter(torch.empty(*wide, config.dim))
        self.w2 = nn.Parameter(torch.empty(*narrow, config.expert_dim))
        self.w3 = nn.Parameter(torch.empty(*wide, config.dim))
        if config.expert_bias:
            self.b1, self.b2, self.b3 = (nn.Parameter(torch.empty(shape)) for shape in (wide, narrow, wide))
        self.scale = 1.0
        """Factor of the adapters' products (models/lora_experts.py)."""

    def forward(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Rows (R, D) -> outputs of their experts (R, D). counts_E: int64 number of rows of each expert."""
        # getattr, because mixed precision on one rank replaces the attributes by copies.
        parameters = {name: getattr(self, name) for name, _ in self.named_parameters()}
        return self.multiply(rows_RD, counts_E, parameters)

    def multiply(self, rows_RD: Tensor, counts_E: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """`forward` with the given parameters."""
        return grouped_feed_forward(rows_RD, counts_E, parameters, self.activation, self.scale)


class Exchange(Protocol):
    """Expert parallel: sends rows to the ranks that hold their experts, and the results back."""

    def dispatch(self, rows_RD: Tensor, counts_E: Tensor, meanwhile: Callable[[], None]) -> tuple[Tensor, Tensor, Any]:
        """Rows for all experts -> rows for this rank's experts, their counts per expert, and the argument of combine.

        meanwhile is called once, while rows are in transit.
        """

    def combine(self, rows_RD: Tensor, sent: Any) -> Tensor:
        """Send rows back to the ranks that they came from, and restore their order before dispatch."""


class Mixture(nn.Module):
    """The weighted sum of each token's experts, plus the shared experts."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.router, self.experts = Router(config), Experts(config)
        self.shared = FeedForward(config.dim, config.shared_dim) if config.n_shared else None
        self.exchange: Exchange | None = None
        """Set if other ranks hold some of the experts."""
        self.counts_E: Tensor | None = None
        """Rows of each expert in the last forward. Recomputation in backward sets the same counts again."""

    def forward(self, x_BSD: Tensor, padding_BS: Tensor | None) -> Tensor:
        """padding_BS: True for padding, which no routed expert sees."""
        if self.shared is None:
            return self.routed(x_BSD, padding_BS)
        if self.exchange is None:
            return self.routed(x_BSD, padding_BS) + self.shared(x_BSD)
        shared, shared_out = self.shared, list[Tensor]()
        out_BSD = self.routed(x_BSD, padding_BS, lambda: shared_out.append(shared(x_BSD)))
        return out_BSD + shared_out[0]

    def routed(self, x_BSD: Tensor, padding_BS: Tensor | None, meanwhile: Callable[[], None] = lambda: None) -> Tensor:
        """The weighted sum of each token's experts; meanwhile is called while rows are in transit to other ranks."""
        x_TD, (batch, length) = x_BSD.flatten(0, 1), x_BSD.shape[:2]
        sequences_T = torch.arange(batch, device=x_TD.device).repeat_interleave(length)
        if padding_BS is None:
            return self._of_tokens(x_TD, sequences_T, batch, meanwhile).view_as(x_BSD)
        (tokens,) = (~padding_BS.flatten()).nonzero(as_tuple=True)
        out_TD = self._of_tokens(x_TD[tokens], sequences_T[tokens], batch, meanwhile)
        return torch.zeros_like(x_TD).index_copy(0, tokens, out_TD).view_as(x_BSD)

    def _of_tokens(self, x_TD: Tensor, sequences_T: Tensor, batch: int, meanwhile: Callable[[], None]) -> Tensor:
        chosen_TC, weights_TC = self.router(x_TD, sequences_T, batch)
        sorted_R, order_R = chosen_TC.flatten().sort(stable=True)
        rows_TC = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(len(order_R), device=order_R.device))
        rows_TC = rows_TC.view_as(chosen_TC)
        experts = torch.arange(self.router.config.n_experts, device=sorted_R.device)
        ends = torch.searchsorted(sorted_R, experts, right=True)
        self.counts_E = ends.diff(prepend=ends.new_zeros(1))
        rows_RD = ToRows.apply(x_TD, order_R // chosen_TC.shape[1], rows_TC)
        if self.exchange is None:
            out_RD = self.experts(rows_RD, self.counts_E)
        else:
            rows_RD, counts_E, sent = self.exchange.dispatch(rows_RD, self.counts_E, meanwhile)
            out_RD = self.exchange.combine(self.experts(rows_RD, counts_E), sent)
        return FromRows.apply(out_RD, weights_TC.to(x_TD.dtype), order_R, rows_TC)


class MixtureBlock(Block):
    """A layer with experts, which counts the rows of each expert in training."""

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)
        self.feed_forward: Any = Mixture(config)
        self.rows_E: Tensor | None = None
        """Rows of each expert since the last update of weights."""
        self.entropy: Tensor | None = None
        """Sum of the router's entropy since the last update of weights, if the router is observed."""
        # A hook, because activation checkpointing calls forward twice.
        self.register_forward_hook(_count)

    @property
    def mixture(self) -> Mixture:
        return self.feed_forward

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, visible: Visible) -> Tensor:
        x_BSD, normed_BSD = self.before_experts(x_BSD, cos, sin, visible)
        return self.finish(x_BSD, self.feed_forward(normed_BSD, visible.padding_BS))

    def before_experts(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, visible: Visible) -> tuple[Tensor, Tensor]:
        """Hidden states after attention, and the experts' input. compile makes one graph of this method."""
        x_BSD = self.attend(x_BSD, cos, sin, visible)
        return x_BSD, self.ffn_norm(x_BSD)


def _count(block: Any, _inputs: Any, _output: Any) -> None:
    if torch.is_grad_enabled():
        block.rows_E = _sum(block.rows_E, block.mixture.counts_E)
        if block.mixture.router.observed:
            block.entropy = _sum(block.entropy, block.mixture.router.entropy)


def _sum(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total + more


class MixtureTransformer(Transformer):
    """A transformer with experts in each layer after the first n_dense_layers."""

    block = MixtureBlock
    kinds: ClassVar[dict[str, Kind]] = KINDS | {
        "layers.*.feed_forward.router": Kind("router"),
        "layers.*.feed_forward.router.bias": BALANCE,
        "layers.*.feed_forward.router.logit_bias": BIAS,
        "layers.*.feed_forward.experts.b[123]": BIAS,
        "layers.*.feed_forward.experts.w[13]": EXPERT,
        "layers.*.feed_forward.experts.w2": replace(EXPERT, into_residual=True),
        "layers.*.feed_forward.shared.w[13]": MATRIX,
        "layers.*.feed_forward.shared.w2": OUTPUT_MATRIX,
    }
    hf_names: ClassVar[Mapping[str, str | Part]] = {
        **NAMES,
        "layers.*.feed_forward.router": "model.layers.*.mlp.gate",
        "layers.*.feed_forward.router.bias": "",
        "layers.*.feed_forward.experts.w1": "model.layers.*.mlp.experts.*.gate_proj.weight",
        "layers.*.feed_forward.experts.w2": "model.layers.*.mlp.experts.*.down_proj.weight",
        "layers.*.feed_forward.experts.w3": "model.layers.*.mlp.experts.*.up_proj.weight",
    }

    def make_layer(self, layer: int) -> nn.Module:
        """The layer with this number, counted from 0."""
        config: Any = self.config
        return (Block if layer < config.n_dense_layers else self.block)(config)

    def kind(self, name: str) -> Kind:
        """A parameter's kind. Only top_k of n_experts experts, and their adapters, multiply a token."""
        kind, config = super().kind(name), self.config
        assert isinstance(config, MixtureConfig)
        is_expert = kind.multiplied and ".experts." in name
        return replace(kind, multiplied=config.top_k / config.n_experts) if is_expert else kind

    def hf_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """A parameter's precision in a Hugging Face folder. router.bias is float32: rounding would change choices."""
        return torch.float32 if self.kind(name) == BALANCE else dtype


class SharedMixtureTransformer(MixtureTransformer):
    """A mixture whose published files have shared experts, biases of routers, and a layer of multi-token prediction."""

    hf_names: ClassVar[Mapping[str, str | Part]] = {
        **MixtureTransformer.hf_names,
        "layers.*.feed_forward.shared.w1": "model.layers.*.mlp.shared_experts.gate_proj",
        "layers.*.feed_forward.shared.w2": "model.layers.*.mlp.shared_experts.down_proj",
        "layers.*.feed_forward.shared.w3": "model.layers.*.mlp.shared_experts.up_proj",
        "layers.*.feed_forward.router.bias": "model.layers.*.mlp.gate.e_score_correction_bias",
    }

    hf_mtp_layers = 1

    def hf_copies(self, name: str) -> list[str]:
        """Each layer of multi-token prediction has copies of embedding and head in published files."""
        copies = {"tok_embeddings.weight": ["embed_tokens"], "output.weight": ["shared_head.head"]}
        if self.config.tie_embeddings:
            copies["tok_embeddings.weight"] += ["shared_head.head"]
        layers = [f"model.layers.{layer}" for layer in self.config.mtp_numbers]
        return [f"{layer}.{copy}.weight" for layer in layers for copy in copies.get(name, ())]

    def hf_config(self) -> dict[str, Any]:
        """The content of config.json, which also says that there is no layer of multi-token prediction."""
        return super().hf_config() | {"num_nextn_predict_layers": self.config.mtp_layers}
