"""The two sets of sequences that a job asks for."""

from components.config import ConfigError, JobConfig, mistake
from components.data.cache import data_spec, prepare
from components.data.packed import PackedSequences


def build_datasets(config: JobConfig, vocab_size: int) -> tuple[PackedSequences, PackedSequences | None]:
    """Training sequences, and those that validation is on: data of its own, or a part held out.

    Raises:
        ConfigError: the tokenizer has more tokens than vocab_size, or there is not enough text.
    """
    training, validation = config.training, config.validation
    cache = prepare(data_spec(training, config.model.hf_assets_path))
    if cache.vocab_size > vocab_size:
        reason = f"{cache.vocab_size} tokens, but {config.model.name} {config.model.flavor} has a table of {vocab_size}"
        raise ConfigError(mistake(config, "model.hf_assets_path", reason))
    if not validation.enable:
        return PackedSequences(cache, training.seq_len), None
    seq_len = validation.seq_len or training.seq_len
    if validation.dataset_path:
        own = prepare(data_spec(training, config.model.hf_assets_path, validation.dataset_path))
        return PackedSequences(cache, training.seq_len), PackedSequences(own, seq_len)
    held_out = validation.held_out_fraction
    return (
        PackedSequences(cache, training.seq_len, "train", held_out),
        PackedSequences(cache, seq_len, "validation", held_out),
    )
