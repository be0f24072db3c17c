"""Who may import whom, read from the source: nothing is imported here."""

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENTRY_POINTS = {"components.generate", "components.weights"}
"""Components with a command line that takes any model: as train.py does, they know models and layouts."""
OURS = {"components", "models", "parallelize", "tests", "train"}


def sources() -> dict[str, str]:
    """Module name -> its source, for train.py and the three packages."""
    files = [*ROOT.glob("train.py"), *(path for name in OURS for path in (ROOT / name).rglob("*.py"))]
    return {_module(path): path.read_text(encoding="utf-8") for path in files}


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(module: str, source: str, known: set[str]) -> Iterator[str]:
    """Full names of what a module imports, anywhere in it; of `from a import b` that is a.b where b is a module."""
    for node in _statements(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{module}: relative import"
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if inside in known else str(node.module)


@functools.cache
def _statements(source: str) -> list[ast.Import | ast.ImportFrom]:
    """Parsing a hundred files takes half a second, and each test has changed one of them."""
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]


def _in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def models_of(files: dict[str, str]) -> set[str]:
    """Families: every module of models/ that has a MODEL."""
    return {name for name, source in files.items() if _in(name, "models") and "\nMODEL = " in source}


def broken(files: dict[str, str]) -> list[str]:
    """Every import that the table forbids."""
    known = set(files)
    families = models_of(files)
    found = []
    for module, source in files.items():
        for name in imports(module, source, known):
            reason = _forbidden(module, name, families)
            if reason:
                found.append(f"{module} imports {name}: {reason}")
    return sorted(found)


def _forbidden(module: str, name: str, families: set[str]) -> str | None:
    """Why module may not import name; None if it may."""
    top = name.partition(".")[0]
    if _in(module, "tests"):
        return None
    if top == "tests":
        return "nothing imports tests"
    if top == "train" and module != "parallelize.plan":
        return "nothing imports train.py but tests and the planner"
    if module == "train":
        return None
    if _in(module, "models"):
        allowed = top in {"torch", "models"} or top in sys.stdlib_module_names
        return None if allowed else "models are single-device torch: no mesh, no job config, no library"
    if _in(module, "components.config"):
        allowed = top in {"pydantic", "annotated_types"} | sys.stdlib_module_names or _in(name, "components.config")
        return None if allowed else "the job file is read without torch, by the standard library and pydantic"
    if module in ENTRY_POINTS:
        return "an entry point knows no named model" if f"models.{name.rpartition('.')[2]}" in families else None
    if _in(module, "components"):
        if top == "models":
            return "components know no model"
        # launch.py is an entry point, as train.py is: it asks the rules too.
        layout = {"parallelize.mesh", "parallelize.rules"} if module == "components.launch" else {"parallelize.mesh"}
        return "components know the mesh only" if top == "parallelize" and name not in layout else None
    family = module.removeprefix("parallelize.")
    if f"models.{family}" in families or module in {"parallelize", "parallelize.plan"}:
        return None
    if _in(module, "parallelize.rules") and name == "models":
        return None  # the registry, for names and sizes
    if top == "models" and name in families | {"models"}:
        return "an axis knows no named model"
    if top == "parallelize" and f"models.{name.removeprefix('parallelize.')}" in families | {"models.parallelize"}:
        return "an axis knows no named model"
    return None


def test_every_import_is_allowed() -> None:
    files = sources()
    assert {"components.config.load", "models.llama", "parallelize.mesh"} <= set(files)
    assert broken(files) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("models.llama", "from parallelize.mesh import build_mesh"),
        ("models.llama", "from components.config import JobConfig"),
        ("models.layers", "import numpy"),
        ("components.config.load", "import torch"),
        ("components.config.tables", "from torch import nn"),
        ("components.config.load", "def late():\n    import torch.distributed"),
        ("components.config.load", "from components.launch import main"),
        ("components.loss", "from models.llama import Llama"),
        ("components.loss", "from models import MODELS"),
        ("components.loss", "from parallelize.tensor import apply_tensor_parallel"),
        ("components.loss", "from parallelize.rules import check_layout"),
        ("components.loss", "from parallelize import PARALLELIZE"),
        ("components.loss", "import train"),
        ("components.generate", "import train"),
        ("components.generate", "from models.llama import Llama"),
        ("components.generate", "from parallelize.llama import parallelize_llama"),
        ("parallelize.data", "from train import main"),
        ("parallelize.data", "from models.llama import Llama"),
        ("parallelize.data", "from models import llama"),
        ("parallelize.data", "from models import MODELS"),
        ("parallelize.data", "from parallelize.llama import parallelize_llama"),
        ("parallelize.rules", "from models.llama import FLAVORS"),
        ("train", "from tests.harness import run"),
    ],
)
def test_a_forbidden_import_is_found(module: str, line: str) -> None:
    files = sources()
    files[module] = files.get(module, "") + f"\n{line}\n"
    files.setdefault("parallelize.llama", "")
    assert [text for text in broken(files) if text.startswith(f"{module} imports")]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("models.llama", "from models.layers import Attention"),
        ("components.loss", "from parallelize.mesh import Degrees"),
        ("components.launch", "from parallelize.rules import check_layout"),
        ("components.generate", "from models import MODELS"),
        ("components.generate", "from parallelize import parallelize_model"),
        ("parallelize.llama", "from models.llama import Llama"),
        ("parallelize.rules", "from models import MODELS"),
        ("parallelize.plan", "from train import build"),
        ("parallelize.data", "from models.layers import Attention"),
        ("tests.test_train", "import train"),
    ],
)
def test_an_allowed_import_is_not(module: str, line: str) -> None:
    assert broken({**sources(), module: line}) == []
