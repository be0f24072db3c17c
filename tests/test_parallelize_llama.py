"""The fixed order, read from the source."""

import ast
import inspect

import pytest

from models import MODELS
from parallelize import ORDER, parallelize_model


def steps_of(source: str) -> list[str]:
    """What a parallelize_<model> calls on each stage, in order, and on nothing else."""
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


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_laid_out_in_the_fixed_order(name: str) -> None:
    source = inspect.getsource(parallelize_model(name))
    assert steps_of(source) == list(ORDER)
    assert len(inspect.getsource(inspect.getmodule(parallelize_model(name))).splitlines()) <= 80  # type: ignore[arg-type]


def test_another_order_is_noticed() -> None:
    lines = inspect.getsource(parallelize_model("llama")).splitlines()
    first, second = (
        number for number, line in enumerate(lines) if line.strip().startswith(("apply_tensor", "apply_data"))
    )
    lines[first], lines[second] = lines[second], lines[first]
    assert steps_of("\n".join(lines)) != list(ORDER)
