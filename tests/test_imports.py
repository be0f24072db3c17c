"""Who may import whom, read from the source: nothing is imported here."""

import ast
import collections
import functools
import graphlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = ("parallelize.mesh", "parallelize.groups", "parallelize.sharding", "parallelize.together")
"""What a component may know of more than one device."""
ROOMS: dict[str, tuple[str, ...]] = {
    "components.config": (),
    "models": (),
    "parallelize": ("components.config", "models"),
    "parallelize.rules": ("components.config", "models", "parallelize"),
    "parallelize.layouts": ("components.config", "parallelize"),
    "components.observe.report": ("components.config",),
    "parallelize.plan": ("components.config", "components.observe.report", "models", "parallelize"),
    "components.launch": ("components.config", *LAYOUT),
    "components.optim": ("components.config", "models.mup", "models.parameters", "models.random_bits", *LAYOUT),
    "components.data": ("components.config", "components.launch", *LAYOUT),
    "parallelize.plan.__main__": ("components", "models", "parallelize"),
    "components.state": (
        *(
            "components.config",
            "components.launch",
            "components.data.tokenizer",
            "components.data.chats",
            "components.data.hub",
            "components.data.store",
            "components.observe.report",
            "components.optim.averages",
            "components.optim.counter_hash",
        ),
        *("models.hugging_face", "models.nf4", "models.parameters", "models.random_bits", *LAYOUT),
    ),
    "components.state.adapters": ("components", "models", "parallelize.rules", *LAYOUT),
    "components.state.reference": (
        "components.config",
        "components.data",
        "components.state",
        *LAYOUT,
        "parallelize.scores",
    ),
    "components.state.__main__": ("components", "models", "parallelize"),
    "components.observe": (
        *("components.config", "components.launch", "components.data.loader", "components.observe.report", *LAYOUT),
    ),
    **dict.fromkeys(
        (
            "components.observe.samples",
            "components.observe.tasks",
            "components.observe.evaluation",
            "components.observe.text_loss",
            "components.observe.looks",
        ),
        (
            *("components.config", "components.data", "components.launch", "components.observe"),
            *("models.random_bits", "parallelize.scores", *LAYOUT),
        ),
    ),
    "components.observe.describe": (
        *("components.config", "components.optim.averages", "components.optim.optimizer", "models", "parallelize"),
    ),
    "components.commands.teach": ("components", "models", "parallelize"),
    "components.data.__main__": ("components",),
    "train": ("components", "models", "parallelize"),
    "components.launch.rank": ("components.config", "components.launch", "train"),
    "components.commands": ("components", "models", "parallelize"),
    "components.commands.dry_run": ("components", "models", "parallelize", "train"),
    "components.commands.observed": ("components", "models", "parallelize", "train"),
    "components.commands.prove": ("components", "models", "parallelize", "train"),
    "components.generate": ("components.commands.generate", "components.launch.ending"),
    "components.metrics": ("components.commands.report",),
    "components.sweep": ("components.commands.sweep",),
}
"""Room -> what it may import of other rooms, from the ground up: a room imports none that stands below it here."""
LIBRARIES = {
    "components.config": {"pydantic", "annotated_types", "tomli"},
    "models": {"torch"},
}
"""Rooms that take only these and the standard library."""
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


def room_of(module: str) -> str:
    """The innermost room that a module is in; a module that no room has is a room by itself."""
    return max((room for room in ROOMS if _in(module, room)), key=len, default=module)


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
    top, room, other = name.partition(".")[0], room_of(module), room_of(name)
    if _in(module, "tests"):
        return None
    if room not in ROOMS:
        return "no room has it: give it one in ROOMS"
    if top not in OURS:
        allowed = room not in LIBRARIES or top in LIBRARIES[room] | sys.stdlib_module_names
        return None if allowed else f"{room} takes only {', '.join(sorted(LIBRARIES[room]))} and the standard library"
    if top == "tests":
        return "nothing imports tests"
    floors = list(ROOMS)
    if room != other:
        below = other in floors and floors.index(other) < floors.index(room)
        if not (below and any(_in(name, package) for package in ROOMS[room])):
            return f"{room} does not know {other}"
    named = name in families or name in {family.replace("models.", "parallelize.") for family in families}
    if named and module.replace("parallelize.", "models.") not in families:
        return "only a family knows a named model"
    registry = name == "models" and room == "parallelize"
    return "an axis knows no model" if registry else None


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
        ("components.config.load", "from components.commands.start import main"),
        ("components.optim.optimizer", "from models.llama import Llama"),
        ("components.optim.optimizer", "from models import MODELS"),
        ("components.optim.optimizer", "from parallelize.tensor import apply_tensor_parallel"),
        ("components.optim.optimizer", "from parallelize.rules import check_layout"),
        ("components.optim.optimizer", "from parallelize import PARALLELIZE"),
        ("components.optim.optimizer", "import train"),
        ("components.config.files", "from components.launch.process import cores"),
        ("components.data.cache", "from components.state.folder import fault"),
        ("components.launch.ranks", "from components.commands.start import main"),
        ("components.launch.ranks", "from components.data.cache import prepare"),
        ("parallelize.mesh", "from parallelize.rules import check_layout"),
        ("parallelize.rules", "from parallelize.plan.auto import filled"),
        ("parallelize.mesh", "from components.observe.report import draw"),
        ("parallelize.rules", "from components.state.weights import check_weights"),
        ("parallelize.data", "from components.launch.signals import StopSignal"),
        ("components.new_room", "import torch"),
        ("components.commands.generate", "import train"),
        ("components.commands.start", "import train"),
        ("components.observe.guards", "from components.commands.start import main"),
        ("components.commands.check", "import train"),
        ("train", "from components.commands.dry_run import Meter"),
        ("components.commands.generate", "from models.llama import Llama"),
        ("components.commands.generate", "from parallelize.llama import parallelize_llama"),
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
    assert [text for text in broken(files) if text.startswith(f"{module} imports")]


def circle(files: dict[str, str]) -> list[str]:
    """Folders that import each other in a circle, apart from entries: the loop's, and that of components.data."""
    known = set(files)
    graph: dict[str, set[str]] = collections.defaultdict(set)
    for module, source in files.items():
        folder = _folder(module)
        if folder and module not in ("components.launch.rank", "components.data.__main__"):
            graph[folder] |= {_folder(name) for name in imports(module, source, known)} - {folder, ""}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def _folder(module: str) -> str:
    """The folder of a module of the repository; empty for tests and for libraries."""
    parts = module.split(".")
    if _in(module, "parallelize.plan"):  # above the rest of parallelize
        return "parallelize.plan"
    if parts[0] not in OURS - {"tests"}:
        return ""
    return ".".join(parts[: 2 if parts[0] == "components" else 1])


def test_no_folders_import_each_other_in_a_circle() -> None:
    files = sources()
    assert circle(files) == []
    files["components.optim.visits"] += "\nfrom components.observe.guards import Guards\n"
    assert {*circle(files)} == {"components.optim", "components.observe"}


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("models.llama", "from models.layers import Attention"),
        ("components.optim.optimizer", "from parallelize.mesh import Degrees"),
        ("components.commands.start", "from parallelize.rules import check_layout"),
        ("components.commands.dry_run", "import train"),
        ("components.commands.generate", "from models import MODELS"),
        ("components.commands.generate", "from parallelize import parallelize_model"),
        ("parallelize.llama", "from models.llama import Llama"),
        ("parallelize.rules", "from models import MODELS"),
        ("parallelize.data", "from models.layers import Attention"),
        ("tests.test_train", "import train"),
    ],
)
def test_an_allowed_import_is_not(module: str, line: str) -> None:
    assert broken({**sources(), module: line}) == []
