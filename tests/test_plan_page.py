"""Pictures of a plan: what they show, and that they are written for any number of devices."""

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from components.config import ROOT, load_config
from parallelize.layouts import Layout
from parallelize.mesh import Degrees
from parallelize.plan.__main__ import main
from parallelize.plan.devices import find_device
from parallelize.plan.page import Nodes, Schedule, pictures
from parallelize.plan.search import Planner

RECIPE = str(ROOT / "recipes" / "llama_debug.toml")


def planned(*words: str, **degrees: int) -> dict[str, Any]:
    job = load_config(["--job.config_file", RECIPE, "--training.global_batch_size", "16", *words])
    layout = Layout(Degrees(**degrees))
    planner = Planner(job, layout.degrees.world_size, find_device("cpu"))
    return pictures(planner.plan(layout.given_to(job), layout.degrees), planner)


@pytest.mark.parametrize("devices", [1, 4])
def test_page_and_pictures_are_written(devices: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, folder = tmp_path / "a plan.html", tmp_path / "new" / "pictures"
    pins = ["--set", "job.description=a $x_ <b>", "--set", "parallelism.pipeline_parallel_degree=1"]
    drawn = ["--html", str(page), "--png", str(folder)]
    assert main([RECIPE, "--devices", str(devices), "--device", "cpu", *drawn, *pins]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("data:image/svg+xml;base64,") == 4
    assert not re.search(r"(src|href)=\"(?!data:)", text), "nothing is loaded from elsewhere"
    assert "a $x_ &lt;b&gt;" in text
    assert "training.local_batch_size" in text
    names = {path.stem for path in folder.iterdir()}
    assert names == {"memory", "schedule", "mesh", "layouts"}
    for path in folder.iterdir():
        with Image.open(path) as image:
            assert min(image.size) > 150


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [RECIPE, "--devices", "1", "--device", "cpu", "--json"]
    assert main([*words, "--html", str(tmp_path / "none" / "a.html")]) == 2
    (tmp_path / "file").touch()
    assert main([*words, "--png", str(tmp_path / "file")]) == 2
    found = capsys.readouterr()
    assert (found.out, found.err.count("\n")) == ("", 2)
    assert found.err.startswith("--html: ")


def test_bars_are_the_memory_of_each_rank_of_the_pipeline() -> None:
    memory = planned("--training.local_batch_size", "16", pp=3)["memory"]
    first, middle, last = memory.ranks
    assert first["activations"] > last["activations"]
    assert first["total"] != middle["total"] != last["total"]


def test_the_schedule_has_the_time_of_messages_and_of_idle_ranks() -> None:
    found: Schedule = planned("--training.local_batch_size", "16", pp=2, tp=2)["schedule"]
    forward = [box for box in found.boxes if box.kind == "F"]
    assert {box.rank for box in forward} == {0, 1}
    assert all(0 < found.shares[box.kind, box.stage] < 1 for box in found.boxes), "tensor parallel waits for messages"
    assert max(box.start for box in forward if box.rank == 1) > min(box.end for box in forward if box.rank == 0)
    alone: Schedule = planned()["schedule"]
    assert {*alone.shares.values()} == {0}
    assert float(found.title.rpartition(" ")[2].rstrip("%")) > 0


NODES = [
    ({"dp_shard": 4, "tp": 2}, False, {"tp": [0, 1, 0, 1, 0, 1, 0, 1], "dp_shard": [0, 0, 1, 1, 2, 2, 3, 3]}, (1, 2)),
    ({"pp": 2, "dp_shard": 2, "tp": 2}, False, {"tp": [0, 1] * 4, "pp": [0] * 4 + [1] * 4}, (1, 2)),
    ({"pp": 2, "dp_shard": 2, "tp": 2}, True, {"tp": [0, 1] * 4, "pp": [0, 0, 1, 1] * 2}, (1, 1)),
    ({"dp_shard": 8, "ep": 8}, False, {"dp_shard": [*range(8)], "ep": [*range(8)]}, (2, 2)),
    ({"dp_shard": 4, "tp": 2, "ep": 4}, False, {"ep": [0, 1, 2, 3] * 2}, (1,)),
    ({"pp": 2, "dp_shard": 2, "tp": 2, "ep": 4}, True, {"ep": [0, 1, 0, 1, 2, 3, 2, 3]}, (2,)),
]


@pytest.mark.parametrize(("degrees", "first", "places", "nodes"), NODES)
def test_ranks_have_their_places_on_nodes(
    degrees: dict[str, int], first: bool, places: dict[str, list[int]], nodes: tuple[int, ...]
) -> None:
    """Nodes of four ranks."""
    mesh = Nodes("", Degrees(**degrees), first, 4)
    assert {name: mesh.places[name] for name in places} == places
    assert tuple(mesh.nodes_of(name) for name in places) == nodes


def test_the_cloud_has_each_layout_and_the_best() -> None:
    job = load_config(["--job.config_file", RECIPE])
    planner = Planner(job, 4, find_device("cpu"))
    (best,), _ = planner.search(1)
    cloud = pictures(best, planner)["layouts"]
    assert len(cloud.plans) > 4
    assert max(plan.tokens_per_second for plan in cloud.plans) == cloud.best.tokens_per_second
