"""The planner: its memory is the dry run's, its layouts are those that rules accept, and its mistakes are sentences."""

import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from components.config import ROOT, ConfigError, JobConfig, load_config
from parallelize.layouts import Layout
from parallelize.mesh import Degrees, resolve_degrees
from parallelize.plan import search
from parallelize.plan.__main__ import main
from parallelize.plan.devices import find_device
from parallelize.plan.memory import Known, Placement, memory, worst
from parallelize.plan.search import Plan, Planner, refusal, with_settings
from parallelize.plan.time import PARTS
from parallelize.tables import order_of_parts, simulate
from tests.benchmarks.plan import compare
from tests.test_dry_run import pool

__all__ = ["pool"]

RECIPE = str(ROOT / "recipes" / "llama_debug.toml")
_PIPED = "llama_debug 2 pp=2 fsdp=1 ddp=1 layers=8 seq=2048 local=4 batch=4 schedule=ZBVZeroBubble"
LAYOUTS = (
    ("llama_debug 2 fsdp=2 ddp=1 seq=1024", 0),
    ("qwen3_moe_debug 4 fsdp=4 ddp=1 tp=1 ep=2 seq=1024 local=2 ac=full", 0),
    *((f"{_PIPED} ac={mode}", rank) for mode in ("none", "full") for rank in (0, 1)),
)


@pytest.mark.parametrize(("words", "rank"), LAYOUTS)
def test_memory_is_that_of_the_dry_run(words: str, rank: int, pool: ProcessPoolExecutor) -> None:
    """All layouts of tests/benchmarks/plan.py take minutes; these take a second."""
    planned, real = pool.submit(compare, words, rank).result()
    assert planned == pytest.approx(real, rel=0.1)


def test_a_layout_of_two_shards_keeps_half() -> None:
    job = load_config(["--job.config_file", RECIPE])
    known = Known(job, "cuda")
    one, two = (memory(Placement(known, job, Degrees(dp_shard=shards)), 0) for shards in (1, 2))
    for line in ("weights", "gradients", "optimizer"):
        assert two[line] == pytest.approx(one[line] / 2)
    assert two["total"] == pytest.approx(sum(size for line, size in two.items() if line != "total"))


def test_every_plan_is_accepted_and_fits() -> None:
    planner = Planner(load_config(["--job.config_file", RECIPE]), 8, find_device("cpu"))
    plans, _ = planner.search(4)
    assert len({plan.degrees for plan in plans}) == 4
    assert all(not refusal(plan.job, plan.degrees) and plan.fits for plan in plans)
    assert [plan.times.total for plan in plans] == sorted(plan.times.total for plan in plans)
    again = load_config(["--job.config_file", RECIPE, *_words(plans[0].settings)])
    assert resolve_degrees(again, 8) == plans[0].degrees, "the printed keys give the layout"


def test_a_contradiction_is_a_refusal() -> None:
    job = load_config(["--job.config_file", RECIPE])
    given = with_settings(job, {"activation_checkpoint.mode": "none", "activation_checkpoint.offload": True})
    assert "activation_checkpoint.offload" in refusal(given, Degrees())


@pytest.mark.slow
def test_the_search_finds_what_trying_everything_finds() -> None:
    """No plan undercuts its bounds by more than the search allows for."""
    planner = Planner(load_config(["--job.config_file", RECIPE]), 4, find_device("cpu"))
    (best, *_), _ = planner.search(1)
    everything = [
        (plan.times.total / each.times.total, plan.gib["total"] / worst(each.place)["total"], plan)
        for each in planner.bounds((degrees for degrees in planner.degrees() if degrees.cp == 1), [{}])
        if (plan := planner._accepted(each))
    ]
    assert min(seconds for seconds, _, _ in everything) > search._CLOSE
    assert min(gib for _, gib, _ in everything) > search._MARGIN
    fastest = min(plan.times.total for _, _, plan in everything if plan.fits)
    assert best.times.total <= search._NEAR * fastest


def test_what_the_search_leaves_out_unless_it_is_pinned() -> None:
    """Context parallel of short sequences."""
    job = load_config(["--job.config_file", RECIPE])
    for length in (4096, 16384):
        planner = Planner(replace(job, training=replace(job.training, seq_len=length)), 4, find_device("h100-80g"))
        planner.search(1)
        assert {1, 2} <= {degrees.cp for degrees in planner.degrees()}
        assert any(plan.degrees.cp > 1 for plan in planner.timed) == (length == 16384)


def test_tensor_parallel_stays_inside_a_node_unless_it_is_pinned() -> None:
    job, device = load_config(["--job.config_file", RECIPE]), replace(find_device("h100-80g"), ranks_per_node=2)
    assert {degrees.tp for degrees in Planner(job, 8, device).degrees()} == {1, 2}
    key = "parallelism.tensor_parallel_degree"
    wide = replace(job, parallelism=replace(job.parallelism, tensor_parallel_degree=4))
    assert {degrees.tp for degrees in Planner(wide, 8, device, frozenset({key})).degrees()} == {4}
    uneven = replace(device, ranks_per_node=6)
    assert {degrees.tp for degrees in Planner(job, 8, uneven).degrees()} == {1, 2}, "a third group of 4 has two nodes"
    long = replace(job, training=replace(job.training, seq_len=16384, global_batch_size=12))
    assert 3 in {degrees.cp for degrees in Planner(long, 6, find_device("h100-80g")).degrees()}, "one node, in part"
    assert uneven.send(1e9, 4) == uneven.send(1e9, 8) > uneven.send(1e9, 2)
    assert uneven.gather(1e9, 4, 4) > uneven.gather(1e9, 3, 3)


def test_a_pipeline_whose_stages_are_given_is_planned() -> None:
    """With a layer a stage, schedules of other numbers of stages cannot be placed."""
    key = "parallelism.pipeline_parallel_layers_per_stage"
    job = with_settings(load_config(["--job.config_file", RECIPE]), {key: 1})
    plans, _ = Planner(job, 2, find_device("cpu"), frozenset({key})).search(4)
    assert {plan.degrees.pp for plan in plans} == {1, 2}


def test_a_pinned_pipeline_may_have_a_layer_a_rank() -> None:
    job = with_settings(load_config(["--job.config_file", RECIPE]), {"parallelism.pipeline_parallel_degree": 4})
    plans, _ = Planner(job, 4, find_device("cpu"), frozenset({"parallelism.pipeline_parallel_degree"})).search(1)
    assert [plan.degrees for plan in plans] == [Degrees(pp=4)]


def test_experts_that_two_ranks_do_not_divide_are_planned() -> None:
    words = ("--job.config_file", str(ROOT / "recipes" / "qwen3_moe_debug.toml"), "--training.global_batch_size", "9")
    job = load_config([*words, "--training.local_batch_size", "1", "--model.sizes.n_experts", "9"])
    plans, _ = Planner(job, 3, find_device("cpu")).search(9)
    assert {plan.degrees.ep for plan in plans} == {1, 3}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("tp=16", "What fits: tensor_parallel_degree = 2"),
        ("tp=2,ep=2", "no experts"),
        ("ep=2", "expert_parallel_degree = 2"),
    ],
)
def test_a_layout_that_rules_refuse_has_its_reason(asked: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([RECIPE, "--devices", "2", "--device", "cpu", "--why-not", asked]) == 0
    assert said in capsys.readouterr().out


def test_offloads_are_compared_with_each_other() -> None:
    """All of them are tried if nothing else fits, and are named."""
    job = load_config(["--job.config_file", str(ROOT / "recipes" / "llama8b.toml")])
    small = replace(find_device("h100-80g"), memory_gib=28)
    planner = Planner(job, 4, small)
    assert planner.search(1)[0]
    assert {key for plan in planner.timed for key in search.OFFLOADS if plan.settings[key]} == {*search.OFFLOADS}


def test_a_plan_that_does_not_quite_fit_is_left_out() -> None:
    job, device = load_config(["--job.config_file", RECIPE]), find_device("cpu")
    best = Planner(job, 4, device).search(1)[0][0]
    smaller = replace(device, memory_gib=best.gib["total"] + device.reserved_gib - 0.001)
    plans, _ = Planner(job, 4, smaller).search(3)
    assert plans
    assert all(plan.fits for plan in plans)


def test_gpipe_keeps_all_micro_batches() -> None:
    words = (
        "--parallelism.pipeline_parallel_schedule",
        "GPipe",
        "--training.local_batch_size",
        "16",
        "--training.global_batch_size",
        "16",
    )
    job = load_config(["--job.config_file", RECIPE, *words, "--parallelism.pipeline_parallel_degree", "2"])
    order = Placement(Known(job, "cpu"), job, Degrees(pp=2)).orders[0]
    assert sum(kind == "F" for step in order for kind, _, _ in step) == 16


def test_the_plain_layout_and_the_formulas_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([RECIPE, "--devices", "8", "--device", "cpu", "--count", "1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("fsdp 8") or "\nfsdp 8, checkpointing" in said
    assert main([RECIPE, "--devices", "2", "--device", "cpu", "--explain"]) == 0
    assert "moments of the shards" in capsys.readouterr().out
    assert main([RECIPE, "--devices", "7", "--device", "cpu"]) == 1
    assert "training.global_batch_size = 8: not a multiple of " in capsys.readouterr().err


def test_an_override_of_the_trainer_is_named_as_it_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([RECIPE, "--devices", "2", "--training.seq_len", "64"])
    assert "--set training.seq_len=64" in capsys.readouterr().err


def test_a_search_is_the_same_again() -> None:
    job = load_config(["--job.config_file", RECIPE])
    first, second = (Planner(job, 8, find_device("cpu")).search(3)[0] for _ in range(2))
    assert [plan.settings for plan in first] == [plan.settings for plan in second]


def _words(settings: dict[str, object]) -> list[str]:
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def test_pinned_keys_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    pins = ["--set", "parallelism.tensor_parallel_degree=2", "--set", "activation_checkpoint.mode=full"]
    assert main([RECIPE, "--devices", "4", "--device", "cpu", "--json", *pins]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert plans
    assert {plan["layout"]["parallelism.tensor_parallel_degree"] for plan in plans} == {2}
    assert {plan["layout"]["activation_checkpoint.mode"] for plan in plans} == {"full"}
    assert (
        main(
            [
                RECIPE,
                "--devices",
                "4",
                "--device",
                "cpu",
                *pins,
                "--set",
                "training.global-batch-size=16",
                "--set",
                "lora.rank=4",
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    for line in ("tensor_parallel_degree = 2", 'mode = "full"', "global_batch_size = 16", "lora.rank = 4"):
        assert f"  {line}\n" in printed, "a key that is pasted has to hold without --set"
    assert "config_file" not in printed
    key = "activation_checkpoint.selective_ac_option"
    job = with_settings(load_config(["--job.config_file", RECIPE]), {key: "3"})
    planner = Planner(job, 2, find_device("cpu"), frozenset({key}))
    assert planner._modes() == [("none", "3"), ("selective", "3"), ("full", "3")]
    assert list(plans[0]["memory_gib"]) == ["weights", "gradients", "optimizer", "activations", "other", "total"]


def test_json_is_a_list_of_plans_with_the_best_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([RECIPE, "--devices", "4", "--device", "cpu", "--json", "--count", "3"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert len(plans) == 3
    numbers = ["step_seconds", "tokens_per_second_per_device", "mfu"]
    for plan in plans:
        assert list(plan) == ["layout", "memory_gib", *numbers, "bound_by"]
        assert all("." in key for key in plan["layout"])
        assert list(plan["memory_gib"]) == ["weights", "gradients", "optimizer", "activations", "other", "total"]
        assert all(type(plan[name]) is float for name in numbers)
        assert plan["bound_by"] in PARTS
        load_config(["--job.config_file", RECIPE, *_words(plan["layout"])])
    seconds = [plan["step_seconds"] for plan in plans]
    assert seconds[0] <= search._NEAR * min(seconds)
    assert seconds[1:] == sorted(seconds[1:])


def test_a_local_batch_size_that_does_not_divide_the_batch_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe's is 4. A resume or a run needs it to divide, so that the plan prints it always."""
    words = [RECIPE, "--devices", "3", "--device", "cpu", "--count", "1", "--set", "training.global_batch_size=6"]
    assert main(words) == 0
    assert "local_batch_size = " in capsys.readouterr().out
    assert main([*words, "--set", "training.local_batch_size=4"]) == 2
    assert "not a multiple of training.local_batch_size = 4" in capsys.readouterr().err


def test_no_checkpointing_is_the_fastest() -> None:
    """The search looks at other modes only behind it."""
    planner = Planner(load_config(["--job.config_file", RECIPE]), 4, find_device("cpu"))
    bounds, behind = planner.bounds(planner.degrees(), [{}], planner._fastest_modes()), 0
    for each in bounds:
        for other in planner._slower(each):
            assert other.times.total >= each.times.total
            behind += 1
    assert behind == (len(search.MODES) - 1) * len(bounds)


def test_slower_modes_of_checkpointing_wait_for_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """If everything fits, most candidates are bounded without checkpointing alone."""
    planner, bounded = Planner(load_config(["--job.config_file", RECIPE]), 4, find_device("cpu")), Counter[str]()

    def counted(self: Planner, job: JobConfig, degrees: Degrees) -> Plan:
        bounded[job.activation_checkpoint.mode] += 1
        return bound(self, job, degrees)

    bound = Planner._bound
    monkeypatch.setattr(Planner, "_bound", counted)
    planner.search(1)
    assert 0 < bounded["full"] < bounded["none"] / 2


@pytest.mark.slow
def test_a_search_for_thousands_of_devices_takes_seconds() -> None:
    """Ten seconds of processor time are docs/plan.md's promise, imports among them."""
    code = (
        "import sys, time; from parallelize.plan.__main__ import main; main(sys.argv[1:]); print(time.process_time())"
    )
    words = ["recipes/llama70b.toml", "--devices", "4096", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout.splitlines()[-1]) < 10


def test_planning_a_float8_job_says_nothing_about_kernels() -> None:
    command = [sys.executable, "-m", "parallelize.plan", RECIPE, "--devices", "1", "--device", "cpu", "--explain"]
    command += ["--set", 'model.converters=["quantize.linear.float8"]', "--set", "quantize.linear.float8.emulate=true"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "checkpointing" in done.stdout, done.stderr
    assert "Failed to load" not in done.stdout + done.stderr


def test_a_device_that_is_too_small_has_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "parallelize/plan/devices.toml").read_text(encoding="utf-8")
    own = tmp_path / "my device.toml"
    own.write_text("[tiny]" + text.partition("[cpu]")[2].replace("memory_gib = 16.0", "memory_gib = 0.51"))
    assert main([RECIPE, "--devices", "2", "--device", str(own)]) == 1
    assert "no layout of 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "h101"], "not one of h100-80g"),
        (["--set", "tp"], "use KEY=VALUE"),
        (["--why-not", "tp=x"], "use degrees"),
        (["--why-not", "tp=0"], "use degrees"),
        (["--devices", "0"], "a number of 1 or more"),
        (["--set", "model.flavor=9B"], "did you mean 8B"),
        (["--set", "model.sizes.n_heads=7"], "heads need equal widths"),
        (["--set", "parallelism.pipeline_parallel_schedule=1F1X"], "did you mean 1F1B"),
        (["--set", "activation_checkpoint.mode=memory_budget"], "no plan knows what it keeps"),
        (["--html", "/proc/a.html", "--png", "/proc/b"], "--html: "),
        (["--png", "/proc/b"], "--png: "),
    ],
)
def test_a_mistake_is_a_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([RECIPE, "--devices", "2", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_device_file_with_a_wrong_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text("[one]\nmemory_gib = -1\n")
    with pytest.raises(ConfigError, match="memory_gib"):
        find_device(str(tmp_path / "one.toml"))
    cpu = (ROOT / "parallelize/plan/devices.toml").read_text(encoding="utf-8").partition("[cpu]")[2]
    (tmp_path / "two.toml").write_text("[two]" + cpu.replace("achieved = { bfloat16 = 0.7,", "achieved = {"))
    with pytest.raises(ConfigError, match="tflops and achieved: give both"):
        find_device(str(tmp_path / "two.toml"))
    device = replace(find_device("cpu"), tflops={"bfloat16": 1.0})
    with pytest.raises(ConfigError, match=r"mixed_precision_param = float32: .* of the device lack it"):
        Planner(load_config(["--job.config_file", RECIPE]), 2, device)


def test_a_schedule_takes_the_time_of_its_stages_and_messages() -> None:
    """1F1B: stages of one second for forward and two for backward; the bubble is (pp - 1) forwards and backwards."""
    boxes = simulate(order_of_parts(4, 8, 1), lambda kind, stage: {"F": 1.0, "B": 2.0}[kind])
    assert max(box.end for box in boxes) == pytest.approx((8 + 3) * 3)
    late = simulate(order_of_parts(4, 8, 1), lambda kind, stage: {"F": 1.0, "B": 2.0}[kind], message=0.1)
    assert max(box.end for box in late) > (8 + 3) * 3 + 6 * 0.1 - 1e-6


def test_degrees_of_thousands_of_devices_are_few() -> None:
    job = load_config(["--job.config_file", RECIPE, "--training.global_batch_size", "4096"])
    found = list(Planner(job, 4096, find_device("h100-80g")).degrees())
    assert 1 < len(found) < 400
    assert all(degrees.tp * degrees.cp <= 8 for degrees in found)
    assert all(Layout(degrees).degrees.world_size == 4096 for degrees in found)
