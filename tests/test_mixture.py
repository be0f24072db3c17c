"""Mixtures: exact shares in every prefix, sources that do not know of each other, and runs that go on elsewhere."""

import functools
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train
from components.commands.figures import Observation, broken_bars
from components.config import ROOT, ConfigError, absolute_tables, from_json, load_config, to_json
from components.config.bounds import integer_weights
from components.data.datasets import mixtures
from components.data.loader import COLUMNS
from components.data.mixture import Mixture, Shares, counts, phases, size_weights, split
from components.data.order import check_data_order, data_order
from components.data.packed import PackedSequences
from components.data.show import shares
from components.data.stream import is_stream
from components.observe.report import read_rows
from models import loss
from tests import limits
from tests.chats import said, save
from tests.harness import observe
from tests.jobs import job, refused
from tests.small import MIXTURE

WEIGHTS = [(7, 3), (1, 1, 1), (70, 20, 7, 3), (999_999_999, 1, 5, 3, 1_000_000_000), (3,), (1,) * 9]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("start", [0, 10**12 - 7])
def test_every_prefix_has_the_exact_shares(weights: tuple[int, ...], start: int) -> None:
    positions = np.arange(start, start + 5000)
    source, place = split(positions, weights)
    before = counts(start, weights)
    for number, weight in enumerate(weights):
        own = np.flatnonzero(source == number)
        assert place[own].tolist() == [*range(before[number], before[number] + len(own))], "each of its places once"
        seen = [before[number] + count for count in np.cumsum(source == number).tolist()]
        exact = [position * weight / sum(weights) for position in range(start + 1, start + 5001)]
        assert max(abs(a - b) for a, b in zip(seen, exact, strict=True)) < 5
    assert counts(start + 5000, weights) == [
        count + int((source == number).sum()) for number, count in enumerate(before)
    ]


def test_weights_are_the_decimal_numbers_that_are_written() -> None:
    assert integer_weights([0.7, 0.3]) == (7, 3)
    assert integer_weights([0.1, 0.2, 0.7]) == (1, 2, 7)
    assert integer_weights([4, 2]) == (2, 1)
    with pytest.raises(ValueError, match="more than 31 bits; use fewer digits"):
        integer_weights([0.1234567891, 1])


def test_the_order_of_sources_and_those_without_weight_change_nothing() -> None:
    def shares(*sources: tuple[str, str]) -> list[Shares]:
        words = []
        for number, (name, weight) in enumerate(sources, 1):
            prefix = f"--training.mixture[{number}]"
            words += [f"{prefix}.name", name, f"{prefix}.weight", weight, f"{prefix}.dataset_path", "x"]
        return phases(load_config(words).training, {})

    assert shares(("b", "0.2"), ("a", "0.8")) == shares(("a", "4"), ("later", "0"), ("b", "1"))


def test_weights_from_sizes() -> None:
    def weights(temperature: float, **tokens: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        words = [f"--training.mixture_temperature={temperature}"]
        for number, name in enumerate(tokens, 1):
            words += [f"--training.mixture[{number}].name={name}", f"--training.mixture[{number}].dataset_path=x"]
        words += [
            f"--training.mixture[{len(tokens) + 1}].{key}" for key in ("name=later", "weight=0", "dataset_path=x")
        ]
        (found,) = phases(load_config(words).training, tokens | {"later": 5})
        return found.names, found.weights

    assert weights(1, a=30_000, b=10_000) == (("a", "b"), (3, 1)), "equal epochs"
    assert weights(2, b=1, a=16) == (("a", "b"), (4, 1))
    one, other = weights(1000, a=10**12, b=1)[1]
    assert one / other == pytest.approx(10 ** (12 / 1000))
    assert weights(1, a=10**12, b=1)[1] == (10**9, 1), "no source is left out"
    # Every machine has these numbers, because a run continues only under its own weights.
    assert size_weights({"a": 123_456_789_012, "b": 987_654_321, "c": 31_337}, 3.3) == {
        "a": 805449135,
        "b": 186470804,
        "c": 8080061,
    }
    assert sum(weights(1.5, **{f"s{number}": 1 + number**7 for number in range(99)})[1]) < 2**31


class Numbers(PackedSequences):
    """Sequences whose tokens are their own numbers."""

    def __init__(self, length: int, first: int, seq_len: int = 4) -> None:
        self.num_sequences, self.seq_len, self.first = length, seq_len, first
        self.num_tokens, self.key, self.cache = length * seq_len, f"from {first}", ONLY_TEXT

    def get(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens = np.repeat(np.asarray(indices)[:, None] + self.first, self.seq_len + 1, axis=1)
        return tokens, np.zeros((len(tokens), self.seq_len), np.int64)


class OnlyText:
    trained = None


ONLY_TEXT: Any = OnlyText()
SOURCES = {"web": Numbers(500, 0), "math": Numbers(90, 1000), "code": Numbers(40, 2000)}


def mixture(*given: tuple[int, dict[str, int]], **more: Any) -> Mixture:
    shares = [
        Shares(start, tuple(sorted(weights)), tuple(weights[name] for name in sorted(weights)))
        for start, weights in given
    ]
    names = {name for _, weights in given for name in weights}
    return Mixture({name: SOURCES[name] for name in names}, shares, 4, **more)


def drawn(mixed: Mixture, length: int, seed: int = 3) -> list[int]:
    return mixed.get(mixed.at(np.arange(length), seed))[0][:, 0].tolist()


def test_a_source_keeps_its_order_whatever_is_mixed_with_it() -> None:
    two = drawn(mixture((0, {"web": 7, "math": 3})), 600)
    three = drawn(mixture((0, {"web": 2, "math": 1, "code": 5})), 600)
    for first, last in ((0, 1000), (1000, 2000)):
        own, other = ([number for number in found if first <= number < last] for found in (two, three))
        assert own[: len(other)] == other[: len(own)]
    maths = drawn(mixture((0, {"math": 1})), 90)
    assert sorted(maths) == [*range(1000, 1090)], "an epoch has each sequence once"
    assert drawn(mixture((0, {"math": 1})), 90, seed=4) != maths


def test_a_phase_goes_on_where_the_phase_before_ended() -> None:
    one = mixture((0, {"web": 7, "math": 3}))
    later = mixture((0, {"web": 7, "math": 3}), (100, {"math": 1, "code": 1}))
    assert drawn(later, 100) == drawn(one, 100), "a source that comes later changes nothing before"
    assert later.seen(100) == {"code": 0, "math": 30, "web": 70}
    assert later.seen(160) == {"code": 30, "math": 60, "web": 70}
    maths = [number for number in drawn(later, 160) if 1000 <= number < 2000]
    assert maths == drawn(mixture((0, {"math": 1})), 60)


def test_validation_has_every_sequence_once_and_each_prefix_its_share_of_all() -> None:
    whole = mixture((0, {"web": 1, "math": 1, "code": 1}), part="validation")
    assert len(whole) == 630
    found = whole.get(np.arange(630))[0][:, 0].tolist()
    everything = [*range(500), *range(1000, 1090), *range(2000, 2040)]
    assert sorted(found) == everything
    assert abs(sum(number < 1000 for number in found[:63]) - 50) <= 3
    assert found[:63] == sorted(found[:63], key=found.index)
    assert [number for number in found if number < 1000] == [*range(500)], "in the source's order"


@pytest.mark.parametrize("part", ["train", "validation"])
def test_each_token_knows_the_number_of_its_source(part: Any) -> None:
    mixed, positions = mixture((0, {"web": 7, "math": 3}), (100, {"math": 1, "code": 1}), part=part), np.arange(400)
    numbers = mixed.at(positions, 3) if part == "train" else positions
    tokens = mixed.get(numbers)[0][:, :-1]
    expected = [["web", "math", "code"][number // 1000] for number in tokens.flatten()]
    found = COLUMNS["sources"](mixed, positions, 3).flatten()
    assert [sorted(SOURCES)[number] for number in found] == expected
    assert {*COLUMNS["sources"](SOURCES["web"], positions, 3).flatten()} == {-1}, "a dataset alone is no source"


def test_the_order_may_change_only_in_what_is_to_come() -> None:
    config = load_config([])

    def state(mixed: Mixture, sequences: int = 800) -> dict[str, Any]:
        order = data_order(mixed.key, None, config, mixed.mixture)
        return json.loads(json.dumps({"data_order": order, "global_batch_size": 8, "sequences": sequences}))

    first = {"web": 7, "math": 3}
    saved = state(mixture((0, first)))
    for accepted in (((0, first),), ((0, first), (800, {"code": 1})), ((0, first), (900, {"web": 1}))):
        check_data_order(saved, state(mixture(*accepted)), 8)
    for wrong in (((0, {"web": 8, "math": 3}),), ((0, first), (799, {"code": 1})), ((0, {"web": 7, "code": 3}),)):
        with pytest.raises(
            ConfigError, match=r"new weights are a \[\[training.mixture_phase\]\] with from_sequence = 800"
        ):
            check_data_order(saved, state(mixture(*wrong)), 8)
    longer = replace_length(mixture((0, first)))
    with pytest.raises(ConfigError, match="the checkpoint continues another run"):
        check_data_order(saved, state(longer), 8)
    single = saved | {"data_order": data_order("key", None, config)}
    with pytest.raises(ConfigError, match="the checkpoint continues another run") as caught:
        check_data_order(saved, single, 8)
    assert "mixture_phase" not in str(caught.value), "no phase leads from a mixture to one dataset"


def replace_length(mixed: Mixture) -> Mixture:
    """The mixture with other data of one source."""
    return Mixture(mixed.sources | {"web": Numbers(500, 5)}, mixed.shares, 4)


TOML = """
[training]
seq_len = 64
[[training.mixture]]
name = "law"
dataset_path = "PATH/law.txt"
weight = 0.7
[[training.mixture]]
name = "songs"
dataset_path = "~/songs"
max_epochs = 2
[[training.mixture_phase]]
from_sequence = 1_000
weights = { law = 0.4, songs = 0.6 }
"""


def test_arrays_of_tables_are_read_and_every_mistake_has_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = job(tmp_path, TOML)
    config = load_config(["--job.config_file", str(path), "--training.mixture[2].weight", "0.3"])
    law, songs = config.training.mixture
    assert (law.name, law.weight, songs.weight, songs.max_epochs) == ("law", 0.7, 0.3, 2.0)
    assert songs.dataset_path == f"{tmp_path}/songs"
    assert phases(config.training, {}) == [Shares(0, ("law", "songs"), (7, 3)), Shares(1000, ("law", "songs"), (2, 3))]
    assert from_json(to_json(config)) == replace(config)
    monkeypatch.chdir(tmp_path)
    assert absolute_tables(config)["training"]["mixture"][0]["dataset_path"] == f"{tmp_path}/PATH/law.txt"
    for old, new, reason in (
        (
            "weight = 0.7",
            "wieght = 0.7",
            r":7: training.mixture[1].wieght = 0.7: unknown key; did you mean training.mixture.weight?",
        ),
        ("weight = 0.7", 'weight = "a"', ':7: training.mixture[1].weight = "a": expected a number of 0 or more'),
        (
            "max_epochs = 2",
            "max_epochs = -1",
            ":11: training.mixture[2].max_epochs = -1: expected a number of 0 or more",
        ),
        (
            'dataset_path = "~/songs"',
            "",
            'training.mixture = (2 tables): source "songs": set either dataset_path, or dataset',
        ),
        ('"~/songs"', '"ftp://b/x"', ":10: training.mixture[2].dataset_path = "),
        (
            "law = 0.4",
            "low = 0.4",
            ':13: training.mixture_phase = (1 tables): no source has the name "low"; there are law, songs',
        ),
        (
            "from_sequence = 1_000",
            "from_sequence = 0",
            ":13: training.mixture_phase[1].from_sequence = 0: expected an integer of 1 or",
        ),
        (
            "[[training.mixture_phase]]",
            "[training.mixture_phase]",
            "expected tables [[training.mixture_phase]]",
        ),
    ):
        assert old in TOML
        assert reason in "\n".join(refused("--job.config_file", job(tmp_path, TOML.replace(old, new)))), new
    assert "an array of tables" in refused("--training.mixture.weight", "1")[0]
    assert "expected tables [[training.mixture]]" in refused("--training.mixture", "1")[0]
    for key in ("training.mixture[1000].weight", "training.mixture[1].weight[2]", "training[2].mixture[1].weight"):
        assert "an array of tables" in refused(f"--{key}", "1")[0] or "unknown" in refused(f"--{key}", "1")[0], key
    for empty in (
        "[[training.mixture]]",
        "[training]\nmixture = [{}]",
        "[training]\nmixture = {}",
        "[training.mixture]",
    ):
        assert "expected tables [[training.mixture]]" in refused("--job.config_file", job(tmp_path, empty))[0], empty
    assert load_config(["--job.config_file", str(job(tmp_path, "[training]\nmixture = []"))]).training.mixture == []
    assert len(refused("--training.mixture[999].name", "a")) == 2
    assert "training.mixture[1].name is missing" in refused("--training.mixture[2].name", "a")[0]


def test_a_mixture_replaces_the_dataset_of_a_recipe() -> None:
    words = ["--training.mixture[1].name", "a", "--training.mixture[1].dataset_path", "x"]
    for dataset in ("c4", "org/name"):
        assert is_stream(load_config(["--training.dataset", dataset]).training)
        assert not is_stream(load_config(["--training.dataset", dataset, *words]).training)


def test_texts_among_chats_have_the_keys_of_texts() -> None:
    words = ["--training.mixture[1].name", "a", "--training.mixture[1].dataset_path", "x"]
    words += ["--training.dataset_format", "chat", "--training.dataset_text_field", "body"]
    assert "records are chats" in refused(*words)[0]
    assert load_config([*words, "--training.mixture[1].dataset_format", "text"]).training.dataset_text_field == "body"


def test_each_source_may_have_a_field_and_a_format_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text(json.dumps({"body": "In the beginning. " * 30}))
    chats = save(tmp_path / "chats", [said("Hi", "b" * 60)] * 9)
    given = [
        f"dataset_path={tmp_path}/texts.jsonl dataset_text_field=body dataset_format=text",
        f"dataset_path={chats} dataset_format=chat",
    ]
    words = ["--training.dataset_format=chat", "--chat.template=assets/templates/llama3.jinja", "--training.seq_len=64"]
    words += [f"--training.dataset_cache={tmp_path}/cache", "--training.mixture_temperature=1"]
    for number, source in enumerate(given, 1):
        words += [f"--training.mixture[{number}].name={'ab'[number - 1]}"]
        words += [f"--training.mixture[{number}].{key}" for key in source.split()]
    config = load_config(words)
    mixed, _ = mixtures(config, sys.maxsize)
    sizes = [source.num_tokens for source in mixed.sources.values()]
    shown = [line.split()[-2:] for line in shares(config)[-2:]]
    assert shown == [[f"{size / sum(sizes):.2%}", name] for size, name in zip(sizes, "ab", strict=True)]
    hotter, _ = mixtures(load_config([*words, "--training.mixture_temperature=2"]), sys.maxsize)
    assert hotter.mixture != mixed.mixture, "a checkpoint knows its weights"


def test_epochs_are_told_and_bounded() -> None:
    mixed = mixture((0, {"math": 1}), max_epochs={"math": 2.0})
    assert mixed.describe(180) == ["source math: 180 of 180 sequences, 2.00 epochs"]
    with pytest.raises(ConfigError, match=r"max_epochs = 2 of math: it would be seen 2.01 times in 181 sequences"):
        mixed.describe(181)


def test_a_run_tells_its_epochs_and_ends_before_it_would_exceed_them(tmp_path: Path) -> None:
    words = ["--job.config_file", "recipes/mixture_debug.toml", "--job.dump_folder", str(tmp_path)]
    words += ["--lr_scheduler.warmup_steps", "0", "--validation.steps", "1", "--training.steps"]
    done, refused = (limits.run([sys.executable, "train.py", *words, steps], cwd=ROOT) for steps in ("2", "90000"))
    assert done.returncode == 0, done.stderr
    assert "source psalms: 2 of 16 sequences, 0.01 epochs" in done.stdout
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert (
        {*rows[0]["loss_by_source"]}
        == {"law", "psalms", "gospels"}
        >= {*rows[-1]["validation_loss_by_source"]}
        > {"law"}
    )
    assert refused.returncode == 2
    assert "training.mixture: max_epochs = 2 of psalms: it would be seen" in refused.stderr
    assert "in 720,000 sequences; lower its weight" in refused.stderr


def of_books(*more: str) -> Iterator[str]:
    books = {"law": ("02-exodus", "0.7"), "songs": ("19-psalms", "0.2"), "kings": ("11-1-kings", "0.1")}
    for number, (name, (book, weight)) in enumerate(books.items(), 1):
        yield from (f"--training.mixture[{number}].name", name, f"--training.mixture[{number}].weight", weight)
        yield from (f"--training.mixture[{number}].dataset_path", str(ROOT / f"assets/kjv/{book}.txt"))
    yield from ("--training.mixture_phase[1].from_sequence", "50")
    yield from ("--training.mixture_phase[1].weights", "{law = 1, kings = 3}", *more)


VALIDATES = ("--validation.enable", "true", "--validation.freq", "2", "--validation.held_out_fraction", "0.05")


def run(*words: str, ranks: int = 1, **more: Any) -> Observation:
    return observe(*of_books(*VALIDATES, *words), ranks=ranks, **({"steps": 3} | more))


@functools.cache
def alone() -> Observation:
    return run()


PIPELINE = "--parallelism.pipeline_parallel_degree"
LAYOUTS = {
    "fsdp 2": (2, ("--parallelism.data_parallel_shard_degree", "2", "--training.local_batch_size", "9")),
    "tp 2": (2, ("--parallelism.tensor_parallel_degree", "2")),
    "cp 3": (3, ("--parallelism.context_parallel_degree", "3")),
    "pp 2": (2, (PIPELINE, "2", "--parallelism.pipeline_parallel_microbatch_size", "6")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_mixture_is_the_same_run_at_other_layouts(name: str) -> None:
    """Also the loss of each source."""
    ranks, words = LAYOUTS[name]
    assert not broken_bars(run(*words, ranks=ranks), alone())


def test_a_source_has_a_loss_at_steps_with_its_labels() -> None:
    found = {step: [*losses] for step, losses in alone().sources.items()}
    assert found.pop("step 3") == ["kings", "law"]
    assert found == {key: ["kings", "law", "songs"] for key in ("step 1", "step 2", "validation")}


def by_label(run: train.Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """A step's row, and what it should be: from the logits of its batches and the numbers of its sequences."""
    mixed, batches, losses = run.train_set, train.local_batches(run), dict[str, list[float]]()
    assert isinstance(mixed, Mixture)
    numbers = mixed.at(np.arange(run.sequences, run.sequences + run.global_batch_size), run.config.debug.seed)
    ends = np.cumsum([len(source) for source in mixed.sources.values()])
    names = iter([[*mixed.sources][np.searchsorted(ends, number, side="right")] for number in numbers])
    for _ in range(run.accumulation_steps):
        batch = train.own_part(run, next(batches))
        labels = batch.pop("labels")
        with torch.no_grad():
            found = F.cross_entropy(run.stages[0](**batch).transpose(1, 2), labels, reduction="none")
        for sequence, kept in zip(found, labels != -100, strict=True):
            losses.setdefault(next(names), []).extend(sequence[kept].tolist())
    own_part, _ = train.train_step(run, train.local_batches(run), train.divisor(run))
    everything = [each for own in losses.values() for each in own]
    means = {name: np.mean(own) for name, own in sorted(losses.items())}
    row = train.row_of(own_part, run.logged, run.objective, run.mesh)
    return row, {"loss": np.mean(everything), "loss_by_source": means}


@pytest.mark.parametrize("size", [100, 2000])
def test_the_loss_of_a_source_is_the_mean_of_its_labels(size: int) -> None:
    """The data are texts and chats, whose rows have padding and tokens that are not trained."""
    row, expected = observe(*MIXTURE, steps=2, at_end=by_label, mutate=functools.partial(cut_into_chunks, size)).extra
    assert row.keys() == expected.keys(), "sums of sources are not logged"
    assert row["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert row["loss_by_source"] == pytest.approx(expected["loss_by_source"], rel=1e-6)
    assert len(expected["loss_by_source"]) == 2


def cut_into_chunks(size: int) -> None:
    loss.CHUNK["cpu"] = size, 0


def test_chats_and_texts_mix(tmp_path: Path) -> None:
    """Rows of chats, and of texts whose every token is trained; the same run at another layout."""
    chats = save(tmp_path, [said("Hi", "b" * length, "And?", "c" * length) for length in range(60)])
    words = ["--training.mixture[1].name", "chats", "--training.mixture[1].dataset_path", str(chats)]
    words += ["--training.mixture[2].name", "law", "--training.mixture[2].dataset_format", "text"]
    words += ["--training.mixture[2].dataset_path", str(ROOT / "assets/kjv/02-exodus.txt"), "--training.seq_len", "96"]
    words += ["--training.dataset_format", "chat", "--chat.template", "assets/templates/llama3.jinja"]
    words += ["--chat.too_long", "skip", *VALIDATES]
    ranks, layout = LAYOUTS["cp 3"]
    assert not broken_bars(observe(*words, *layout, ranks=ranks, steps=2), observe(*words, steps=2))


def test_a_mixture_goes_on_at_another_layout_and_under_a_new_phase(tmp_path: Path) -> None:
    """In the middle of a phase; the last phase is given after the first start."""
    phase = ("--training.mixture_phase[2].from_sequence", "110", "--training.mixture_phase[2].weights", "{songs = 1}")
    (ranks, words), saves = LAYOUTS["fsdp 2"], ("--checkpoint.enable", "true")
    run(*saves, steps=2, folder=str(tmp_path))
    resumed, whole = run(*saves, *words, *phase, ranks=ranks, steps=2, folder=str(tmp_path)), run(*phase, steps=4)
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=1e-6)
    for name, weight in whole.weights.items():
        assert (resumed.weights[name] - weight).norm() <= 1e-5 * weight.norm(), name
    with pytest.raises(RuntimeError, match="the checkpoint continues another run"):
        run(*saves, *phase, "--training.mixture[1].weight", "0.6", steps=1, folder=str(tmp_path))
