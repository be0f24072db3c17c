"""The two sets of sequences that a job asks for."""

import os

from components.config import ConfigError, JobConfig, mistake
from components.data.cache import data_spec, prepare
from components.data.packed import PackedSequences, StreamedSequences
from components.data.stream import StreamCache, is_stream, start_writer, stream_spec


def build_datasets(config: JobConfig, vocab_size: int) -> tuple[PackedSequences, PackedSequences | None]:
    """Training sequences, and those that validation is on: data of its own, or a part held out.

    Raises ConfigError: the tokenizer has more tokens than vocab_size, or there is not enough text.
    """
    training, validation = config.training, config.validation
    if is_stream(training):
        return _streamed(config, vocab_size)
    cache = prepare(data_spec(training, config.model.hf_assets_path))
    _check_vocabulary(config, cache.vocab_size, vocab_size)
    if not validation.enable:
        return PackedSequences(cache, training.seq_len), None
    if validation.dataset_path:
        return PackedSequences(cache, training.seq_len), _own_validation(config)
    seq_len, held_out = validation.seq_len or training.seq_len, validation.held_out_fraction
    return (
        PackedSequences(cache, training.seq_len, "train", held_out),
        PackedSequences(cache, seq_len, "validation", held_out),
    )


def _streamed(config: JobConfig, vocab_size: int) -> tuple[PackedSequences, PackedSequences | None]:
    from parallelize.groups import from_rank_0

    # A dataset of the hub may change from one moment to the next: all ranks read the commit that one of them was told.
    spec = from_rank_0(lambda: stream_spec(config))
    _check_vocabulary(config, spec.vocab_size, vocab_size)
    writer = start_writer(spec) if int(os.environ.get("LOCAL_RANK", 0)) == 0 else None
    train_set = StreamedSequences(StreamCache(spec, writer), config.training.seq_len)
    return train_set, _own_validation(config) if config.validation.enable else None


def _own_validation(config: JobConfig) -> PackedSequences:
    own = prepare(data_spec(config.training, config.model.hf_assets_path, config.validation.dataset_path))
    return PackedSequences(own, config.validation.seq_len or config.training.seq_len)


def _check_vocabulary(config: JobConfig, found: int, most: int) -> None:
    if found > most:
        reason = f"{found} tokens, but {config.model.name} {config.model.flavor} has a table of {most}"
        raise ConfigError(mistake(config, "model.hf_assets_path", reason))
