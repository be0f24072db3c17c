"""Dynamics: what the numbers are, the same at every layout; nothing in steps not sampled; rows of a real run."""

import functools
import itertools
import json
import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import train
from components.commands.dry_run import Meter
from components.commands.figures import Observation
from components.observe.metrics import _flat
from components.observe.rows import without_nan
from models import MODELS
from parallelize.groups import gather
from tests.dynamics import (
    CHECKPOINTED,
    COMPILED,
    CP,
    METHOD,
    NO_SEQUENCE_PARALLEL,
    PP,
    RUNS,
    SCHEDULE,
    TP,
    UNBALANCED,
    case,
    one_process,
    wrong,
)
from tests.harness import observe, observe_all, rewrite
from tests.limits import finish
from tests.test_train import count_waits, rows, run_train

COMPILED_LAYOUTS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "one rank": ("llama", 1, COMPILED),
    "ring": ("llama", 2, (CP, "2", *COMPILED)),
    "allgather": ("qwen3", 4, (CP, "4", METHOD, "allgather_kv", *UNBALANCED, *COMPILED, *CHECKPOINTED)),
    "ZBV, tp": ("six layers", 4, (PP, "2", SCHEDULE, "ZBVZeroBubble", TP, "2", *NO_SEQUENCE_PARALLEL, *COMPILED)),
}
"""tests/test_matrix.py compares the tables of all others."""


@pytest.mark.parametrize("layout", COMPILED_LAYOUTS)
def test_numbers_of_a_compiled_layout_are_those_of_one_process(layout: str) -> None:
    kind, ranks, overrides = COMPILED_LAYOUTS[layout]
    (observed,) = observe_all([case(kind, *overrides, ranks=ranks)])
    assert isinstance(observed, Observation), observed
    assert not wrong(observed.dynamics, one_process()[kind].dynamics)


def part_of(name: str) -> str:
    return ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])


def norms(tensors: dict[str, Tensor]) -> dict[str, float]:
    squares: dict[str, float] = defaultdict(float)
    for name, tensor in tensors.items():
        squares[part_of(name)] += tensor.double().square().sum().item()
    return {part: math.sqrt(square) for part, square in squares.items()}


def largest_logits(kind: str, weights: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, float]:
    """From q and k of the plain model, every one against every other."""
    name = RUNS[kind][1] if kind == "qwen3" else "llama"
    model_class, flavors = MODELS[name]
    model = model_class(flavors[RUNS[kind][RUNS[kind].index("--model.flavor") + 1]])
    model.load_state_dict(weights, strict=False)  # a tied table is there once
    found: dict[str, float] = {}

    def look(layer: str, core: nn.Module, given: tuple[Tensor, ...]) -> None:
        q, k = (tensor.detach().double() for tensor in given[:2])
        logits = (
            torch.einsum("bhsk,bhtk->bhst", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) / q.shape[3] ** 0.5
        )
        before = torch.ones(logits.shape[2:], dtype=torch.bool).tril()[None]
        if "document_ids" in batch:
            documents = batch["document_ids"]
            before = before & (documents[:, :, None] == documents[:, None])
        found[layer] = logits[before[:, None].expand_as(logits)].max().item()

    for number, layer in model.layers.items():
        layer.attention.core.register_forward_pre_hook(functools.partial(look, f"layers.{number}"))
    model(**batch)
    return found


@pytest.mark.parametrize("kind", ["qwen3", "six layers"])
def test_numbers_are_what_the_page_says(kind: str) -> None:
    """Recomputed from the gradients and weights that the harness saw in the first step, and from its tokens."""
    observed = one_process()[kind]
    tables, batch = observed.dynamics, observed.extra
    before = norms(observed.first_weights)
    change = norms({name: observed.weights[name] - weight for name, weight in observed.first_weights.items()})
    assert not wrong(
        tables,
        {
            "gradient_norm": norms(observed.gradients),
            "weight_norm": before,
            "update_ratio": {part: change[part] / before[part] for part in before},
            "attention_logit_max": largest_logits(kind, observed.first_weights, batch),
        },
    )
    layers = [f"layers.{layer}" for layer in range(2 if kind == "qwen3" else 6)]
    ends = ["norm"] if kind == "qwen3" else ["norm", "output"]  # where it is tied, the table is counted once
    assert list(tables["gradient_norm"]) == ["tok_embeddings", *layers, *ends]
    assert list(tables["attention_logit_max"]) == layers
    assert math.sqrt(sum(norm**2 for norm in tables["gradient_norm"].values())) == pytest.approx(observed.norms[0][0])


def note_observed_queries() -> None:
    import models.attention as attention

    vars(attention)["raise_to_largest_logit"] = lambda largest, q, *_: _observed_queries.append(q.shape[2])


def observed_queries(run: train.Run) -> list[int]:
    return gather(sum(_observed_queries))


_observed_queries: list[int] = []


@pytest.mark.parametrize(
    ("layout", "queries"),
    [
        ((TP, "4"), [34] * 4),
        ((CP, "4"), [5, 9, 10, 10]),
        ((CP, "4", METHOD, "allgather_kv", *UNBALANCED), [9, 9, 9, 7]),
        ((CP, "4", METHOD, "ulysses", "--model.flavor", "many_heads"), [34] * 4),
    ],
    ids=["tp", "ring", "allgather_kv", "ulysses"],
)
def test_logits_of_padding_do_not_count(layout: tuple[str, ...], queries: list[int]) -> None:
    """34 tokens are padded: to 36, or to 40 in pieces of five, of which rank 0 has the first and the last one."""
    length = ("--training.seq_len", "34", "--metrics.dynamics_freq", "1", *layout)
    found = observe(*length, ranks=4, steps=1, mutate=note_observed_queries, at_end=observed_queries).extra
    layers, rest = divmod(sum(found), sum(queries))
    assert (rest, found) == (0, [layers * count for count in queries])


def test_logits_by_pieces_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    import models.attention as attention

    torch.manual_seed(1)
    q, k = torch.randn(2, 8, 40, 16), torch.randn(2, 2, 40, 16)
    documents = torch.tensor([[0] * 13 + [1] * 27, [0] * 30 + [1] * 10])
    found = []
    for size in (2**20, 2000, 1):
        monkeypatch.setitem(attention._LOGITS_AT_A_TIME, "cpu", size)
        for queries, seen in ((q, (None, None)), (q[:, :, 33:], (documents, None)), (q, (documents, 5))):
            largest = torch.full((), -math.inf)
            attention.raise_to_largest_logit(largest, queries, k, *seen)
            found.append(largest.item())
            visible = attention.Visible(queries.shape[2], 40, k.device, *seen).dense()
            logits = queries @ k.repeat_interleave(4, 1).transpose(2, 3) / 4
            assert found[-1] == pytest.approx(logits.masked_fill(~visible, -math.inf).max().item())
    assert len(set(found[:3])) == 3


def count(run: train.Run) -> tuple[dict[tuple[str, str], list[int]], int, list[str]]:
    """Messages, peak of memory, and waits for the device of the steps after the second."""
    batches = train.local_batches(run)
    batches = itertools.chain([next(batches)], batches)
    with Meter(run.mesh, run.parameters) as meter:
        train.train_step(run, batches, train.divisor(run))
    return meter.sent, meter.peak, count_waits(run)


def test_a_step_that_is_not_sampled_sends_holds_and_waits_as_without() -> None:
    layout = ("--model.flavor", "many_heads", TP, "2", CP, "2")
    never, other, sampled = (
        observe(*layout, "--metrics.dynamics_freq", freq, ranks=4, steps=2, at_end=count).extra
        for freq in ("0", "7", "3")
    )
    assert never == other
    assert never[2] == []
    messages = {key: sampled[0].get(key, [0])[0] - number for key, (number, _) in never[0].items()}
    # Weights are split over fsdp and tp, and norms over fsdp alone; logits are compared; keys of two layers gathered.
    assert messages["tp", "all-reduce"] == 1 + 1
    assert sampled[0]["fsdp", "all-reduce"][0] == 2 + 1
    assert sampled[1] > never[1]


def not_a_number() -> None:
    rewrite("train", "train_step", "divisor, last)", "divisor * float('nan'), last)")


def test_a_step_that_is_not_finite_has_no_update() -> None:
    (observed,) = observe_all([case("qwen3", mutate=not_a_number)])
    assert isinstance(observed, Observation), observed
    tables = observed.dynamics
    assert set(tables["update_ratio"].values()) == {0.0}
    assert all(math.isnan(norm) for norm in tables["gradient_norm"].values())
    row = without_nan({"step": 3, "loss": math.inf, "dynamics": tables})
    assert row["dynamics"]["gradient_norm"]["norm"] is None
    assert row["dynamics"]["weight_norm"] == tables["weight_norm"]
    assert "NaN" not in json.dumps(row)
    flat = _flat(row)
    assert flat["step"] == 3
    assert flat["update_ratio/layers.1"] == 0.0
    assert not any(isinstance(value, dict) for value in flat.values())


@pytest.mark.torchrun
def test_rows_of_a_run_survive_a_resume(tmp_path: Path) -> None:
    given = ["--metrics.dynamics_freq", "2", "--metrics.enable_tensorboard", "--job.dump_folder", str(tmp_path)]
    given += ["--validation.no_enable", "--checkpoint.interval", "2"]
    for steps in ("3", "6"):
        process = run_train(*given, "--training.steps", steps)
        output = finish(process)[0]
        assert process.returncode == 0, output
    sampled = {row["step"]: row["dynamics"] for row in rows(tmp_path) if "dynamics" in row}
    assert list(sampled) == [2, 4, 6]
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [1, 2, 3, 4, 5, 6]
    parts = ["tok_embeddings", *(f"layers.{layer}" for layer in range(4)), "norm", "output"]
    for tables in sampled.values():
        assert {table: list(values) for table, values in tables.items()} == {
            **dict.fromkeys(("gradient_norm", "weight_norm", "update_ratio"), parts),
            "attention_logit_max": parts[1:-2],
        }
        assert all(value > 0 for table in ("weight_norm", "update_ratio") for value in tables[table].values())
    (norm,) = (row["grad_norm"] for row in rows(tmp_path) if row["step"] == 4 and "loss" in row)
    assert math.sqrt(sum(value**2 for value in sampled[4]["gradient_norm"].values())) == pytest.approx(norm)
    events = b"".join(path.read_bytes() for path in (tmp_path / "tb").glob("events.*"))
    assert b"attention_logit_max/layers.3" in events
