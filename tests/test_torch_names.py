"""The table of torch's private names is whole, and another torch is refused only for what a layout uses."""

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.distributed import _functional_collectives

from components.config import ConfigError, load_config
from parallelize.mesh import Degrees, resolve_degrees
from parallelize.rules import check_layout, torch_names, warnings
from parallelize.rules.torch_names import PRIVATE, lacking
from tests.small import RECIPE
from tests.test_imports import ROOT, sources

FULL = {f"{module}.{name}" for part in PRIVATE.values() for module in part for name in part[module].split()}
OURS = {name: source for name, source in sources().items() if not name.startswith("tests")}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(source: str, ours: set[str]) -> Iterator[str]:
    """Private names of torch that a source uses; "._name" where no import leads to what has it."""
    tree = ast.parse(source)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if is_private(known[alias.asname or alias.name]):
                    yield known[alias.asname or alias.name]
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and _root(node.value) in known:
            known |= {ast.unparse(target): _full(node.value, known) for target in node.targets}
    if not any(name.startswith("torch") for name in known.values()):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _root(node) in known:
            if is_private(_full(node, known)):
                yield _full(node, known)
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in {*ours, "_replace"}:
            yield f".{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            names = [name.value for name in node.args[1:2] if isinstance(name, ast.Constant)]
            yield from (f".{name}" for name in names if isinstance(name, str) and is_private(name))


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _full(node: ast.AST, known: dict[str, str]) -> str:
    root, _, rest = ast.unparse(node).partition(".")
    return f"{known[root]}.{rest}"


def unlisted(sources: dict[str, str]) -> list[str]:
    """What the table does not have."""
    ours = {name for source in OURS.values() for name in _defined(source)}
    found = {name for source in sources.values() for name in private_names(source, ours)}
    return sorted(name for name in found if name.startswith(("torch.", ".")) and not _listed(name))


def _defined(source: str) -> Iterator[str]:
    """Attributes of classes of ours."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            yield from (line.name for line in node.body if isinstance(line, ast.FunctionDef))
            yield from (ast.unparse(line.target) for line in node.body if isinstance(line, ast.AnnAssign))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _root(node) == "self":
            yield node.attr


def _listed(name: str) -> bool:
    if name.startswith("."):
        return any(full.endswith(name) for full in FULL)
    return any(full == name or full.startswith(f"{name}.") or name.startswith(f"{full}.") for full in FULL)


def test_the_table_has_every_private_name() -> None:
    assert unlisted(OURS) == []


def test_this_torch_has_every_name_and_each_is_used() -> None:
    assert [name for part in PRIVATE for name in lacking(part)] == []
    text = "\n".join(source for name, source in OURS.items() if name != "parallelize.rules.torch_names")
    assert [name for name in FULL if name.rpartition(".")[2] not in text] == []


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from torch.distributed.tensor._ops import relu", "torch.distributed.tensor._ops.relu"),
        ("import torch._dynamo\ntorch._dynamo.reset()", "torch._dynamo.reset"),
        ("import torch.distributed as dist\ndist._coalescing_manager()", "torch.distributed._coalescing_manager"),
        ("import torch\naten = torch.ops.aten\naten._softmax.default()", "torch.ops.aten._softmax"),
        ("import torch\ndef made(mesh):\n    return mesh._flatten()", "._flatten"),
        ("import torch\ndef local(tensor):\n    return getattr(tensor, '_spec', None)", "._spec"),
    ],
)
def test_a_name_that_the_table_lacks_is_found(line: str, name: str) -> None:
    assert name in unlisted({**OURS, "parallelize.new": line})


def test_nothing_private_is_imported_before_the_check() -> None:
    """But by the dry run, which is a program of its own, and by the planner, which is imported where it is asked."""
    for module, source in OURS.items():
        first = "\n".join(
            ast.unparse(node) for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)
        )
        found = [name for name in private_names(first, set()) if name.startswith("torch.")]
        assert not found or module in ("components.commands.dry_run", "parallelize.plan.layer"), (module, found)


CP, PP = "--parallelism.context_parallel_degree", "--parallelism.pipeline_parallel_degree"


def check(ranks: int, *overrides: str) -> None:
    config = load_config(["--job.config_file", str(RECIPE), *overrides])
    check_layout(config, resolve_degrees(config, ranks))


def test_another_torch_is_refused_only_for_what_the_layout_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_functional_collectives, "permute_tensor")
    check(2, CP, "2")  # 2.13 is not looked at
    monkeypatch.setattr(torch_names, "torch_version", lambda: "2.14.0+cpu")
    check(2)
    check(2, CP, "2", "--parallelism.context_parallel_method", "allgather_kv")
    with pytest.raises(
        ConfigError, match=r"^torch 2\.14\.0\+cpu lacks \S+_functional_collectives\.permute_tensor \(ring\), which"
    ):
        check(2, CP, "2")
    monkeypatch.delattr(torch, "_foreach_norm")
    with pytest.raises(ConfigError, match=r"lacks torch\._foreach_norm \(every run\), which"):
        check(1)


@pytest.mark.parametrize(
    ("ranks", "words", "parts"),
    [
        (1, (), set()),
        (1, ("--model.name", "qwen3_moe"), set()),
        (1, ("--model.name", "qwen3_moe", "--training.enable_cpu_offload", "true"), {"experts"}),
        (1, ("--model.name", "qwen3_moe", "--training.dtype", "bfloat16"), {"experts"}),
        (2, ("--model.name", "qwen3_moe"), {"experts"}),
        (2, (CP, "2"), {"ring", "attention in steps"}),
        (2, (CP, "2", "--parallelism.context_parallel_method", "ulysses"), {"ulysses"}),
        (2, (PP, "2", f"{PP[:-7]}_sequence_splits", "2"), {"pipeline", "attention in steps", "tables of actions"}),
        (2, (PP, "2", f"{PP[:-7]}_schedule_csv", "a.csv"), {"pipeline", "tables of actions"}),
    ],
)
def test_a_layout_uses_the_names_of_its_parts(ranks: int, words: tuple[str, ...], parts: set[str]) -> None:
    config = load_config(["--job.config_file", str(RECIPE), *words])
    used = torch_names._used(config, resolve_degrees(config, ranks))
    assert {part for part, is_used in used.items() if is_used and part in PRIVATE} == {"every run"} | parts


def test_another_torch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config([])
    assert warnings(config, Degrees(), 1, on_cpu=False) == []
    monkeypatch.setattr(torch_names, "torch_version", lambda: "2.14.0")
    assert warnings(config, Degrees(), 1, on_cpu=False) == ["torch 2.14.0 has not been tried; 2.13 has"]


STARTED = """
import sys
import torch, torch.distributed.tensor.parallel
from torch.distributed import _functional_collectives
from parallelize.rules import torch_names
torch_names.torch_version = lambda: "2.14.0"
del _functional_collectives.permute_tensor
from components.commands.start import main
sys.exit(main(sys.argv[1:]))
"""


def test_the_start_says_it_in_one_line() -> None:
    words = ("--job.config_file", str(RECIPE), CP, "2", "--training.steps", "1", "--lr_scheduler.warmup_steps", "0")
    done = subprocess.run(
        [sys.executable, "-c", STARTED, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("torch 2.14.0 lacks torch.distributed._functional_collectives.permute_tensor (ring)")
