"""The debug recipe where a step takes milliseconds: small flavors of every family, and settings."""

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from components.commands.shrink import VOCABULARY, chats, clauses, pairs, small_tokenizer
from components.config import ROOT, load_config
from models import MODELS
from models.deepseek_v3 import DeepseekV3Config
from models.llama import FLAVORS, LlamaConfig
from models.moe import MixtureConfig
from models.phi3 import Phi3Config
from models.rotary import RopeScaling

RECIPE = ROOT / "recipes" / "llama_debug.toml"
load_config(["--job.config_file", str(RECIPE)])  # what it imports at first use


_LAYERS = (*range(2, 9), 10, 13, 18)
"""Layers of the matrix's models: Layout.layers."""


def _wide(sizes: Any) -> Any:
    """With matrices whose rows are blocks of NF4, which four tensor parallel ranks keep whole."""
    heads, key_heads = sizes.n_heads, sizes.n_kv_heads
    if heads == 24:  # no power of two
        heads, key_heads = 16, {24: 16, 3: 4}.get(key_heads, key_heads)
    more: dict[str, int] = {"n_heads": heads, "n_kv_heads": key_heads}
    more |= {"head_size": 256 // heads} if sizes.head_size else {}
    if isinstance(sizes, MixtureConfig):
        more["expert_dim"] = 256
    if isinstance(sizes, DeepseekV3Config):
        more |= {"kv_lora_rank": 64, "v_dim": 256 // heads, "nope_dim": 256 // heads - sizes.rope_dim}
        more |= {"q_lora_rank": 64} if sizes.q_lora_rank else {}
    return replace(sizes, dim=256, ffn_dim=256, **more)


def _with_longrope(sizes: Any) -> Any:
    """With half of each head rotated, by factors that sequences of more than 16 tokens have."""
    if sizes.dim < 8 * sizes.n_heads:
        sizes = replace(sizes, dim=8 * sizes.n_heads)
    pairs = range(sizes.head_dim // 4)
    short, long = tuple(1.1 + pair for pair in pairs), tuple(1.5 + 3 * pair for pair in pairs)
    scaling = RopeScaling("longrope", sizes.context_length / 16, 16, short_factor=short, long_factor=long)
    return replace(sizes, rotary_fraction=0.5, rope_scaling=scaling)


for _, flavors in MODELS.values():
    debug = flavors["debug"]
    if isinstance(debug, Phi3Config):
        debug = replace(debug, rotary_fraction=1.0, rope_scaling=None)
    latent = isinstance(debug, DeepseekV3Config)  # a key for each head
    # A norm over two numbers, which dim / n_heads is in the matrix, has a gradient that is mostly rounding.
    own = {"head_size": 8 if debug.head_size or debug.qk_norm else None, "n_kv_heads": 4 if latent else 2}
    tiny = replace(debug, dim=64, n_layers=2, n_heads=4, **own)
    tiny = replace(tiny, ffn_dim=128, vocab_size=VOCABULARY)
    if debug.window:
        tiny = replace(tiny, window=9, full_every=2 if debug.full_every else 0)
    if isinstance(tiny, MixtureConfig):
        tiny = replace(tiny, n_experts=8, top_k=2, expert_dim=32)
    if latent:  # the second version's; and of the third, where scores are sigmoids
        stretched = RopeScaling("yarn", 4.0, 16, mscale=1.0, mscale_all_dim=1.0)
        widths = {"kv_lora_rank": 16, "nope_dim": 8, "rope_dim": 4, "v_dim": 6}
        router = {"score": "softmax", "normalised": False, "n_groups": 1, "top_groups": 1, "route_scale": 1.0}
        tiny = replace(tiny, q_lora_rank=None, rope_scaling=stretched, **widths, **router)
    sizes = {"tiny": tiny}
    for key_heads, more in itertools.product((4, 2, 1), (0, 3)):
        suffix = f"_{key_heads}_key_heads" * (key_heads != 4) + "_odd_vocabulary" * (more > 0)
        many_heads = replace(tiny, n_heads=16, n_kv_heads=16 if latent else key_heads, vocab_size=VOCABULARY + more)
        sizes["many_heads" + suffix] = many_heads
        for long, layers in (("long", 6), ("long5", 5), ("long3", 3)):
            sizes[long + suffix] = replace(many_heads, n_layers=layers, dim=32, ffn_dim=64)
    # Degrees of 2, 3 and 4 divide these sizes, which tests/layouts.py lays out.
    own = {"n_experts": 12, "expert_dim": 48} if isinstance(tiny, MixtureConfig) else {}
    for layers, key_heads, odd in itertools.product(_LAYERS, (4, 3, 2, 1), (False, True)):
        own |= {"n_layers": layers, "n_kv_heads": 24 if latent else key_heads, "vocab_size": VOCABULARY + 8 - 5 * odd}
        own |= {"dim": 96, "ffn_dim": 192} if layers == 2 else {"dim": 48, "ffn_dim": 96}
        suffix = f"_{key_heads}_key_heads" * (key_heads != 4) + "_odd_vocabulary" * odd
        sizes[f"matrix{layers}{suffix}"] = replace(tiny, n_heads=24, **own)
    if isinstance(tiny, MixtureConfig):
        for flavor, each in list(sizes.items()):
            third = replace(each, q_lora_rank=24) if latent else each
            sizes[f"{flavor}_sigmoid"] = replace(
                third, score="sigmoid", normalised=True, n_groups=4, top_groups=2, top_k=3, route_scale=2.5, n_shared=1
            )
    for flavor, each in sizes.items():
        for suffix, size in (("", each), ("_wide", _wide(each))):
            size = _with_longrope(size) if isinstance(size, Phi3Config) else size
            flavors[flavor + suffix] = replace(size, tie_embeddings=False)
            flavors[f"{flavor}{suffix}_tied"] = replace(size, tie_embeddings=True)
# Weights are nearly all that it needs memory for.
FLAVORS["deep"] = LlamaConfig(dim=128, n_layers=12, n_heads=4, n_kv_heads=4, ffn_dim=384, vocab_size=4096)
FLAVORS["less_deep"] = replace(FLAVORS["deep"], n_layers=8)
# Tensors of some MiB.
FLAVORS["wide"] = LlamaConfig(dim=512, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=1536, vocab_size=4096)
FLAVORS["biased"] = replace(FLAVORS["tiny"], qkv_bias=True, output_bias=True, ffn_bias=True, hidden_act="relu2")
# Nothing here divides by 2, 3 or 4 ranks.
FLAVORS["odd"] = LlamaConfig(dim=50, n_layers=1, n_heads=5, n_kv_heads=1, ffn_dim=77, vocab_size=VOCABULARY + 3)


def _prepared(name: str, text: str) -> Path:
    """A file with this text, that all processes share."""
    path = ROOT / ".cache" / "tests" / name
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(text, encoding="utf-8")
        fresh.rename(path)
    return path


_CLAUSES = str(_prepared("clauses.jsonl", clauses()))
_CHATS = str(_prepared("chats.jsonl", chats()))
TOKENIZER = str(_prepared("small.tiktoken", small_tokenizer()))
CHATS = (
    *("--training.dataset_format", "chat", "--training.dataset_path", _CHATS),
    *("--chat.template", "assets/templates/llama3.jinja", "--chat.too_long", "truncate_end"),
)
"""Rows of chats instead of text."""
_SHORT = "{% for message in messages %}{{ message.content + '<|eot_id|>' }}{% endfor %}"
PAIRS = (
    *("--training.dataset_format", "preference"),
    *("--training.dataset_path", str(_prepared("pairs.jsonl", pairs()))),
    *("--chat.template", str(_prepared("short.jinja", _SHORT)), "--chat.too_long", "truncate_end"),
)
"""Rows of pairs instead of text: one or two in a row of 32 tokens."""
MIXTURE = (
    *CHATS[:2],
    *CHATS[4:],
    *("--training.mixture[1].name", "clauses", "--training.mixture[1].dataset_path", _CLAUSES),
    *("--training.mixture[1].dataset_format", "text", "--training.mixture[1].weight", "0.6"),
    *("--training.mixture[2].name", "chats", "--training.mixture[2].dataset_path", _CHATS),
    *("--training.mixture[2].weight", "0.4", "--training.mixture_phase[1].from_sequence", "50"),
    *("--training.mixture_phase[1].weights", "{clauses = 0.3, chats = 0.7}"),
)
"""Texts and rows of chats, in shares that change in the second step."""


SMALL = [
    *(
        "--training.dataset_path",
        _CLAUSES,
        "--model.hf_assets_path",
        str(_prepared("small.tiktoken", small_tokenizer())),
    ),
    *("--model.flavor", "tiny", "--training.seq_len", "32", "--training.global_batch_size", "36"),
    *("--training.local_batch_size", "36", "--training.steps", "100", "--lr_scheduler.warmup_steps", "0"),
    *("--optimizer.lr", "1e-3", "--optimizer.eps", "1e-5", "--validation.enable", "false"),
    *("--parallelism.data_parallel_replicate_degree", "1", "--parallelism.data_parallel_shard_degree", "-1"),
    *("--checkpoint.enable", "false"),
]
"""The debug recipe where a step takes milliseconds. With this eps the sign of near-zero gradients decides nothing."""


def small_for(words: Sequence[str]) -> list[str]:
    """SMALL, without its data if the words name a mixture."""
    mixed = any(word.startswith("--training.mixture[") for word in words)
    return SMALL[2:] if mixed else SMALL
