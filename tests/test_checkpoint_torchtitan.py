"""Weights from torchtitan's own checkpoints: its names, its order of rows, and no manifest."""

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from components.state.torchtitan import halves_of_pairs
from models import MODELS
from models.nf4 import pack, unpack
from models.parameters import is_adapter
from models.rotary import apply_rotary, rotary_cos_sin, rotary_frequencies
from tests.checkpoints import run, value_of
from tests.harness import observe, rewrite


def _pairs(weight: Tensor, head_dim: int) -> Tensor:
    """A weight here in torchtitan's order: a head's row i and row i + head_dim / 2 follow each other."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def _weights(name: str, flavor: str) -> dict[str, Tensor]:
    torch.manual_seed(7)
    model = MODELS[name][0](MODELS[name][1][flavor])
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _save(folder: Path, name: str, flavor: str, prefix: str, apart: float = 0.0) -> None:
    """What torchtitan v0.2 saves: weights by name, and tables of the rest, with numbers and bytes in them."""
    head_dim, theirs = MODELS[name][1][flavor].head_dim, {}
    for key, weight in _weights(name, flavor).items():
        paired = name == "llama" and key.endswith(("attention.wq.weight", "attention.wk.weight"))
        theirs[prefix + key] = _pairs(weight, head_dim) if paired else weight
    if flavor.endswith("_tied"):
        theirs[f"{prefix}output.weight"] = theirs[f"{prefix}tok_embeddings.weight"] + apart
    moments = {f"state.{key}.exp_avg": torch.zeros_like(weight) for key, weight in theirs.items()}
    losses = io.BytesIO()
    torch.save([1.0, 2.0], losses)
    rest = {
        "optimizer": {**moments, "param_groups.norm.weight.lr": 1e-3},
        "lr_scheduler": {"last_epoch": 3, "_step_count": 4},
        "train_state": {"step": torch.tensor(3), "ntokens_seen": torch.tensor(99), "losses": losses},
        "dataloader": {"dp_rank_0": b"bytes", "world_size": 1},
    }
    dcp.save({**theirs, **rest}, checkpoint_id=folder / "step-3")


TP = ("--parallelism.tensor_parallel_degree", "2")
V_OF_TWO = (
    *("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_microbatch_size", "6"),
    *("--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble"),
)
CASES = {
    "llama, names alone": ("llama", "odd", "", 1, ()),
    "llama, fsdp 3 cuts heads": ("llama", "odd", "model.", 3, ("--training.local_batch_size", "12")),
    "llama, tp 2": ("llama", "tiny", "", 2, TP),
    "qwen3, tied": ("qwen3", "tiny_tied", "", 1, ()),
    "llama, tied, both ends on a rank": ("llama", "long_tied", "", 2, V_OF_TWO),
    "llama, the base of adapters": ("llama", "tiny", "model.", 1, ("--lora.rank", "4")),
    "llama, the base in 4 bits, tp 2": ("llama", "tiny_wide", "", 2, (*TP, "--lora.rank", "4", "--lora.base", "nf4")),
}


def start_from(folder: Path, name: str, flavor: str, *more: str) -> tuple[str, ...]:
    given = ("--checkpoint.enable", "--checkpoint.initial_load_path", str(folder))
    return ("--model.name", name, "--model.flavor", flavor, *given, *more)


def _base(name: str, weight: Tensor, packed: bool) -> Tensor:
    if not packed:
        return weight
    return unpack(pack(weight)) if name.startswith("layers.") and weight.ndim == 2 else weight.bfloat16()


@pytest.mark.parametrize("case", CASES)
def test_a_run_starts_from_a_checkpoint_of_torchtitan(tmp_path: Path, case: str) -> None:
    name, flavor, prefix, ranks, words = CASES[case]
    value_of(_save, tmp_path / "theirs", name, flavor, prefix)
    given = start_from(tmp_path / "theirs", name, flavor, *words)
    observed = observe(*given, ranks=ranks, steps=0, folder=str(tmp_path / "run"))
    expected = _weights(name, flavor)
    assert {key for key in observed.first_weights if not is_adapter(key)} == expected.keys()
    packs = "nf4" in words
    wrong = [
        key for key, weight in expected.items() if not observed.first_weights[key].equal(_base(key, weight, packs))
    ]
    assert not wrong


def test_rows_in_its_order_would_be_seen(tmp_path: Path) -> None:
    value_of(_save, tmp_path / "theirs", "llama", "odd", "")
    plant = partial(rewrite, "components.state.torchtitan", "halves_of_pairs", ".transpose(1, 2)", "")
    given = start_from(tmp_path / "theirs", "llama", "odd")
    observed = observe(*given, steps=0, folder=str(tmp_path / "run"), mutate=plant).first_weights
    wrong = {key for key, weight in _weights("llama", "odd").items() if not observed[key].equal(weight)}
    assert wrong == {"layers.0.attention.wq.weight", "layers.0.attention.wk.weight"}


def test_attention_is_the_same_in_either_order() -> None:
    """torchtitan rotates neighbouring numbers of a head, as complex ones, by the position's angles."""
    torch.manual_seed(0)
    x, query, key = torch.randn(1, 9, 40), torch.randn(3 * 8, 40), torch.randn(3 * 8, 40)
    positions, frequencies = torch.arange(9)[None], rotary_frequencies(8, 500.0, None, torch.device("cpu"))
    turns = torch.polar(torch.ones(9, 4), positions[0, :, None] * frequencies)[None, :, None]
    cos, sin = rotary_cos_sin(positions, frequencies)

    def scores(rotate: Any, *weights: Tensor) -> Tensor:
        q, k = (rotate((x @ weight.T).unflatten(-1, (3, 8))) for weight in weights)
        return torch.einsum("bshk,bthk->bhst", q, k)

    def theirs(heads: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(heads.unflatten(-1, (4, 2))) * turns).flatten(-2)

    right = scores(theirs, query, key)
    ours = scores(lambda heads: apply_rotary(heads, cos, sin), halves_of_pairs(query, 8), halves_of_pairs(key, 8))
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-3)
    unchanged = scores(lambda heads: apply_rotary(heads, cos, sin), query, key)
    assert (unchanged - right).abs().max() > 1


def _start(folder: Path, flavor: str, change: str) -> None:
    from components.config import Checkpoint
    from components.state.checkpoint import Checkpointer

    table = folder / "step-3" / ".metadata"
    if change == "link":
        table.rename(folder / "elsewhere")
        table.symlink_to(folder / "elsewhere")
    model = MODELS["llama"][0](MODELS["llama"][1][flavor])
    config = Checkpoint(enable=True, initial_load_path=str(folder), initial_load_model_only=change != "everything")
    loader = Checkpointer(folder / "run", config, [model], torch.optim.AdamW(model.parameters()))
    assert loader.load_initial() is None


def test_what_is_said_and_what_is_refused(tmp_path: Path) -> None:
    value_of(_save, tmp_path, "llama", "tiny", "")
    outcome = run(_start, tmp_path, "tiny", "")[0]
    assert outcome.error == ""
    said = "is torchtitan's: it has no manifest.json, so nothing could be verified against hashes"
    assert f"{tmp_path}/step-3 {said}" in outcome.printed
    error = run(_start, tmp_path, "odd", "")[0].error
    assert "does not fit this model: tok_embeddings.weight is (1024, 64) there and (1027, 50) here" in error
    assert "layers.1.attention.wq.weight is not in this model" in error
    assert "no manifest.json in it" in run(_start, tmp_path, "tiny", "everything")[0].error
    assert ".metadata is a symbolic link" in run(_start, tmp_path, "tiny", "link")[0].error
    value_of(_save, tmp_path / "apart", "llama", "tiny_tied", "", 1.0)
    said = "output.weight is another tensor than the embedding, to which this model ties it"
    assert said in run(_start, tmp_path / "apart", "tiny_tied", "")[0].error
