"""Mixtures of experts in one process: routing, products, balancing, and what is counted."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import train
from components.config import Model
from components.state.init import initialize_weights
from models import MODELS, meta_model
from models.grouped import grouped_feed_forward, grouped_product
from models.moe import Balance, Mixture, MixtureBlock, Router
from tests.harness import observe, rewrite

SIZES = replace(MODELS["qwen3_moe"][1]["tiny"], dim=16, n_experts=8, top_k=3, expert_dim=8)
SIGMOID = {"score": "sigmoid", "n_groups": 4, "top_groups": 2, "route_scale": 2.5, "n_shared": 2}


def mixture(**changes: Any) -> Mixture:
    module = Mixture(replace(SIZES, **changes))
    initialize_weights(module, lambda name: 0.0 if name.endswith("bias") else 0.5, seed=1)
    return module


def by_loop(module: Mixture, x_TD: Tensor) -> Tensor:
    """What the layer is to compute, expert by expert and token by token."""
    config, router, experts = module.router.config, module.router, module.experts
    out = []
    for x in x_TD:
        scores = torch.softmax(router.weight @ x, 0) if config.score == "softmax" else (router.weight @ x).sigmoid()
        chosen_by = (scores + router.bias).detach()
        if config.n_groups > 1:
            groups = chosen_by.view(config.n_groups, -1)
            worth = groups.max(1).values if config.score == "softmax" else groups.sort(1).values[:, -2:].sum(1)
            kept = worth.sort().indices[-config.top_groups :]
            allowed = torch.full_like(groups, -torch.inf)
            allowed[kept] = groups[kept]
            chosen_by = allowed.flatten()
        chosen = chosen_by.sort().indices[-config.top_k :]
        weights = scores[chosen] / (scores[chosen].sum() if config.normalised else 1) * config.route_scale
        parts = [
            weight * (experts.w2[e] @ (F.silu(experts.w1[e] @ x) * (experts.w3[e] @ x)))
            for e, weight in zip(chosen.tolist(), weights, strict=True)
        ]
        out.append(torch.stack(parts).sum(0))
    total = torch.stack(out)
    return total if module.shared is None else total + module.shared(x_TD)


CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "not normalised": {"normalised": False},
    "sigmoid in groups, shared": SIGMOID,
    "groups by their best": {**SIGMOID, "score": "softmax"},
    "one expert": {"top_k": 1, "normalised": False},
}


@pytest.mark.parametrize("case", CASES)
def test_grouped_products_are_the_experts_one_by_one(case: str) -> None:
    module = mixture(**CASES[case])
    module.router.bias.data = torch.linspace(-0.2, 0.2, 8)
    x = torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    tensors = [x, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    found, wanted = module(x, None), by_loop(module, x.flatten(0, 1)).view(2, 20, 16)
    assert ((found - wanted).norm() / wanted.norm()).item() < 1e-6
    probe = torch.linspace(-1, 1, 16)
    gradients = [torch.autograd.grad((out * probe).sum(), tensors) for out in (found, wanted)]
    for name, own, right in zip(["x", *names], *gradients, strict=True):
        assert ((own - right).norm() / right.norm()).item() < 1e-5, name


def test_products_on_a_cpu_have_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN makes a kernel for each number of rows, and that of an expert differs from step to step."""
    counts = torch.tensor([0, 3, 17, 0, 48, 40, 1, 5, 0])
    random = torch.Generator().manual_seed(0)
    rows, gradient, weights = (torch.randn(size, generator=random) for size in ((114, 8), (114, 6), (9, 8, 6)))
    wanted = [part @ weights[e] for e, part in enumerate(rows.split(counts.tolist()))]
    wanted_weights = [
        part.T @ other for part, other in zip(*(x.split(counts.tolist()) for x in (rows, gradient)), strict=True)
    ]
    mm, sizes = torch.mm, set()

    def noted(left: Tensor, right: Tensor, **options: Any) -> Tensor:
        sizes.add(len(left if right.shape == (8, 6) else right))
        return mm(left, right, **options)

    monkeypatch.setattr(torch, "mm", noted)
    ends = counts.cumsum(0)
    torch.testing.assert_close(grouped_product(rows, weights, ends), torch.cat(wanted))
    torch.testing.assert_close(grouped_product(rows.T, gradient, ends), torch.stack(wanted_weights))
    assert sizes == {0, 16, 32, 48}


def test_an_expert_without_a_row_has_a_gradient_of_zero() -> None:
    module = mixture()
    module.router.bias.data = torch.tensor([-9.0, 0, 0, 0, 0, 0, 0, 9.0])
    module(torch.randn(1, 5, 16), None).sum().backward()
    assert module.counts_E is not None
    assert module.counts_E[0] == 0
    assert module.counts_E[7] == 5
    assert module.experts.w1.grad is not None
    assert not module.experts.w1.grad[0].any()
    assert module.experts.w1.grad[7].any()


def test_padding_is_neither_routed_nor_counted() -> None:
    module = mixture()
    x = torch.randn(2, 6, 16)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    padded = module(x.masked_fill(padding[..., None], torch.nan), padding)
    assert module.counts_E is not None
    assert module.counts_E.sum() == 10 * 3
    assert not padded[padding].any()
    assert torch.allclose(padded[~padding], module(x, None)[~padding], atol=1e-6)


@pytest.mark.parametrize("case", ["softmax", "sigmoid in groups, shared"])
def test_losses_of_the_router_are_those_of_their_papers(case: str) -> None:
    """Their gradients, by hand: the sequence loss of arXiv:2412.19437, equations 17 to 20, and the z-loss."""
    module = mixture(**CASES[case])
    router, length, sequences = module.router, 7, 3
    x = torch.randn(sequences, length, 16, generator=torch.Generator().manual_seed(3))
    logits = x @ router.weight.T
    scores = logits.softmax(-1) if case == "softmax" else logits.sigmoid()
    chosen = router.choose(scores.flatten(0, 1).detach()).view(sequences, length, 3)
    loss = 0.01 * logits.logsumexp(-1).square().sum()
    for own_scores, own_chosen in zip(scores, chosen, strict=True):
        mean_shares = (own_scores / own_scores.sum(-1, keepdim=True)).mean(0)
        shares_of_rows = own_chosen.flatten().bincount(minlength=8) * 8 / (3 * length)
        loss = loss + 0.1 * (shares_of_rows * mean_shares).sum()
    (wanted,) = torch.autograd.grad(loss, router.weight)
    router.balance = Balance(sequence_loss=0.1, z_loss=0.01, length=length)
    numbers = torch.arange(sequences).repeat_interleave(length)
    _, weights = router(x.flatten(0, 1), numbers, sequences)
    (found,) = torch.autograd.grad(weights.sum() * 0, router.weight)
    assert ((found - wanted).norm() / wanted.norm()).item() < 1e-5


def test_biases_choose_and_do_not_weigh() -> None:
    module = mixture()
    x = torch.randn(4, 16)
    before, _ = module.router(x, torch.zeros(4), 1)
    module.router.bias.data[before[0, 0]] = -1
    after, weights = module.router(x, torch.zeros(4), 1)
    assert before[0, 0] not in after[0]
    assert torch.allclose(weights.sum(1), torch.ones(4))


@pytest.mark.parametrize(
    ("changes", "why"), [({"top_k": 1}, "would learn nothing"), ({"n_groups": 4, "top_k": 3}, "8 experts in 4 groups")]
)
def test_sizes_with_which_nothing_could_be_trained(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replace(SIZES, **changes)


@pytest.mark.parametrize(
    ("family", "flavor", "billions", "active", "gigaflops"),
    [
        ("qwen3_moe", "30B-A3B", 30.532, 3.353, 23.08),
        ("qwen3_moe", "235B-A22B", 235.094, 22.191, 148.33),
        ("glm4_moe", "106B-A12B", 106.852, 13.424, 90.71),
        ("deepseek_v3", "16B", 15.706, 2.661, 16.41),
        ("deepseek_v3", "236B", 235.741, 21.376, 155.30),
        ("deepseek_v3", "671B", 671.026, 37.552, 250.45),
    ],
)
def test_published_sizes(family: str, flavor: str, billions: float, active: float, gigaflops: float) -> None:
    model = meta_model(Model(name=family, flavor=flavor))
    sizes = {name: (model.kind(name), parameter.numel()) for name, parameter in model.named_parameters()}
    assert round(sum(size for kind, size in sizes.values() if not kind.zero) / 1e9, 3) == billions
    used = sum(size * (kind.multiplied if kind.role == "expert" else 1) for kind, size in sizes.values())
    assert round(used / 1e9, 3) == active
    assert round(model.flops_per_token(4096)[1] / 1e9, 2) == gigaflops


MOE = ("--model.name", "qwen3_moe", "--experts.bias_update_speed", "0.01")
TOKENS = 36 * 32


def rows_left(run: train.Run) -> int:
    """Rows that are counted when nothing was trained since the last update."""
    train.validate(run)
    blocks = [module for stage in run.stages for module in stage.modules() if isinstance(module, MixtureBlock)]
    return sum(int(block.rows_E.sum()) for block in blocks if block.rows_E is not None)


VALIDATED = ("--validation.enable", "true", "--validation.held_out_fraction", "0.006")


def test_each_row_of_training_is_counted_once() -> None:
    for more in ((), ("--activation_checkpoint.mode", "full"), ("--training.local_batch_size", "12")):
        observed = observe(*MOE, *VALIDATED, *more, at_end=rows_left)
        assert {sum(rows) for steps in observed.expert_rows.values() for rows in steps} == {TOKENS * 2}
        assert observed.extra == 0
        biases = [weight for name, weight in observed.weights.items() if name.endswith("router.bias")]
        assert len(biases) == 2
        assert all((bias / 0.01).round().abs().max() in (1, 3) for bias in biases)


@pytest.mark.parametrize(
    "fault",
    [
        (
            "Mixture._of_tokens",
            "self.counts_E = ends",
            "self.counts_E = (0 if self.counts_E is None else self.counts_E) + ends",
        ),
        ("_count", "if torch.is_grad_enabled():", "if True:"),
    ],
    ids=["recomputation counts twice", "validation counts"],
)
def test_rows_that_are_counted_wrongly_are_found(fault: tuple[str, str, str]) -> None:
    plant = functools.partial(rewrite, "models.moe", *fault)
    words = (*MOE, *VALIDATED, "--activation_checkpoint.mode", "full")
    observed = observe(*words, at_end=rows_left, mutate=plant, steps=2)
    counted = {sum(rows) for steps in observed.expert_rows.values() for rows in steps}
    assert observed.extra or counted != {TOKENS * 2}


def moved_by_a_step(run: train.Run, finite: bool = True) -> list[bool]:
    """Of each layer: whether a step moves its biases."""
    routers = [module for module in run.stages[0].modules() if isinstance(module, Router)]
    before = [router.bias.clone() for router in routers]
    if not finite:
        run.stages[0].get_parameter("norm.weight").data[0] = torch.nan
    train.train_step(run, train.local_batches(run), train.divisor(run))
    return [not router.bias.equal(old) for router, old in zip(routers, before, strict=True)]


def test_a_skipped_step_moves_no_bias() -> None:
    assert observe(*MOE, steps=0, at_end=moved_by_a_step).extra == [True, True]
    assert observe(*MOE, steps=0, at_end=functools.partial(moved_by_a_step, finite=False)).extra == [False, False]


def test_gradients_of_biases_are_contiguous() -> None:
    """A split backward sets them as they are, and the fused optimizer reads them as if they were."""
    torch.manual_seed(0)
    counts = torch.tensor([2, 0, 3])
    weights = {name: torch.randn(3, 8, 8) for name in ("w1", "w2", "w3")}
    biases = {name: torch.randn(3, 8, requires_grad=True) for name in ("b1", "b2", "b3")}
    out = grouped_feed_forward(torch.randn(5, 8), counts, weights | biases, "clamped_swiglu")
    seen: list[Tensor] = []
    for bias in biases.values():
        bias.register_hook(seen.append)
    out.sum().backward()
    assert [gradient.is_contiguous() for gradient in seen] == [True] * 3
    torch.testing.assert_close(biases["b2"].grad, counts[:, None].expand(3, 8).float())


def test_scores_that_are_all_zero_give_no_nan() -> None:
    """Sigmoids of logits of -200, in float32."""
    config = MODELS["deepseek_v3"][1]["tiny_sigmoid"]
    router = Router(config)
    x_TD = torch.ones(3, config.dim)
    weights = {"weight": torch.full((config.n_experts, config.dim), -200 / config.dim), "bias": torch.zeros(())}
    _, weights_TC = router.route(x_TD, torch.zeros(3, dtype=torch.int64), 1, weights)
    assert torch.isfinite(weights_TC).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_groups": 8, "top_groups": 3}, "n_groups = 8: the score of a group is the sum of its two best experts"),
        ({"n_groups": 2, "top_groups": 3}, "top_groups = 3: only 2 groups exist"),
    ],
)
def test_groups_that_cannot_be_scored_or_chosen_are_refused(change: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(SIZES, score="sigmoid", **change)
