"""The fixed order, read from the source; and what it leaves: names, and which parameters are trained."""

import ast
import functools
import inspect
import re
from dataclasses import replace

import pytest

import train
from models import MODELS
from models.llama import FLAVORS
from parallelize import parallelize_model
from parallelize.order import parallelize
from tests.harness import observe, rewrite

ORDER = (
    "apply_float8",
    "apply_tensor_parallel",
    "apply_expert_parallel",
    "apply_context_parallel",
    "apply_sequence_splits",
    "apply_compile",
    "apply_activation_checkpoint",
    "apply_data_parallel",
)


def steps_of(source: str) -> list[str]:
    """What is called on each stage, in order, and on nothing else."""
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    calls = [ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)]
    bare = [
        ast.unparse(node.value.func)
        for node in ast.walk(function)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ]
    assert [name for name in calls if name.startswith("apply_")] == bare, "each step is a bare call"
    return bare


def test_the_order_is_fixed() -> None:
    assert steps_of(inspect.getsource(parallelize)) == list(ORDER)


def test_another_order_is_noticed() -> None:
    lines = inspect.getsource(parallelize).splitlines()
    first, second = (
        number for number, line in enumerate(lines) if line.strip().startswith(("apply_tensor", "apply_data"))
    )
    lines[first], lines[second] = lines[second], lines[first]
    assert steps_of("\n".join(lines)) != list(ORDER)


@pytest.mark.parametrize("name", MODELS)
def test_every_family_is_its_plan_and_one_line(name: str) -> None:
    source = inspect.getsource(parallelize_model(name))
    body = ast.parse(source).body[0].body[1:]  # type: ignore[attr-defined]
    (line,) = (ast.unparse(each) for each in body)
    plan = r"\w+_tp_plan\(config\.parallelism(, model\.config)?\)"
    assert re.fullmatch(rf"return parallelize\(model, mesh, config, {plan}\)", line)


FROZEN = ("tok_embeddings", "norm", "layers.*.attention_norm", "layers.*.ffn_norm", "layers.*.attention.w[qo]")


def freeze() -> None:
    """Parameters of each style of the plan."""
    for name in ("tiny", "tiny_tied"):
        FLAVORS[name] = replace(FLAVORS[name], frozen=FROZEN)


def freeze_and_forget(restored: str) -> None:
    freeze()
    rewrite("parallelize.tensor", "apply_tensor_parallel", restored, "pass")


def trained(run: train.Run) -> dict[str, bool]:
    return {name: parameter.requires_grad for stage in run.stages for name, parameter in stage.named_parameters()}


PARALLEL = {
    "with sequence parallel": ("--parallelism.tensor_parallel_degree", "2"),
    "without": ("--parallelism.tensor_parallel_degree", "2", "--parallelism.sequence_parallel", "false"),
    "tied": ("--parallelism.tensor_parallel_degree", "2", "--model.flavor", "tiny_tied"),
}


@pytest.mark.parametrize("layout", PARALLEL.values(), ids=PARALLEL)
def test_what_is_frozen_stays_frozen(layout: tuple[str, ...]) -> None:
    flags = observe(*layout, ranks=2, steps=0, mutate=freeze, at_end=trained).extra
    one_process = observe(*layout[2:], steps=0, mutate=freeze, at_end=trained).extra
    assert flags == one_process
    assert {*flags.values()} == {True, False}


@pytest.mark.parametrize("layout", [PARALLEL["with sequence parallel"], PARALLEL["tied"]])
def test_what_thaws_is_noticed(layout: tuple[str, ...]) -> None:
    mutate = functools.partial(freeze_and_forget, "set_trained(model)")
    with pytest.raises(RuntimeError, match="whether it is trained"):
        observe(*layout, ranks=2, steps=0, mutate=mutate)
