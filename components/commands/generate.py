"""Text from a model: a run's newest good checkpoint (or --step N), or a Hugging Face folder.

    python -m components.generate outputs/llama_debug "In the beginning" --tokens 100
    torchrun --nproc-per-node 2 -m components.generate FOLDER "In the beginning"

Runs on one device, or with each matrix split over all ranks that torchrun starts. Each token passes through the model
once, because attention keeps the keys and values of earlier tokens. The model's code knows nothing of this cache.
"""

import argparse
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from components.config import Chat, ConfigError, JobConfig, Parallelism, Training
from components.config.bounds import LARGEST, local_path, path_argument
from components.config.files import read_json_as
from components.data.chats import Chats
from components.data.template import BadChat
from components.data.tokenizer import Tokenizer, fitting_tokenizer, passed_over
from components.launch.exit_codes import ExitCode
from components.state.adapters import open_run
from components.state.base import load_run, precisions
from components.state.folder import chat_of, chosen_model, separator_of
from components.state.weights import check_weights, left_out, load_weights
from models import MODELS, meta_model, of_hugging_face
from models.attention import KERNELS, AttentionCore, Visible
from models.moe import Router
from parallelize import parallelize_model
from parallelize.groups import init_distributed
from parallelize.mesh import Degrees, Mesh
from parallelize.rules.sizes import uneven

_CHUNK_TOKENS = 512  # of a prompt in one forward, because the head computes logits for every token


@dataclass
class Source:
    """A folder's model and tokenizer, before any memory is allocated."""

    name: str
    """The family, of models.MODELS."""
    model: Any
    """The whole model, on the meta device."""
    tokenizer: str
    said: str
    load: Callable[[nn.Module], None]
    """Fills the parameters that this rank has."""
    separator: str = "auto"
    """training.dataset_separator of the run."""
    chat: Chat | None = None
    """Chat settings of the run; None if the run was not trained on chats."""


def open_source(folder: Path, step: int | None, tokenizer: str | None = None) -> Source:
    """A run's dump_folder or a Hugging Face folder. Called by all ranks. Raises ConfigError if it cannot be used."""
    if (folder / "run.json").exists():
        return _open_run(folder, step, tokenizer)
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder}: no run.json and no config.json: not a dump_folder, and no Hugging Face folder")
    if step is not None:
        raise ConfigError(f"--step {step}: {folder} is a Hugging Face folder, which has no steps")
    return _open_hugging_face(folder, tokenizer)


def _open_run(folder: Path, step: int | None, tokenizer: str | None) -> Source:
    config, checkpoint = open_run(folder, step)
    chosen = chosen_model(config)
    model = meta_model(chosen, config["training"]["dtype"])
    load = partial(load_run, config=config, checkpoint=checkpoint, of_run=precisions(model))
    said = f"{chosen.name} {chosen.flavor} from {checkpoint}"
    path = tokenizer or config["model"]["hf_assets_path"]
    return Source(chosen.name, model, path, said, load, separator_of(config), chat_of(config))


def _open_hugging_face(folder: Path, given_tokenizer: str | None) -> Source:
    file = folder / "config.json"
    try:
        name, sizes = of_hugging_face(read_json_as(dict[str, Any], file))
        with torch.device("meta"):
            model = MODELS[name][0](sizes)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
    check_weights(model, folder)
    # tokenizer.json first, because it says which tokens begin and end a text. A tiktoken rank file does not say this.
    own = folder / "tokenizer.json" if (folder / "tokenizer.json").exists() else folder
    said = f"{name} from {folder}{left_out(model, folder)}"
    return Source(name, model, given_tokenizer or str(own), said, lambda model: load_weights([model], folder))


def build(source: Source, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model with its weights, its matrices split over all ranks.

    Raises ConfigError if the ranks cannot share the model evenly, or the weights do not fit.
    """
    ranks, sizes = dist.get_world_size(), source.model.config
    check_ranks(sizes, ranks)
    # No sequence parallel, because one token cannot be split. Weights already have the dtype, so nothing is cast.
    config = JobConfig(
        parallelism=Parallelism(tensor_parallel_degree=ranks, sequence_parallel=False),
        training=Training(mixed_precision_param=str(dtype).removeprefix("torch.")),  # type: ignore[arg-type]
    )
    mesh = Mesh(Degrees(tp=ranks), device.type)
    whole = source.model.to(dtype)
    for module in whole.modules():
        if isinstance(module, Router):
            module.float()  # as in training, because fewer bits would make close scores equal
    (model,) = parallelize_model(source.name)(whole, mesh, config)
    model.to_empty(device=device)
    model.tie_weights()
    source.load(model)
    return model


def check_ranks(sizes: Any, ranks: int) -> None:
    """Raises ConfigError where ranks cannot split a model of these sizes evenly."""
    split = {"attention heads": sizes.n_heads, "key/value heads": sizes.n_kv_heads}
    split |= {f"feed-forward columns ({name})": columns for name, columns in sizes.tp_columns.items()}
    if found := [f"the model has {reason}" for what, size in split.items() if (reason := uneven(size, what, ranks))]:
        raise ConfigError(found)


class CachedCore(AttentionCore):
    """Attention of new tokens to all tokens so far; keeps their keys and values (B, G, T, K).

    No kernel is compiled, because the number of keys changes with each token.
    """

    kernel = KERNELS["sdpa"]

    def __init__(self) -> None:
        super().__init__()
        self.kept: tuple[Tensor, Tensor] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, sinks_H: Tensor | None = None) -> Tensor:
        assert visible.documents_BT is None, "the tokens are of one document"
        if self.kept is not None:
            k, v = torch.cat((self.kept[0], k), dim=2), torch.cat((self.kept[1], v), dim=2)
        self.kept = k, v
        visible = replace(visible, keys=k.shape[2])
        if sinks_H is None:
            return super().forward(q, k, v, self.kernel.prepare(visible))
        groups = k.shape[1]
        scores = q.unflatten(1, (groups, -1)) @ k[:, :, None].mT * q.shape[-1] ** -0.5
        scores = scores.float().masked_fill(~visible.dense()[:, None], -math.inf)
        sinks = sinks_H.float().view(groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        return (weights.to(v.dtype) @ v[:, :, None]).flatten(1, 2)


@torch.no_grad()
def generate(model: nn.Module, prompt: list[int], choose: Callable[[Tensor], int], count: int = 0) -> Iterator[int]:
    """The tokens that follow a prompt, without end; choose picks a token from its logits (V,), float32 on the CPU.

    count: tokens that the caller takes; longrope chooses its factors by the length of the whole text.
    Every rank gets the same logits. Each call replaces the attention cores, so one prompt runs at a time.
    """
    for module in [*model.modules()]:
        if isinstance(getattr(module, "core", None), AttentionCore):
            module.core = CachedCore()
    model.seq_len = len(prompt) + count  # type: ignore[assignment]
    device = next(model.parameters()).device
    new, done = torch.tensor(prompt), 0
    while True:
        for tokens in new.split(_CHUNK_TOKENS):
            positions = torch.arange(done, done + len(tokens), device=device)
            logits = model(tokens[None].to(device), positions=positions[None])
            done += len(tokens)
        token = choose(logits[0, -1].float().cpu())
        yield token
        new = torch.tensor([token])


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """A token drawn from the softmax of logits (V,) / temperature. Temperature 0 always gives the likeliest token.

    Only the likeliest tokens, whose probabilities add up to top_p, can be drawn (arXiv:1904.09751).
    """
    if temperature == 0:
        return int(logits.argmax())
    probabilities, tokens = (logits.double() / temperature).softmax(dim=0).sort(descending=True, stable=True)
    before = probabilities.cumsum(dim=0) - probabilities
    return int(tokens[torch.multinomial(probabilities * (before < top_p), 1, generator=generator)])


def decode_stream(tokenizer: Tokenizer, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yields the text of the tokens that follow a prompt. Each character is held back until its last byte is there."""
    ids, start, said = [*prompt], 0, len(prompt)
    for token in tokens:
        ids.append(token)
        # Tokens are decoded with earlier ones, because some tokenizers leave out the space before a first word.
        before, text = tokenizer.decode(ids[start:said]), tokenizer.decode(ids[start:])
        if not text.endswith("\ufffd"):
            yield text[len(before) :]
            start, said = said, len(ids)
    if rest := tokenizer.decode(ids[start:])[len(tokenizer.decode(ids[start:said])) :]:
        yield rest


def continue_text(
    model: nn.Module, tokenizer: Tokenizer, prompt: str, count: int, temperature: float, top_p: float, seed: int
) -> Iterator[str]:
    """The text that follows a prompt, in pieces. It ends before the end-of-text token, or after `count` tokens.

    The text depends on seed and prompt, not on earlier prompts. Raises ConfigError for an empty prompt if the tokenizer
    has no token that begins a text.
    """
    ids = [*([] if tokenizer.bos_id is None else [tokenizer.bos_id]), *tokenizer.encode(prompt)]
    if not ids:
        raise ConfigError("an empty prompt, and the tokenizer has no token that begins a text")
    return continue_tokens(model, tokenizer, ids, {tokenizer.eos_id}, count, temperature, top_p, seed)


def continue_tokens(
    model: nn.Module,
    tokenizer: Tokenizer,
    ids: list[int],
    ends: Collection[int | None],
    count: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> Iterator[str]:
    """Yields the text that follows these tokens. It ends before one of `ends`, or after `count` tokens."""
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> int:
        # A model may have more rows than the tokenizer has tokens.
        return sample(logits[: tokenizer.vocab_size], temperature, top_p, generator)

    tokens = takewhile(lambda token: token not in ends, islice(generate(model, ids, choose, count), count))
    return decode_stream(tokenizer, ids, tokens)


def answers(
    model: nn.Module, chats: Chats, system: str, turns: Iterable[str], *sampling: Any
) -> Iterator[tuple[str, Iterator[str]]]:
    """Yields (a user's turn, the pieces of its answer) of one chat. A turn sees all earlier ones.

    Raises ConfigError for a turn that the template cannot show.
    """
    messages = [{"role": "system", "content": system}] if system else []
    try:
        ends = chats.ends()
    except BadChat as error:
        raise ConfigError(str(error)) from None
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        said: list[str] = []
        try:
            ids = chats.prompt(messages)
        except BadChat as error:
            raise ConfigError(f"{turn[:60]}: {error}") from None

        def pieces(ids: list[int] = ids, said: list[str] = said) -> Iterator[str]:
            for piece in continue_tokens(model, chats.tokenizer, ids, ends, *sampling):
                said.append(piece)
                yield piece

        yield turn, pieces()
        messages.append({"role": "assistant", "content": "".join(said)})


def main(argv: list[str]) -> int:
    """The command line; returns an exit code. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m components.generate", description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=path_argument, help="a run's dump_folder, or a Hugging Face folder")
    parser.add_argument("prompts", nargs="*", metavar="prompt", help="what each text begins with; with --chat, turns")
    parser.add_argument("--chat", action="store_true", help="prompts are a user's turns, or else lines of the console")
    parser.add_argument("--system", default="", help="the system's turn of a chat")
    parser.add_argument("--step", type=int, help="step of the checkpoint (default: the newest that verifies)")
    parser.add_argument("--tokenizer", type=local_path, help="file or folder (default: the tokenizer of the source)")
    parser.add_argument("--tokens", type=int, default=200, help="maximum after each prompt (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (0.8)")
    parser.add_argument("--top-p", type=float, default=1.0, help="total probability of the tokens to draw from (1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws, the same for each prompt (0)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="float32 on CPU, else bfloat16")
    options = parser.parse_intermixed_args(argv)
    for name, fits, allowed in (
        ("tokens", 1 <= options.tokens <= LARGEST, f"1 to {LARGEST:,}"),
        ("temperature", options.temperature == 0 or 1e-6 <= options.temperature < math.inf, "0, or 1e-6 or more"),
        ("top_p", 0 < options.top_p <= 1, "a number above 0 and at most 1"),
        ("seed", 0 <= options.seed < 2**64, "0 to 2^64 - 1"),
    ):
        if not fits:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: use {allowed}")
    if not options.prompts and not options.chat:
        parser.error("a prompt is missing")
    if options.system and not options.chat:
        parser.error("--system needs --chat")
    device = init_distributed(300)
    if options.chat and not options.prompts and dist.get_world_size() > 1:
        raise ConfigError("--chat on several ranks takes its turns from the command line")
    source = open_source(options.source, options.step, options.tokenizer)
    rows = source.model.config.vocab_size
    tokenizer = fitting_tokenizer(source.tokenizer, source.name, rows, source.separator)
    dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    model = build(source, device, getattr(torch, dtype))
    first = dist.get_rank() == 0
    if first:
        print(f"{source.said}, {dtype}", *passed_over(source.tokenizer), sep="\n", file=sys.stderr)
    sampling = options.tokens, options.temperature, options.top_p, options.seed
    if options.chat:
        turns = options.prompts or (line.rstrip("\n") for line in sys.stdin)
        said = answers(model, Chats(source.chat or Chat(), source.tokenizer), options.system, turns, *sampling)
    else:
        said = ((prompt, continue_text(model, tokenizer, prompt, *sampling)) for prompt in options.prompts)
    for number, (prompt, pieces) in enumerate(said):
        if first and options.chat:
            print("\n\n" * (number > 0) + f"> {prompt}\n", end="", flush=True)
        elif first:
            print("\n\n" * (number > 0) + prompt, end="", flush=True)
        for piece in pieces:
            if first:
                print(piece, end="", flush=True)
    if first:
        print()
    return ExitCode.DONE
