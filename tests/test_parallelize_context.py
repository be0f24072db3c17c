"""Context parallel: how sequences are cut, documents that don't see each other, and faults that have to be found."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import flex_attention

import train
from components.commands.figures import Observation, broken_bars
from models import MODELS, flex
from models.llama import FLAVORS, Llama
from parallelize.context import rank_order, sequence_order, shard_sequence
from tests.harness import observe, rewrite
from tests.test_parallelize_data import UNEVEN_LABELS, one_process

CP = "--parallelism.context_parallel_degree"
METHOD = "--parallelism.context_parallel_method"
BALANCER = "--parallelism.context_parallel_load_balancer"
DOCUMENTS = ("--training.document_mask", "true")


def test_ranks_hold_the_sequence_in_this_order() -> None:
    sequence = torch.arange(8)
    assert torch.equal(rank_order(sequence, 0, 2, balanced=False), sequence)
    assert rank_order(sequence, 0, 2, balanced=True).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_order_of_ranks_and_that_of_the_sequence_are_inverse(ranks: int) -> None:
    sequence = torch.arange(48).view(3, 16)
    assert torch.equal(sequence_order(rank_order(sequence, 1, ranks, True), 1, ranks, True), sequence)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_balanced_ranks_have_as_many_pairs_of_query_and_key(ranks: int) -> None:
    seen = [(part + 1).sum().item() for part in rank_order(torch.arange(64), 0, ranks, True).chunk(ranks)]
    assert len(set(seen)) == 1


def cut_a_batch(run: train.Run) -> dict[str, list]:
    """This batch, as all cp ranks hold it together; and how many labels count in it before and after it was cut."""
    whole = next(train.local_batches(run))
    part = shard_sequence(whole, run.mesh, run.config.parallelism)
    cp = run.mesh["cp"]
    gathered = {}
    for name, tensor in part.items():
        parts = [torch.empty_like(tensor) for _ in range(cp.size())]
        dist.all_gather(parts, tensor.contiguous(), group=cp.get_group())
        gathered[name] = torch.cat(parts, dim=1)
    return {"whole": [whole], "gathered": [gathered]}


@pytest.mark.parametrize("documents", [(), DOCUMENTS], ids=["one document", "packed"])
@pytest.mark.parametrize(("ranks", "balancer"), [(2, "headtail"), (4, "headtail"), (2, "none")])
def test_positions_and_labels_travel_with_their_tokens(ranks: int, balancer: str, documents: tuple[str, ...]) -> None:
    """Pitfalls: labels shifted after the cut, so that each shard loses one; positions that are not permuted."""
    layout = (CP, str(ranks), BALANCER, balancer, METHOD, "allgather_kv", *documents)
    seen = observe(*layout, ranks=ranks, steps=0, at_end=cut_a_batch).extra
    whole, gathered = seen["whole"][0], seen["gathered"][0]
    order = rank_order(torch.arange(32), 0, ranks, balancer == "headtail")
    for name, tensor in whole.items():
        assert torch.equal(gathered[name], tensor[:, order]), name
    assert (gathered["labels"] != -100).sum() == (whole["labels"] != -100).sum()
    if documents:
        starts = whole["document_ids"].diff(dim=1) > 0
        assert starts.any(), "the batch has a document that begins inside a sequence"
        assert (whole["positions"][:, 1:][starts] == 0).all()
        assert (whole["positions"].diff(dim=1)[~starts] == 1).all()
    else:
        assert torch.equal(gathered["positions"], order.expand_as(gathered["positions"]))


@pytest.mark.parametrize("method", ["ring", "allgather_kv", "ulysses"])
def test_a_shard_without_a_label_adds_nothing(method: str) -> None:
    """Pitfall: 0 / 0. The second rank of an unbalanced cut has no label in any sequence."""
    labels = (1, 7, 3)
    observed = observe(CP, "2", METHOD, method, BALANCER, "none", ranks=2, valid_labels=labels)
    assert not broken_bars(observed, one_process(valid_labels=labels))


def logits_before_and_after(run: train.Run) -> torch.Tensor:
    """How far logits move, by place, when every token of the first document is another one."""
    tokens = torch.arange(32).view(1, 32) + 100
    document_ids = (torch.arange(32) >= 12).long().view(1, 32)
    positions = torch.arange(32).view(1, 32) - 12 * document_ids
    found = []
    for change in (0, 500):
        batch = {"tokens": tokens + change * (1 - document_ids), "document_ids": document_ids, "positions": positions}
        part = shard_sequence(batch, run.mesh, run.config.parallelism)
        with torch.no_grad():
            logits = run.stages[0](**part)
        parts = [torch.empty_like(logits) for _ in range(run.mesh["cp"].size())]
        dist.all_gather(parts, logits.contiguous(), group=run.mesh["cp"].get_group())
        balanced = run.config.parallelism.context_parallel_load_balancer == "headtail"
        found.append(sequence_order(torch.cat(parts, dim=1), 1, len(parts), balanced))
    return (found[1] - found[0]).abs().amax(dim=(0, 2))


@pytest.mark.parametrize("balancer", ["headtail", "none"])
@pytest.mark.parametrize(
    ("ranks", "method"), [(1, "ring"), (4, "ring"), (2, "allgather_kv"), (4, "allgather_kv"), (2, "ulysses")]
)
def test_documents_do_not_see_each_other(ranks: int, method: str, balancer: str) -> None:
    """Pitfall: packed documents under context parallel."""
    layout = (CP, str(ranks), METHOD, method, BALANCER, balancer, *DOCUMENTS)
    moved = observe(*layout, ranks=ranks, steps=0, at_end=logits_before_and_after).extra
    assert moved[:12].min() > 1e-3
    assert moved[12:].max() == 0


def test_without_the_mask_documents_see_each_other() -> None:
    model = Llama(FLAVORS["tiny"])
    tokens = torch.arange(32).view(1, 32)
    ids = (torch.arange(32) >= 12).long().view(1, 32)
    with torch.no_grad():
        other = torch.where(ids == 0, tokens + 500, tokens)
        assert not torch.equal(model(tokens)[:, 12:], model(other)[:, 12:])
        assert torch.equal(model(tokens, document_ids=ids)[:, 12:], model(other, document_ids=ids)[:, 12:])


def test_a_packed_document_is_as_if_it_were_alone() -> None:
    """On one device: same logits at the same places, whatever is packed before it."""
    model, tokens = Llama(FLAVORS["tiny"]), torch.arange(32).view(1, 32)
    ids = (torch.arange(32) >= 12).long().view(1, 32)
    with torch.no_grad():
        packed = model(tokens, document_ids=ids, positions=torch.arange(32).view(1, 32) - 12 * ids)
        assert torch.allclose(packed[:, 12:], model(tokens[:, 12:]), atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_no_model_draws_random_numbers(name: str) -> None:
    """Ranks that draw could agree, or differ, where they should not."""
    model_class, flavors = MODELS[name]
    model, before = model_class(flavors["debug"]).train(), torch.get_rng_state()
    model(torch.arange(8).view(1, 8), labels=torch.arange(8).view(1, 8)).backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [("-100 if", "0 if"), ("0, count)", "count, 0)")], ids=["labels", "at the front"])
def test_padding_that_counts_is_found(fault: tuple[str, str]) -> None:
    length = ("--training.seq_len", "33")
    cp = ("--parallelism.context_parallel_degree", "2", "--parallelism.context_parallel_method", "ulysses")
    plant = functools.partial(rewrite, "parallelize.padding", "_padded", *fault)
    observed = observe(*length, *cp, ranks=2, valid_labels=UNEVEN_LABELS, mutate=plant)
    assert "gradient" in broken_bars(observed, observe(*length, valid_labels=UNEVEN_LABELS))


FAULTS = {
    "labels shifted after the cut": (
        "parallelize.context",
        "shard_sequence",
        "batch.items()\n    }",
        'batch.items()} | {"labels": rank_order(batch["tokens"], 1, ranks, balanced).chunk(ranks, 1)[rank].roll(-1)}',
    ),
    "positions not permuted": (
        "parallelize.context",
        "shard_sequence",
        "rank_order(tensor, 1, ranks, balanced)",
        '(tensor if name == "positions" else rank_order(tensor, 1, ranks, balanced))',
    ),
    "keys and values of the wrong rank": (
        "parallelize.ring",
        "RingExchange.passed_on",
        "[(rank - number) % ranks]",
        "[rank]",
    ),
    "gradients of keys and values brought to the wrong rank": (
        "parallelize.ring",
        "RingExchange.brought_home",
        "(rank - number) % ranks",
        "number",
    ),
    "gradients not summed over cp": (
        "parallelize.mesh",
        "Mesh.__init__",
        "degrees.dp_shard * degrees.cp}",
        "degrees.dp_shard}",
    ),
    "loss not summed over cp": ("parallelize.mesh", "sum_over_token_ranks", '"fsdp"', '"dp_shard"'),
    "a balanced cut for a ring that is told of none": (
        "parallelize.context",
        "_WholeSequence.forward",
        "self.balanced, whole, documents",
        "False, whole, documents",
    ),
}
OF_DOCUMENTS = {
    "own documents taken for those of the keys": (
        "parallelize.ring",
        "steps_of",
        "documents[rank], documents[source]",
        "documents[rank], documents[rank]",
    ),
    "documents of the other half of the queries": (
        "parallelize.ring",
        "_with_documents",
        "own_BS[:, seen.queries]",
        "own_BS[:, : seen.queries.stop - seen.queries.start]",
    ),
    "a query that sees no key counts all the same": (
        "models.steps",
        "_forward_on_cpu",
        "logsumexp if blind is None",
        "logsumexp if 1",
    ),
    "keys that backward sees again": ("models.steps", "_backward_on_cpu", "attn_mask=added", "attn_mask=None"),
}


RING = ("--training.seq_len", "33", CP, "4", *DOCUMENTS)


@functools.cache
def documents_on_one() -> Observation:
    return observe("--training.seq_len", "33", *DOCUMENTS, valid_labels=UNEVEN_LABELS)


@pytest.mark.slow
@pytest.mark.parametrize("fault", OF_DOCUMENTS)
def test_a_planted_fault_of_documents_in_the_ring_is_found(fault: str) -> None:
    plant = functools.partial(rewrite, *OF_DOCUMENTS[fault])
    observed = observe(*RING, ranks=4, valid_labels=UNEVEN_LABELS, mutate=plant)
    assert "gradient" in broken_bars(observed, documents_on_one())


def take_the_kernel_of_a_gpu() -> None:
    """FlexAttention, in torch's plain form, by blocks of four."""
    vars(flex)["BLOCK"] = 4
    vars(flex_attention)["_validate_device"] = lambda *_: None  # which refuses its backward on a CPU
    for function in ("_kernel", "_wanted"):
        rewrite("models.steps", function, '"cpu"', '"none"')


@pytest.mark.parametrize("layout", [DOCUMENTS, ()], ids=["documents", "one document"])  # in float32
def test_flex_attention_computes_the_steps_of_the_ring(layout: tuple[str, ...]) -> None:
    labels = ("--training.seq_len", "33", *layout)
    observed = observe(*labels, CP, "4", ranks=4, valid_labels=UNEVEN_LABELS, mutate=take_the_kernel_of_a_gpu)
    assert not broken_bars(observed, observe(*labels, valid_labels=UNEVEN_LABELS))


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    try:
        observed = observe(
            CP, "2", ranks=2, valid_labels=UNEVEN_LABELS, mutate=functools.partial(rewrite, *FAULTS[fault])
        )
    except RuntimeError:
        assert fault == "gradients not summed over cp", "only here are the sizes of the mesh wrong"
        return
    assert broken_bars(observed, one_process(valid_labels=UNEVEN_LABELS))
