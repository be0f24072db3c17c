"""The datasets of a job: training and validation sequences, of text or of chats, streamed or not."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from components.config import ConfigError, JobConfig, mistake
from components.config.tables import Training
from components.data.cache import DataSpec, data_spec, prepare
from components.data.hub import download_split, is_of_hub
from components.data.mixture import Mixture, phases
from components.data.packed import PackedSequences, StreamedSequences
from components.data.pairs import PairCache, PairRows, PairSpec
from components.data.remote import localize
from components.data.rows import ChatCache, ChatRows, ChatSpec
from components.data.sources import has_fields
from components.data.stream import StreamCache, is_stream, start_writer, stream_spec
from components.data.teacher import open_rows
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

    Downloads data of the hub. Raises ConfigError for an unknown dataset, if it cannot be downloaded, or if a field is
    given for text files.
    """
    training, tokenizer = of_source(config.training, source), config.model.hf_assets_path
    on_hub = path is None and is_of_hub(training)
    spec = data_spec(training, tokenizer, training.dataset if on_hub else path)
    if on_hub:
        spec = replace(spec, path=str(download_split(config, spec.cache_folder / "hub", source)))
    if training.dataset_format == "tokens":
        return TokenSpec(**vars(spec), token_dtype=training.token_dtype)
    kinds = {"chat": ChatSpec, "preference": PairSpec}
    if kind := kinds.get(training.dataset_format):
        return kind(**vars(spec), chat=config.chat)
    key = f"training.mixture[{source}].dataset_text_field" if source else "training.dataset_text_field"
    if path is None and key in config.origins and not any(has_fields(file) for file in spec.files()):
        raise ConfigError(mistake(config, key, f"{spec.path} has texts without fields: leave it out"))
    return spec


def build_datasets(config: JobConfig, vocab_size: int) -> tuple[PackedSequences, PackedSequences | None]:
    """(training sequences, validation sequences or None). Validation has separate data or a held-out part.

    All ranks must call this function. Raises ConfigError in four cases:

    - The tokenizer has more tokens than vocab_size, or lacks training.dataset_separator.
    - A token file has an id of vocab_size or more.
    - There is not enough text.
    - The files on the nodes differ.
    """
    import torch.distributed as dist  # whoever only tokenizes needs no torch

    warnings = check_tokenizer(config)
    if LAUNCHER_PIPE not in os.environ and os.environ.get("RANK", "0") == "0":  # else the launcher has printed them
        print(*(f"warning: {warning}" for warning in warnings), sep="\n", end="\n" * bool(warnings), file=sys.stderr)
    built = open_datasets(localize(config), vocab_size)  # a launcher has localized the job already
    if dist.is_initialized():
        given = config.training
        where = given.dataset_path or ("of the mixture" if given.mixture else given.dataset)
        _check_same_on_ranks(f"data {where}", built)
    return built


def specs_beside(config: JobConfig) -> dict[str, DataSpec]:
    """Key -> the spec of data that validations read beside the training data. Raises ConfigError as spec_of."""
    own, text = config.validation.dataset_path, text_spec(config)
    found = {"validation.dataset_path": spec_of(config, own)} if config.validation.enable and own else {}
    return found | ({"validation.text_path": text} if text else {})


def text_spec(config: JobConfig) -> DataSpec | None:
    """The data of validation.text_path; None without such a text, or without validations."""
    path = config.validation.enable and config.validation.text_path
    return data_spec(config.training, config.model.hf_assets_path, path) if path else None


def build_text(config: JobConfig, vocab_size: int) -> PackedSequences:
    """The sequences of validation.text_path. All ranks must call this function. Raises as build_datasets."""
    text = open_text(localize(config), vocab_size)
    _check_same_on_ranks(f"validation.text_path {config.validation.text_path}", [text])
    assert text
    return text


def open_text(config: JobConfig, vocab_size: int) -> PackedSequences | None:
    """build_text for one process, of a job without remote data; None without a text."""
    spec = text_spec(config)
    return _beside(config, "validation.text_path", spec, vocab_size, PackedSequences) if spec else None


def _check_same_on_ranks(what: str, parts: Sequence[PackedSequences | None]) -> None:
    from parallelize.groups import gather

    found = gather(
        [
            (part.key, part.content, [each.teacher and each.teacher.name for each in sources_of(part)])
            for part in parts
            if part is not None
        ]
    )
    if others := [rank for rank, own in enumerate(found) if own != found[0]]:
        reason = f"ranks {', '.join(map(str, others))} have found other data than rank 0"
        raise ConfigError(f"{what}: {reason}: all nodes need the same files")


def open_datasets(config: JobConfig, vocab_size: int) -> tuple[PackedSequences, PackedSequences | None]:
    """build_datasets for one process, of a job without remote data."""
    found = _build(config, vocab_size)
    _check_teachers(config, found, vocab_size)
    return found


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
    """Sequences of a cache, with their teacher's rows. `given`: seq_len, part and held_out_fraction of PackedSequences.

    Raises ConfigError if a teacher's rows are missing.
    """
    made: PackedSequences
    if isinstance(cache, ChatCache):
        made = (PairRows if isinstance(cache, PairCache) else ChatRows)(cache, config.chat, *given)
    else:
        made = PackedSequences(cache, *given)
    if config.distill.alpha:
        made.teacher = open_rows(config, made)
    return made


def sources_of(sequences: PackedSequences) -> list[PackedSequences]:
    """The sources of a mixture, or the sequences themselves."""
    return [*sequences.sources.values()] if isinstance(sequences, Mixture) else [sequences]


def _check_teachers(config: JobConfig, parts: Sequence[PackedSequences | None], most: int) -> None:
    for each in (source for part in parts if part is not None for source in sources_of(part)):
        if each.teacher and each.teacher.about.largest >= most:
            about, most_of = each.teacher.about, _table(config, most)
            reason = f"{about.teacher} has token {about.largest}, but {most_of} = {about.largest + 1} grows it"
            raise ConfigError(mistake(config, "distill.alpha", reason))


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
    spec = spec_of(config, config.validation.dataset_path)
    return _beside(config, "validation.dataset_path", spec, vocab_size, partial(packed, config))


def _beside(
    config: JobConfig, key: str, spec: DataSpec, vocab_size: int, cut: Callable[[Any, int], PackedSequences]
) -> PackedSequences:
    """The sequences of data beside the training data, which a key names."""
    with about(config, key):
        cache = prepare(spec)
    _check_tokens(config, cache, vocab_size)
    with about(config, key):
        return cut(cache, config.validation.seq_len or config.training.seq_len)


@contextmanager
def about(config: JobConfig, key: str) -> Iterator[None]:
    """Names the key of data in the messages of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([mistake(config, key, message) for message in error.messages]) from None


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
