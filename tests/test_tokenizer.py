"""Tokenizers: the bundled one, one trained here, and tokenizer.json."""

import base64
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from components.config import ROOT, ConfigError, load_config
from components.data.__main__ import prepare_all
from components.data.datasets import _check_vocabulary, build_datasets
from components.data.tokenizer import (
    SPECIAL_TOKENS,
    SPLIT_PATTERN,
    JsonTokenizer,
    TiktokenTokenizer,
    check_tokenizer,
    export_tokenizer,
    find_tokenizer,
    fingerprint,
    load_tokenizer,
    passed_over,
    train_bpe,
    try_tokenizer,
)
from components.launch.orphan import LAUNCHER_PIPE

BUNDLED = "assets/tokenizer"
TEXTS = [
    "",
    " ",
    "In the beginning God created the heaven and the earth.",
    "  two  spaces\t\ttabs \n\n\r\n lines \r ",
    "naïve Ünïcödé e\u0301 日本語 עִבְרִית 😀👩‍👩‍👧 \U0010ffff",
    "\x00\x01\x7f\ufeff\u200b\u2028",
    "12345678901234567890 3.14 it's WE'LL I'd",
    "x" * 10_000,
    "<|begin_of_text|><|end_of_text|><|eot_id|></s><s>",
]


def save_json_tokenizer(folder: Path, *, settings: bool = True) -> Path:
    """A small tokenizer.json as Hugging Face ships it, in a folder, with the tokens <s> and </s>."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    made.train_from_iterator(["In the beginning God created the heaven and the earth."], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    if settings:
        names = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A rank file trained on a little text."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("In the beginning God created the heaven and the earth. " * 50 + "naïve 日本")
    train_bpe([folder / "text.txt"], 600, folder / "deep" / "tokenizer.model")
    return folder / "deep" / "tokenizer.model"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_json_tokenizer(tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("kind", ["bundled", "trained", "saved"])
def test_text_comes_back(request: pytest.FixtureRequest, kind: str, text: str) -> None:
    tokenizer = load_tokenizer(BUNDLED if kind == "bundled" else str(request.getfixturevalue(kind)))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids), "text that looks like a special token is text"


def test_special_tokens_follow_the_ranks() -> None:
    tokenizer = load_tokenizer(BUNDLED)
    assert tokenizer.vocab_size == 4096
    assert (tokenizer.bos_id, tokenizer.eos_id) == (4096 - 256, 4096 - 255)
    assert len(set(SPECIAL_TOKENS)) == 256
    # As in Llama 3, where 128,000 ranks make <|eot_id|> 128,009.
    assert SPECIAL_TOKENS.index("<|eot_id|>") == 9
    assert tokenizer.decode([4096 - 256]) == "<|begin_of_text|>"


def test_a_trained_file_has_every_byte_and_the_size_that_was_asked_for(trained: Path) -> None:
    ranks = dict(line.split() for line in trained.read_bytes().splitlines())
    assert {base64.b64encode(bytes([byte])) for byte in range(256)} <= set(ranks)
    assert sorted(map(int, ranks.values())) == list(range(len(ranks)))
    tokenizer = load_tokenizer(str(trained))
    assert 512 < tokenizer.vocab_size <= 600
    assert len(tokenizer.encode(" beginning")) == 1
    with pytest.raises(ConfigError, match="a vocabulary of 500"):
        train_bpe([trained], 500, trained)


def test_training_is_a_command(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a rose is a rose is a rose")
    words = ["train", "--input", str(tmp_path), "--vocab-size", "520", "--output", str(tmp_path / "out.tiktoken")]
    command = [sys.executable, "-m", "components.data", "tokenizer", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    printed = done.stdout
    assert "Warning" not in done.stderr
    assert printed.endswith(f"{tmp_path / 'out.tiktoken'}: {load_tokenizer(str(tmp_path)).vocab_size} tokens\n")


def test_first_and_last_token_come_from_the_settings(saved: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(saved))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert load_tokenizer(str(saved / "tokenizer.json")).eos_id == 1
    bare = load_tokenizer(str(save_json_tokenizer(tmp_path, settings=False)))
    assert (bare.bos_id, bare.eos_id) == (None, None)


BOTH = {"bos_token": "<s>", "eos_token": "</s>"}
NAMED_ELSEWHERE: list[tuple[dict[str, Any], tuple[int | None, int | None]]] = [
    ({}, (None, None)),
    ({"special_tokens_map.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}}}, (0, 1)),
    ({"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": "</s>"}}, (None, 1)),
    ({"config.json": {"bos_token_id": 1, "eos_token_id": 1}}, (1, 1)),
    ({"config.json": {"vocab_size": 4}, "generation_config.json": {"eos_token_id": [1, 0]}}, (None, 1)),
    ({"special_tokens_map.json": {"bos_token": "<s>"}, "config.json": {"bos_token_id": 1, "eos_token_id": 1}}, (0, 1)),
    # null names no token; the id of a piece of text belongs to another tokenizer.
    (
        {"tokenizer_config.json": {"bos_token": None, "eos_token": "</s>"}, "config.json": {"bos_token_id": 0}},
        (None, 1),
    ),
    ({"config.json": {"bos_token_id": 5, "eos_token_id": 100_000}}, (None, None)),
    ({"config.json": {"bos_token_id": None, "eos_token_id": []}}, (None, None)),
]


def save_named(folder: Path, files: dict[str, Any]) -> str:
    save_json_tokenizer(folder, settings=False)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize(("files", "ids"), NAMED_ELSEWHERE, ids=range(len(NAMED_ELSEWHERE)))
def test_first_and_last_token_come_from_other_files_too(
    files: dict[str, Any], ids: tuple[int | None, int | None], tmp_path: Path
) -> None:
    path = save_named(tmp_path, files)
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == ids
    none = load_tokenizer(path, "none")
    assert (none.bos_id, none.eos_id) == (None, None)
    named = load_tokenizer(path, "<s>")
    assert (named.bos_id, named.eos_id) == (ids[0], 0)
    said = check_tokenizer(load_config(["--model.hf_assets_path", path]))
    assert [f"no file of {path} names an end token; set training.dataset_separator to " in line for line in said] == [
        True for _ in [ids[1]] if ids[1] is None
    ]
    for separator in ("none", "</s>"):
        words = ["--model.hf_assets_path", path, "--training.dataset_separator", separator]
        assert check_tokenizer(load_config(words)) == []


def test_a_separator_is_a_token_of_the_tokenizer(tmp_path: Path) -> None:
    for path, right in ((save_named(tmp_path, {}), "</s>"), (BUNDLED, "<|eot_id|>")):
        job = tmp_path / "job.toml"
        job.write_text(f'[model]\nhf_assets_path = "{path}"\n[training]\ndataset_separator = "{right[:-1]}"\n')
        with pytest.raises(ConfigError) as caught:
            check_tokenizer(load_config(["--job.config_file", str(job)]))
        (line,) = caught.value.messages
        assert line.startswith(
            f'{job}:4: training.dataset_separator = "{right[:-1]}": not a token of {path}; use "{right}", '
        )
        assert line.endswith(', "auto" or "none"')
        with pytest.raises(ConfigError, match=r'training\.dataset_separator: names a token "x!" that'):
            load_tokenizer(path, "x!")
    llama = load_tokenizer(BUNDLED, "<|eot_id|>")
    assert (llama.bos_id, llama.eos_id) == (4096 - 256, 4096 - 256 + 9)


@pytest.mark.parametrize(("variables", "times"), [({}, 1), ({"RANK": "1"}, 0), ({LAUNCHER_PIPE: "3"}, 0)])
def test_a_start_says_that_documents_run_together(
    variables: dict[str, str],
    times: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A rank says so where no launcher has."""
    for name in ("RANK", LAUNCHER_PIPE):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    path = save_named(tmp_path, {})
    config = load_config(["--model.hf_assets_path", path, "--training.dataset_path", "none"])
    for start, right in ((lambda: build_datasets(config, 4096), times), (lambda: prepare_all(config), 1)):
        with pytest.raises(ConfigError, match="no such file"):
            start()
        assert capsys.readouterr().err.count(f"warning: documents run together: no file of {path} ") == right


def test_a_named_separator_needs_a_row(saved: Path, tmp_path: Path) -> None:
    made = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    made.add_special_tokens(["<|end|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    rows = load_tokenizer(str(tmp_path)).rows
    assert load_tokenizer(str(tmp_path), "<|end|>").rows == rows + 1


@pytest.mark.parametrize("separator", ["auto", "none", "<s>"])
@pytest.mark.parametrize(
    "files",
    [{}, {"special_tokens_map.json": BOTH | {"pad_token": "</s>"}}, {"config.json": {"eos_token_id": 1}}],
    ids=["nothing", "map", "ids"],
)
def test_an_export_names_the_tokens_around_documents(files: dict[str, Any], separator: str, tmp_path: Path) -> None:
    path = save_named(tmp_path / "given", files)
    (tmp_path / "out").mkdir()
    ids = export_tokenizer(path, tmp_path / "out", separator)
    (tmp_path / "out" / "config.json").write_text(json.dumps(ids))
    given, again = load_tokenizer(path, separator), load_tokenizer(str(tmp_path / "out"))
    assert (again.bos_id, again.eos_id) == (given.bos_id, given.eos_id) == (ids["bos_token_id"], ids["eos_token_id"])
    if "special_tokens_map.json" in files:
        assert json.loads((tmp_path / "out" / "special_tokens_map.json").read_text())["pad_token"] == "</s>"


def test_a_rank_file_is_exported_with_the_separator(tmp_path: Path) -> None:
    for separator, names in (("<|eot_id|>", ("<|begin_of_text|>", "<|eot_id|>")), ("none", (None, None))):
        ids = export_tokenizer(BUNDLED, tmp_path, separator)
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        assert (settings["bos_token"], settings["eos_token"]) == names
        again = load_tokenizer(str(tmp_path))
        assert (again.bos_id, again.eos_id) == (ids["bos_token_id"], ids["eos_token_id"])


def test_a_file_of_any_name_is_exported_under_the_usual_one(saved: Path, tmp_path: Path) -> None:
    shutil.copy(saved / "tokenizer.json", tmp_path / "mine.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "out").mkdir()
    export_tokenizer(str(tmp_path / "mine.json"), tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (saved / "tokenizer.json").read_bytes()


def test_a_token_that_no_text_has_needs_no_row(saved: Path, tmp_path: Path) -> None:
    """As the token of images of Gemma 3, whose text models have no row for it."""
    made = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    before = load_tokenizer(str(saved)).rows
    made.add_special_tokens(["<image>"])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.rows, tokenizer.vocab_size) == (before, before + 1)
    assert max(tokenizer.encode("an <image> of <s>")) < before
    config = load_config(["--model.hf_assets_path", str(tmp_path)])
    _check_vocabulary(config, before + 1, before)
    with pytest.raises(ConfigError, match=f"{before} tokens, but llama debug has a table of {before - 1}"):
        _check_vocabulary(config, before + 1, before - 1)


def test_a_tokenizer_that_asks_for_short_inputs_still_encodes_all(saved: Path, tmp_path: Path) -> None:
    made = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    made.enable_truncation(8)
    made.enable_padding(length=64)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    for text in ("a", "the heaven and the earth " * 40):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_with_gaps_stay_below_the_vocabulary_size(tmp_path: Path) -> None:
    model = models.WordLevel({"a": 0, "b": 70_000}, unk_token="a")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).vocab_size == 70_001


@pytest.mark.parametrize(
    ("settings", "message"),
    [('{"bos_', "tokenizer_config.json: not JSON"), ('{"eos_token": "<end>"}', 'a token "<end>" that the tokenizer')],
)
def test_wrong_settings_are_told(tmp_path: Path, settings: str, message: str) -> None:
    save_json_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(settings)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("path", ["missing", "assets/kjv", "recipes/none.model", "~nobody-of-this-name/x"])
def test_a_missing_tokenizer_is_told_with_how_to_get_one(path: str) -> None:
    with pytest.raises(ConfigError, match=rf"no tokenizer at {path}: give a tiktoken rank file .*huggingface\.co"):
        load_tokenizer(path)


def corrupt(lines: list[bytes], kind: str) -> bytes:
    changed = {
        "empty": [],
        "no base64": [*lines[:-1], b"!!!! " + lines[-1].split()[1]],
        "no rank": [lines[0].split()[0], *lines[1:]],
        "rank is no number": [lines[0].replace(b" 0", b" zero"), *lines[1:]],
        "a byte is missing": lines[5:],
        "a part is missing": [*lines[:400], *lines[410:]],
        "one rank twice": [*lines[:-1], lines[-1].split()[0] + b" 300"],
        "something else": [b"<html>", b"<body>Not found</body>"],
    }[kind]
    return b"\n".join(changed)


@pytest.mark.parametrize(
    "kind",
    [
        *("empty", "no base64", "no rank", "rank is no number", "a byte is missing", "a part is missing"),
        *("one rank twice", "something else"),
    ],
)
def test_a_corrupt_rank_file_is_told(tmp_path: Path, kind: str) -> None:
    lines = find_tokenizer(BUNDLED).read_bytes().splitlines()
    (tmp_path / "tokenizer.model").write_bytes(corrupt(lines, kind))
    with pytest.raises(ConfigError, match=r"tokenizer\.model: not a (whole )?tiktoken rank file"):
        load_tokenizer(str(tmp_path))


def test_a_corrupt_tokenizer_json_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_a_file_on_which_the_library_aborts_is_told(tmp_path: Path) -> None:
    """A prefix of one byte is cut off tokens whose first character has two."""
    bundled = load_tokenizer(BUNDLED)
    assert isinstance(bundled, TiktokenTokenizer)
    made = json.loads(bundled.to_json().to_str())
    made["model"]["continuing_subword_prefix"] = "\0"
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: the tokenizer's library breaks down on it"):
        try_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match=r"README\.md: not a tiktoken rank file"):
        try_tokenizer("README.md")
    assert try_tokenizer(BUNDLED) == bundled.vocab_size


def test_packages_on_pythonpath_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiktoken.py").write_text("raise SystemExit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"breaks down on it \(exit code 7\)"):
        try_tokenizer(BUNDLED)


def test_a_folder_is_searched_in_one_order(tmp_path: Path, trained: Path) -> None:
    save_json_tokenizer(tmp_path)
    assert isinstance(load_tokenizer(str(tmp_path)), JsonTokenizer)
    for name in ("b.tiktoken", "a.tiktoken", "tokenizer.model"):
        (tmp_path / name).write_bytes(trained.read_bytes())
        assert find_tokenizer(str(tmp_path)).name == name


SENTENCEPIECE = b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\n\x0c\n\x03<s>"


def test_a_sentencepiece_model_is_passed_over(tmp_path: Path, trained: Path) -> None:
    """As in the folders of Mistral 7B and Gemma."""
    model = tmp_path / "tokenizer.model"
    model.write_bytes(SENTENCEPIECE)
    with pytest.raises(ConfigError, match=r"a SentencePiece model: use a tokenizer\.json, which transformers'"):
        load_tokenizer(str(tmp_path))
    save_json_tokenizer(tmp_path)
    assert isinstance(load_tokenizer(str(tmp_path)), JsonTokenizer)
    said = f"{tmp_path / 'tokenizer.json'} is read, not the SentencePiece model tokenizer.model beside it"
    assert passed_over(str(tmp_path)) == [said]
    assert check_tokenizer(load_config(["--model.hf_assets_path", str(tmp_path)])) == [said]
    with pytest.raises(ConfigError, match=rf"a SentencePiece model: use {tmp_path / 'tokenizer.json'}"):
        load_tokenizer(str(model))
    model.write_bytes(trained.read_bytes())
    assert isinstance(load_tokenizer(str(tmp_path)), TiktokenTokenizer)
    assert passed_over(str(tmp_path)) == []


def fingerprint_of_before(folder: Path) -> str:
    """From the time when tokenizer_config.json alone was read."""
    content = (folder / "tokenizer.json").read_bytes() + (folder / "tokenizer_config.json").read_bytes()
    return hashlib.blake2b(SPLIT_PATTERN.encode() + content, digest_size=16).hexdigest()


def test_a_fingerprint_changes_with_the_tokens_around_documents_alone(tmp_path: Path) -> None:
    path = save_named(tmp_path, {})
    bare = fingerprint(path)
    assert bare == fingerprint(path, "none") != fingerprint(path, "</s>")
    found = []
    for name, content in (
        ("config.json", {"bos_token_id": 0, "eos_token_id": 1}),
        ("generation_config.json", {"eos_token_id": 0}),
        ("special_tokens_map.json", BOTH),
    ):
        (tmp_path / name).write_text(json.dumps(content))
        found += [fingerprint(path), fingerprint(path, "</s>")]
        assert fingerprint(path, "none") == bare
    assert {*found} == {found[0]} != {bare}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(BOTH | {"eos_token": "<s>"}))
    assert fingerprint(path) not in {bare, *found}
    # A cache of before is taken where it has the same tokens.
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(BOTH))
    (tmp_path / "special_tokens_map.json").unlink()
    before = fingerprint_of_before(tmp_path)
    assert fingerprint(path) == fingerprint(path, "</s>") == before != fingerprint(path, "none")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(BOTH))
    assert fingerprint(path) == before


def test_a_token_written_twice_is_another_fingerprint(tmp_path: Path) -> None:
    """Caches of before have a BOS that is EOS twice between documents. A text that BOS alone begins is the same."""
    path = save_named(tmp_path, {"tokenizer_config.json": {"bos_token": "</s>", "eos_token": "</s>"}})
    assert fingerprint(path) != fingerprint_of_before(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "</s>"}')
    assert fingerprint(path) == fingerprint(path, "</s>") == fingerprint_of_before(tmp_path)
    (said,) = check_tokenizer(load_config(["--model.hf_assets_path", path]))
    assert said.startswith("documents have no end token, only BOS: ")
    assert said.endswith('; set training.dataset_separator to "</s>", "<s>"')


def test_a_fingerprint_changes_with_the_encoding(saved: Path, trained: Path, tmp_path: Path) -> None:
    prints = {fingerprint(BUNDLED), fingerprint(str(saved)), fingerprint(str(trained))}
    assert fingerprint(str(save_json_tokenizer(tmp_path))) in prints
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert len(prints | {fingerprint(str(tmp_path))}) == 4
