"""The planner's time: products by size, messages by link, and schedules beside real ranks that sleep."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from components.config import ROOT
from parallelize.plan import calibrate
from parallelize.plan.devices import find_device
from tests.benchmarks.plan_time import RECIPES, correlation, is_slower, job_of, planned, planned_point, points
from tests.benchmarks.sleeping import Sleepers, sleep
from tests.ranks import Ranks

H100 = find_device("h100-80g")


def test_a_small_product_is_slower_than_its_share() -> None:
    whole = H100.product(8192, 8192, 8192, "bfloat16", 2)
    assert 2 * 8192**3 / whole == pytest.approx(H100.rate("bfloat16"), rel=0.02)
    assert H100.product(8192, 8192, 64, "bfloat16", 2) > 2 * whole / 128, "memory bounds a narrow product"
    assert H100.product(16, 16, 16, "bfloat16", 2) == pytest.approx(H100.kernel_us * 1e-6, rel=0.01)
    assert H100.product(64, 2048, 768, "bfloat16", 2, 128) > 1.5 * H100.product(8192, 2048, 768, "bfloat16", 2)


def test_a_message_takes_the_link_that_it_crosses() -> None:
    inside, alone = H100.gather(1e9, 8, 8), H100.gather(1e9, 8, 64)
    assert alone / inside == pytest.approx(H100.node.gb_s / H100.network.gb_s, rel=0.05), (
        "one rank a node: one connection"
    )
    assert H100.gather(1e9, 64, 64) < 1.3 * inside, "eight ranks a node use eight connections"
    assert H100.exchange(1e9, 64, 64) > 5 * H100.exchange(1e9, 8, 8)
    assert H100.send(1e9, 64) > 5 * H100.send(1e9, 8)
    assert H100.gather(8, 64, 64) > 8 * H100.network.latency_us * 1e-6


def test_hidden_messages_cost_what_they_take_from_the_work_beside_them() -> None:
    assert H100.exposed(1, 3) == pytest.approx(0.12)
    assert H100.exposed(3, 1) == pytest.approx(2.12)
    assert replace(H100, overlap=0).exposed(3, 1) == pytest.approx(3)


def test_layouts_differ_as_their_work_and_messages_do() -> None:
    one = {"parallelism.data_parallel_shard_degree": 1, "training.global_batch_size": 8}
    settings = {"training.local_batch_size": 4, "training.seq_len": 1024, "activation_checkpoint.mode": "none"}
    seconds = {
        name: planned(job_of("llama1b", one | settings | more), ranks, H100)[1]
        for name, ranks, more in (
            ("one", 1, {}),
            ("eager", 1, {"compile.enable": False}),
            ("op", 1, {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}),
            ("full", 1, {"activation_checkpoint.mode": "full"}),
            ("host", 1, {"optimizer.state_offload": True}),
            ("fsdp", 2, {"parallelism.data_parallel_shard_degree": 2}),
            ("tp", 8, {"parallelism.tensor_parallel_degree": 8, "training.local_batch_size": 8}),
        )
    }
    assert seconds["one"].total < seconds["op"].total < seconds["full"].total
    assert seconds["eager"].memory > 1.5 * seconds["one"].memory
    assert seconds["full"].products == pytest.approx(4 / 3 * seconds["one"].products, rel=0.12)
    assert seconds["host"].offload > seconds["one"].offload == 0
    assert seconds["fsdp"].fsdp > 0 == seconds["one"].fsdp
    assert seconds["tp"].tp > 0
    assert seconds["tp"].products > 1.05 * seconds["one"].products / 8, "narrow matrices are slower"


@pytest.mark.parametrize("name", ["8B, 8 GPUs, fsdp 8, 2 x 8192, checkpointing op, compiled", "8B LoRA, one GPU"])
def test_a_published_point_is_near(name: str) -> None:
    point = next(each for each in points() if each["name"].startswith(name))
    assert planned_point(point)[0] == pytest.approx(point["tokens_per_second"], rel=0.2)


def test_every_published_point_is_in_the_table() -> None:
    rows = (ROOT / "docs" / "plan_points.md").read_text(encoding="utf-8")
    for point in points():
        assert f"| {point['name']} | {point['source']} | {point['tokens_per_second']:,} |" in rows


@pytest.fixture(scope="module")
def sleepers() -> Iterator[Ranks]:
    ranks = Ranks(2, sleep, {})
    yield ranks
    ranks.end()


@pytest.mark.parametrize(
    "case", [Sleepers("1F1B", 2, 3, unit=0.15), Sleepers("ZBVZeroBubble", 2, 4, 2, uneven=True, unit=0.08)]
)
def test_a_schedule_of_real_ranks_is_idle_as_simulated(case: Sleepers, sleepers: Ranks) -> None:
    """All schedules, by longer sleeps: python -m tests.benchmarks.plan_time --pipeline."""
    real, (simulated, work) = sleepers.run(case), case.simulated()
    assert abs(real - simulated) / work < 0.05


def test_the_first_stage_leaves_its_backward_to_w(sleepers: Ranks, tmp_path: Path) -> None:
    """No schedule of torch waits for the first stage's I. Here its next forward, and so the other rank, does."""
    table = tmp_path / "steps.csv"
    table.write_text("0F0,0I0,0F1,0W0,0I1,0F2,0W1,0I2,0W2\n1F0,1B0,1F1,1B1,1F2,1B2\n", "utf-8")
    case = Sleepers("1F1B", 2, 3, unit=0.1, table=str(table))
    real, (simulated, work) = sleepers.run(case), case.simulated()
    assert abs(real - simulated) / work < 0.1, "with half of the backward in I the simulation is 22 points longer"


def test_ranks_of_numbers_are_correlated() -> None:
    assert correlation([1.0, 2.0, 3.0], [10.0, 40.0, 50.0]) == pytest.approx(1)
    assert correlation([1.0, 2.0, 3.0], [5.0, 4.0, 1.0]) == pytest.approx(-1)


def test_this_machine_is_a_device(tmp_path: Path) -> None:
    out = tmp_path / "my device.toml"
    assert calibrate.main(["--ranks", "2", "--out", str(out), "--seconds", "0.01"]) == 0
    device = find_device(str(out))
    assert device.ranks_per_node == 2
    assert device.rate("float32") > 1e9
    assert device.node.gb_s > 0.001
    assert device.dtensor_us > device.kernel_us > 0, "an operation of DTensor has many of torch's"
    assert calibrate.main(["--ranks", "1", "--out", str(out), "--seconds", "0.01"]) == 0
    assert find_device(str(out)).node == find_device("cpu").node, "one rank measures no link"
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "0"], "use 1 to"),
        (["--out", "/nowhere/a.toml"], "folder"),
        (["--seconds", "0"], "at most 10"),
        (["--out", "/proc/a.toml"], "--out /proc/a.toml: "),
    ],
)
def test_a_mistake_of_calibrate_is_a_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        calibrate.main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_recipe_that_a_plan_beats_says_why() -> None:
    """After a change of recipes or of plans: python -m tests.benchmarks.plan_time --recipes."""
    rows = [json.loads(line) for line in RECIPES.read_text(encoding="utf-8").splitlines()]
    recipes = {path.stem: path for path in (ROOT / "recipes").glob("*.toml")}
    assert {row["recipe"] for row in rows} == recipes.keys()
    beaten = [row["recipe"] for row in rows if is_slower(row)]
    assert beaten
    assert [name for name in beaten if "# A plan takes" not in recipes[name].read_text(encoding="utf-8")] == []
