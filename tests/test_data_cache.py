"""The token cache: no document is lost, it is found again by what decides the tokens, and a damaged one is told."""

import dataclasses
import json
import os
import shutil
import subprocess
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from components.config import ROOT, ConfigError, Training
from components.data import PackedSequences, data_spec
from components.data import cache as cache_module
from components.data import chunks as chunks_module
from components.data.chunks import _chunks, _cut, _encode
from components.data.sources import read_documents
from components.data.tokenizer import load_tokenizer
from components.data.tokens import BLOCK_BYTES
from tests.caches import TOKENIZER, WORDS, caches_in, documents_of, prepared, spec_of
from tests.limits import finish, limited
from tests.processes import small_disk, start
from tests.test_tokenizer import save_json_tokenizer

ODD_TEXTS = [
    "a\n",
    " ",
    "<|end_of_text|> is text here, and so is <|begin_of_text|>",
    "naïve 日本語 😀 \u200b\x00 tabs\t\t\n\n\n  end  ",
    "é" * 70_000,
    (WORDS * 4000)[:200_000] + "\n\n",
    "\n" * 66_000 + " " * 66_000,
]


@pytest.mark.parametrize("workers", [1, 2])
def test_no_document_is_lost(tmp_path: Path, workers: int) -> None:
    folder = tmp_path / "with a space"
    folder.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ["", *ODD_TEXTS, ""])
    (folder / "0.jsonl").write_text(lines)
    (folder / "1.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (folder / "2.txt").touch()
    pyarrow.parquet.write_table(pyarrow.table({"text": ODD_TEXTS}), folder / "3.parquet")
    cache = prepared(spec_of(folder, tmp_path / "cache"), workers)
    assert documents_of(cache) == [*ODD_TEXTS, "one\ntwo", *ODD_TEXTS]
    tokenizer = load_tokenizer(TOKENIZER)
    assert (cache.tokens[np.append(0, cache.document_ends[:-1])] == tokenizer.bos_id).all()
    assert (cache.tokens[cache.document_ends - 1] == tokenizer.eos_id).all()
    for special in (tokenizer.bos_id, tokenizer.eos_id):
        assert (np.asarray(cache.tokens) == special).sum() == len(cache.document_ends)


def test_documents_are_separated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a token that both begins and ends a text, as GPT-2's."""
    path = save_json_tokenizer(tmp_path / "tokenizer", settings=False)
    (path / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": 1}')
    monkeypatch.setattr(chunks_module, "_worker", {"dtype": "<u2", "spaces": False})
    for separator, right in (("auto", "</s>In the"), ("none", "In the"), ("<s>", "</s>In the<s>")):
        tokenizer = chunks_module._worker["tokenizer"] = load_tokenizer(str(path), separator)
        assert tokenizer.decode(np.frombuffer(_encode("In the", True, True), "<u2").tolist()) == right
    data = tmp_path / "a.jsonl"
    data.write_text('{"text": "In the beginning"}\n{"text": "God created"}\n')
    spec = dataclasses.replace(spec_of(data, tmp_path / "cache", tokenizer=str(path)), separator="<s>")
    tokens = prepared(spec, 1).tokens.tolist()
    assert tokenizer.decode(tokens) == "</s>In the beginning<s></s>God created<s>"


def test_a_cache_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(WORDS * 20_000)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": WORDS * n}) + "\n" for n in range(1, 300)))
    one, two = (prepared(spec_of(tmp_path, tmp_path / f".cache{workers}"), workers) for workers in (1, 2))
    assert one.key == two.key
    for name in ("tokens.bin", "documents.bin"):
        assert (one.folder / name).read_bytes() == (two.folder / name).read_bytes()


def test_a_cache_is_found_again_without_writing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text(WORDS)
    spec = spec_of(tmp_path / "a.txt", tmp_path / "cache")
    first = prepared(spec, 1)
    assert "tokenized" in capsys.readouterr().out
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")}
    second = prepared(spec)
    assert capsys.readouterr().out == ""
    assert second.folder == first.folder
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")} == files
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    assert prepared(spec_of(tmp_path / "b.txt", tmp_path / "cache")).folder == first.folder


def test_what_decides_the_tokens_decides_the_key(tmp_path: Path) -> None:
    data, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    data.write_text('{"text": "one two", "body": "three four"}\n')
    other = save_json_tokenizer(tmp_path / "tokenizer")
    keys = {
        prepared(spec, 1).key
        for spec in (
            spec_of(data, cache),
            spec_of(data, cache, field="body"),
            spec_of(data, cache, skip=True),
            spec_of(data, cache, tokenizer=str(other)),
        )
    }
    (other / "tokenizer_config.json").write_text("{}")
    keys.add(prepared(spec_of(data, cache, tokenizer=str(other)), 1).key)
    assert len(keys) == 5
    # The same size and time of writing: what changed is found all the same.
    before = data.stat()
    data.write_text('{"text": "One two", "body": "three four"}\n')
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = prepared(spec_of(data, cache), 1)
    assert changed.key not in keys
    assert documents_of(changed) == ["One two"]


def test_documents_of_one_token_and_no_token_around_them(tmp_path: Path) -> None:
    tokenizer = save_json_tokenizer(tmp_path / "tokenizer", settings=False)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 100)
    cache = prepared(spec_of(tmp_path / "a.jsonl", tmp_path / "cache", tokenizer=str(tokenizer)), 1)
    assert cache.document_ends.tolist() == list(range(1, 101))
    assert PackedSequences(cache, 9).get(np.array([5]))[1].tolist() == [list(range(9))]


def test_only_empty_documents_are_no_data(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 100)
    with pytest.raises(ConfigError, match="no text in it"):
        prepared(spec_of(tmp_path / "a.jsonl", tmp_path / "cache"), 1)
    (tmp_path / "a.jsonl").write_text("no json\n" * 100)
    with pytest.raises(ConfigError, match=r"(?s)no text in it.*a\.jsonl:1: not JSON"):
        prepared(spec_of(tmp_path / "a.jsonl", tmp_path / "cache", skip=True), 1)
    assert not caches_in(tmp_path / "cache")


@pytest.mark.parametrize("last", ["", "😀"])
def test_a_text_file_is_not_held_in_memory(tmp_path: Path, last: str) -> None:
    file = tmp_path / "a.txt"
    file.write_text(WORDS * 150_000 + last)
    spec = spec_of(file, tmp_path / "cache")
    tracemalloc.start()
    try:
        size = sum(len(text) for text, *_ in _chunks(((each, None) for each in read_documents(file, "text")), spec, []))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == len(WORDS) * 150_000 + len(last)
    assert peak < 12 << 20 < 2 * size


def test_huge_lines_take_no_longer_than_others(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "words.txt").write_text((WORDS * 100_000)[: 5 << 20])
    (tmp_path / "letters.txt").write_bytes((rng.integers(0, 26, 5 << 20) + ord("a")).astype(np.uint8).tobytes())
    (tmp_path / "one_letter.txt").write_text("a" * (1 << 20))
    with limited("tokenizing 11 MiB", 60):  # where it takes the square of a line's length: hours
        cache = prepared(spec_of(tmp_path, tmp_path / ".cache"), 2)
    letters, one_letter, words = documents_of(cache)
    assert letters == (tmp_path / "letters.txt").read_text()
    assert one_letter == "a" * (1 << 20)
    assert words == (tmp_path / "words.txt").read_text()


def test_a_damaged_cache_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(WORDS)
    spec = spec_of(tmp_path / "a.txt", tmp_path / "cache")
    folder = prepared(spec, 1).folder
    whole = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(whole[:-2])
    with pytest.raises(ConfigError, match=rf"tokens.bin: {len(whole) - 2} bytes, not {len(whole)}: remove"):
        prepared(spec)
    (folder / "tokens.bin").unlink()
    with pytest.raises(ConfigError, match=r"No such file.*tokens\.bin"):
        prepared(spec)
    # Without its index it was never finished.
    (folder / "index.json").unlink()
    assert documents_of(prepared(spec, 1)) == [WORDS]


def test_a_changed_byte_of_the_tokens_is_told_where_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(WORDS * 20_000)
    spec = spec_of(tmp_path / "a.txt", tmp_path / "cache")
    cache = prepared(spec, 1)
    file, size = cache.folder / "tokens.bin", cache.tokens.nbytes
    assert size > 3 * BLOCK_BYTES
    sequences = PackedSequences(cache, 1000)
    assert sequences.get(np.arange(len(sequences)))[0].shape[0] == len(sequences)
    whole = file.read_bytes()
    content = bytearray(whole)
    content[2 * BLOCK_BYTES + 5] ^= 1
    file.write_bytes(content)
    sequences = PackedSequences(prepared(spec, 1), 1000)
    sequences.get(np.array([0, 1]))
    with pytest.raises(ConfigError, match=r"tokens\.bin: block 2 is damaged: remove "):
        sequences.get(np.arange(len(sequences)))
    held_out = PackedSequences(prepared(spec, 1), 40_000, "train", 0.05)
    with pytest.raises(ConfigError, match="block 2 is damaged"):
        held_out.get(np.arange(len(held_out)))
    # A sequence of validation jumps at each join, here over two blocks.
    content[2 * BLOCK_BYTES + 5] ^= 1
    content[BLOCK_BYTES : 2 * BLOCK_BYTES] = bytes(BLOCK_BYTES)
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="block 1 is damaged"):
        PackedSequences(prepared(spec, 1), 8192, "validation", 0.1).get(np.array([0]))
    file.write_bytes(whole)
    (cache.folder / "blocks.bin").unlink()  # as a cache of before there were hashes
    PackedSequences(prepared(spec, 1), 1000).get(np.arange(len(sequences)))


@pytest.mark.parametrize("place", ["a.txt", "a.txt/cache", "/proc/cache"])
def test_a_cache_folder_that_cannot_be_is_told(tmp_path: Path, place: str) -> None:
    (tmp_path / "a.txt").write_text(WORDS)
    with pytest.raises(ConfigError, match=r"cache in .*"):
        prepared(spec_of(tmp_path / "a.txt", tmp_path / place), 1)


def test_who_cannot_write_in_the_checkout_has_a_cache_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout, data = tmp_path / "checkout", tmp_path / "a.txt"
    checkout.mkdir()
    data.write_text(WORDS)
    monkeypatch.setattr(cache_module, "ROOT", checkout)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    training = Training(dataset_path=str(data))
    owners = data_spec(training, TOKENIZER)
    assert owners.cache_folder == checkout / ".cache/tokens"
    made = prepared(owners, 1).folder
    monkeypatch.setattr(os, "access", lambda path, mode: checkout not in (Path(path), *Path(path).parents))
    ours = data_spec(training, TOKENIZER)
    assert ours.cache_folder == tmp_path / "mine/meshwright/tokens"
    capsys.readouterr()
    assert prepared(ours, 1).folder == made, "the owner of the checkout has tokenized this"
    data.write_text(WORDS * 2)
    assert prepared(ours, 1).folder.parent == ours.cache_folder
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_spec(training, TOKENIZER).cache_folder == tmp_path / ".cache/meshwright/tokens"
    named = dataclasses.replace(training, dataset_cache="tokens")
    assert data_spec(named, TOKENIZER).cache_folder == checkout / "tokens", "a folder that is named is kept or refused"


def test_a_read_only_cache_is_found_by_who_sees_the_data_elsewhere(tmp_path: Path) -> None:
    """As on another node: hashes.json has other names, and cannot be written."""
    (tmp_path / "a.txt").write_text(WORDS)
    made = prepared(spec_of(tmp_path / "a.txt", tmp_path / "cache"), 1).folder
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    with small_disk(tmp_path / "disk", "1m") as disk:
        shutil.copytree(made, disk / made.name)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert prepared(spec_of(tmp_path / "b.txt", disk), 1).key == made.name
        (tmp_path / "c.txt").write_text(WORDS * 2)
        with pytest.raises(ConfigError, match=r"\(training\.dataset_cache\): .*Read-only file system"):
            prepared(spec_of(tmp_path / "c.txt", disk), 1)


@pytest.mark.quick
def test_prepare_is_a_command(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text(WORDS)
    command = ["-m", "components.data", "prepare", "--job.config_file", "recipes/llama_debug.toml"]
    bundled = [*command, "--training.dataset_cache", str(tmp_path / "cache")]
    own = [*bundled, "--training.dataset_path", str(tmp_path / "own.txt"), "--validation.dataset_path"]
    validated, missing = ([*own, str(tmp_path / name)] for name in ("own.txt", "missing.txt"))
    runs = [bundled, bundled, validated, missing, command[:2]]
    results = []
    for arguments in runs:
        process = start(*arguments)
        results.append((*finish(process), process.returncode))
    assert "66 documents" in results[0][0]
    assert results[1] == ("", "", 0)
    assert results[2][0].startswith("tokenized")
    assert results[3][2] == 2
    assert 'missing.txt": data ' in results[3][1]
    assert results[3][1].endswith("missing.txt: no such file or folder\n")
    assert results[4][2] == 2
    assert "usage" in results[4][1]


def test_tokens_do_not_depend_on_where_chunks_are_cut() -> None:
    """The bundled text, cut into chunks, has the tokens of the text in one piece."""
    tokenizer = load_tokenizer("assets/tokenizer")
    text = "".join(file.read_text() for file in sorted((ROOT / "assets/kjv").glob("*.txt"))[:8])
    start, ids = 0, []
    while start < len(text):
        end = _cut(text, start)
        ids += tokenizer.encode(text[start:end])
        start = end
    assert ids == tokenizer.encode(text)


def test_chunks_begin_with_no_space_that_the_text_does_not_have(tmp_path: Path) -> None:
    """Of tokenizers that put a space before each text, as those made from SentencePiece do."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"])
    made.train_from_iterator([WORDS], trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text((WORDS * 9000)[:150_000].strip())
    spec = dataclasses.replace(spec_of(tmp_path / "a.txt", tmp_path / "cache"), tokenizer_path=str(tmp_path))
    tokens = prepared(spec, 1).tokens.tolist()
    assert tokens == made.encode((tmp_path / "a.txt").read_text()).ids
