"""python -m components.state ls, verify and diff: what a run has saved, and how two differ."""

import contextlib
import io
import json
import re
from pathlib import Path

from components.config import ConfigError
from components.state.__main__ import main
from tests.checkpoints import checkpointer, flip_a_bit, saved, value_of


def _main(words: list[str]) -> tuple[int, str]:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            code = main(words)
    except ConfigError as error:
        return 2, str(error)
    return code, printed.getvalue()


def command(*words: object) -> tuple[int, str]:
    return value_of(_main, [str(word) for word in words])


def _run_of(folder: Path, *steps: int, world: int = 1) -> Path:
    saved(folder / "checkpoint", *steps, world=world)
    (folder / "run.json").write_text(json.dumps({"config": {"checkpoint": {"folder": "checkpoint"}}}))
    return folder


def test_ls_shows_what_is_there(tmp_path: Path) -> None:
    run = _run_of(tmp_path / "run", 10, 20, world=2)
    folder = run / "checkpoint"
    value_of(_save_in_doubt, folder, 30)
    (folder / "step-10" / "__1_0.distcp").unlink()
    (folder / "step-20").rename(folder / "abandoned-step-20")
    code, printed = command("ls", run)
    lines = printed.splitlines()
    assert code == 0
    assert lines[0].split() == ["name", "MiB", "saved", "ranks", "branch"]
    assert re.fullmatch(r"step-10 +0\.\d +20\d\d-\d\d-\d\d \d\d:\d\d +2 +0 +__1_0.distcp is missing", lines[1])
    assert re.search(r"step-30 .* 1 +1, from step 10 +weights only; saved while steps were skipped", lines[2])
    assert lines[3].startswith("abandoned-step-20 ")
    assert command("ls", folder)[1] == printed, "the folder itself"
    assert command("ls", tmp_path)[1] == f"{tmp_path}: no checkpoint in it\n"


def _save_in_doubt(folder: Path, step: int) -> None:
    saver = checkpointer(folder, step)
    saver.branch = type(saver.branch)(number=1, began_at=10)
    (folder / "step-20").rename(folder.parent / "step-20")  # it would be put aside by this save
    saver.save(step, {}, model_only=True, prune=False)
    (folder.parent / "step-20").rename(folder / "step-20")


def test_verify_reads_every_file(tmp_path: Path) -> None:
    run = _run_of(tmp_path / "run", 10, 20)
    folder = run / "checkpoint"
    assert command("verify", run) == (0, f"{folder}/step-10: whole\n{folder}/step-20: whole\n")
    flip_a_bit(folder / "step-10")
    assert command("verify", run) == (
        1,
        f"{folder}/step-10: __0_0.distcp is corrupt\n{folder}/step-20: whole\n",
    )
    assert command("verify", run, "--step", 20) == (0, f"{folder}/step-20: whole\n")
    code, error = command("verify", run, "--step", 25)
    assert (code, error) == (2, f"{folder}: no checkpoint of step 25 in it")


def test_diff_names_tensors_that_differ(tmp_path: Path) -> None:
    one, two = _run_of(tmp_path / "one", 10, 20), _run_of(tmp_path / "two", 20, world=2)
    code, printed = command("diff", one, two)
    assert (code, printed) == (0, "16 of 16 tensors are equal\n")
    code, printed = command("diff", one / "checkpoint" / "step-10", two)
    assert code == 1
    assert re.search(r"^model\.0\.weight: 30 of 30 numbers differ, by up to 0\.\d+$", printed, re.MULTILINE)
    value_of(_save_other_sizes, tmp_path / "three")
    code, printed = command("diff", two, tmp_path / "three" / "step-20")
    assert code == 1
    assert "model.0.weight: (5, 6) torch.float32 and (7, 6) torch.float32\n" in printed
    assert f"optimizer.1.bias.exp_avg: only in {two}/checkpoint/step-20\n" in printed
    flip_a_bit(two / "checkpoint" / "step-20")
    code, error = command("diff", one, two / "checkpoint" / "step-20")
    assert (code, error) == (2, f"{two}/checkpoint/step-20: __0_0.distcp is corrupt")


def _save_other_sizes(folder: Path) -> None:
    checkpointer(folder, 20, (6, 7, 3)).save(20, {}, model_only=True)


def test_a_path_that_cannot_be_read_is_a_mistake_and_no_difference(tmp_path: Path) -> None:
    run, file = _run_of(tmp_path / "run", 1), tmp_path / "file"
    file.write_text("")
    for path in (tmp_path / "nothing", file / "x"):
        for words in (("diff", run), ("ls",), ("verify",)):
            code, printed = command(*words, path)
            assert (code, str(path) in printed) == (2, True), printed
