"""What ranks send, counted in bytes for each dimension of the mesh, is what docs/ say; and what a rank keeps."""

import pytest
import torch

import train
from components.commands.dry_run import Meter
from models.llama import FLAVORS, Llama
from tests.harness import observe
from tests.test_parallelize_data import GLOBAL_BATCH, LAYOUTS, local_batch


def count_traffic(run: train.Run) -> dict[tuple[str, str], int]:
    """Bytes of each kind of collective in each dimension of the mesh."""
    batches, valid = train.local_batches(run), train.divisor(run)
    with Meter(run.mesh) as meter:
        train.train_step(run, batches, valid)
    return {key: size for key, (_, size) in meter.sent.items()}


def parameter_bytes(names: tuple[str, ...] = ("",), model: str = "tiny") -> int:
    """Of the harness's model, in float32."""
    with torch.device("meta"):
        parameters = Llama(FLAVORS[model]).named_parameters()
    return 4 * sum(parameter.numel() for name, parameter in parameters if name.startswith(names))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    "layout", ["ddp 2", "fsdp 2 always", "fsdp 2 never", "fsdp 2 default", "fsdp 4 default", "hsdp 2x2"]
)
def test_bytes_of_collectives_are_those_of_the_formulas(layout: str, accumulation: int) -> None:
    """Every size of the harness's model divides by these ranks, so buffers are without padding."""
    ranks, overrides = LAYOUTS[layout]
    observed = observe(*overrides, *local_batch(ranks, accumulation), ranks=ranks, steps=1, at_end=count_traffic).extra
    whole, kept = parameter_bytes(), parameter_bytes(("output", "norm"))
    assert GLOBAL_BATCH % (ranks * accumulation) == 0
    if layout == "ddp 2":
        # One gradient sum a step; weights are gathered over a single rank, which moves nothing.
        assert observed == {("dp_replicate", "all-reduce"): whole}
        return
    gathers = {"always": 2 * whole, "never": whole}.get(layout.split()[-1], 2 * whole - kept)
    expected = {("fsdp", "gather"): gathers * accumulation, ("fsdp", "reduce-scatter"): whole}  # once a step
    if layout == "hsdp 2x2":
        expected["dp_replicate", "all-reduce"] = whole // 2
    assert observed == expected


def test_replicas_are_summed_once_a_step_where_each_batch_is_reduced() -> None:
    ranks, overrides = LAYOUTS["hsdp 2x2"]
    each = (*overrides, *local_batch(ranks, 3), "--parallelism.fsdp_reduce_gradients", "each")
    observed = observe(*each, ranks=ranks, steps=1, at_end=count_traffic).extra
    assert observed["fsdp", "reduce-scatter"] == 3 * parameter_bytes()
    assert observed["dp_replicate", "all-reduce"] == parameter_bytes() // 2


# Of the model, and of the step, that the tests below count.
SIZES, TOKENS, SEQUENCE = FLAVORS["many_heads"], GLOBAL_BATCH * 32, 32
HIDDEN = 4 * TOKENS * SIZES.dim
LAYERS, KEYS_AND_VALUES = SIZES.n_layers, 4 * 2 * TOKENS * SIZES.n_kv_heads * SIZES.head_dim
NORMS = 4 * (2 * LAYERS + 1) * SIZES.dim


def count_layout(ranks: int, *settings: str) -> dict[tuple[str, str], int]:
    model = ("--model.flavor", "many_heads", "--parallelism.data_parallel_shard_degree", "1")
    return observe(*model, *settings, ranks=ranks, steps=1, at_end=count_traffic).extra


@pytest.mark.parametrize("tp", [2, 4])
def test_bytes_of_tensor_parallel(tp: int) -> None:
    """Each layer 4 gathers and 4 reduce-scatters of the hidden state, or as many bytes in 4 all-reduces."""
    degree = ("--parallelism.tensor_parallel_degree", str(tp))
    ends = 2  # the embedding's, and the head's
    per_token = 3 * 4 * TOKENS  # loss: maximum, sum, and logit of the label
    assert count_layout(tp, *degree) == {
        ("tp", "gather"): (4 * LAYERS + ends) * HIDDEN,
        ("tp", "reduce-scatter"): (4 * LAYERS + ends) * HIDDEN,
        ("tp", "all-reduce"): per_token + NORMS,
    }
    assert count_layout(tp, *degree, "--parallelism.sequence_parallel", "false") == {
        ("tp", "all-reduce"): (4 * LAYERS + ends) * HIDDEN + per_token
    }
    logits = 4 * TOKENS * SIZES.vocab_size
    assert count_layout(tp, *degree, "--parallelism.loss_parallel", "false") == {
        ("tp", "gather"): (4 * LAYERS + ends) * HIDDEN + logits,
        ("tp", "reduce-scatter"): (4 * LAYERS + ends) * HIDDEN,
        ("tp", "all-reduce"): NORMS,
    }


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("method", ["ring allgather", "ring alltoall", "allgather_kv", "ulysses"])
def test_bytes_of_context_parallel(method: str, cp: int) -> None:
    """All of the keys and values, for each layer; with ulysses a rank's own heads of four tensors, there and back."""
    kind, _, rotate = method.partition(" ")
    settings = ["--parallelism.context_parallel_degree", str(cp), "--parallelism.context_parallel_method", kind]
    settings += ["--parallelism.context_parallel_rotate_method", rotate] if rotate else []
    own = KEYS_AND_VALUES // cp
    queries_and_results = 4 * 2 * TOKENS * SIZES.n_heads * SIZES.head_dim // cp
    expected = {
        # Forward, and again backward; from neighbour to neighbour, gradients go all the way round.
        "ring allgather": {"gather": 2 * LAYERS * KEYS_AND_VALUES, "reduce-scatter": LAYERS * KEYS_AND_VALUES},
        "ring alltoall": {"all-to-all": (2 * (cp - 1) + cp) * LAYERS * own},
        "allgather_kv": {"gather": LAYERS * KEYS_AND_VALUES, "reduce-scatter": LAYERS * KEYS_AND_VALUES},
        "ulysses": {"all-to-all": 2 * LAYERS * (queries_and_results + own)},
    }[method]
    # Weights are sharded over cp, as over dp_shard.
    whole, kept = parameter_bytes(model="many_heads"), parameter_bytes(("output", "norm"), "many_heads")
    weights = {"gather": 2 * whole - kept, "reduce-scatter": whole}
    for name, size in weights.items():
        expected[name] = expected.get(name, 0) + size
    assert count_layout(cp, *settings) == {("fsdp", name): size for name, size in expected.items()}


@pytest.mark.parametrize(
    ("layout", "share"), [("one", 1), ("ddp 2", 1), ("fsdp 2 default", 2), ("fsdp 4 default", 4), ("hsdp 2x2", 2)]
)
def test_bytes_that_a_rank_keeps(layout: str, share: int) -> None:
    """Weights and two moments, in float32."""
    ranks, overrides = LAYOUTS.get(layout, (1, ()))
    kept = observe(*overrides, *local_batch(ranks, 1), ranks=ranks, steps=1, at_end=count_kept).extra
    assert kept == 3 * parameter_bytes() // share


def count_kept(run: train.Run) -> int:
    moments = [state[name] for state in run.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    tensors = [value.to_local() if hasattr(value, "to_local") else value for value in (*run.parameters, *moments)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
