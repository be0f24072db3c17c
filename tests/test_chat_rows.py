"""Rows of chats: whole chats packed tightly, each a document; labels, padding, the divisor; the command that shows."""

import functools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train
from components.commands.figures import Observation, broken_bars
from components.config import ConfigError, load_config
from components.data import __main__ as data
from components.data import prepare, spec_of
from components.data.loader import IGNORED, GlobalOrder, batch_of, build_loader
from components.data.rows import _count, best_fit
from components.data.show import histogram, pieces, row_of
from components.data.tokenizer import load_tokenizer
from models import MODELS
from tests.chats import CHATML, rows_in, said, save, tokenizer_in
from tests.harness import observe, rewrite
from tests.small import CHATS

RECORDS = [said(*["ab" * (number % 5), "xyz" * (number % 7)] * (1 + number % 2)) for number in range(60)]


def test_a_row_has_whole_chats_and_then_padding(tmp_path: Path) -> None:
    rows = rows_in(tmp_path, RECORDS, 128)
    ends = np.asarray(rows.cache.document_ends)
    chats = [each.tolist() for each in np.split(np.asarray(rows.cache.tokens), ends[:-1])]
    found, labels = list[list[int]](), 0
    for number in range(len(rows)):
        one = np.array([number])
        (tokens,), ((places,), (documents,)) = rows.get(one)[0], rows._laid_out(one)
        assert not np.diff(places < 0).sum() > 1, "padding is at the end"
        found += [tokens[(documents == each) & (places >= 0)].tolist() for each in np.unique(documents[places >= 0])]
        batch = batch_of(rows, one, document_mask=True)
        assert (batch["positions"][0].numpy()[places[:-1] < 0] == -1).all()
        labels += int((batch["labels"] != IGNORED).sum())
        assert rows.count_valid(one) == int((batch["labels"] != IGNORED).sum())
    assert sorted(map(tuple, found)) == sorted(map(tuple, chats))
    assert labels == int(rows.cache.trained.sum()), "every trained token is one row's label, and is trained once"


def test_positions_restart_and_no_chat_predicts_the_next_ones_first_token(tmp_path: Path) -> None:
    rows = rows_in(tmp_path, RECORDS, 256)
    batch = batch_of(rows, np.arange(len(rows)), document_mask=True)
    starts = batch["positions"] == 0
    assert starts.sum() == len(rows.lengths)
    assert (batch["labels"][:, :-1][starts[:, 1:]] == IGNORED).all()


@pytest.mark.parametrize("fraction", [0.05, 0.2])
def test_what_is_held_out_does_not_depend_on_the_length_of_rows(fraction: float, tmp_path: Path) -> None:
    parts = [
        [
            rows_in(tmp_path, RECORDS, length, part=part, fraction=fraction).num_tokens
            for part in ("train", "validation")
        ]
        for length in (128, 300)
    ]
    assert parts[0] == parts[1]
    assert sum(parts[0]) == rows_in(tmp_path, RECORDS, 128).num_tokens


@pytest.mark.parametrize(
    ("fraction", "reason"), [(0.7, "use 0.5"), (0.4, "use 0.5, 0.333"), (0.001, "holds out none of")]
)
def test_a_share_that_cannot_be_held_out_is_refused(fraction: float, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"held_out_fraction = {fraction}.*{reason}"):
        rows_in(tmp_path, RECORDS, 128, part="validation", fraction=fraction)


def test_a_chat_that_is_too_long_is_refused_left_out_or_cut(tmp_path: Path) -> None:
    long = [said("q", "a" * 200), *RECORDS]
    with pytest.raises(
        ConfigError, match=r"chats.jsonl:1: 2\d\d tokens, and 0 other sequences, do not fit training.seq_len = 128;"
    ):
        rows_in(tmp_path, long, 128)
    whole = rows_in(tmp_path, RECORDS, 128)
    assert rows_in(tmp_path, long, 128, "--chat.too_long", "skip").num_tokens == whole.num_tokens
    cut = rows_in(tmp_path, long, 128, "--chat.too_long", "truncate_end")
    assert cut.num_tokens == whole.num_tokens + 129
    assert cut.count_valid(np.arange(len(cut))) < int(cut.cache.trained.sum())
    asked = [said("q" * 200, "a"), *RECORDS]
    lost = rows_in(tmp_path, asked, 128, "--chat.too_long", "truncate_end")
    assert (lost.num_tokens, lost.without_labels) == (whole.num_tokens, 1)
    with pytest.raises(ConfigError, match="no chat for training fits"):
        rows_in(tmp_path, [said("q" * 200, "a")], 128, "--chat.too_long", "skip")


def test_one_chat_a_row_on_request(tmp_path: Path) -> None:
    rows = rows_in(tmp_path, RECORDS, 128, "--chat.packing", "none")
    assert len(rows) == len(rows.lengths) == 60


def test_best_fit_fills_rows_quickly() -> None:
    drawn = np.random.default_rng(0)
    lengths = np.minimum(drawn.lognormal(5.2, 0.6, 100_000).astype(np.int64) + 8, 2049)
    begun = time.process_time()
    found = best_fit(lengths, 2049)
    assert time.process_time() - begun < 10, "0.3 s on an idle machine"
    assert sorted(number for row in found for number in row) == [*range(100_000)]
    filled = [int(lengths[row].sum()) for row in found]
    assert max(filled) <= 2049
    assert sum(filled) / (len(found) * 2049) > 0.99


def test_bad_records_are_told_with_their_place_or_counted(tmp_path: Path) -> None:
    records = [*RECORDS[:3], {"text": "no chat"}, said("Hi"), said("a", "b")]
    with pytest.raises(ConfigError, match=r"chats.jsonl:4: no messages, .*To skip such records"):
        rows_in(tmp_path, records, 128)
    rows = rows_in(tmp_path, records, 128, "--training.dataset_errors", "skip")
    assert len(rows.lengths) == 4
    skipped = json.loads((rows.cache.folder / "index.json").read_text())["skipped_records"]
    assert [reason.split(": ")[0].rpartition(":")[2] for reason in skipped] == ["4", "5"]
    deep = said("a", "b", tools=[])
    for _ in range(900):
        deep["tools"] = [deep["tools"]]
    with pytest.raises(ConfigError, match=r"chats.jsonl:2: nested deeper than 100"):
        rows_in(tmp_path, [RECORDS[0], deep], 128)
    (tmp_path / "torn").mkdir()
    path = save(tmp_path / "torn", RECORDS[:2])
    path.write_text(path.read_text()[:-9] + "\n")
    with pytest.raises(ConfigError, match=r"chats.jsonl:2: not JSON"):
        rows_in_file(tmp_path, path)


def rows_in_file(tmp_path: Path, path: Path) -> None:
    words = ["--training.dataset_format", "chat", "--training.dataset_path", str(path)]
    words += ["--model.hf_assets_path", str(tokenizer_in(tmp_path / "t", CHATML))]
    prepare(spec_of(load_config([*words, "--training.dataset_cache", str(tmp_path / "cache")])), 1)


def test_a_template_that_writes_without_end_is_refused(tmp_path: Path) -> None:
    template = tmp_path / "long.jinja"
    template.write_text("{{ 'x' * 6000000000 }}")
    with pytest.raises(ConfigError, match=r"chats.jsonl:1: the template .*long.jinja cannot show it: MemoryError"):
        rows_in(tmp_path, RECORDS[:1], 64, "--chat.template", str(template))


@pytest.mark.parametrize("name", ["chats.json", "chats.parquet"])
def test_lists_and_parquet_files_are_read(name: str, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    if name.endswith(".json"):
        (tmp_path / name).write_text(json.dumps(RECORDS))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / name)
    rows_in_file(tmp_path, tmp_path / name)
    (tmp_path / "one.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"one\.json:1: no messages"):
        rows_in_file(tmp_path, tmp_path / "one.json")


def test_the_key_depends_on_all_that_changes_tokens(tmp_path: Path) -> None:
    keys = {
        rows_in(tmp_path, RECORDS, 128, *words).cache.key
        for words in (
            (),
            ("--chat.history", "last_turn"),
            ("--chat.roles_to_train", "['assistant', 'user']"),
            ("--chat.template_kwargs", '{"x": 1}'),
        )
    }
    assert len(keys) == 4
    assert rows_in(tmp_path, RECORDS, 128).key != rows_in(tmp_path, RECORDS, 128, "--chat.packing", "none").key


def test_a_cache_whose_file_was_cut_is_refused(tmp_path: Path) -> None:
    file = rows_in(tmp_path, RECORDS, 128).cache.folder / "trained.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"trained.bin: \d+ bytes, not \d+: remove"):
        rows_in(tmp_path, RECORDS, 128)


def test_batches_have_the_same_chats_with_workers_and_the_divisor_needs_no_batch(tmp_path: Path) -> None:
    rows = rows_in(tmp_path, RECORDS, 64, "--chat.too_long", "skip")
    order = GlobalOrder(rows, 3, 4, 4)
    batch = next(build_loader(order, document_mask=True))
    assert order.count("labels") == int((batch["labels"] != IGNORED).sum())


def test_a_row_is_shown_as_it_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path, [said("Hi", "Hello <b>"), said("A", "B")])
    words = ["--training.dataset_format", "chat", "--training.dataset_path", str(path), "--training.seq_len", "64"]
    words += ["--model.hf_assets_path", str(tokenizer_in(tmp_path / "t", CHATML))]
    words += ["--training.dataset_cache", str(tmp_path / "cache")]
    data.main(["show", *words])
    shown = capsys.readouterr().out
    assert "<|im_start|>assistant\n[[Hello <b><|im_end|>]]" in shown
    assert "[[B<|im_end|>]]" in shown
    data.main(["show", "--json", *words])
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: len(column) for name, column in row.items()} == dict.fromkeys(
        ("tokens", "labels", "positions", "documents", "text"), 64
    )
    data.main(["show", "--html", str(tmp_path / "row.html"), *words])
    assert "<b>Hello &lt;b&gt;&lt;|im_end|&gt;</b>" in (tmp_path / "row.html").read_text()
    for page, reason in {str(path): "no page", "/nowhere/x.html": "No such file"}.items():
        with pytest.raises(ConfigError, match=f"--html {page}: .*{reason}"):
            data.main(["show", "--html", page, *words])
    data.main(["show", "--stats", *words])
    assert "2 sequences of chats in 1 rows of 64 tokens" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--row 7: there are rows from 0 to 0"):
        data.main(["show", "--row", "7", *words])
    with pytest.raises(ConfigError, match='only rows of chats, of pairs and token files are shown; use "chat"'):
        data.main(["show"])


@pytest.mark.parametrize("lengths", [[7], [7, 7], [1, 2], [5, 9, 9, 300], [*range(2, 2000, 3)]])
def test_a_histogram_has_every_length_in_the_range_that_it_names(lengths: list[int]) -> None:
    bars = [line.replace(",", "").split() for line in histogram(np.asarray(lengths))]
    counts = [sum(int(low) <= length <= int(high) for length in lengths) for low, _, high, *_ in bars]
    assert counts == [int(bar[-1]) for bar in bars]
    assert sum(counts) == len(lengths)


def test_what_is_shown_is_every_token_of_a_full_row(tmp_path: Path) -> None:
    rows = rows_in(tmp_path, RECORDS, 40, "--chat.too_long", "skip")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    for number in range(len(rows)):
        chats = pieces(row_of(rows, number, tokenizer), tokenizer)
        shown = sum(len(tokenizer.encode_template(text)) for chat in chats for _, text in chat)
        first, last = rows._rows[number], rows._rows[number + 1]
        assert shown == rows.lengths[first:last].sum()


LAYOUTS = [
    (2, ("--parallelism.tensor_parallel_degree", "2")),
    (2, ("--parallelism.context_parallel_degree", "2")),
    (2, ("--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_microbatch_size", "6")),
    (2, ("--parallelism.data_parallel_shard_degree", "2", "--training.local_batch_size", "9")),
]
LONGER = ("--training.seq_len", "48")


@functools.cache
def alone() -> Observation:
    return observe(*CHATS, *LONGER, steps=2)


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
def test_rows_of_chats_are_the_same_run_at_other_layouts(ranks: int, layout: tuple[str, ...]) -> None:
    assert not broken_bars(observe(*CHATS, *LONGER, *layout, ranks=ranks, steps=2), alone())


def test_chats_of_1_and_of_400_labels_weigh_by_their_labels(tmp_path: Path) -> None:
    """Over data parallel ranks and accumulation, as on one process: no rank divides by its own labels."""
    path = save(tmp_path, [said("q", "a " * 400 if number % 3 == 0 else "") for number in range(30)])
    words = (*CHATS, "--training.dataset_path", str(path), "--training.seq_len", "500", "--chat.packing", "none")
    split = ("--parallelism.data_parallel_shard_degree", "2", "--training.local_batch_size", "1")
    assert not broken_bars(observe(*words, *split, ranks=2, steps=2), observe(*words, steps=2))


def test_a_batch_with_one_label_is_divided_by_one(tmp_path: Path) -> None:
    path = save(tmp_path, [said("q", "")])
    words = (*CHATS, "--training.dataset_path", str(path), "--training.local_batch_size")
    one, many = (observe(*words, n, "--training.global_batch_size", n, steps=1).losses[0] for n in ("1", "6"))
    assert one == pytest.approx(many, rel=1e-6)


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("ChatRows.count_valid", "self.labels[indices].sum()", "self.labels[indices[: len(indices) // 2]].sum()"),
        ("ChatRows._laid_out", "documents[row, at:end] = document\n", "documents[row, at:end] = 0\n"),
    ],
)  # fmt: skip
def test_a_fault_in_rows_is_seen(function: str, old: str, new: str) -> None:
    fault = functools.partial(rewrite, "components.data.rows", function, old, new)
    assert broken_bars(observe(*CHATS, *LONGER, steps=2, mutate=fault), alone())


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss"])
def test_the_gradient_of_rows_is_the_sum_of_their_chats_each_alone(name: str, tmp_path: Path) -> None:
    """Chats see nothing of each other, and no expert sees padding."""
    torch.manual_seed(0)
    model_class, flavors = MODELS[name]
    model = model_class(replace(flavors["tiny"], vocab_size=300))
    model.visibility.padded_rows = True
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    found = []
    for packing in ("best_fit", "none"):
        rows = rows_in(tmp_path, RECORDS[:12], 128, "--chat.packing", packing)
        model.zero_grad()
        for number in range(len(rows)):
            model(**batch_of(rows, np.array([number]), document_mask=True)).backward()
        found.append({name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None})
    packed, alone = found
    assert packed.keys() == alone.keys()
    for name, gradient in packed.items():
        assert (gradient - alone[name]).norm() <= 1e-5 * alone[name].norm(), name


def has_padded_rows(run: train.Run) -> bool:
    visibility: Any = run.stages[0].visibility
    return bool(visibility.padded_rows)


def test_the_model_of_a_run_on_chats_knows_of_padding() -> None:
    split = ("--parallelism.context_parallel_degree", "2")
    assert observe(*CHATS, *LONGER, *split, ranks=2, steps=1, at_end=has_padded_rows).extra
    assert not observe(*LONGER, steps=1, at_end=has_padded_rows).extra


def test_labels_of_parts_are_counted() -> None:
    drawn = np.random.default_rng(0)
    trained = drawn.random(1000) < 0.4
    ends = [*np.unique(drawn.integers(1, 1000, 60)).tolist(), 1000]
    starts = np.array([0, *ends[:-1]])
    lengths = np.minimum(np.array(ends) - starts, 20)
    for chosen in (np.arange(len(starts)), np.arange(0, len(starts), 3), np.array([len(starts) - 1])):
        found = _count(trained, starts[chosen], lengths[chosen])
        assert found.tolist() == [trained[starts[at] : starts[at] + lengths[at]].sum() for at in chosen]
