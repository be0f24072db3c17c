"""Token files of other trainers give the sequences of the text that they were made from, or are refused."""

import json
import os
import pickle
import shutil
import struct
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.ipc
import pytest

from components.config import ROOT, ConfigError, load_config
from components.data import PackedSequences, TokenCache, build_datasets, prepare, spec_of, token_files
from components.data.__main__ import main, prepare_all
from components.data.cache import _contents, _key
from components.data.datasets import _own_validation, mixtures
from components.data.token_files import TokenSpec
from components.data.tokenizer import load_tokenizer
from components.data.tokens import JoinedTokens
from tests import caches
from tests.caches import TOKENIZER, prepared
from tests.test_tokenizer import save_json_tokenizer

datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TokenCache:
    folder = tmp_path_factory.mktemp("text")
    verses = [line for line in (ROOT / "assets/kjv/08-ruth.txt").read_text().splitlines() if line]
    (folder / "ruth.jsonl").write_text("".join(json.dumps({"text": verse}) + "\n" for verse in verses))
    return prepared(caches.spec_of(folder, folder / "cache"))


def spec(path: Path, cache: Path, token_dtype: str | None = None, **changed: Any) -> TokenSpec:
    return TokenSpec(**vars(caches.spec_of(path, cache)) | changed, token_dtype=token_dtype)


def tokens_of(path: Path, token_dtype: str | None = None, **changed: Any) -> JoinedTokens:
    found = prepare(spec(path, path.parent / ".cache", token_dtype, **changed))
    assert isinstance(found, JoinedTokens)
    return found


def read(own: TokenSpec, folder: Path) -> dict[str, Any]:
    """Reads the files as prepare does, into a cache in this folder."""
    with own.pool(1) as pool:
        return own.tokenize(own.files(), folder, "data", pool, 1)


def key_of(path: Path, token_dtype: str | None = None, **changed: Any) -> str:
    own = spec(path, path.parent / ".cache", token_dtype, **changed)
    return _key(own, _contents(own, own.files()))


def documents(tokens: np.ndarray, ends: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(np.asarray(tokens), ends[:-1])]


def write_megatron(file: Path, tokens: np.ndarray, ends: np.ndarray, dtype: str = "uint16") -> None:
    """As Megatron-LM's IndexedDatasetBuilder. A document has two sequences, as preprocess_data.py may split."""
    np.asarray(tokens).astype(dtype).tofile(file)
    edges = np.unique([0, *ends, (int(ends[0]) + int(ends[1])) // 2])
    lengths = np.diff(edges)
    starts = edges[:-1] * np.dtype(dtype).itemsize
    indices = np.searchsorted(edges, [0, *ends])
    code = {"int32": 4, "uint16": 8}[dtype]
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(indices))
    body = lengths.astype("<i4").tobytes() + starts.astype("<i8").tobytes() + indices.astype("<i8").tobytes()
    file.with_suffix(".idx").write_bytes(head + body)


def write_llm_c(file: Path, tokens: np.ndarray, ends: np.ndarray, magic: int = 20240520) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, {20240520: 1, 20240801: 7}[magic], len(tokens)
    dtype = {20240520: "<u2", 20240801: "<u4"}[magic]
    file.write_bytes(header.tobytes() + np.asarray(tokens).astype(dtype).tobytes())


def write_raw(file: Path, tokens: np.ndarray, ends: np.ndarray, dtype: str = "uint16") -> None:
    np.asarray(tokens).astype(dtype).tofile(file)


def write_npy(file: Path, tokens: np.ndarray, ends: np.ndarray) -> None:
    np.save(file, np.asarray(tokens).astype(np.int32))


def write_dataset(folder: Path, tokens: np.ndarray, ends: np.ndarray, **given: Any) -> None:
    rows = documents(tokens, ends)
    columns = {"input_ids": rows, "labels": rows, "attention_mask": [[1] * len(row) for row in rows]}
    datasets.Dataset.from_dict(columns).save_to_disk(folder, num_shards=2, max_shard_size=None, **given)


FORMATS: dict[str, tuple[str, Callable[..., None], str | None]] = {
    "Megatron-LM": ("corpus_text_document.bin", write_megatron, None),
    "Megatron-LM of int32": ("corpus.bin", partial(write_megatron, dtype="int32"), None),
    "nanoGPT": ("train.bin", write_raw, "uint16"),
    "OLMo": ("part-000-00000.npy", partial(write_raw, dtype="uint32"), "uint32"),
    "npy": ("a.npy", write_npy, None),
    "llm.c of GPT-2": ("train_000001.bin", write_llm_c, None),
    "llm.c of Llama 3": ("train_000001.bin", partial(write_llm_c, magic=20240801), None),
    "datasets": ("data", write_dataset, None),
}


@pytest.mark.parametrize("name", FORMATS)
def test_sequences_are_those_of_the_text(
    name: str, text: TokenCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "_PIECE", 100)
    file, write, dtype = FORMATS[name]
    folder = tmp_path / "with a space"
    folder.mkdir()
    write(folder / file, text.tokens, text.document_ends)
    found = tokens_of(folder, dtype)
    assert (found.num_tokens, found.vocab_size) == (text.num_tokens, text.vocab_size)
    for part in ("all", "train", "validation"):
        wanted, own = (PackedSequences(each, 50, part, 0.1) for each in (text, found))
        assert len(wanted) == len(own)
        every = np.arange(len(wanted))[::-1]
        for right, is_ in zip(wanted.get(every), own.get(every), strict=True):
            assert np.array_equal(right, is_)
    again = pickle.dumps(found)
    assert len(again) < 2000, "the tokens stay in the file"
    places = np.arange(found.num_tokens)[None]
    assert np.array_equal(pickle.loads(again).tokens_at(places), text.tokens_at(places))
    assert not [*folder.parent.rglob("tokens.bin")], "no copy"


def test_files_of_a_folder_are_read_in_order_and_an_added_one_alone(
    text: TokenCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = int(text.document_ends[20])
    halves = [text.tokens[:cut], text.tokens[cut:]]
    ends = [text.document_ends[:21], text.document_ends[21:] - cut]
    data = tmp_path / "data"
    data.mkdir()
    write_megatron(data / "b.bin", halves[1], ends[1])
    alone = tokens_of(data)
    assert "read " in capsys.readouterr().out
    write_megatron(data / "a.bin", halves[0], ends[0], "int32")
    both = tokens_of(data)
    assert f"read 1 of 2 files of {data}: {cut:,} tokens in 21 documents" in capsys.readouterr().out
    places = np.arange(text.num_tokens)[None]
    assert np.array_equal(both.tokens_at(places), text.tokens_at(places))
    assert np.array_equal(both.documents_at(places), text.documents_at(places))
    data.rename(tmp_path / "moved")
    (data := tmp_path / "moved").joinpath("a.bin").unlink()
    (data / "a.idx").unlink()
    found = tokens_of(data)
    assert found.key == alone.key
    assert capsys.readouterr().out == "", "found by its content"
    assert np.array_equal(found.tokens_at(places[:, :60]), halves[1][None, :60])


def scanned(path: Path, tokens: list[int], tokenizer: Path, separator: str = "auto") -> list[int]:
    """Document ends of an array without a header."""
    file = path / "a.bin"
    np.array(tokens, np.uint16).tofile(file)
    own = spec(file, path, "uint16", tokenizer_path=str(tokenizer), separator=separator)
    read(own, path)
    return np.fromfile(path / "documents.bin", np.int64).tolist()


@pytest.mark.parametrize("piece", [1, 2, 3, 100])
def test_where_documents_end(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "_PIECE", piece)
    path = save_json_tokenizer(tmp_path / "tokenizer", settings=False)
    config = path / "config.json"
    config.write_text('{"bos_token_id": 0, "eos_token_id": 1}')
    first, last = load_tokenizer(str(path)).bos_id, load_tokenizer(str(path)).eos_id
    assert (first, last) == (0, 1)
    assert scanned(tmp_path, [0, 9, 1, 0, 9, 9, 1], path) == [3, 7]
    assert scanned(tmp_path, [9, 9, 1, 9, 1], path) == [3, 5], "EOS alone"
    assert scanned(tmp_path, [0, 9, 9, 0, 9], path) == [3, 5], "BOS alone, as llm.c's of Llama 3"
    assert scanned(tmp_path, [9, 9, 0, 9, 1, 9, 9], path) == [2, 5, 7], "cut documents at both ends of a file"
    assert scanned(tmp_path, [0, 9, 1, 0, 9, 1], path, "none") == [6]
    assert scanned(tmp_path, [9, 9, 8, 9, 8], path, load_tokenizer(str(path)).decode([8])) == [3, 5]
    config.write_text('{"bos_token_id": 1, "eos_token_id": 1}')
    assert scanned(tmp_path, [9, 9, 1, 9, 1], path) == [3, 5], "nanoGPT, OLMo"
    assert scanned(tmp_path, [1, 9, 9, 1, 9], path) == [3, 5], "llm.c"
    assert scanned(tmp_path, [9, 9, 1, 9, 9], path) == [2, 5], "a later file of llm.c, which cuts documents"
    assert scanned(tmp_path, [1, 9, 9, 1], path) == [3, 4]


RIGHT = np.arange(400, dtype=np.uint16) % 90 + 300
ENDS = np.array([100, 250, 400])


def _file(name: str, write: Callable[..., None], *given: Any) -> Callable[[Path], None]:
    return lambda folder: write(folder / name, RIGHT, ENDS, *given)


def _all(*makes: Callable[[Path], object]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for each in makes:
            each(folder)

    return make


def _cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def _megatron(*changes: Callable[[Path], object]) -> Callable[[Path], None]:
    return _all(_file("a.bin", write_megatron), *changes)


def _put(name: str, place: int, content: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.seek(place)
            file.write(content)

    return make


def _patched(place: int, content: bytes) -> Callable[[Path], None]:
    return _megatron(_put("a.idx", place, content))


def _llm_c(word: int, value: int) -> Callable[[Path], None]:
    return _all(_file("a.bin", write_llm_c), _put("a.bin", 4 * word, struct.pack("<i", value)))


def _arrow(**columns: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        table = pyarrow.table(columns)
        with pyarrow.ipc.new_stream(folder / "a.arrow", table.schema) as writer:
            writer.write_table(table)

    return make


def _splits(folder: Path) -> None:
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2]]})
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(folder)


def _without_shard(folder: Path) -> None:
    write_dataset(folder, RIGHT, ENDS)
    (folder / "data-00001-of-00002.arrow").unlink()


def _linked(folder: Path) -> None:
    write_megatron(folder / "a.bin", RIGHT, ENDS)
    (folder / "a.idx").rename(folder.parent / "a.idx")
    (folder / "a.idx").symlink_to(folder.parent / "a.idx")


ROW = [[1, 2, 3], [4, 5]]
AT = token_files._MEGATRON.size
REFUSED: dict[str, tuple[Callable[[Path], Any], str | None, str]] = {
    "an empty index": (_megatron(_cut("a.idx", 0)), None, r"a\.idx: 0 bytes are not a whole index"),
    "a torn header": (_megatron(_cut("a.idx", 20)), None, r"a\.idx: 20 bytes are not a whole index"),
    "a torn index": (_megatron(_cut("a.idx", 80)), None, r"a\.idx: 80 bytes are not a whole index"),
    "no index": (
        _megatron(_file("b.bin", write_raw)),
        "uint16",
        r"b\.bin: its \.idx is missing; other files",
    ),
    "no tokens": (
        _megatron(_cut("a.bin", 0)),
        None,
        r"no file that ends in|only empty files",
    ),
    "an index alone": (
        _megatron(_file("b.npy", write_npy), lambda folder: (folder / "a.bin").unlink()),
        None,
        r"a\.idx: its \.bin is missing or empty",
    ),
    "a link that leaves the folder": (_linked, None, r"a\.idx leads to "),
    "modes": (
        _patched(AT + 4 * 12 + 4 * 8, bytes(4)),
        None,
        r"a\.idx: a multimodal dataset \(it has modes\)",
    ),
    "the older index": (_patched(0, b"TNTIDX\0\0"), None, r"a\.idx: not an index .*the older formats TNTIDX"),
    "another index": (_patched(0, b"{"), None, r"a\.idx: not an index of Megatron-LM"),
    "version 2": (_patched(9, b"\2"), None, r"a\.idx: not an index of Megatron-LM \(MMIDIDX, version 1\)"),
    "tokens of float32": (_patched(17, b"\7"), None, r"a\.idx: token type 7 is not an integer type"),
    "another type": (
        _patched(17, b"\4"),
        None,
        r"a\.bin: 800 bytes, but the last sequence of int32 in a\.idx ends at byte 1,100",
    ),
    "a torn file": (
        _megatron(_cut("a.bin", 700)),
        None,
        r"a\.bin: 700 bytes, but the last sequence of uint16 in a\.idx ends at byte 800: copy",
    ),
    "lengths that do not add up": (
        _patched(AT, b"\1"),
        None,
        r"a\.idx: lengths and places of the sequences contradict",
    ),
    "document indices of another file": (
        _patched(AT + 4 * 12 + 3 * 8, b"\3"),
        None,
        r"a\.idx: documents end with sequence 3 of 4",
    ),
    "document indices that shrink": (_patched(AT + 4 * 12 + 8, b"\4"), None, r"a\.idx: document indices do not grow"),
    "documents not from 0": (_patched(AT + 4 * 12, b"\1"), None, r"a\.idx: document indices do not grow from 0"),
    "no type": (
        _file("a.bin", write_raw),
        None,
        r'a\.bin: tokens without a header: set training\.token_dtype \("uint16" fits its bytes\), or put the \.idx',
    ),
    "no type of uint32": (
        _file("a.npy", write_raw, "uint32"),
        None,
        r'a\.npy: tokens without a header: set training\.token_dtype \("uint32" fits its bytes\)$',
    ),
    "half of the bytes": (
        _file("a.npy", write_raw, "uint32"),
        "uint16",
        r'a\.npy: training\.token_dtype = "uint16": 1,600 bytes of other tokens; "uint32" fits',
    ),
    "twice the bytes": (
        _file("a.npy", write_raw),
        "uint32",
        r'a\.npy: training\.token_dtype = "uint32": 800 bytes of other tokens; "uint16" fits',
    ),
    "an odd number of bytes": (
        lambda folder: (folder / "a.bin").write_bytes(bytes(7)),
        "uint16",
        r'a\.bin: training\.token_dtype = "uint16": 7 bytes are no whole number of tokens; no type',
    ),
    "a negative id": (
        lambda folder: write_raw(folder / "a.bin", np.array([5, 6, -100, 7]), ENDS, "int32"),
        "int32",
        r"a\.bin: token 2 has the id -100",
    ),
    "an array of rows": (
        lambda folder: np.save(folder / "a.npy", RIGHT.reshape(4, 100)),
        None,
        r"a\.npy: an array of uint16 of shape \(4, 100\); expected one dimension",
    ),
    "floats": (
        lambda folder: np.save(folder / "a.npy", RIGHT / 2),
        None,
        r"a\.npy: an array of float64 of shape \(400,\)",
    ),
    "objects": (
        lambda folder: np.save(folder / "a.npy", np.array([[1], {}], dtype=object), allow_pickle=True),
        None,
        r"a\.npy: not a whole \.npy file",
    ),
    "a torn .npy": (
        _all(_file("a.npy", write_npy), _cut("a.npy", 1000)),
        None,
        r"a\.npy: not a whole \.npy file",
    ),
    "a torn file of llm.c": (_llm_c(2, 401), None, r"a\.bin: 1,824 bytes, not 1,826 for the 401 tokens of its header"),
    "another version of llm.c": (_llm_c(1, 2), None, r"a\.bin: version 2 of llm\.c's token files; version 1 is read"),
    "an evaluation of llm.c": (_llm_c(0, 20240522), None, r"a\.bin: an evaluation file of llm\.c"),
    "a torn .arrow": (
        _all(_arrow(input_ids=ROW), _cut("a.arrow", 300)),
        None,
        r"a\.arrow: cannot be read as Arrow",
    ),
    "an .arrow torn between batches": (
        _all(_arrow(input_ids=ROW), lambda folder: _cut("a.arrow", (folder / "a.arrow").stat().st_size - 8)(folder)),
        None,
        r"a\.arrow: an IPC stream without its end",
    ),
    "no Arrow": (lambda folder: (folder / "a.arrow").write_bytes(b"x"), None, r"a\.arrow: cannot be read as Arrow"),
    "a column of texts": (_arrow(text=["a"]), None, r'a\.arrow: no column "input_ids"; it has text'),
    "texts in the column": (_arrow(input_ids=["a"]), None, r'column "input_ids" is string; expected lists of integers'),
    "a row without tokens": (_arrow(input_ids=[[1], None]), None, r"a list of tokens or labels is missing"),
    "a missing token": (_arrow(input_ids=[[1, None]]), None, r"a list of tokens or labels is missing"),
    "labels": (
        _arrow(input_ids=ROW, labels=[[-100, 2, 3], [4, 5]]),
        None,
        r'column "labels" in rows 0 to 1 takes tokens',
    ),
    "labels of classes": (_arrow(input_ids=ROW, labels=[0, 1]), None, r'column "labels" is int64; expected lists'),
    "a mask": (_arrow(input_ids=ROW, attention_mask=[[1, 1, 0], [1, 1]]), None, r'column "attention_mask" in rows 0'),
    "a mask of chats": (
        _arrow(input_ids=ROW, assistant_masks=[[False] * 3, [True] * 2]),
        None,
        r'column "assistant_masks" in rows 0 to 1',
    ),
    "splits": (_splits, None, r"data: has the splits test, train: name one"),
    "no shard": (_without_shard, None, r"data-00001-of-00002\.arrow: is missing or empty, but state\.json names it"),
    "texts": (
        lambda folder: (folder / "a.txt").write_text("a"),
        None,
        r'no file that ends in .*read \.txt with training\.dataset_format = "text"',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_not_whole_is_one_sentence(name: str, tmp_path: Path) -> None:
    make, dtype, expected = REFUSED[name]
    folder = tmp_path / "data"
    folder.mkdir()
    make(folder)
    own = spec(folder, tmp_path / "cache", dtype)
    with pytest.raises(ConfigError, match=expected) as refused:
        read(own, tmp_path)
    assert len(refused.value.messages) == 1


def test_the_file_of_tokens_is_named(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a.bin", RIGHT, ENDS)
    for name in ("a", "a.idx"):  # Megatron-LM takes the first
        with pytest.raises(ConfigError, match=rf"{name}: name the file of tokens: .*a\.bin$"):
            spec(tmp_path / name, tmp_path).files()
    with pytest.raises(ConfigError, match=r'read \.bin with training\.dataset_format = "tokens"'):
        caches.spec_of(tmp_path / "a.bin", tmp_path).files()
    assert spec(tmp_path / "a.bin", tmp_path).files() == [tmp_path / "a.bin"]
    assert spec(tmp_path / "*.bin", tmp_path).files() == [tmp_path / "a.bin"]


def test_only_shards_of_a_dataset_are_read(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", RIGHT, ENDS)
    shards = sorted((tmp_path / "data").glob("data-*.arrow"))
    shutil.copy(shards[0], tmp_path / "data" / "cache-1f2e.arrow")  # of `map`
    assert spec(tmp_path / "data", tmp_path).files() == shards
    assert spec(shards[1], tmp_path).files() == shards[1:]
    (tmp_path / "data" / "state.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"state\.json: not the state of a dataset"):
        spec(tmp_path / "data", tmp_path).files()


def test_compressed_files_are_told_and_texts_are_not(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", RIGHT, ENDS)
    (tmp_path / "a.jsonl").write_text("x" * 9999)
    assert spec(tmp_path, tmp_path).unread() is None
    (tmp_path / "b.npy.zst").write_bytes(bytes(9000))
    left = spec(tmp_path, tmp_path).unread()
    assert left
    assert left.is_most
    assert str(left) == f"not read: 1 file, 9,000 bytes ({tmp_path / 'b.npy.zst'}): decompress them"


def job(path: Path, *more: str) -> list[str]:
    words = ["--training.dataset_format", "tokens", "--training.dataset_path", str(path), "--training.seq_len", "16"]
    cache = ["--training.dataset_cache", str(path.parent / ".cache"), "--model.hf_assets_path", TOKENIZER]
    return [*words, *cache, "--validation.no_enable", *more]


def test_an_id_that_the_tokenizer_or_the_model_lacks(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    tokens = RIGHT.copy()
    tokens[123] = 4095
    write_megatron(tmp_path / "a" / "0.bin", RIGHT, ENDS)
    write_megatron(tmp_path / "a" / "1.bin", tokens, ENDS - [50, 0, 0])
    config = load_config(job(tmp_path / "a"))
    found = build_datasets(config, 4096)[0].cache.documents_at(np.arange(800)[None])[0]
    assert np.bincount(found).tolist() == [100, 150, 150, 50, 200, 150], "two files of one cache"
    with pytest.raises(
        ConfigError, match=r"1\.bin: token 123 has the id 4,095, but .* has a table of 4095; .*grows it"
    ):
        build_datasets(config, 4095)
    beside = ["--validation.enable", "--validation.dataset_path", str(tmp_path / "a")]
    config = load_config([*job(tmp_path / "a")[:-1], *beside])
    with pytest.raises(ConfigError, match=r"1\.bin: token 123 has the id 4,095"):
        _own_validation(config, 4095)
    tokens[123] = 4096
    write_megatron(tmp_path / "a" / "1.bin", tokens, ENDS)
    for _ in ("read", "found again"):
        with pytest.raises(
            ConfigError, match=r"1\.bin: token 123 has the id 4,096, but .* has 4,096 tokens: model\.hf_"
        ):
            prepare_all(load_config(job(tmp_path / "a")))


def test_what_decides_the_documents_decides_the_key(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a.bin", RIGHT, ENDS)
    keys = {key_of(tmp_path / "a.bin")}
    write_megatron(tmp_path / "a.bin", RIGHT, ENDS - [50, 0, 0])
    changed = tokens_of(tmp_path / "a.bin")
    assert changed.documents_at(np.arange(400)[None])[0, 50] == 1
    assert changed.key == key_of(tmp_path / "a.bin")
    keys.add(changed.key)
    write_raw(tmp_path / "b.bin", RIGHT, ENDS, "uint32")
    (tmp_path / "a.idx").unlink()
    keys |= {key_of(tmp_path / "b.bin", dtype) for dtype in ("uint32", "int32")}
    keys.add(key_of(tmp_path / "b.bin", "int32", separator="none"))
    assert len(keys) == 5


def test_a_file_that_changes_under_a_run_is_told(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", RIGHT, ENDS)
    found = tokens_of(tmp_path / "a.bin", "uint16")
    cache = found.segments[0].open
    for size, expected in ((600, "300 tokens, but it had 400: start again"), (601, "changed since it was read")):
        os.truncate(tmp_path / "a.bin", size)
        with pytest.raises(ConfigError, match=rf"a\.bin: {expected}"):
            cache(tmp_path / "a.bin")
    write_raw(tmp_path / "a.bin", RIGHT, ENDS)
    assert isinstance(cache, token_files.OpenTokens)
    os.truncate(cache.cache / "documents.bin", 0)
    with pytest.raises(ConfigError, match=r"documents\.bin: too short: remove "):
        cache(tmp_path / "a.bin")


def test_large_files_need_little_memory(tmp_path: Path) -> None:
    tokens = np.full(16 << 20, 300, np.uint16)
    tokens[::1000] = load_tokenizer(TOKENIZER).eos_id or 0
    tokens.tofile(tmp_path / "a.bin")
    del tokens
    own = spec(tmp_path / "a.bin", tmp_path, "uint16")
    tracemalloc.start()
    assert read(own, tmp_path)["documents"] == (16 << 20) // 1000 + 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20


def test_token_files_mix_with_texts(text: TokenCache, tmp_path: Path) -> None:
    write_megatron(tmp_path / "a.bin", text.tokens, text.document_ends)
    words = ["--training.seq_len", "16", "--training.dataset_cache", str(text.folder.parent), "--validation.no_enable"]
    paths = {"tokens": tmp_path / "a.bin", "text": text.folder.parent.parent}
    for number, (name, path) in enumerate(paths.items(), 1):
        source = f"--training.mixture[{number}]."
        words += [f"{source}name", name, f"{source}dataset_path", str(path)]
    words += ["--training.mixture[1].dataset_format", "tokens", "--model.hf_assets_path", TOKENIZER]
    mixture, _ = mixtures(load_config(words), 4096)
    first = [mixture.sources[name].get(np.arange(9)) for name in paths]
    assert all(np.array_equal(*pair) for pair in zip(*first, strict=True))


def test_show_tells_what_was_found(text: TokenCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_llm_c(tmp_path / "a.bin", text.tokens, text.document_ends)
    main(["show", *job(tmp_path / "a.bin")])
    largest = int(np.argmax(text.tokens))
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first == (
        f"1 files (llm.c): {text.num_tokens:,} tokens in {len(text.document_ends):,} documents; "
        f"largest id {int(text.tokens[largest]):,} ({tmp_path / 'a.bin'}, token {largest:,})"
    )
    assert second.startswith(
        "the first tokens as text: '<|begin_of_text|>Ruth<|end_of_text|><|begin_of_text|>Chapter 1"
    )
    with pytest.raises(ConfigError, match="show prints what is in token files: leave out --row"):
        main(["show", *job(tmp_path / "a.bin"), "--row", "3"])


def test_a_check_reads_the_head_of_each_file(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.bin", RIGHT, ENDS)
    config = load_config(job(tmp_path / "a.bin"))
    with pytest.raises(ConfigError, match=r"a\.bin: tokens without a header"):
        [*spec_of(config).documents(tmp_path / "a.bin")]


def test_a_folder_of_many_files_is_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(9):
        np.arange(9, dtype=np.uint16).tofile(tmp_path / f"{number}.bin")
    searched, glob = list[Path](), Path.glob

    def counted(folder: Path, pattern: str) -> Any:
        searched.append(folder)
        return glob(folder, pattern)

    monkeypatch.setattr(Path, "glob", counted)
    assert len(spec(tmp_path, tmp_path / ".cache").files()) == 9
    assert searched == [tmp_path]
