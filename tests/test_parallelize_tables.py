"""Schedules from a file: torch's own as tables are the run of one process; a wrong table is refused before launch."""

import os
from pathlib import Path

import pytest

from components.commands.figures import broken_bars
from components.config import ConfigError, load_config
from parallelize.mesh import resolve_degrees
from parallelize.rules import check_layout
from parallelize.tables import Order, read_table, written
from parallelize.timeline import actions
from tests.harness import observe
from tests.small import RECIPE, SMALL
from tests.test_parallelize_data import UNEVEN_LABELS, one_process

PP, TABLE = "--parallelism.pipeline_parallel_degree", "--parallelism.pipeline_parallel_schedule_csv"
GIVEN = (PP, "2", "--model.flavor", "long5", "--parallelism.pipeline_parallel_microbatch_size", "6")


def write(path: Path, orders: Order) -> str:
    path.write_text("\n".join(",".join(written(step) for step in order) for order in orders))
    return str(path)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_a_table_of_a_schedule_is_the_run_of_one_process(schedule: str, tmp_path: Path) -> None:
    orders = actions(schedule, 2, 6)
    table = write(tmp_path / "my table.csv", orders)
    assert read_table(table) == orders
    observed = observe(*GIVEN, TABLE, table, ranks=2, valid_labels=UNEVEN_LABELS)
    assert not broken_bars(observed, one_process("--model.flavor", "long5", valid_labels=UNEVEN_LABELS))


def test_ranks_may_hold_different_numbers_of_stages(tmp_path: Path) -> None:
    """Three stages on two ranks, the last of them alone."""
    forward, backward = ([f"{stage}{kind}{{0}}" for stage in stages] for kind, stages in (("F", (0, 1)), ("B", (1, 0))))
    first = [cell.format(number) for cells in (forward, backward) for number in range(6) for cell in cells]
    second = [cell.format(number) for cell in ("2F{0}", "2B{0}") for number in range(6)]
    table = tmp_path / "table.csv"
    table.write_text(",".join(first) + "\n" + ",,".join(second) + "\n")
    observed = observe(*GIVEN, TABLE, str(table), ranks=2, valid_labels=UNEVEN_LABELS)
    assert not broken_bars(observed, one_process("--model.flavor", "long5", valid_labels=UNEVEN_LABELS))


def test_kept_results_are_there_for_both_backwards_of_a_table(tmp_path: Path) -> None:
    op = ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op")
    table = write(tmp_path / "table.csv", actions("ZBVZeroBubble", 2, 6))
    observed = observe(*GIVEN, *op, TABLE, table, ranks=2, valid_labels=UNEVEN_LABELS)
    assert not broken_bars(observed, one_process("--model.flavor", "long5", valid_labels=UNEVEN_LABELS))
    config = load_config([*SMALL, *GIVEN, TABLE, table, "--parallelism.fsdp_reshard_after_forward", "always"])
    with pytest.raises(ConfigError, match=r"table\.csv computes gradients of weights after those of inputs"):
        check_layout(config, resolve_degrees(config, 4))


RIGHT = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
WRONG = {
    "no action": (RIGHT.replace("0B1", "0X1"), "row 1, cell 4: '0X1' is no action"),
    "a third row": (RIGHT + "2F0,2F1,2B0,2B1\n", "rows for 3 ranks, not for 2"),
    "an empty row": (RIGHT.split("\n")[0] + "\n,,\n", "rows for 1 ranks, not for 2"),
    "nothing": ("", "rows for 0 ranks"),
    "a stage on two ranks": (RIGHT.replace("1B1", "0B1"), "stage 0 is on ranks 0 and 1"),
    "a stage left out": (RIGHT.replace("\n1", "\n2").replace(",1", ",2"), "stage 1 is on no rank"),
    "backward first": (RIGHT.replace("0F1,0B0,0B1", "0B1,0B0,0F1"), "0B1 comes before 0F1"),
    "weights before inputs": (RIGHT.replace("0B0,", "0W0,0I0,"), "0W0 comes before 0I0"),
    "twice": (RIGHT.replace("0B0", "0B0,0B0"), "0B0 is there twice"),
    "no backward": (RIGHT.replace(",1B1", ""), "stage 1, micro-batch 1: F instead of F and B"),
    "gradient of weights missing": (RIGHT.replace("0B0", "0I0"), "stage 0, micro-batch 0: FI instead of"),
    "too many": (RIGHT.replace("0F1", "0F1,0F2"), "micro-batch 2 is one too many: there are 2"),
    "the last stage out of order": (
        RIGHT.replace("1F0,1B0,1F1,1B1", "1F1,1B1,1F0,1B0"),
        "the last stage, 1, has to take micro-batches in order",
    ),
    "waiting for each other": (
        RIGHT.replace("0F0,0F1,0B0,", "0F0,0B0,0F1,").replace("1F0,1B0,1F1", "1F0,1F1,1B0"),
        "wait for ever: rank 0 at 0B0, rank 1 at 1F1",
    ),
    "a cell without end": ("0" * 200_000, "cannot be read: field larger than"),
    "not text": ("0F0\x00", "cannot be read: "),
}


def check(table: str, *words: str) -> None:
    given = ("--model.flavor", "long3", "--training.local_batch_size", "2", PP, "2", TABLE, table)
    config = load_config(["--job.config_file", str(RECIPE), *SMALL, *given, *words])
    check_layout(config, resolve_degrees(config, 2))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_table_is_refused_with_what_is_wrong(name: str, tmp_path: Path) -> None:
    content, says = WRONG[name]
    table = tmp_path / "table.csv"
    table.write_text(RIGHT)
    check(str(table))
    other = tmp_path / "wrong.csv"
    other.write_text(content)
    with pytest.raises(ConfigError) as refused:
        check(str(other))
    (message,) = refused.value.messages
    assert message.startswith("command line: parallelism.pipeline_parallel_schedule_csv")
    assert says in message


def test_a_table_as_other_programs_write_it_is_read(tmp_path: Path) -> None:
    """A byte order mark, quotes, carriage returns, and rows without cells."""
    table = tmp_path / "table.csv"
    table.write_bytes(b"\xef\xbb\xbf" + RIGHT.replace("0F1", '"0F1"').replace("\n", "\r\n\r\n,,\r\n").encode())
    check(str(table))


def test_what_does_not_go_with_a_table_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(RIGHT)
    with pytest.raises(ConfigError, match=r"cannot be read: .*No such file"):
        check(str(tmp_path / "nowhere.csv"))
    os.mkfifo(tmp_path / "a pipe")
    for name in ("a pipe", "."):
        with pytest.raises(ConfigError, match="cannot be read: it is no file"):
            check(str(tmp_path / name))
    with pytest.raises(ConfigError, match="local_batch_size = 2 is no multiple"):
        check(str(table), "--parallelism.pipeline_parallel_microbatch_size", "4")
    with pytest.raises(ConfigError, match="no other schedule in pipeline_parallel_schedule"):
        check(str(table), "--parallelism.pipeline_parallel_schedule", "GPipe")
    with pytest.raises(ConfigError, match="has 2 stages, not 5"):
        check(str(table), "--parallelism.pipeline_parallel_layers_per_stage", "1")
    with pytest.raises(ConfigError, match=r"no parallelism\.pipeline_parallel_schedule_csv"):
        check(str(table), "--parallelism.pipeline_parallel_sequence_splits", "2")
