"""The global order of sequences: a seeded permutation per epoch, which is computed instead of stored."""

from typing import Any

import numpy as np

from components.config import ConfigError, JobConfig

_ROUNDS = 6


def sequence_at(positions: np.ndarray, num_sequences: int, seed: int) -> np.ndarray:
    """Sequence numbers (int64) at these positions of the global order, which start at 0 and have no end.

    Every epoch has a different permutation of range(num_sequences). Step t of a run with global batch G consumes
    positions t G to (t + 1) G - 1, at any layout. A Feistel network permutes the range up to the next power of four,
    and is applied until the result is in range (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    positions = np.asarray(positions, dtype=np.int64)
    epochs, index = np.divmod(positions, num_sequences)
    half_bits = max(1, ((num_sequences - 1).bit_length() + 1) // 2)
    keys = _mix(epochs.astype(np.uint64) ^ _mix(np.uint64(seed)))
    permuted = _feistel(index.astype(np.uint64), keys, half_bits)
    while (outside := permuted >= num_sequences).any():
        permuted[outside] = _feistel(permuted[outside], keys[outside], half_bits)
    return permuted.astype(np.int64)


def token_keys(positions: np.ndarray, seq_len: int, seed: int) -> np.ndarray:
    """Random int64 keys (n, seq_len), one per token of the sequences at these n positions of the global order."""
    tokens = np.asarray(positions, dtype=np.uint64)[:, None] * np.uint64(seq_len) + np.arange(seq_len, dtype=np.uint64)
    return _mix(tokens ^ _mix(np.uint64(seed))).view(np.int64)


def data_order(
    data_key: str, content: str | None, config: JobConfig, mixture: list[Any] | None = None
) -> dict[str, Any]:
    """Everything that determines the order of sequences.

    content: hash of the files of a streamed folder, because data_key does not depend on their content; else None.
    mixture: PackedSequences.mixture, instead of data_key.
    """
    data: dict[str, Any] = {"training.mixture": mixture} if mixture else {"data": data_key}
    order = data | {"training.seq_len": config.training.seq_len, "debug.seed": config.debug.seed}
    if window := config.training.dataset_shuffle_window:
        order["training.dataset_shuffle_window"] = window
    return order | ({"content of the stream's files": content} if content else {})


def check_data_order(saved: dict[str, Any], now: dict[str, Any], global_batch_size: int) -> None:
    """Raises ConfigError with all differences between a checkpoint's data order and the run's; both are Run.state.

    global_batch_size: the value in the job file; -1 if it follows from the layout.
    """
    before, order = ({"training.dataset_shuffle_window": 0, **each["data_order"]} for each in (saved, now))
    if "training.mixture" in before and "training.mixture" in order:  # phases may be added to what is to come
        before, order = (
            {**each, "training.mixture": [phase for phase in each["training.mixture"] if phase[0] < saved["sequences"]]}
            for each in (before, order)
        )
    # The key of the data is a hash.
    names = {"data": "the data (files, tokenizer, training.dataset_*, [chat], validation.held_out_fraction)"}
    changed = [
        f"{names.get(key, key)} was {was}, is {order.get(key)}" for key, was in before.items() if order.get(key) != was
    ]
    size, size_now = saved["global_batch_size"], now["global_batch_size"]
    if global_batch_size == -1 and size != size_now:
        changed.append(f"training.global_batch_size is unset and would be {size_now}; set it to {size}")
    if changed:
        remedy = 'to start the data anew, set checkpoint.exclude_from_loading = ["dataloader"]'
        if {*before} & {*order} >= {"training.mixture"} and before["training.mixture"] != order["training.mixture"]:
            remedy += (
                f"; new weights are a [[training.mixture_phase]] with from_sequence = {saved['sequences']} or more"
            )
        raise ConfigError([f"the checkpoint continues another run: {change}; {remedy}" for change in changed])


def _feistel(value: np.ndarray, keys: np.ndarray, half_bits: int) -> np.ndarray:
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = value >> shift, value & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (_mix(right ^ _mix(keys + np.uint64(number))) & mask)
    return np.asarray(left << shift | right)


def _mix(value: np.ndarray | np.uint64) -> np.ndarray:
    """splitmix64's finalizer: every bit of the result depends on every bit of the value."""
    with np.errstate(over="ignore"):
        value = np.asarray(value, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(value ^ (value >> np.uint64(31)))
