"""Sinks and windows: attention against a softmax written out, and planted faults of layouts, which have to be found."""

import functools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from components.commands.figures import Observation, broken_bars
from components.config import Compile, Parallelism
from components.state.init import initialize_weights
from models import MODELS, flex, steps
from models.attention import AttentionCore, Visible
from models.steps import AttentionInSteps, Own, one_step
from parallelize.compile import apply_compile
from tests.harness import observe, rewrite
from tests.test_attention import SEEN

GPT_OSS = ("--model.name", "gpt_oss", "--model.flavor", "many_heads", "--training.seq_len", "64")
"""Windows of 9 tokens, shorter than the pieces of a ring of two ranks."""
CP, METHOD = "--parallelism.context_parallel_degree", "--parallelism.context_parallel_method"
TP, PP = "--parallelism.tensor_parallel_degree", "--parallelism.pipeline_parallel_degree"
SPLITS = "--parallelism.pipeline_parallel_sequence_splits"


def inputs(visible: Visible) -> list[Tensor]:
    """q (2, 4, S, 8), k and v (2, 2, T, 8), sinks (4,)."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, visible.queries, 8, requires_grad=True)
    k, v = (torch.randn(2, 2, visible.keys, 8, requires_grad=True) for _ in range(2))
    return [q, k, v, torch.tensor([-1.0, 0.0, 2.0, 5.0], requires_grad=True)]


def written_out(q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor, visible: Visible) -> Tensor:
    """A column of logits more, which has no value."""
    k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
    logits = (q @ k.mT / math.sqrt(8)).masked_fill(~visible.dense(), -math.inf)
    column = sinks_H[:, None, None].expand(2, -1, visible.queries, 1)
    return torch.cat((logits, column), dim=-1).softmax(dim=-1)[..., :-1] @ v


@pytest.mark.parametrize("name", SEEN)
def test_a_sink_takes_its_share_of_the_softmax(name: str) -> None:
    visible = SEEN[name]
    q, k, v, sinks_H = given = inputs(visible)
    expected = written_out(q, k, v, sinks_H, visible)
    core = AttentionCore()
    out = core(q, k, v, core.kernel.prepare(replace(visible, sinks=True)), sinks_H)
    torch.testing.assert_close(out, expected)
    direction = torch.randn_like(out)
    theirs = torch.autograd.grad(expected, given, direction)
    for ours, other in zip(torch.autograd.grad(out, given, direction), theirs, strict=True):
        torch.testing.assert_close(ours, other)


def test_the_steps_of_a_gpu_know_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's, in its plain form: the sink is merged as a further step is."""
    visible = Visible(12, 12, torch.device("cpu"), window=5)
    q, k, v, sinks_H = given = inputs(visible)
    expected = torch.autograd.grad(written_out(q, k, v, sinks_H, visible).square().sum(), given)
    flex = steps._Kernel(steps._flex_forward, steps._flex_backward)
    monkeypatch.setattr(steps, "_kernel", lambda *_: flex)
    monkeypatch.setattr("models.steps.flex.BLOCK", 4)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    made = one_step(visible)._replace(visible=visible)
    out = AttentionInSteps.apply(q, k, v, sinks_H, [[made]], Own())
    for ours, other in zip(torch.autograd.grad(out.square().sum(), given), expected, strict=True):
        torch.testing.assert_close(ours, other)


@functools.cache
def one_process() -> Observation:
    return observe(*GPT_OSS)


STEPS = "models.steps"
RING, GATHER, PARTS = (CP, "2"), (CP, "2", METHOD, "allgather_kv"), (PP, "2", SPLITS, "2")
FAULTS = {
    "queries and keys do not know the sink in backward": (
        RING,
        (STEPS, "AttentionInSteps.forward", "        total = together\n    out", "    out"),
    ),
    "sinks pull instead of push": (GATHER, (STEPS, "AttentionInSteps.backward", "-(shares", "(shares")),
    "each rank has the sinks of the first": (
        (TP, "2"),
        ("parallelize.tensor", "OwnHeads._apply", "[device_mesh.get_local_rank()]", "[0]"),
    ),
    "sinks have the gradient of one rank's heads": (
        (TP, "2"),
        ("parallelize.tensor", "partial_sum", "[Partial()]", "[Replicate()]"),
    ),
    "a window counts from the start of a piece": (RING, ("parallelize.ring", "_windowed", "start - first)", "0)")),
    "a first step that shows no key": (
        RING,
        ("parallelize.ring", "_windowed", "reversed([*enumerate(theirs)])", "enumerate(theirs)"),
    ),
    "keys of an earlier piece that some queries see": (
        RING,
        ("parallelize.ring", "_windowed", "start - last + 1", "start - last + 9"),
    ),
    "no window over earlier parts": (
        PARTS,
        ("parallelize.parts", "_PartVisibility._of_part", "window=window, first", "first"),
    ),
    "earlier layers have the window of later ones": (
        (PP, "2"),
        ("models.config", "TransformerConfig.has_window", "(layer + 1)", "(layer + 2)"),
    ),
}


@pytest.mark.parametrize("layout", [RING, GATHER, (CP, "2", METHOD, "ulysses"), (TP, "2"), PARTS], ids=" ".join)
def test_a_layout_with_sinks_and_windows_is_the_run_of_one_process(layout: tuple[str, ...]) -> None:
    assert not broken_bars(observe(*GPT_OSS, *layout, ranks=2), one_process())


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    layout, planted = FAULTS[fault]
    observed = observe(*GPT_OSS, *layout, ranks=2, mutate=functools.partial(rewrite, *planted))
    assert "gradient" in broken_bars(observed, one_process())


class OnCuda:
    """Stands for a mesh of one GPU."""

    device_type = "cuda"

    def __getitem__(self, name: str) -> Any:
        return SimpleNamespace(size=lambda: 1)


def test_compiled_layers_leave_out_sinks_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a step with a window is FlexAttention's, which the CPU computes here without a kernel."""
    monkeypatch.setattr(steps, "_kernel", lambda *_: steps._Kernel(steps._flex_forward, steps._flex_backward))
    monkeypatch.setattr(steps, "_wanted", flex.blocks)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    model_class, flavors = MODELS["gpt_oss"]
    tokens, gradients = torch.randint(0, 1024, (1, 64)), []
    for enable in (False, True):
        model = model_class(flavors["tiny"])
        initialize_weights(model, model.init_std, seed=0)
        config = Compile(enable=enable, components=["model"], backend="eager")
        apply_compile(model, OnCuda(), config, Parallelism())  # type: ignore[arg-type]
        model(tokens).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)
