"""Dropout of adapters: the same numbers are dropped at every layout, after a resume, and in recomputed layers."""

import copy
import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from components.commands.figures import Observation, broken_bars
from components.config import Lora, Model
from components.data.order import token_keys
from models import meta_model
from models.lora import AdaptedLinear
from tests.harness import observe, rewrite

RATE = 0.25
ADAPTED = ("--model.flavor", "many_heads", "--lora.rank", "4", "--lora.alpha", "8", "--lora.dropout", str(RATE))
TP = ("--parallelism.tensor_parallel_degree", "2")
CP = ("--parallelism.context_parallel_degree", "2")
PP = ("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_microbatch_size", "9")
RECOMPUTED = ("--activation_checkpoint.mode", "full")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "fsdp 2": (2, ("--training.local_batch_size", "18")),
    "ddp 2, accumulation": (
        2,
        ("--parallelism.data_parallel_replicate_degree", "2", "--training.local_batch_size", "6"),
    ),
    "tp 2": (2, TP),
    "tp 2, whole": (2, (*TP, "--parallelism.sequence_parallel", "false")),
    "tp 2, one key head": (2, (*TP, "--model.flavor", "many_heads_1_key_heads")),
    "tp 2, nf4": (2, (*TP, "--model.flavor", "many_heads_wide", "--lora.base", "nf4")),
    "cp 2, padded": (2, (*CP, "--training.seq_len", "33")),
    "cp 2, tp 2, recomputed": (4, (*CP, *TP, *RECOMPUTED)),
    "pp 2, recomputed": (2, (*PP, *RECOMPUTED)),
    "pp 2, V, recomputed": (2, (*PP, *RECOMPUTED, "--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble")),
    "pp 2, parts": (2, (*PP, "--parallelism.pipeline_parallel_sequence_splits", "2")),
    "tp 2, compiled": (2, (*TP, "--compile.enable", "--compile.backend", "aot_eager")),
    "one, compiled": (1, ("--compile.enable",)),
    "one, recomputed by operation": (
        1,
        ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"),
    ),
    "one, gemma3": (2, (*TP, "--model.name", "gemma3")),
    "tp 2, attention beside experts": (
        2,
        (*TP, "--model.name", "qwen3_moe", "--lora.target_modules", '["wq", "wk", "wv", "wo"]'),
    ),
}
OF_THE_RUN = ("--model.", "--lora.", "--training.seq_len")


@functools.cache
def one_process(*words: str) -> Observation:
    return observe(*ADAPTED, *words)


def of_the_run(words: tuple[str, ...]) -> tuple[str, ...]:
    """The settings that one process has too."""
    return tuple(
        word
        for key, value in zip(words, (*words[1:], ""), strict=True)
        if key.startswith(OF_THE_RUN)
        for word in (key, value)
    )


@pytest.mark.parametrize(("ranks", "words"), LAYOUTS.values(), ids=LAYOUTS)
def test_the_same_numbers_are_dropped_at_every_layout(ranks: int, words: tuple[str, ...]) -> None:
    assert broken_bars(observe(*ADAPTED, *words, ranks=ranks), one_process(*of_the_run(words))) == {}


def test_another_probability_or_none_is_another_run() -> None:
    for words in (("--lora.dropout", "0"), ("--lora.dropout", "0.24")):
        assert "gradient" in broken_bars(one_process(*words), one_process())


def test_a_resume_drops_what_the_unbroken_run_drops(tmp_path: Path) -> None:
    words = (*ADAPTED, "--checkpoint.enable")
    unbroken = observe(*words, steps=4)
    shared = (*words, "--training.local_batch_size", "18")
    observe(*shared, ranks=2, steps=2, folder=str(tmp_path))
    rest = observe(*shared, ranks=2, steps=2, folder=str(tmp_path))
    assert rest.losses == pytest.approx(unbroken.losses[2:], rel=1e-6)
    for name, weight in unbroken.weights.items():
        torch.testing.assert_close(rest.weights[name], weight, rtol=1e-5, atol=1e-7)


FAULTS = {
    "columns of a rank": (
        ("parallelize.tensor", "compute_locally", 'own_slice(module.get_parameter("lora_A"))[1][1]', "0"),
        TP,
    ),
    "keys of a rank's sequences": (
        (
            "components.data.loader",
            "_columns",
            "(sequences, positions, seed)",
            "(sequences, positions - positions[0], seed)",
        ),
        ("--training.local_batch_size", "18"),
    ),
    "keys of another part of the sequence": (
        (
            "parallelize.context",
            "shard_sequence",
            "rank_order(tensor",
            "rank_order(tensor.roll(int('drop' in name), 1)",
        ),
        CP,
    ),
    "keys of another micro-batch": (
        ("models.lora", "_forward_with_keys", "AdaptedLinear)", "AdaptedLinear) and module.dropout_keys_BS is None"),
        PP,
    ),
    "one pattern for all modules": (("models.lora", "AdaptedLinear.added", "self.key", "first"), TP),
}


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "words"), FAULTS.values(), ids=FAULTS)
def test_a_fault_in_what_is_dropped_is_found(fault: tuple[str, str, str, str], words: tuple[str, ...]) -> None:
    observed = observe(*ADAPTED, *words, ranks=2, mutate=functools.partial(rewrite, *fault))
    assert "gradient" in broken_bars(observed, one_process())


def dropping(rate: float = RATE) -> AdaptedLinear:
    module = AdaptedLinear(torch.nn.Linear(512, 8, bias=False), 8, 2.0, rate, "layers.0.attention.wq.weight")
    torch.nn.init.eye_(module.lora_B)
    torch.nn.init.zeros_(module.weight)
    return module


def test_a_number_is_dropped_with_the_probability_asked_for_and_the_others_make_up_for_it() -> None:
    keys = torch.from_numpy(token_keys(np.arange(64), 32, 0))
    module = dropping()
    module.dropout_keys_BS = keys
    with torch.no_grad():
        kept = torch.stack([_kept(module, column) for column in range(4)], -1)
    assert kept.double().mean() == pytest.approx(1 - RATE, abs=4 * (RATE * (1 - RATE) / kept.numel()) ** 0.5)
    assert abs(torch.corrcoef(kept.flatten(0, 1).T.double()).triu(1)).max() < 0.1


def _kept(module: AdaptedLinear, column: int) -> torch.Tensor:
    """(B, S): whether this column of each token is kept."""
    torch.nn.init.zeros_(module.lora_A)[0, column] = 1
    assert module.dropout_keys_BS is not None
    out = module(torch.ones(*module.dropout_keys_BS.shape, 512))[..., 0]
    assert {round(each, 5) for each in out.unique().tolist()} == {0, round(2 / (1 - RATE), 5)}
    return out > 0


def test_keys_of_tokens_are_of_the_seed_and_of_the_position() -> None:
    keys = token_keys(np.arange(100), 64, 0)
    assert len(np.unique(keys)) == keys.size
    assert np.array_equal(token_keys(np.array([7, 3]), 64, 0), keys[[7, 3]])
    assert not np.isin(token_keys(np.arange(100), 64, 1), keys).any()


def test_nothing_is_dropped_without_keys_and_a_copy_drops_by_itself() -> None:
    model = meta_model(Model(name="llama", flavor="tiny", lora=Lora(rank=4, dropout=RATE))).to_empty(device="cpu")
    plain = meta_model(Model(name="llama", flavor="tiny", lora=Lora(rank=4))).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    plain.load_state_dict(model.state_dict())
    tokens = torch.arange(48).view(2, 24)
    keys = torch.from_numpy(token_keys(np.arange(2), 24, 0))
    other = copy.deepcopy(model)
    dropped = model(tokens, dropout_keys=keys)
    assert torch.equal(model(tokens), plain(tokens))
    assert torch.equal(other(tokens, dropout_keys=keys), dropped)
    assert not torch.allclose(dropped, plain(tokens))
    assert all(each.dropout_keys_BS is None for each in model.modules() if isinstance(each, AdaptedLinear))
