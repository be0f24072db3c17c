"""What parameters are, by name; and that what is frozen has no gradient, no moments and no cost, at every layout."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import train
from components.commands.figures import Observation, broken_bars
from components.config import Model, Optimizer
from components.optim.muon import Muon
from components.optim.optimizer import build_optimizer, state_bytes
from components.state.checkpoint import Checkpointer
from models import MODELS, meta_model
from models.llama import FLAVORS, Llama
from models.moe import MixtureConfig
from models.parameters import HEAD, MATRIX, NORM, Role, find_kind
from parallelize.groups import gather
from parallelize.sharding import describe_memory
from tests.benchmarks.loss import chunked
from tests.harness import observe

FROZEN = {
    "embedding": ("tok_embeddings",),
    "norms": ("layers.*.attention_norm", "layers.*.ffn_norm", "norm"),
    "first layers": ("tok_embeddings", "layers.0", "layers.1"),
    "head": ("output",),
    "all but the head": ("tok_embeddings", "layers", "norm"),
}
STARTS = {
    "embedding": ("tok",),
    "norms": (*(f"layers.{layer}.{name}" for layer in range(4) for name in ("attention_norm", "ffn_norm")), "norm"),
    "first layers": ("tok", "layers.0.", "layers.1."),
    "head": ("output",),
    "all but the head": ("tok", "layers.", "norm."),
}
"""How the names begin of what FROZEN covers."""
PP = ("--parallelism.pipeline_parallel_degree", "2")
EVEN_ENDS = (
    *("--parallelism.pipeline_parallel_first_stage_less_layers", "0"),
    *("--parallelism.pipeline_parallel_last_stage_less_layers", "0"),
)
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tp 2": ("--parallelism.tensor_parallel_degree", "2"),
    "tp 2, whole": ("--parallelism.tensor_parallel_degree", "2", "--parallelism.sequence_parallel", "false"),
    "fsdp 2": ("--training.local_batch_size", "9"),
    "pp 2": PP,
    "pp 2, zero bubble": (*PP, "--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble", *EVEN_ENDS),
}
PAIRS = [
    *[(what, layout) for what in ("embedding", "norms", "first layers") for layout in ("tp 2", "fsdp 2", "pp 2")],
    ("norms", "tp 2, whole"),
    ("head", "tp 2"),
    ("first layers", "pp 2, zero bubble"),
    ("all but the head", "pp 2, zero bubble"),
]
"""In pp 2 the first layers are all that rank 0 has; the head is all that is trained in the last pair."""


def freeze(what: str) -> None:
    """Give the family a frozen flavor; called in each rank."""
    FLAVORS["frozen"] = replace(FLAVORS["long"], n_layers=4, frozen=FROZEN[what])


def optimizer_names(run: train.Run) -> list[str]:
    """Of the tensors that a checkpoint would keep of the optimizer, on all ranks."""
    tensors = Checkpointer(Path(), run.config.checkpoint, run.stages, run.optimizer)._tensors(with_optimizer=True)
    return sorted({name for names in gather([*tensors]) for name in names if name.startswith("optimizer.")})


def run(what: str, *overrides: str, **options: Any) -> Observation:
    options |= {"mutate": partial(freeze, what), "at_end": optimizer_names}
    return observe("--model.flavor", "frozen", *overrides, **options)


run_on_one = cache(run)


@pytest.mark.parametrize("what", FROZEN)
def test_frozen_has_no_gradient_no_moments_and_keeps_its_bits(what: str) -> None:
    observed = run_on_one(what)
    covered = {name for name in observed.weights if name.startswith(STARTS[what])}
    trained = observed.weights.keys() - covered
    assert covered
    assert observed.gradients.keys() == trained
    assert {name.removeprefix("optimizer.").rpartition(".")[0] for name in observed.extra} == trained
    for name, first in observed.first_weights.items():
        assert torch.equal(observed.weights[name], first) == (name in covered), name


@pytest.mark.parametrize(("what", "layout"), PAIRS)
def test_frozen_is_the_same_run_at_every_layout(what: str, layout: str) -> None:
    reference, observed = run_on_one(what), run(what, *LAYOUTS[layout], ranks=2)
    assert broken_bars(observed, reference) == {}
    assert observed.extra == reference.extra
    for name in observed.first_weights.keys() - observed.gradients.keys():
        assert torch.equal(observed.weights[name], observed.first_weights[name]), name


def test_dynamics_are_of_what_is_trained() -> None:
    """Also on a rank of a pipeline that trains nothing."""
    sampled = ("--model.flavor", "frozen", "--metrics.dynamics_freq", "1")
    one, two = (
        observe(*sampled, *PP[: 2 * (ranks - 1)], ranks=ranks, mutate=partial(freeze, "first layers"), at_end=_tables)
        for ranks in (1, 2)
    )
    assert one.extra.keys() == two.extra.keys()
    for table, values in one.extra.items():
        assert two.extra[table] == pytest.approx(values, rel=1e-5), table
        layers = {"layers.0", "layers.1"} if table == "attention_logit_max" else set()
        assert values.keys() == {"layers.2", "layers.3", *layers, *(() if layers else ("norm", "output"))}


def _tables(run: train.Run) -> dict[str, dict[str, float]]:
    return run.dynamics.tables()


@pytest.mark.parametrize("family", MODELS)
def test_every_family_says_what_its_parameters_are(family: str) -> None:
    for flavor, sizes in MODELS[family][1].items():
        if flavor.startswith("matrix"):  # hundreds, of the same parameters
            continue
        model = meta_model(Model(name=family, flavor=flavor))
        kinds = {name: model.kind(name) for name, _ in model.named_parameters()}
        absent = {"adapter", *(["head"] if sizes.tie_embeddings else [])}
        absent |= set() if isinstance(sizes, MixtureConfig) else {"router", "expert"}
        absent |= set() if sizes.qkv_bias else {"bias"}
        assert {kind.role for kind in kinds.values()} == {*get_args(Role)} - absent
        assert all(
            (kind.role == "norm" or kind.zero) == (parameter.ndim == 1 or ".experts.b" in name)
            for (name, parameter), kind in zip(model.named_parameters(), kinds.values(), strict=True)
        )
        tables = [kind for kind in kinds.values() if kind.role in ("embedding", "head")]
        assert sum(kind.multiplied for kind in tables) == 1


def test_biases_begin_at_zero_have_no_decay_and_cost_nothing() -> None:
    def built(family: str) -> Any:
        with torch.device("meta"):
            return MODELS[family][0](replace(MODELS[family][1]["debug"], tie_embeddings=False))

    model = built("qwen2")
    biases = [name for name, _ in model.named_parameters() if name.endswith(".bias")]
    assert len(biases) == 3 * model.config.n_layers
    assert {model.init_std(name) for name in biases} == {0.0}
    assert model.flops_per_token(64) == built("llama").flops_per_token(64)
    optimizer = build_optimizer([model], Optimizer(name="Muon"))
    assert isinstance(optimizer, Muon)
    decay = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["names"]}
    assert {decay[name] for name in biases} == {0.0}
    assert not {*biases} & {name for name, *_ in optimizer.matrices}


def test_the_longest_pattern_that_covers_a_name_counts() -> None:
    kinds = {"layers.*.attention.wq": MATRIX, "layers.*.attention": NORM, "layers.*.attention.wq.bias": HEAD}
    found = {name: find_kind(f"layers.3.attention.{name}", kinds, ()) for name in ("wq.weight", "wq.bias", "sinks")}
    assert found == {"wq.weight": MATRIX, "wq.bias": HEAD, "sinks": NORM}


def test_a_parameter_without_a_kind_and_a_pattern_without_a_parameter_are_errors() -> None:
    with pytest.raises(ValueError, match=r"no pattern for layers\.0\.router\.weight"):
        meta_model(Model(name="llama", flavor="debug")).kind("layers.0.router.weight")
    with pytest.raises(ValueError, match=r"\[.layers\.9.\]: no parameter"), torch.device("meta"):
        Llama(replace(FLAVORS["debug"], frozen=("layers.0", "layers.9")))
    everything = ("tok_embeddings", "layers", "norm", "output")
    with pytest.raises(ValueError, match="no parameter would be trained"), torch.device("meta"):
        Llama(replace(FLAVORS["debug"], frozen=everything))


def test_a_resume_with_other_frozen_weights_is_refused(tmp_path: Path) -> None:
    observe("--checkpoint.enable", "true", steps=1, folder=str(tmp_path))
    with pytest.raises(RuntimeError, match=r"is of another model: frozen = \[\] there and"):
        observe("--checkpoint.enable", "true", "--model.sizes.frozen", '["norm"]', steps=2, folder=str(tmp_path))


def test_frozen_costs_a_third_less_and_what_is_tied_counts_once() -> None:
    def products(**changes: Any) -> int:
        with torch.device("meta"):
            full, causal = Llama(replace(FLAVORS["debug"], **changes)).flops_per_token(64)
        return 2 * causal - full

    head, layers = 4096 * 256, 4 * (256 * 256 * 3 + 3 * 256 * 768)
    assert products() == products(tie_embeddings=True) == 6 * (head + layers)
    assert products(frozen=("output",)) == 4 * head + 6 * layers
    assert products(frozen=("tok_embeddings",), tie_embeddings=True) == 4 * head + 6 * layers
    assert products(frozen=("tok_embeddings", "layers.*.ffn_norm")) == 6 * (head + layers)


def test_memory_is_that_of_what_is_trained() -> None:
    with torch.device("meta"):
        model = Llama(replace(FLAVORS["debug"], frozen=("tok_embeddings", "output")))
    table, size = 4 * 4096 * 256 / 2**20, 4 * sum(parameter.numel() for parameter in model.parameters()) / 2**20
    said = describe_memory([*model.parameters()], state_bytes=state_bytes([model], Optimizer()), batches=1)
    assert said == (
        f"a rank keeps {size:.1f} MiB of weights, {size - 2 * table:.1f} MiB of gradients, "
        f"{2 * (size - 2 * table):.1f} MiB of optimizer state"
    )
    assert describe_memory([], 2**20, 1, state_on_host=True).endswith("1.0 MiB of optimizer state on the host")


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_the_loss_makes_only_the_gradients_that_are_wanted(trained: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {"hidden": torch.randn(1, 40, 8, generator=generator), "weight": torch.randn(30, 8, generator=generator)}
    labels = torch.randint(0, 30, (1, 40), generator=generator)

    def gradient(*wanted: str) -> torch.Tensor:
        given = {name: tensor.clone().requires_grad_(name in wanted) for name, tensor in tensors.items()}
        loss = chunked(given["hidden"], given["weight"], labels)
        kept = [saved for saved in loss.grad_fn.saved_tensors if saved is not None]  # type: ignore[union-attr]
        assert len(kept) == len(wanted)
        loss.backward()
        assert [name for name in given if given[name].grad is not None] == [*wanted]
        found = given[trained].grad
        assert found is not None
        return found

    assert torch.equal(gradient(trained), gradient("hidden", "weight"))
