"""Rates and starting values by width (models/mup.py): their numbers, all layouts, and what they are for."""

import math
from typing import Any

import pytest
import torch

from components.config import ConfigError, load_config
from components.config.model import Model
from components.observe.describe import describe, describe_rate_change
from components.optim.optimizer import build_optimizer, rate_settings
from components.state.init import initialize_weights
from models import MODELS, meta_model
from models.mup import UNSCALED, Scale
from parallelize.mesh import Degrees
from parallelize.rules import check_layout
from tests.benchmarks import mup
from tests.harness import observe
from tests.layouts import layout
from tests.matrix import measure
from tests.ranks import group_of_one

DOUBLE = {"dim": 512, "n_heads": 16, "n_kv_heads": 8, "ffn_dim": 1536}
"""Twice the width of the debug flavors, with heads of the same width."""


def doubled(name: str = "llama", **more: Any) -> Any:
    return meta_model(Model(name=name, sizes=DOUBLE | more), mup_base="debug")


def scales_of(model: Any, *names: str) -> list[Scale]:
    return [model.scale(name) for name in names]


@pytest.mark.parametrize("name", MODELS)
def test_at_the_width_of_the_base_all_factors_are_one(name: str) -> None:
    model = meta_model(Model(name=name, flavor="debug"), mup_base="debug")
    assert {*model.scales} == {name for name, _ in model.named_parameters()}
    assert {*model.scales.values()} == {UNSCALED}


def test_factors_at_twice_the_width() -> None:
    model, half = doubled(), 2**-0.5
    matrix = Scale(half, 0.5, half)
    for name in ("layers.0.attention.wq.weight", "layers.1.feed_forward.w2.weight"):
        assert model.scale(name) == pytest.approx(matrix)
    vectors = "tok_embeddings.weight", "layers.3.ffn_norm.weight", "output.weight"
    assert scales_of(model, *vectors) == [UNSCALED] * 3
    assert model.scale("norm.weight") == Scale(0.5, 0.5, 0.5), "the multiplier of the logits"


def test_factors_of_experts_routers_latents_and_layers_of_further_tokens() -> None:
    model = doubled("deepseek_v3", expert_dim=384, n_kv_heads=16, mtp_layers=1)
    half = 2**-0.5
    experts = [f"layers.2.feed_forward.experts.w{number}" for number in (1, 2, 3)]
    for scale in scales_of(model, *experts):
        assert scale == pytest.approx((half, 0.5, half)), "the inputs of one expert"
    assert model.scale("layers.2.feed_forward.router.weight")[:2] == (0.5, 0.5), "as many outputs at every width"
    assert model.scale("layers.2.feed_forward.router.bias") == UNSCALED
    assert model.scale("layers.2.attention.wkv_a.weight")[:2] == (half, 0.5)
    assert model.scale("layers.2.attention.wkv_b.weight")[:2] == (1, 1), "its latent is as wide as the base's"
    assert model.scale("layers.4.mtp.norm.weight") == Scale(0.5, 0.5, 0.5), "it is before the head too"
    assert model.scale("layers.4.mtp.enorm.weight") == UNSCALED


@pytest.mark.parametrize(("name", "carrier"), [("llama", "wq"), ("olmo2", "q_norm")])
def test_queries_carry_the_scale_of_wider_heads(name: str, carrier: str) -> None:
    wide = doubled(name, n_heads=8, n_kv_heads=4).scale(f"layers.0.attention.{carrier}.weight")
    kept = doubled(name).scale(f"layers.0.attention.{carrier}.weight")
    assert wide == pytest.approx(kept.times(2**-0.5)), "1 / head_dim instead of 1 / sqrt(head_dim)"


def test_a_family_that_scales_its_embeddings_by_width_is_scaled_back() -> None:
    """Gemma multiplies embeddings by sqrt(dim); its norms multiply by 1 + weight."""
    model = doubled("gemma3")
    assert model.scale("tok_embeddings.weight") == pytest.approx((2**-0.5,) * 3)
    assert model.scale("norm.weight") == pytest.approx((2**-0.5,) * 3), "1 / 2, and sqrt(2) for the tied table"
    model.to_empty(device="cpu")
    initialize_weights(model, model.init_std, 0)
    assert model.norm.weight.unique().tolist() == pytest.approx([2**-0.5 - 1])


def test_a_family_with_multipliers_of_its_own_is_not_scaled_twice() -> None:
    model = doubled("granite", logits_scaling=4.0)
    assert model.scale("norm.weight") == UNSCALED, "its logits are divided by the width already"


@pytest.mark.parametrize("tied", [False, True])
def test_factors_of_weights_are_the_multipliers_of_the_paper(tied: bool) -> None:
    """The same losses as with multipliers of logits and of attention in the forward pass, but for rounding.

    Granite has such multipliers. The model is twice as wide as the base, and so is each head.
    """
    base, found = "tiny" + "_tied" * tied, []
    sizes = {"dim": 128, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 256}
    for multipliers in ({}, {"logits_scaling": 4.0, "attention_multiplier": 0.03125 / 2}):
        words = [word for key, value in (sizes | multipliers).items() for word in (f"--model.sizes.{key}", str(value))]
        # Neither depends on the width: a norm is the same for both, and eps is 0 in effect.
        words += ["--training.max_norm", "1e9", "--optimizer.eps", "1e-20", "--optimizer.mup_base", base]
        found.append(observe("--model.name", "granite", "--model.flavor", base, *words, steps=4))
    plain, multiplied = found
    assert plain.losses == pytest.approx(multiplied.losses, rel=2e-5)
    assert plain.losses[-1] < plain.losses[0] - 0.01
    assert (plain.weights["norm.weight"] * 2 - multiplied.weights["norm.weight"]).abs().max() < 1e-3


def optimizer_of(*words: str) -> Any:
    config = load_config([*words])
    model = meta_model(config.model, mup_base=config.optimizer.mup_base)
    return build_optimizer([model], config.optimizer)


TWICE = [word for key, value in DOUBLE.items() for word in (f"--model.sizes.{key}", str(value))]


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_rate_times_decay_is_the_same_at_every_width(optimizer: str) -> None:
    words = ["--optimizer.name", optimizer, "--optimizer.mup_base", "debug", "--optimizer.matrix.lr_factor", "0.3"]
    groups = [group for group in optimizer_of(*words, *TWICE).param_groups if group["names"]]
    rates = {name: group["rate"] for group in groups for name in group["names"]}
    expected = 0.5 if optimizer == "AdamW" else 2**-0.5
    assert rates["layers.0.attention.wq.weight"] == pytest.approx(0.3 * expected)
    assert (rates["norm.weight"], rates["layers.0.ffn_norm.weight"], rates["output.weight"]) == (0.5, 1, 1)
    for group in groups:
        decay = {"matrix": 0.03, "norm": 0.0}.get(group["role"], 0.1)
        assert group["rate"] * group["weight_decay"] == pytest.approx(decay), group["names"]


def test_at_the_width_of_the_base_a_run_has_the_same_bits() -> None:
    runs = [observe("--model.flavor", "debug", *words, steps=2) for words in ((), ("--optimizer.mup_base", "debug"))]
    assert runs[0].losses == runs[1].losses
    assert all(torch.equal(runs[1].weights[name], weights) for name, weights in runs[0].weights.items())


LAYOUTS = [
    layout(mup="debug", dp="fsdp 2", tp="2"),
    layout(mup="debug", pp="2", tied="true", optimizer="Muon"),
    layout(mup="debug", model="qwen3_moe", dp="fsdp 2", ep="2", mtp="1", resume="elsewhere"),
]


@pytest.mark.slow
@pytest.mark.parametrize("each", LAYOUTS, ids=str)
def test_every_layout_is_the_run_of_one_process(each: Any) -> None:
    (result,) = measure([each])
    assert result.verdict == "proven", result.error or result.broken or result.refusal


def test_a_base_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.mup_base = .large.: not one of debug, "):
        check_layout(load_config(["--optimizer.mup_base", "large"]), Degrees())


def test_a_decay_that_would_undo_the_factors_of_norms_is_refused() -> None:
    """A norm of Gemma's multiplies by 1 + weight, and a decay draws this number to 1; others are drawn to 0."""
    words = ["--optimizer.mup_base", "debug", "--optimizer.norm.weight_decay", "0.1"]
    words += [word for name, size in DOUBLE.items() for word in (f"--model.sizes.{name}", str(size))]
    check_layout(load_config(words), Degrees())
    check_layout(load_config([*words[:4], "--model.name", "gemma3"]), Degrees())
    with pytest.raises(ConfigError, match=r"norm\.weight multiplies by 1 \+ weight: optimizer\.norm\.weight_decay"):
        check_layout(load_config([*words, "--model.name", "gemma3"]), Degrees())


def test_the_run_says_it_and_a_resume_with_another_base_too() -> None:
    config = load_config(["--optimizer.mup_base", "debug", *TWICE])
    assert "by width (muP): 2 times that of debug" in describe(config, Degrees())
    (line, remedy) = describe_rate_change(load_config([]), rate_settings(config), 1)
    assert 'optimizer.mup_base was "debug" and is unset' in line
    assert 'set optimizer.mup_base = "debug"' in remedy


def best_rate(width: int, kind: str, rates: tuple[float, ...]) -> float:
    return mup.best_rate({rate: mup.final_loss(width, rate, kind) for rate in rates})


@pytest.mark.slow
def test_the_best_rate_moves_less_than_without() -> None:
    """At the width of the base, 256, both are the same run. A fourth of it has a rate of its own."""
    with group_of_one():
        wide = best_rate(256, "AdamW", (5e-4, 1e-3, 2e-3, 4e-3))
        narrow = {kind: best_rate(64, kind, (1e-3, 2e-3, 4e-3, 8e-3)) for kind in ("AdamW", "AdamW, muP")}
    moved, kept = (abs(math.log2(rate / wide)) for rate in narrow.values())
    assert kept < 1.25, narrow
    assert moved > kept + 0.5, narrow


@pytest.mark.slow
def test_activations_change_as_much_at_every_width() -> None:
    with group_of_one():
        found = {kind: [mup.activations(width, kind) for width in (64, 256)] for kind in ("AdamW", "AdamW, muP")}
    for name in ("queries", "attention", "feed-forward", "logits"):
        without, scaled = (wide[name] / narrow[name] for narrow, wide in found.values())
        assert without > 2.5, name
        assert 0.5 < scaled < 1.5, name


def test_rows_of_the_figures_are_of_this_shape() -> None:
    assert mup.best_rate({1e-3: 3.0, 2e-3: 2.0, 4e-3: 3.0}) == pytest.approx(2e-3)
    assert 2e-3 < mup.best_rate({1e-3: 3.0, 2e-3: 2.0, 4e-3: 2.5}) < 2.8e-3
    assert mup.best_rate({1e-3: 2.0, 2e-3: 3.0}) == 1e-3
