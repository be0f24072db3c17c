"""The datasets of a job: training and validation sequences, of text or of chats, streamed or not."""

import os
import sys
from dataclasses import replace
from typing import Any

from components.config import ConfigError, JobConfig, mistake
from components.config.tables import Training
from components.data.cache import DataSpec, data_spec, prepare
from components.data.hub import download_split, is_of_hub
from components.data.mixture import Mixture, phases
from components.data.packed import PackedSequences, StreamedSequences
from components.data.remote import localize
from components.data.rows import ChatCache, ChatRows, ChatSpec
from components.data.stream import StreamCache, is_stream, start_writer, stream_spec
from components.data.token_files import TokenSpec, check_ids
from components.data.tokenizer import check_tokenizer, load_tokenizer
from components.data.tokens import JoinedTokens, Tokens
from components.launch.orphan import LAUNCHER_PIPE


def source_numbers(training: Training) -> list[int]:
    """1, 2, ... for the sources of a mixture; 0, for training.dataset, without one."""
    return [number for number, _ in enumerate(training.mixture, 1)] or [0]


def of_source(training: Training, number: int) -> Training:
    """The training data of a source alone; training itself for 0."""
    if not number:
        return training
    source = training.mixture[number - 1]
    names = ("dataset", "dataset_text_field", "dataset_format")
    given: dict[str, Any] = {name: getattr(source, name) or getattr(training, name) for name in names}
    return replace(training, **given, dataset_path=source.dataset_path, mixture=[], mixture_phase=[])


def spec_of(config: JobConfig, path: str | None = None, source: int = 0) -> DataSpec:
    """The spec of a job's training data, of one of its source_numbers, or of data at another path.

    Downloads data of the hub. Raises ConfigError for an unknown dataset, or if it cannot be downloaded.
    """
    training, tokenizer = of_source(config.training, source), config.model.hf_assets_path
    on_hub = path is None and is_of_hub(training)
    spec = data_spec(training, tokenizer, training.dataset if on_hub else path)
    if on_hub:
        spec = replace(spec, path=str(download_split(config, spec.cache_folder / "hub", source)))
    if training.dataset_format == "tokens":
        return TokenSpec(**vars(spec), token_dtype=training.token_dtype)
    return ChatSpec(**vars(spec), chat=config.chat) if training.dataset_format == "chat" else spec


def build_datasets(config: JobConfig, vocab_size: int) -> tuple[PackedSequences, PackedSequences | None]:
    """(training sequences, validation sequences or None). Validation has separate data or a held-out part.

    All ranks must call this function. Raises ConfigError in four cases:

    - The tokenizer has more tokens than vocab_size, or lacks training.dataset_separator.
    - A token file has an id of vocab_size or more.
    - There is not enough text.
    - The files on the nodes differ.
    """
    import torch.distributed as dist  # whoever only tokenizes needs no torch

    from parallelize.groups import gather

    warnings = check_tokenizer(config)
    if LAUNCHER_PIPE not in os.environ and os.environ.get("RANK", "0") == "0":  # else the launcher has printed them
        print(*(f"warning: {warning}" for warning in warnings), sep="\n", end="\n" * bool(warnings), file=sys.stderr)
    built = _build(localize(config), vocab_size)  # a launcher has localized the job already
    if dist.is_initialized():
        found = gather([(part.key, part.content) for part in built if part is not None])
        if others := [rank for rank, parts in enumerate(found) if parts != found[0]]:
            given = config.training
            where = given.dataset_path or ("of the mixture" if given.mixture else given.dataset)
            reason = f"ranks {', '.join(map(str, others))} have found other data than rank 0"
            raise ConfigError(f"training data {where}: {reason}: all nodes need the same files")
    return built


def _build(config: JobConfig, vocab_size: int) -> tuple[PackedSequences, PackedSequences | None]:
    training, validation = config.training, config.validation
    if is_stream(training):
        return _streamed(config, vocab_size)
    if training.mixture:
        mixture, held = mixtures(config, vocab_size)
        own = validation.enable and validation.dataset_path
        return mixture, _own_validation(config, vocab_size) if own else held
    cache = prepare(spec_of(config))
    _check_tokens(config, cache, vocab_size)
    if not validation.enable:
        return packed(config, cache, training.seq_len), None
    if validation.dataset_path:
        return packed(config, cache, training.seq_len), _own_validation(config, vocab_size)
    seq_len, held_out = validation.seq_len or training.seq_len, validation.held_out_fraction
    return (
        packed(config, cache, training.seq_len, "train", held_out),
        packed(config, cache, seq_len, "validation", held_out),
    )


def mixtures(config: JobConfig, vocab_size: int) -> tuple[Mixture, Mixture | None]:
    """(training sequences, held-out sequences or None) of a job with a mixture. Raises ConfigError."""
    training, validation = config.training, config.validation
    bounds = {source.name: source.max_epochs for source in training.mixture}
    specs = [spec_of(config, source=number) for number in source_numbers(training)]
    caches = {source.name: prepare(spec) for source, spec in zip(training.mixture, specs, strict=True)}
    for cache in caches.values():
        _check_tokens(config, cache, vocab_size)

    def mixture(seq_len: int, *part: Any) -> Mixture:
        found = {}
        for name, cache in caches.items():
            try:
                found[name] = packed(config, cache, seq_len, *part)
            except ConfigError as error:
                raise ConfigError([f"training.mixture: {name}: {message}" for message in error.messages]) from None
        shares = phases(training, {name: each.num_tokens for name, each in found.items()})
        return Mixture(found, shares, seq_len, part[0] if part else "train", bounds)

    if not validation.enable or validation.dataset_path:
        return mixture(training.seq_len), None
    held_out = validation.held_out_fraction
    held = mixture(validation.seq_len or training.seq_len, "validation", held_out)
    return mixture(training.seq_len, "train", held_out), held


def packed(config: JobConfig, cache: Tokens, *given: Any) -> PackedSequences:
    """Sequences of a cache. `given` holds the arguments seq_len, part and held_out_fraction of PackedSequences."""
    return ChatRows(cache, config.chat, *given) if isinstance(cache, ChatCache) else PackedSequences(cache, *given)


def _streamed(config: JobConfig, vocab_size: int) -> tuple[PackedSequences, PackedSequences | None]:
    from parallelize.together import together

    # A dataset of the hub may change at any time, so all ranks read the commit that rank 0 has resolved.
    spec = together(lambda: stream_spec(config), first_only=True)[0]
    _check_vocabulary(config, spec.vocab_size, vocab_size)
    first_of_node = int(os.environ.get("LOCAL_RANK", 0)) == 0
    if first_of_node and spec.revision is None:  # another node may have other files in this folder
        spec = replace(spec, content=stream_spec(config).content)
    writer = start_writer(spec) if first_of_node else None
    seq_len, window = config.training.seq_len, config.training.dataset_shuffle_window
    train_set = StreamedSequences(StreamCache(spec, writer), seq_len, window)
    return train_set, _own_validation(config, vocab_size) if config.validation.enable else None


def _own_validation(config: JobConfig, vocab_size: int) -> PackedSequences:
    own = prepare(spec_of(config, config.validation.dataset_path))
    _check_tokens(config, own, vocab_size)
    return packed(config, own, config.validation.seq_len or config.training.seq_len)


def _check_tokens(config: JobConfig, tokens: Tokens, most: int) -> None:
    for segment in tokens.segments if isinstance(tokens, JoinedTokens) else ():
        check_ids(segment, most, f"{_table(config, most)} grows it")
    _check_vocabulary(config, tokens.vocab_size, most)


def _check_vocabulary(config: JobConfig, found: int, most: int) -> None:
    tokenizer = config.model.hf_assets_path, config.training.dataset_separator
    if found > most and (found := load_tokenizer(*tokenizer).rows) > most:
        reason = f"{found} tokens, but {_table(config, most)} = {found} grows it"
        raise ConfigError(mistake(config, "model.hf_assets_path", reason))


def _table(config: JobConfig, most: int) -> str:
    return f"{config.model.name} {config.model.flavor} has a table of {most}; model.sizes.vocab_size"
