"""Adapters: what they compute, what is trained, the same run at every layout; and faults that would be found."""

import functools
import re
from typing import Any

import pytest
import torch

import train
from components.commands.figures import Observation, broken_bars
from components.config import ConfigError, Lora, Model, Optimizer, load_config, to_dict
from components.optim.optimizer import build_optimizer
from components.state.folder import chosen_model
from components.state.init import initialize_weights
from models import MODELS, meta_model
from parallelize.mesh import resolve_degrees
from parallelize.rules import check_layout
from tests.harness import observe, rewrite
from tests.small import SMALL

ADAPTED = ("--model.flavor", "many_heads", "--lora.rank", "4", "--lora.alpha", "8")
TP = ("--parallelism.tensor_parallel_degree", "2")


def adapted(name: str, **settings: Any) -> Any:
    """A model whose adapters are not 0."""
    model = meta_model(Model(name=name, flavor="tiny", lora=Lora(rank=4, **settings))).to_empty(device="cpu")
    initialize_weights(model, lambda name: 0.1 if name.endswith("lora_B") else model.init_std(name), 0)
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("use_rslora", [False, True])
def test_an_adapter_adds_its_product_to_the_matrix(name: str, use_rslora: bool) -> None:
    model = adapted(name, alpha=8.0, use_rslora=use_rslora)
    plain = meta_model(Model(name=name, flavor="tiny")).to_empty(device="cpu")
    weights = dict(model.named_parameters())
    scale = 4.0 if use_rslora else 2.0
    with torch.no_grad():
        for each, parameter in plain.named_parameters():
            module = each.rpartition(".")[0]
            parameter.copy_(weights[each])
            adapter = f"{module}.lora_" if each.endswith(".weight") else f"{each}_lora_"  # of experts
            if f"{adapter}A" in weights:
                parameter.add_(scale * weights[f"{adapter}B"] @ weights[f"{adapter}A"])
        tokens = torch.arange(48).view(2, 24)
        torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-4, atol=1e-5)


def test_only_adapters_are_trained_with_settings_of_their_own() -> None:
    model = adapted("llama")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if name.endswith(("lora_A", "lora_B"))}
    assert len(trained) == 2 * 7 * model.config.n_layers
    groups = build_optimizer([model], Optimizer()).param_groups
    assert {group["role"]: {*group["names"]} for group in groups if group["params"]} == {"adapter": trained}


def test_adapters_start_as_those_of_peft() -> None:
    model = meta_model(Model(name="llama", flavor="debug", lora=Lora(rank=16))).to_empty(device="cpu")
    initialize_weights(model, model.init_std, 0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            assert not parameter.any(), name
        elif name.endswith("lora_A"):
            bound = parameter.shape[1] ** -0.5
            assert 0.99 * bound < parameter.abs().max() <= bound, name
            assert parameter.std().item() == pytest.approx(bound / 3**0.5, rel=0.05), name


def test_a_frozen_matrix_costs_two_thirds_of_a_trained_one() -> None:
    plain, model = (meta_model(Model(name="llama", flavor="debug", lora=Lora(rank=rank))) for rank in (0, 16))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    adapters = sum(size for name, size in sizes.items() if model.kind(name).role == "adapter")
    products = sum(round(size * model.kind(name).multiplied) for name, size in sizes.items()) - adapters
    assert plain.flops_per_token(64)[0] - model.flops_per_token(64)[0] == 2 * products - 6 * adapters


@pytest.mark.parametrize("names", [["wq", "w2"], ["q_proj", "down_proj"], ["wq", "down_proj", "q_proj"]])
def test_targets_have_our_names_or_those_of_hugging_face(names: list[str]) -> None:
    model = meta_model(Model(name="llama", flavor="tiny", lora=Lora(rank=2, target_modules=names)))
    found = {name.split(".")[-2] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert found == {"wq", "w2"}


REFUSED = {
    "is no matrix of the layers; did you mean q_proj?": ("--lora.rank", "4", "--lora.target_modules", '["q_prj"]'),
    "no matrix would have an adapter": ("--lora.rank", "4", "--lora.target_modules", "[]"),
    "tok_embeddings is no matrix of the layers": ("--lora.rank", "4", "--lora.target_modules", '["tok_embeddings"]'),
    "attention_norm is no matrix of the layers": ("--lora.rank", "4", "--lora.target_modules", '["attention_norm"]'),
    "needs lora.rank of 1 or more": ("--lora.alpha", "32"),
    "model.lora.dropout = 0.1: needs lora.rank": ("--lora.dropout", "0.1"),
    "float8 would train matrices": ("--lora.rank", "4", "--model.converters", '["quantize.linear.float8"]'),
    "biases of routers, which are frozen": (
        *("--lora.rank", "4", "--model.name", "qwen3_moe", "--experts.bias_update_speed", "0.1"),
    ),
    "nothing: adapters have no norms": ("--lora.use_dora", "true"),
    "in a model with experts only attention can": (
        *("--lora.rank", "4", "--lora.lora_dropout", "0.1", "--model.name", "qwen3_moe"),
    ),
    "expected a number": ("--lora.rank", "4", "--lora.dropout", "1"),
    "expected an integer of 0 or more": ("--lora.r", "-1"),
}


@pytest.mark.parametrize(("reason", "words"), REFUSED.items(), ids=REFUSED)
def test_what_adapters_cannot_do_is_refused(reason: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        check_words(words)


def check_words(words: tuple[str, ...]) -> None:
    config = load_config([*SMALL, *words])
    check_layout(config, resolve_degrees(config, 1))


def test_a_run_keeps_its_adapters_for_generation_and_export() -> None:
    config = load_config([*SMALL, "--lora.lora_r", "4", "--lora.lora_alpha", "3", "--lora.target_modules", '["wv"]'])
    assert chosen_model(to_dict(config)).lora == Lora(rank=4, alpha=3.0, target_modules=["wv"])


LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp 2": (2, TP),
    "tp 2, whole": (2, (*TP, "--parallelism.sequence_parallel", "false")),
    "tp 2, one key head": (2, (*TP, "--model.flavor", "many_heads_1_key_heads")),
    "tp 2, compiled": (2, (*TP, "--compile.enable", "--compile.backend", "aot_eager")),
    "tp 2, fsdp 2": (4, (*TP, "--training.local_batch_size", "18")),
    "fsdp 2, Muon": (2, ("--training.local_batch_size", "18", "--optimizer.name", "Muon")),
    "pp 2, embedding alone": (
        2,
        (
            *("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_microbatch_size", "9"),
            *(
                "--parallelism.module_fqns_per_model_part",
                '[["tok_embeddings"], ["layers.0", "layers.1", "norm", "output"]]',
            ),
        ),
    ),
}


@functools.cache
def one_process(*words: str) -> Observation:
    return observe(*ADAPTED, *words)


def of_the_run(words: tuple[str, ...]) -> tuple[str, ...]:
    """The settings that one process has too."""
    pairs = zip(words[::2], words[1::2], strict=True) if "--compile.enable" not in words else ()
    return tuple(word for pair in pairs for word in pair if pair[0] in ("--model.flavor", "--optimizer.name"))


@pytest.mark.parametrize(("ranks", "words"), LAYOUTS.values(), ids=LAYOUTS)
def test_adapters_are_the_same_run_at_every_layout(ranks: int, words: tuple[str, ...]) -> None:
    reference, observed = one_process(*of_the_run(words)), observe(*ADAPTED, *words, ranks=ranks)
    assert {*reference.gradients} == {name for name in reference.weights if name.endswith(("lora_A", "lora_B"))}
    assert broken_bars(observed, reference) == {}
    for name in reference.weights.keys() - reference.gradients.keys():
        assert torch.equal(observed.weights[name], reference.first_weights[name]), name


FAULTS = {
    "A local to a rank": ("parallelize.tensor", "_own", "partial_sum(tensor)", "tensor.to_local()"),
    "a dead adapter": ("models.lora", "low_rank", "* scale", "* scale * 0"),
    "a bound of the rank's columns": (
        "models.transformer",
        "Transformer.init_std",
        "matrices[attribute]",
        "matrices[attribute].to_local()",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_in_an_adapter_is_found(fault: tuple[str, str, str, str]) -> None:
    observed = observe(*ADAPTED, *TP, ranks=2, mutate=functools.partial(rewrite, *fault))
    assert broken_bars(observed, one_process()).keys() & {"gradient", "weights at step 0"}


def test_a_base_that_tensor_parallel_thaws_is_noticed() -> None:
    mutate = functools.partial(rewrite, "parallelize.tensor", "apply_tensor_parallel", "set_trained(model)", "pass")
    with pytest.raises(RuntimeError, match="whether it is trained"):
        observe(*ADAPTED, *TP, ranks=2, steps=0, mutate=mutate)


def flags(run: train.Run) -> dict[str, bool]:
    return {name: parameter.requires_grad for stage in run.stages for name, parameter in stage.named_parameters()}


def test_a_base_stays_frozen_with_a_tied_table() -> None:
    words = (*ADAPTED, "--model.flavor", "many_heads_tied")
    one, two = (observe(*words, *TP[: 2 * (ranks - 1)], ranks=ranks, steps=0, at_end=flags).extra for ranks in (1, 2))
    assert one == two
