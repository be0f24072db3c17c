"""python -m parallelize.plan compare: a run's figures beside its plan's, and folders that have none."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from components.config import absolute_tables, load_config
from parallelize.plan.__main__ import main
from parallelize.plan.compare import measured_share


def leave(folder: Path, steps: int = 6, restart: int = 0, **changes: object) -> Path:
    """The dump folder of a run of 2 ranks whose steps take two seconds, and the first of them twenty."""
    job = load_config(["--model.name", "llama", "--model.flavor", "debug", "--training.seq_len", "64"])
    folder.mkdir()
    run = {"ranks": 2, "device": "x86_64", "config": absolute_tables(job)} | changes
    (folder / "run.json").write_text(json.dumps(run))
    tokens, rows = 2 * 8 * 64, []
    for step in range(1, steps + 1):
        seconds = 20 if step in (1, restart + 1) else 2 if step > restart else 5
        row = {
            "step": step,
            "tokens": step * tokens,
            "tokens_per_second": tokens / seconds,
            "memory_gib": 0.5 + step / 10 if step > restart else 9.0,
        }
        rows.append(row | {"seconds": step * 2.0 - (restart * 2 if step > restart else 0)})
    lines = [json.dumps(row) for row in rows] + [json.dumps({"step": steps, "validation_loss": 1.0})]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 9, "tok')
    return folder


@pytest.mark.parametrize("restart", [0, 3])
def test_figures_are_side_by_side(restart: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows before the last start are of other ranks; a memory of 0.5 GiB is the process itself."""
    folder = leave(tmp_path / "my run", 6 + restart, restart)
    assert main(["compare", str(folder)]) == 0
    lines = {line[:29].strip(): line[29:].split() for line in capsys.readouterr().out.splitlines()}
    assert "2 x cpu" in " ".join(lines)
    assert lines["step, seconds"][1] == "2"
    assert lines["tokens/s a device"][1] == f"{8 * 64 / 2:.4g}"
    assert lines["memory, GiB"][1] == f"{0.5 + (6 + restart) / 10:.4g}"
    assert 0.5 < float(lines["memory, GiB"][0]) < 1
    assert lines["messages that nothing hides"][1] == "unknown:"


def no_run(folder: Path) -> None:
    (folder / "run.json").unlink()


def torn_run(folder: Path) -> None:
    (folder / "run.json").write_text('{"ranks": 2, "conf')


def other_version(folder: Path) -> None:
    (folder / "run.json").write_text('{"ranks": 2, "device": "cpu", "config": {"no_table": {}}}')


def no_rows(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()


def other_ranks(folder: Path) -> None:
    run = json.loads((folder / "run.json").read_text())
    run["config"]["parallelism"]["tensor_parallel_degree"] = 3
    (folder / "run.json").write_text(json.dumps(run))


def other_card(folder: Path) -> None:
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"device": "NVIDIA TITAN"}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (no_run, "run.json: missing, cut short"),
        (torn_run, "run.json: missing, cut short"),
        (other_version, "run.json: missing, cut short"),
        (no_rows, "0 logged steps since its last start; a comparison needs more than 2"),
        (other_ranks, "but there are 2"),
        (other_card, "NVIDIA TITAN: no device"),
    ],
)
def test_a_folder_without_a_run_is_a_sentence(
    spoil: Callable[[Path], None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(folder := leave(tmp_path / "run"))
    assert main(["compare", str(folder)]) == 2
    assert said in capsys.readouterr().err


def test_two_logged_steps_are_too_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(leave(tmp_path / "run", 2))]) == 2
    assert "2 logged steps" in capsys.readouterr().err


def test_messages_beside_which_no_kernel_runs_are_counted(tmp_path: Path) -> None:
    """NCCL runs in six of ten microseconds; in four of these six another kernel runs too."""
    kernels = [("gemm", 0, 4), ("ncclDevKernel_AllGather", 2, 4), ("norm", 4, 2), ("ncclDevKernel_Reduce", 8, 2)]
    events = [{"cat": "kernel", "name": name, "ts": at, "dur": length} for name, at, length in kernels]
    trace = tmp_path / "rank_0.json.gz"
    with gzip.open(trace, "wt") as file:
        json.dump({"traceEvents": [*events, {"cat": "cpu_op", "name": "nccl", "ts": 0, "dur": 99}, {"ph": "M"}]}, file)
    assert measured_share([trace]) == pytest.approx(0.2)
    assert measured_share([]) is None
