"""What a query may see: the description, what kernels make of it, and how often it is made."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint

import train
from components.config import ConfigError, load_config
from models import attention, flex
from models.attention import KERNELS, AttentionCore, Kernel, Visibility, Visible
from models.llama import FLAVORS, Llama
from parallelize.groups import gather
from parallelize.rules import check_model
from tests.harness import observe

CP, METHOD = "--parallelism.context_parallel_degree", "--parallelism.context_parallel_method"
BALANCER = "--parallelism.context_parallel_load_balancer"
CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3])
SEEN = {
    "causal": Visible(12, 12, CPU),
    "documents": Visible(12, 12, CPU, DOCUMENTS),
    "window": Visible(12, 12, CPU, window=4),
    "documents, window": Visible(12, 12, CPU, DOCUMENTS, 3),
    "after others": Visible(5, 12, CPU),
    "documents, after others": Visible(5, 12, CPU, DOCUMENTS, 6),
    "a part": Visible(12, 14, CPU, torch.cat((DOCUMENTS[:, :1], DOCUMENTS, DOCUMENTS[:, -1:]), 1)).part(3, 10),
}
BEHIND = {
    "behind all keys": Visible(6, 12, CPU, first=12),
    "behind all keys, documents": Visible(4, 12, CPU, DOCUMENTS, None, 12, torch.tensor([[1, 1, 2, 3], [0, 1, 1, 2]])),
}


def sees(visible: Visible, row: int, query: int, key: int) -> bool:
    """In words: the query stands behind the keys that are there before all queries."""
    place = query + (visible.keys - visible.queries if visible.first is None else visible.first)
    own, documents = visible.own_documents_BS, visible.documents_BT
    if documents is not None and own is None:
        own = documents[:, visible.keys - visible.queries :]
    together = documents is None or own is None or bool(own[row, query] == documents[row, key])
    return key <= place and together and (visible.window is None or place - key < visible.window)


@pytest.mark.parametrize("name", SEEN | BEHIND)
def test_a_mask_is_what_the_description_says(name: str) -> None:
    visible = (SEEN | BEHIND)[name]
    dense = visible.dense().expand(2, 1, -1, -1)
    assert dense.shape == (2, 1, visible.queries, visible.keys)
    for row, _, query, key in torch.cartesian_prod(*map(torch.arange, dense.shape)).tolist():
        assert dense[row, 0, query, key] == sees(visible, row, query, key)


def test_queries_behind_all_keys_are_not_causal() -> None:
    assert Visible(12, 12, CPU, first=0).is_causal
    assert not Visible(12, 12, CPU, first=12).is_causal


def test_a_part_is_rows_of_the_whole_without_the_keys_that_none_of_them_sees() -> None:
    for visible in SEEN.values():
        part, whole = visible.part(1, 4), visible.dense()
        assert torch.equal(part.dense(), whole[:, :, 1:4, : part.keys])
        assert not whole[:, :, 1:4, part.keys :].any()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", SEEN)
def test_a_kernel_computes_with_what_is_visible(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its gradients; the plain one by blocks of five queries and what is left over, flex by blocks of 4."""
    monkeypatch.setattr(attention, "_QUERIES", 5)
    monkeypatch.setattr(flex, "BLOCK", 4)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)  # which refuses its backward on a CPU
    torch.manual_seed(0)
    visible = KERNELS[kernel].prepare(SEEN[name])
    given = [torch.randn(2, heads, length, 8) for heads, length in ((4, visible.queries), *[(2, visible.keys)] * 2)]
    gradient = torch.randn_like(given[0])

    def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = q @ k.repeat_interleave(2, 1).transpose(2, 3) / 8**0.5
        return logits.masked_fill(~visible.dense(), -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)

    found = []
    for attend in (right, lambda q, k, v: KERNELS[kernel].attend(q, k, v, visible)):
        inputs = [tensor.clone().requires_grad_() for tensor in given]
        out = attend(*inputs)
        out.backward(gradient)
        found.append([out, *(tensor.grad for tensor in inputs)])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*found))


@pytest.mark.parametrize("name", SEEN | BEHIND)
def test_flex_lists_the_blocks_of_the_mask_that_are_seen_in_part_and_as_a_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "BLOCK", 2)
    visible = (SEEN | BEHIND)[name]
    mask, made = visible.dense()[:, 0], flex.blocks(visible)
    rows, columns = (-(-length // 2) for length in mask.shape[1:])
    padded = F.pad(mask, (0, 2 * columns - mask.shape[2], 0, 2 * rows - mask.shape[1]))
    tiles = padded.view(-1, rows, 2, columns, 2).transpose(2, 3)
    whole = tiles.all(-1).all(-1)
    for kind, numbers, counts in (
        (tiles.any(-1).any(-1) & ~whole, made.kv_indices, made.kv_num_blocks),
        (whole, made.full_kv_indices, made.full_kv_num_blocks),
    ):
        for (*place, row), count in zip(
            torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist(), counts.flatten()
        ):
            assert numbers[*place, row, :count].tolist() == kind[place[0], row].nonzero().flatten().tolist()
    assert name != "causal" or whole.any()


@pytest.mark.parametrize(("kernel", "documents"), [("auto", False), ("auto", True), ("flex", True)])
def test_it_is_made_once_a_forward_and_layers_are_compiled_once(
    kernel: str, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    made, compiled = [], CompileCounter()

    def count(wants: Callable, visible: Visible) -> Tensor | None:
        made.append(visible)
        return wants(visible)

    def refuse(visible: Visible) -> None:
        raise AssertionError("made anew in a layer")

    model, asked = Llama(FLAVORS["tiny"]), KERNELS[kernel]
    model.visibility.kernel, of_layers = Kernel(asked.attend, partial(count, asked.wants)), Kernel(asked.attend, refuse)
    layer: Any
    for layer in model.layers.children():
        layer.attention.core.kernel = of_layers
        layer.forward = torch.compile(layer.forward, backend=compiled, fullgraph=True)
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    tokens = torch.arange(24).view(2, 12)
    for _ in range(3):
        model(tokens, labels=tokens, document_ids=DOCUMENTS if documents else None).backward()
    assert (len(made), compiled.frame_count) == (3, 1)


def look(run: train.Run) -> list:
    """Of each rank: kernels, and the sizes of what is visible with their masks, of a sequence of 16 tokens."""
    stage: Any = run.stages[0]
    part = torch.zeros(1, 16 // run.mesh["cp"].size(), dtype=torch.int64)
    visible = stage.visibility(part, None)
    pieces = visible.made if isinstance(visible.made, list) else [visible]
    modules = [module for module in stage.modules() if isinstance(module, (AttentionCore, Visibility))]
    names = [name for name, kernel in KERNELS.items() for module in modules if module.kernel is kernel]
    return gather((names, [(piece.queries, piece.keys, piece.made is None) for piece in pieces]))


@pytest.mark.parametrize(
    ("method", "balancer", "seen"),
    [
        ("ulysses", "headtail", [[(16, 16, True)]] * 2),
        ("allgather_kv", "headtail", [[(4, 4, True), (4, 16, False)], [(4, 8, False), (4, 12, False)]]),
        ("allgather_kv", "none", [[(8, 8, True)], [(8, 16, False)]]),
    ],
)
def test_context_parallel_masks_no_more_than_it_has_to(method: str, balancer: str, seen: list) -> None:
    layout = (CP, "2", METHOD, method, BALANCER, balancer, "--model.attention_kernel", "sdpa")
    found = observe(*layout, ranks=2, steps=0, at_end=look).extra
    assert found == [(["sdpa"] * 3, each) for each in seen]  # of two layers, and of what they may see


def test_kernels_of_more_than_eight_shapes_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight are torch's own limit; beyond it nothing is compiled."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    flex._compiled.cache_clear()
    with torch._dynamo.config.patch(recompile_limit=8):
        for tokens in range(1, 11):
            q = torch.randn(1, 2, tokens, 8)
            flex._compiled()(q, q, q, block_mask=flex.blocks(Visible(tokens, tokens, q.device)))
    flex._compiled.cache_clear()
    assert counter.frame_count == 10


def test_flex_pads_narrow_heads_to_what_torchs_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU torch raises NotImplementedError below 16."""
    widths: list[int] = []
    run: Any = flex_attention.flex_attention

    def seen(*qkv: Tensor, **more: Any) -> Any:
        widths.extend(x.shape[3] for x in qkv)
        return run(*qkv, **more)

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "flex_attention", seen)
    q, k, v = torch.randn(2, 4, 12, 6), torch.randn(2, 2, 12, 6), torch.randn(2, 2, 12, 4)
    visible = KERNELS["flex"].prepare(SEEN["documents"])
    out, logsumexp = flex.attend_with_logsumexp(q, k, v, visible.made)
    scores = (q @ k.repeat_interleave(2, 1).mT) * 6**-0.5
    scores = scores.masked_fill(~visible.dense(), -torch.inf)
    torch.testing.assert_close(out, scores.softmax(-1) @ v.repeat_interleave(2, 1))
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1))
    torch.testing.assert_close(flex.attend(q, k, v, visible), out)
    assert {*widths} == {16}


def test_an_unknown_kernel_is_refused_before_adapters_are_made() -> None:
    config = load_config(["--model.attention_kernel", "sdpb", "--lora.rank", "4"])
    with pytest.raises(ConfigError, match=r"not one of auto, .*did you mean sdpa"):
        check_model(config)


def test_a_window_that_hides_no_key_needs_no_mask() -> None:
    """Phi-4-mini's is longer than its context."""
    causal = {window: Visible(8, 8, torch.device("cpu"), window=window).is_causal for window in (None, 7, 8, 9)}
    assert causal == {None: True, 7: False, 8: True, 9: True}
