"""The decoder-only transformer that the families share. A family adds its sizes and names."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from models.attention import Visibility, Visible
from models.config import TransformerConfig
from models.hugging_face import NAMES, Part, from_hugging_face, hugging_face_name, rope_fields, to_hugging_face
from models.layers import Attention, FeedForward, Head
from models.parameters import (
    KINDS,
    TIED_EMBEDDING,
    Kind,
    Uniform,
    adapter_kind,
    check_frozen,
    find_kind,
    is_adapter,
    set_trained,
)
from models.rotary import rotary_cos_sin, rotary_frequencies


class Block(nn.Module):
    """One layer: attention and feed-forward, each with norms before or after it, inside a residual connection."""

    attention_class: type[Attention] = Attention
    feed_forward_class: type[FeedForward] = FeedForward
    norm: type[nn.Module] = nn.RMSNorm
    """Class of the layer's norms."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention = self.attention_class(config, self.norm)
        self.feed_forward = self.feed_forward_class(config.dim, config.ffn_dim, config.hidden_act, config.ffn_bias)
        before, after = config.norms != "after", config.norms != "before"
        self.attention_norm, self.attention_post_norm, self.ffn_norm, self.ffn_post_norm = (
            self.norm(config.dim, eps=config.norm_eps) if present else nn.Identity()
            for present in (before, after, before, after)
        )
        self.residual_multiplier = config.residual_multiplier

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, visible: Visible) -> Tensor:
        x_BSD = self.attend(x_BSD, cos, sin, visible)
        return self.add(x_BSD, self.ffn_post_norm(self.feed_forward(self.ffn_norm(x_BSD))))

    def attend(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, visible: Visible) -> Tensor:
        """The residual stream after attention."""
        return self.add(x_BSD, self.attention_post_norm(self.attention(self.attention_norm(x_BSD), cos, sin, visible)))

    def add(self, x_BSD: Tensor, out_BSD: Tensor) -> Tensor:
        """The residual stream with the output of attention or feed-forward."""
        return x_BSD + (out_BSD if self.residual_multiplier == 1 else out_BSD * self.residual_multiplier)


class Transformer(nn.Module):
    """The model. In a pipeline stage, a missing embedding, norm or head is None, and layers keep their names."""

    block: type[nn.Module] = Block
    """Class of a layer."""
    final_norm: type[nn.Module] = nn.RMSNorm
    """Class of the norm before the head."""
    kinds: ClassVar[dict[str, Kind]] = KINDS
    """Pattern -> kind of the model's parameters."""
    hf_names: ClassVar[Mapping[str, str | Part]] = NAMES
    """Name of a module or parameter -> Hugging Face's name."""
    hf_type: str = ""
    """model_type of config.json; empty if Hugging Face has no such model."""
    hf_class: str = ""
    """Hugging Face's class of the model."""
    adapted: bool = False
    """Some matrices have adapters (models/lora.py), and only adapters are trained."""
    adapter_scale: float = 0.0
    """The scale in W + scale B A."""
    copies_embedding: bool = False
    """True in a pipeline's last stage that holds the tied embedding table only for its head."""
    seq_len: int = 0
    """Tokens of a training sequence, or of a text, by which longrope chooses its factors; 0: those of each forward."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        self.visibility = Visibility()
        self.visibility.sinks = config.sinks
        self.layers = nn.ModuleDict({str(layer): self.make_layer(layer) for layer in range(config.n_layers)})
        self.norm: nn.Module | None = self.final_norm(config.dim, eps=config.norm_eps)
        self.output: Head | None = Head(config.dim, config.vocab_size)
        self.tie_weights()
        check_frozen(config.frozen, (name for name, _ in self.named_parameters()))
        set_trained(self)

    def make_layer(self, layer: int) -> nn.Module:
        """The layer with this number, counted from 0."""
        return self.block(self.config)

    def tie_weights(self) -> None:
        """Share the embedding table with the head, if the model ties them. Call again after parameters got memory."""
        if self.config.tie_embeddings and self.tok_embeddings is not None and self.output is not None:
            (self.output.weight,) = self.tok_embeddings.parameters()  # .weight may be a copy in bfloat16

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        dropout_keys: Tensor | None = None,
        **columns: Tensor,
    ) -> Tensor:
        """Logits (B, S, V) of tokens (B, S); with labels (B, S), the sum of losses over labels that are not -100.

        positions (B, S): count from 0 by default.
        document_ids (B, S): a token sees only its document; by default it sees all tokens before it in the sequence.
        dropout_keys (B, S): an int64 key per token; None: no dropout.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
        # A layer's inputs depend on its window and its RoPE.
        kinds = {n: (self.config.has_window(int(n)), self.config.has_rope(int(n))) for n in self.layers}
        visible_by_window = {
            windowed: replace(self._visible(positions, document_ids, windowed), dropout_keys_BS=dropout_keys)
            for windowed in sorted({windowed for windowed, _ in kinds.values()})
        }
        rotations = {kind: self._rotation(positions, *kind) for kind in sorted({*kinds.values()})}
        embeds = self.tok_embeddings is not None and not self.copies_embedding
        x_BSD = self.embed(tokens) if embeds else tokens
        for number, block in self.layers.items():
            kind = kinds[number]
            x_BSD = block(x_BSD, *rotations[kind], visible_by_window[kind[0]])
        if self.norm is not None:
            x_BSD = self.norm(x_BSD)
        if self.output is None:
            return x_BSD
        if self.config.logits_scaling != 1:
            x_BSD = x_BSD / self.config.logits_scaling  # the head may compute the loss, and no logits
        return self.output(x_BSD, labels, **columns)

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens (B, S) -> embeddings (B, S, D)."""
        x_BSD, factor = self.tok_embeddings(tokens), self.config.embedding_multiplier  # type: ignore[misc]
        return x_BSD if factor == 1 else x_BSD * factor

    def _rotation(self, positions: Tensor, windowed: bool, rotated: bool) -> tuple[Tensor, Tensor]:
        """Cosines and sines for layers with or without a window, and with or without RoPE."""
        config = self.config
        theta, scaling = config.rope_theta, config.rope_scaling
        if windowed and config.window_rope_theta is not None:
            theta, scaling = config.window_rope_theta, None
        length = self.seq_len or positions.shape[1]
        frequencies = rotary_frequencies(config.rotary_dim, theta, scaling, positions.device, length)
        if not rotated:  # the rotation by an angle of 0 changes no bit
            return rotary_cos_sin(positions, torch.zeros_like(frequencies))
        return rotary_cos_sin(positions, frequencies, scaling.amplitude if scaling else 1.0)

    def _visible(self, positions: Tensor, document_ids: Tensor | None, windowed: bool) -> Visible:
        """The Visible of layers with or without a window."""
        visible = self.visibility(positions, document_ids, self.config.window if windowed else None)
        if self.visibility.padding or self.visibility.padded_rows:
            visible = replace(visible, padding_BS=positions < 0)
        return visible

    def kind(self, name: str) -> Kind:
        """A parameter's kind, which says whether the parameter is trained."""
        if adapter := adapter_kind(name):
            return adapter
        tied = {"tok_embeddings": TIED_EMBEDDING} if self.config.tie_embeddings else {}
        kind = find_kind(name, self.kinds | tied, self.config.frozen)
        return replace(kind, trained=False) if self.adapted else kind

    def hf_name(self, name: str) -> str | Part:
        """Hugging Face's name of a parameter, or its Part of a tensor; empty if there is none, as for adapters.

        A * stands for the index along the first dimension: Hugging Face has one tensor per index.
        """
        return "" if is_adapter(name) else hugging_face_name(name, self.hf_names)

    def hf_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """A parameter's precision in a Hugging Face folder whose precision is dtype."""
        return dtype

    def hf_ignores(self, there: str) -> bool:
        """Whether the model ignores this tensor of a Hugging Face folder. Old files have RoPE frequencies."""
        return there.endswith("rotary_emb.inv_freq")

    def hf_config(self) -> dict[str, Any]:
        """The content of config.json."""
        return {"model_type": self.hf_type, "architectures": [self.hf_class], **to_hugging_face(self.config)}

    def hf_misfits(self, given: dict[str, Any]) -> list[str]:
        """Differences between a config.json and this model, except a context length that changes no number."""
        ours = to_hugging_face(self.config) | {"model_type": self.hf_type}
        try:
            theirs = to_hugging_face(from_hugging_face(given, type(self.config)))
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            return [str(error)]
        theirs["model_type"] = given.get("model_type")
        scaling = self.config.rope_scaling
        if scaling is None or scaling.rope_type != "longrope":  # the amplitude of longrope may follow from it
            theirs["max_position_embeddings"] = self.config.context_length
        ours.pop("rope_parameters", None)  # the newer spelling of other fields
        return [
            f"{key} is {theirs.get(key)} there and {ours[key]} here" for key in ours if theirs.get(key) != ours[key]
        ]

    def hf_lost(self) -> dict[str, tuple[Any, Any]]:
        """Field -> its value in the config.json of an export, and here, for fields that config.json would change.

        Raises ValueError if config.json cannot describe the model.
        """
        ours = self.config
        back = from_hugging_face(self.hf_config(), type(ours))
        found = {}
        for name in (field.name for field in fields(ours)):
            there, here = getattr(back, name), getattr(ours, name)
            if name == "head_size":  # None is dim / n_heads
                there, here = back.head_dim, ours.head_dim
            elif name == "rope_scaling":  # some fields are not those of its type
                there, here = rope_fields(there), rope_fields(here)
            if there != here and name != "frozen" and (name != "ffn_dim" or name in ours.hf_fields):
                found[name] = there, here
        return found

    def init_std(self, name: str) -> float | Uniform | None:
        """Standard deviation of a parameter's normal distribution at step 0; None for ones (norms), 0 for zeros.

        Matrices have 0.02, or 0.02 / sqrt(2 n_layers) if their product is added to the residual stream (GPT-2). The
        matrix A of an adapter is uniform with bound 1 / sqrt(in) (PEFT).
        """
        kind = self.kind(name)
        if kind.zero:
            return 0.0
        if kind.role == "norm":
            return None
        if kind.role == "adapter":
            module, _, attribute = name.rpartition(".")
            # named_parameters, because the attribute may be a copy in bfloat16.
            matrices = dict(self.get_submodule(module).named_parameters(recurse=False))
            return Uniform(matrices[attribute].shape[-1] ** -0.5)
        return 0.02 / (2 * self.config.n_layers) ** 0.5 if kind.into_residual else 0.02

    def flops_per_token(self, seq_len: int) -> tuple[int, int]:
        """FLOPs per token, forward and backward: with attention over all pairs (PaLM), and over causal ones (Megatron).

        The first number is 6 N + 12 L H K S; the second has half of the attention term. A layer with a window counts
        only the keys in the window. N counts parameters in matrix products: the head but not the embedding, and a tied
        table once. A frozen parameter counts 4 instead of 6, because backward computes only its input's gradient.
        """
        config = self.config
        sizes = [(self.kind(name), parameter.numel()) for name, parameter in self.named_parameters()]
        products = sum((6 if kind.trained else 4) * round(size * kind.multiplied) for kind, size in sizes)
        pair_width = 6 * config.n_heads * (config.head_dim + config.value_dim)
        keys = [config.keys_seen(layer, seq_len) for layer in range(config.n_layers)]
        all_pairs, causal_pairs = (pair_width * sum(counts) for counts in zip(*keys, strict=True))
        return products + round(all_pairs), products + round(causal_pairs)
