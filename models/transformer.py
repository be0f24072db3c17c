"""The decoder-only transformer that the families share. A family adds its sizes and names."""

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from models.attention import Visibility, Visible
from models.config import TransformerConfig
from models.hugging_face import NAMES, Part, from_hugging_face, hugging_face_name, rope_fields, to_hugging_face
from models.layers import Attention, FeedForward, Head
from models.mtp import Mtp, mtp_columns, pair, stack
from models.mup import UNSCALED, Scale
from models.parameters import (
    KINDS,
    TIED_EMBEDDING,
    Constant,
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
        self.mtp: Mtp | None = None
        """Set in a layer of multi-token prediction."""

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, visible: Visible) -> Tensor:
        x_BSD = self.attend(x_BSD, cos, sin, visible)
        return self.finish(x_BSD, self.feed_forward(self.ffn_norm(x_BSD)))

    def attend(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, visible: Visible) -> Tensor:
        """The residual stream after attention."""
        if self.mtp is not None:
            x_BSD = self.mtp(x_BSD)
        return self.add(x_BSD, self.attention_post_norm(self.attention(self.attention_norm(x_BSD), cos, sin, visible)))

    def finish(self, x_BSD: Tensor, out_BSD: Tensor) -> Tensor:
        """The layer's output: the residual stream after the feed-forward; normalized in multi-token prediction."""
        x_BSD = self.add(x_BSD, self.ffn_post_norm(out_BSD))
        return x_BSD if self.mtp is None else self.mtp.norm(x_BSD)

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
    hf_mtp_layers: ClassVar[int] = 0
    """Layers of multi-token prediction in published files."""
    adapted: bool = False
    """Some matrices have adapters (models/lora.py), and only adapters are trained."""
    adapter_scale: float = 0.0
    """The scale in W + scale B A."""
    scales: Mapping[str, Scale] = {}
    """Parameter name -> factors by width (models/mup.py); empty: all are 1."""
    copies_embedding: bool = False
    """True in a pipeline's last stage that holds the embedding table only for a tied head or multi-token prediction."""
    seq_len: int = 0
    """Tokens of a training sequence, or of a text, by which longrope chooses its factors; 0: those of each forward."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        self.visibility = Visibility()
        self.visibility.sinks = config.sinks
        self.layers = nn.ModuleDict({str(layer): self.make_layer(layer) for layer in range(config.n_layers)})
        self.layers.update({str(layer): self.make_mtp_layer(layer) for layer in config.mtp_numbers})
        self.norm: nn.Module | None = self.final_norm(config.dim, eps=config.norm_eps)
        self.output: Head | None = Head(config.dim, config.vocab_size)
        self.tie_weights()
        check_frozen(config.frozen, (name for name, _ in self.named_parameters()))
        if config.frozen and not any(self.kind(name).trained for name, _ in self.named_parameters()):
            raise ValueError(f"frozen = {[*config.frozen]}: no parameter would be trained; leave one out")
        set_trained(self)

    def make_layer(self, layer: int) -> nn.Module:
        """The layer with this number, counted from 0."""
        return self.block(self.config)

    def make_mtp_layer(self, layer: int) -> nn.Module:
        """A layer of multi-token prediction; its number follows those of the model's layers."""
        block: Any = self.make_layer(layer)
        block.mtp = Mtp(self.config.dim, self.config.norm_eps, block.norm)
        return block

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

        def layer(number: int, x_BSD: Tensor) -> Tensor:
            kind = kinds[str(number)]
            return self.layers[str(number)](x_BSD, *rotations[kind], visible_by_window[kind[0]])

        ahead = self._ahead(labels, columns)
        x_BSD, embedded = self._embed_all(tokens, [tokens_ahead for tokens_ahead, _ in ahead])
        for number in map(int, self.layers):
            if number not in self.config.mtp_numbers:
                x_BSD = layer(number, x_BSD)
        if self.norm is not None:
            x_BSD = self.norm(x_BSD)
        if self.output is None:
            return x_BSD
        if labels is not None and ahead:
            hidden = [x_BSD]
            for number, embedded_BSD in zip(self.config.mtp_numbers, embedded, strict=True):
                hidden.append(layer(number, pair(hidden[-1], embedded_BSD)))
            x_BSD, labels, columns = stack(hidden, [labels, *(labels_ahead for _, labels_ahead in ahead)], columns)
        if self.config.logits_scaling != 1:
            x_BSD = x_BSD / self.config.logits_scaling  # the head may compute the loss, and no logits
        return self.output(x_BSD, labels, **columns)

    def _ahead(self, labels: Tensor | None, columns: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Takes the tokens and labels of multi-token prediction out of the columns; empty without gradients."""
        if labels is None or self.output is None or not torch.is_grad_enabled():
            return []
        names = [mtp_columns(layer) for layer in range(1, self.config.mtp_layers + 1)]
        return [(columns.pop(tokens), columns.pop(its_labels)) for tokens, its_labels in names]

    def _embed_all(self, tokens: Tensor, ahead: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Embeddings of tokens (B, S), or the previous stage's hidden state, and embeddings of each of ahead.

        FSDP gathers the table once, for one call.
        """
        embeds = self.tok_embeddings is not None and not self.copies_embedding
        asked = [tokens, *ahead] if embeds else ahead
        if len(asked) == 1:
            found = [self.embed(*asked)]
        else:
            found = [*self.embed(torch.cat(asked)).chunk(len(asked))] if asked else []
        return (found[0], found[1:]) if embeds else (tokens, found)

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

    def scale(self, name: str) -> Scale:
        """A parameter's factors by width."""
        return self.scales.get(name, UNSCALED)

    def hf_name(self, name: str) -> str | Part:
        """Hugging Face's name of a parameter, or its Part of a tensor; empty if there is none, as for adapters.

        A * stands for the index along the first dimension: Hugging Face has one tensor per index.
        """
        return "" if is_adapter(name) else hugging_face_name(name, self.hf_names)

    def hf_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """A parameter's precision in a Hugging Face folder whose precision is dtype."""
        return dtype

    def hf_copies(self, name: str) -> list[str]:
        """Further names of a parameter in a Hugging Face folder, under which the folder may hold equal copies of it."""
        return []

    def hf_ignores(self, there: str, mtp_layers: int = 0) -> bool:
        """Whether the model ignores this tensor of a Hugging Face folder. Old files have RoPE frequencies.

        Layers of multi-token prediction that the folder has and the model lacks are ignored too. mtp_layers:
        num_nextn_predict_layers of the folder's config.json.
        """
        layer, config = re.match(r"model\.layers\.(\d+)\.", there), self.config
        lacked = range(config.n_layers + config.mtp_layers, config.n_layers + max(mtp_layers, self.hf_mtp_layers))
        return there.endswith("rotary_emb.inv_freq") or (layer is not None and int(layer[1]) in lacked)

    def hf_config(self) -> dict[str, Any]:
        """The content of config.json."""
        ahead = {"num_nextn_predict_layers": self.config.mtp_layers} if self.config.mtp_layers else {}
        return {"model_type": self.hf_type, "architectures": [self.hf_class], **to_hugging_face(self.config), **ahead}

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
            if there != here and name not in ("frozen", "mtp_layers") and (name != "ffn_dim" or name in ours.hf_fields):
                found[name] = there, here
        return found

    def init_std(self, name: str) -> float | Uniform | Constant | None:
        """Standard deviation of a parameter's normal distribution at step 0; None for ones (norms), 0 for zeros.

        Matrices have 0.02, or 0.02 / sqrt(2 n_layers) if their product is added to the residual stream (GPT-2). The
        matrix A of an adapter is uniform with bound 1 / sqrt(in) (PEFT). Factors by width multiply these numbers.
        """
        kind, factor = self.kind(name), self.scale(name).start
        if kind.role == "norm" and factor != 1:
            return Constant(factor - 1 if kind.zero else factor)  # a norm that starts at 0 multiplies by 1 + weight
        if kind.zero:
            return 0.0
        if kind.role == "norm":
            return None
        if kind.role == "adapter":
            module, _, attribute = name.rpartition(".")
            # named_parameters, because the attribute may be a copy in bfloat16.
            matrices = dict(self.get_submodule(module).named_parameters(recurse=False))
            return Uniform(matrices[attribute].shape[-1] ** -0.5)
        return factor * (0.02 / (2 * self.config.n_layers) ** 0.5 if kind.into_residual else 0.02)

    def flops_per_token(self, seq_len: int) -> tuple[int, int]:
        """FLOPs per token, forward and backward: with attention over all pairs (PaLM), and over causal ones (Megatron).

        The first number is 6 N + 12 L H K S; the second has half of the attention term. A layer with a window counts
        only the keys in the window. N counts parameters in matrix products: the head but not the embedding, and a tied
        table once; multi-token prediction adds its layers, and the head once for each. A frozen parameter counts 4
        instead of 6, because backward computes only its input's gradient.
        """
        config = self.config
        sizes = [(self.kind(name), parameter.numel()) for name, parameter in self.named_parameters()]
        sizes += [each for each in sizes if each[0].role in ("head", "embedding")] * config.mtp_layers
        products = sum((6 if kind.trained else 4) * round(size * kind.multiplied) for kind, size in sizes)
        pair_width = 6 * config.n_heads * (config.head_dim + config.value_dim)
        keys = [config.keys_seen(layer, seq_len) for layer in (*range(config.n_layers), *config.mtp_numbers)]
        all_pairs, causal_pairs = (pair_width * sum(counts) for counts in zip(*keys, strict=True))
        return products + round(all_pairs), products + round(causal_pairs)
