"""Weights in bfloat16, moments in bfloat16 and 8 bits: rounded fairly, alike at every layout, kept by checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import train
from components.commands.figures import figures
from components.commands.observed import whole_tensors, whole_weights
from components.config import load_config
from components.optim import optimizer as optimizers
from components.optim.counter_hash import chunks
from components.optim.muon import Muon
from components.optim.optimizer import Adam, AdamW, state_bytes, update
from components.optim.rounded_adam import RoundedAdam
from components.optim.rounding import Kept, RandomBits, new_moment, to_bfloat16
from components.state import init
from models.random_bits import key_of
from parallelize.sharding import local_part
from tests.harness import observe

WEIGHTS, STATE = ("--training.dtype", "bfloat16"), "--optimizer.state_dtype"
KINDS: dict[str, tuple[str, ...]] = {
    "bfloat16 weights": WEIGHTS,
    "bfloat16 moments": (STATE, "bfloat16"),
    "8-bit moments": (STATE, "int8"),
    "bfloat16 weights, 8-bit moments": (*WEIGHTS, STATE, "int8"),
    "Adam": (*WEIGHTS, STATE, "bfloat16", "--optimizer.name", "Adam"),
    "Muon": (*WEIGHTS, STATE, "int8", "--optimizer.name", "Muon"),
}
REPLICATE, SHARD, TP, PP, LOCAL = (
    "--parallelism.data_parallel_replicate_degree",
    "--parallelism.data_parallel_shard_degree",
    "--parallelism.tensor_parallel_degree",
    "--parallelism.pipeline_parallel_degree",
    "--training.local_batch_size",
)
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "fsdp 2": (2, (SHARD, "2", LOCAL, "18")),
    "fsdp 3": (3, (SHARD, "3", LOCAL, "12")),
    "tp 2": (2, (TP, "2")),
    "ddp 2, accumulating": (2, (REPLICATE, "2", LOCAL, "6")),
    "pp 2 x fsdp 2": (4, (PP, "2", SHARD, "2", LOCAL, "18")),
    "fsdp 2 x tp 2, offloaded": (4, (SHARD, "2", TP, "2", LOCAL, "18", "--training.enable_cpu_offload", "true")),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def rounded(values: Tensor, dtype: str, draws: int, signed: bool = True) -> Tensor:
    """(draws, ...): what is read of values that were kept, each time with other bits."""
    read = []
    for draw in range(draws):
        kept = Kept.of(new_moment(values, "moment", dtype, signed), "moment", draw % 3)
        for rows, indices in chunks(values):
            kept.write(rows, values[rows].clone(), RandomBits(indices, draw, torch.tensor(1.0)), None)
        read.append(kept.read(slice(None)))
    return torch.stack(read)


@pytest.mark.parametrize(("dtype", "signed"), [("bfloat16", True), ("int8", True), ("int8", False)])
def test_rounding_is_up_or_down_and_fair(dtype: str, signed: bool) -> None:
    torch.manual_seed(0)
    values = torch.randn(8, 1024) if signed else torch.randn(8, 1024).square()
    found = rounded(values, dtype, draws=300, signed=signed)
    assert all(len(found[:, 0, column].unique()) <= 2 for column in range(200))
    spread = found.std(0)
    off = (found.mean(0) - values) / (spread / 300**0.5).clamp(min=1e-9)
    moved = spread > 0
    # A second moment's smallest code is not 0, which the bias of those that would be near it tells.
    fair = moved if signed else moved & (values > 1e-6)
    assert fair.sum() > 0.9 * values.numel()
    assert off[fair].abs().mean() < 1.0  # 0.8 of a normal distribution
    assert off[fair].mean().abs() < 0.1


def test_what_has_an_exact_code_keeps_it() -> None:
    values = torch.randn(4, 256).bfloat16().float()
    assert torch.equal(rounded(values, "bfloat16", 3), values.expand(3, -1, -1))
    found = rounded(values, "int8", 3).view(3, 4, 16, 16)
    largest = values.view(4, 16, 16).abs().amax(-1)
    assert torch.allclose(found.abs().amax(-1), largest.expand(3, -1, -1), rtol=1e-6)
    assert torch.equal(rounded(torch.zeros(4, 256), "int8", 2), torch.zeros(2, 4, 256))


def test_no_second_moment_is_rounded_to_zero() -> None:
    values = torch.logspace(-20, 0, 256)[torch.randperm(256)].expand(4, 256).contiguous()
    assert rounded(values, "int8", 5, signed=False).min() > 0


@pytest.mark.parametrize("decoupled", [True, False])
def test_without_rounding_updates_are_those_of_torch(decoupled: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(40, 70)) for _ in range(2))
    settings: Any = {"lr": 1e-2, "weight_decay": 0.1}
    one = RoundedAdam([{"params": [ours], "names": ["weight"], **settings}], (0.9, 0.95), 1e-8, 0, "float32", decoupled)
    reference = (AdamW if decoupled else Adam)([{"params": [theirs], **settings}], betas=(0.9, 0.95), fused=True)
    for _ in range(4):
        ours.grad = torch.randn(40, 70)
        theirs.grad = ours.grad.clone()
        one.step()
        reference.step()
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)


def test_each_step_each_name_and_each_number_has_other_bits() -> None:
    def bits(name: str, step: int, turn: int) -> Tensor:
        made = [
            RandomBits(indices, key_of(0, name), torch.tensor(float(step)))
            for _, indices in chunks(torch.empty(256, 256))
        ]
        return torch.cat([each.take(turn) for each in made])

    drawn = [bits(name, step, turn) for name in ("a", "b") for step in (1, 2) for turn in (0, 1, 2)]
    for number, left in enumerate(drawn):
        assert 0 <= left.min() <= left.max() < 1 << 16
        assert abs(left.float().mean() / (1 << 15) - 1) < 0.05
        for right in drawn[:number]:
            assert (
                abs(torch.corrcoef(torch.stack([left.flatten(), right.flatten()]).float())[0, 1]) < 0.023
            )  # six deviations


@pytest.mark.parametrize("muon", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_an_update_that_is_not_accepted_changes_no_bit(dtype: str, muon: bool) -> None:
    parameter = nn.Parameter(torch.randn(32, 256).bfloat16())
    settings: Any = {"lr": 1e-2, "rate": 1.0}
    group = {"params": [parameter], "names": ["weight"], **settings}
    optimizer: torch.optim.Optimizer
    if muon:
        others = RoundedAdam([{"params": [], "names": [], **settings}], (0.9, 0.95), 1e-8, 0, dtype)
        optimizer = Muon([group], others, None, torch.bfloat16, 0.95, 5, dtype)
    else:
        optimizer = RoundedAdam([group], (0.9, 0.95), 1e-8, 0, dtype)
    parameter.grad = torch.randn(32, 256).bfloat16()
    update(optimizer, 1e-2, torch.tensor(True))
    before = [parameter.detach().clone(), *(value.clone() for value in optimizer.state[parameter].values())]
    parameter.grad.fill_(torch.nan)
    update(optimizer, 1e-2, torch.tensor(False))
    after = [parameter.detach(), *optimizer.state[parameter].values()]
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))


@each_kind
def test_bytes_are_those_that_are_kept(kind: str) -> None:
    """And of a matrix with rows of 4,096: 2 a moment's number in bfloat16, 1 + 4 / 256 in 8 bits."""
    config = load_config([*KINDS[kind]])
    dtype = getattr(torch, config.training.dtype)
    matrix = nn.Parameter(torch.zeros(8, 4096, dtype=dtype))
    found = optimizers.row_bytes("matrix", 2, 4096, dtype, config.optimizer) / 4096
    of_one = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 256}[config.optimizer.state_dtype]
    assert found == of_one * (1 if config.optimizer.name == "Muon" else 2)
    assert matrix.nbytes == 8 * 4096 * (2 if "weights" in kind or kind in ("Adam", "Muon") else 4)


class Recorder(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> Any:
        """Nothing."""


def test_an_update_is_decided_where_weights_are() -> None:
    """They may be offloaded, and the decision on the GPU. A stage may have no parameter of the first role."""
    parameter = nn.Parameter(torch.zeros(1, device="meta"))
    groups = [{"params": list[Tensor](), "rate": 1.0}, {"params": [parameter], "rate": 1.0}]
    optimizer: Any = Recorder(groups, {"fused": True})
    update(optimizer, 1e-2, torch.tensor(True))
    assert optimizer.found_inf.device.type == "meta"


def test_what_is_not_finite_stays_so() -> None:
    bits = torch.tensor([0x7FFFFFFF, 0x7F800000, -0x800000, 0x7FC00000, -1], dtype=torch.int32)
    found = to_bfloat16(bits.view(torch.float32).clone(), torch.full((5,), 0xFFFF))
    assert found.isnan().tolist() == [True, False, False, True, True]
    assert found.isinf().tolist() == [False, True, True, False, False]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_rank_may_have_no_part_of_a_parameter(dtype: str) -> None:
    """With more ranks than rows, or than numbers in a norm."""
    parameters = [nn.Parameter(torch.empty(shape, dtype=torch.bfloat16)) for shape in ((0,), (0, 64), (2, 64))]
    group = {"params": parameters, "names": ["norm", "none", "matrix"], "lr": 1e-2}
    optimizer = RoundedAdam([group], (0.9, 0.95), 1e-8, 0, dtype)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all(optimizer.state[parameter]["step"] == 1 for parameter in parameters)


def bytes_said_and_kept(run: train.Run) -> tuple[int, int]:
    values = [value for state in run.optimizer.state.values() for value in state.values() if value.ndim]
    return state_bytes(run.stages, run.config.optimizer), sum(local_part(value)[1].nbytes for value in values)


@pytest.mark.parametrize("layout", ["fsdp 3", "tp 2"])
@each_kind
def test_a_rank_keeps_the_bytes_that_it_says(kind: str, layout: str) -> None:
    ranks, words = LAYOUTS[layout]
    said, kept = observe(*KINDS[kind], *words, ranks=ranks, steps=1, at_end=bytes_said_and_kept).extra
    assert said == kept


def test_gradients_of_several_batches_are_rounded_once() -> None:
    """In one process too."""
    found = figures(observe(*WEIGHTS, LOCAL, "6", steps=1), observe(*WEIGHTS, steps=1))
    assert found["gradient"] < 1e-4


def fill_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Gradients that are a function of names and indices: the same at every layout."""
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            parameter.grad = torch.zeros_like(parameter)
            init._fill(parameter.grad, 1e-2, key_of("gradient", name), torch.device("cpu"))


def give_equal_gradients() -> None:
    """Each update of the run is made from them."""
    original = train.update

    def with_equal_gradients(optimizer: torch.optim.Optimizer, lr: float, accepted: Tensor) -> None:
        fill_gradients(optimizer)
        original(optimizer, lr, accepted)

    vars(train)["update"] = with_equal_gradients


def states(run: train.Run) -> dict[str, Tensor]:
    """Whole tensors of the optimizer's state."""
    found = {}
    for stage in run.stages:
        for name, parameter in stage.named_parameters():
            for key, value in run.optimizer.state[parameter].items():
                found[f"{name} {key}"] = value
    return whole_tensors(run, found)


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


def two_updates(run: train.Run) -> dict[str, Tensor]:
    for _ in range(2):
        fill_gradients(run.optimizer)
        train.update(run.optimizer, 1e-3, torch.tensor(True))
    return states(run) | whole_weights(run)


@each_kind
def test_every_layout_keeps_the_same_bits_after_updates_from_equal_gradients(kind: str) -> None:
    one = observe(*KINDS[kind], steps=0, at_end=two_updates).extra
    kept = {value.dtype for value in one.values()}
    assert kept & {torch.int8, torch.uint8, torch.bfloat16}
    for layout, (ranks, words) in LAYOUTS.items():
        other = observe(*KINDS[kind], *words, ranks=ranks, steps=0, at_end=two_updates).extra
        assert not differing(other, one), layout


def move_by_one_unit() -> None:
    """Every weight starts one unit of its last place further from zero."""
    original = train.initialize_weights

    def moved(model: nn.Module, *arguments: Any) -> None:
        original(model, *arguments)
        for parameter in model.parameters():
            bits = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[parameter.dtype]
            parameter.data.view(bits).add_(1)

    vars(train)["initialize_weights"] = moved


@each_kind
def test_three_steps_differ_by_less_than_three_units_make_them(kind: str) -> None:
    one = observe(*KINDS[kind])
    moved = figures(observe(*KINDS[kind], mutate=move_by_one_unit), one)
    for layout, (ranks, words) in LAYOUTS.items():
        found = figures(observe(*KINDS[kind], *words, ranks=ranks), one)
        assert found["weights at step 0"] == found["tokens"] == found["norm among ranks"] == 0, layout
        assert found["weights"] <= 3 * moved["weights"], layout
        assert found["loss"] <= 1e-4, layout


def test_weights_start_from_a_checkpoint_of_another_precision(tmp_path: Path) -> None:
    words = ("--checkpoint.enable", "true")
    saved = observe(*words, steps=1, folder=str(tmp_path / "one")).weights
    start = ("--checkpoint.initial_load_path", str(tmp_path / "one"))
    found = observe(*words, *start, *WEIGHTS, steps=0, folder=str(tmp_path / "two")).weights
    assert not differing(found, {name: weight.bfloat16() for name, weight in saved.items()})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--optimizer.name", "Muon"), "keep optimizer.name and state_dtype, or set checkpoint.exclude"),
        (("--optimizer.state_dtype", "int8"), "keep optimizer.name and state_dtype, or set checkpoint.exclude"),
        (("--training.dtype", "bfloat16", "--training.mixed_precision_param", "bfloat16"), "keep training.dtype, or"),
    ],
)
def test_a_resume_of_another_optimizer_or_precision_is_one_sentence(
    words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    observe("--checkpoint.enable", "true", steps=1, folder=str(tmp_path))
    with pytest.raises(RuntimeError, match=r"step-1 does not fit this run: .*, and \d+ others: ") as refused:
        observe("--checkpoint.enable", "true", *words, steps=2, folder=str(tmp_path))
    assert said in str(refused.value)


@pytest.mark.parametrize("kind", [*KINDS, "Muon, float32"])
def test_a_run_goes_on_at_another_layout(kind: str, tmp_path: Path) -> None:
    """fsdp 2, then tp 2, then one process, a step each: the bits of three steps of one process."""
    settings = KINDS.get(kind, ("--optimizer.name", "Muon"))
    words = (*settings, "--checkpoint.enable", "true")
    for name in ("fsdp 2", "tp 2", ""):
        ranks, layout = LAYOUTS.get(name, (1, ()))
        last = observe(
            *(*words, *layout), ranks=ranks, steps=1, folder=str(tmp_path), mutate=give_equal_gradients, at_end=states
        )
    whole = observe(*settings, steps=3, mutate=give_equal_gradients, at_end=states)
    assert not differing(last.weights, whole.weights)
    assert not differing(last.extra, whole.extra)
