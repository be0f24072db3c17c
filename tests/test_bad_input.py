"""Input that no reader expects is one sentence with exit code 2: no traceback, no hang."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.commands import start
from components.commands.generate import open_source
from components.config import ConfigError, Lora, Model, load_config
from components.data import build_datasets
from components.data.sources import find_files
from components.data.stream import check_stream, stream_spec
from components.data.tokenizer import fingerprint, load_tokenizer, try_tokenizer
from components.state import weights
from components.state.adapters import check_adapters
from components.state.folder import _first_fault, read_inside
from models import meta_model
from tests.jobs import job, refused
from tests.limits import limited
from tests.test_tokenizer import save_json_tokenizer

DEBUG = ["--job.config_file", str(start.DEFAULT_RECIPE)]


LONG = "9" * 5000
JOBS = {
    "an integer of 5,000 digits": (f"[training]\nsteps = {LONG}", "an integer has too many digits"),
    "an integer of 50,000 hexadecimal digits": (f"[training]\nsteps = 0x{'f' * 50_000}", "steps = ...: expected"),
    "such an integer in a list": (f"[model]\nconverters = [0x{'f' * 50_000}]", "converters = ...: expected"),
    "lists in lists": (f"[model]\nconverters = {'[' * 2000}{']' * 2000}", "nested too deeply"),
    "tables in tables": (f"{'a.' * 2000}a = 1", "nested too deeply"),
    "tables in tables that the reader takes": (f"{'a.' * 900}a = 1", "nested too deeply|unknown"),
    "a NUL in a path": ('[training]\ndataset_path = "a\\u0000b"', "job.toml:2: .*: embedded null byte"),
    "a line end in a path": ('[job]\n"a\\nb" = 1', r'job.toml:2?.*"job\.a\\nb" = 1: unknown key'),
    "a name of 300 letters": (f'[model]\nhf_assets_path = "{"a" * 300}"', "job.toml:2: .*: File name too long"),
    "a folder of 300 letters": (f'[checkpoint]\nfolder = "{"a" * 300}"', "job.toml:2: .*: File name too long"),
    "a seed of 2^64": (
        f"[debug]\nseed = {2**64}",
        f"job.toml:2: debug.seed = {2**64}: expected an integer of 0 or more",
    ),
    "a timeout of 2^63": (f"[comm]\ninit_timeout_seconds = {2**63}", "of 1 or more and of 1000000000 or less"),
    "a batch of 2^62": (f"[training]\nlocal_batch_size = {2**62}", "of 1 or more and of 16777216 or less"),
    "a length of 2^62": (f"[training]\nseq_len = {2**62}", "of 1 or more and of 2147483647 or less"),
    "more tokens than fit": ("[training]\nseq_len = 100_000\nlocal_batch_size = 100_000", "tokens at once"),
    "fifty thousand unknown keys": ("\n".join(f"a{number} = 1" for number in range(50_000)), "and perhaps more"),
    "a line of spaces": (" " * 100_000, None),
    "a file of 2 MiB": ("#" * (2 << 20), "larger than 1 MiB"),
}


@pytest.mark.parametrize("case", JOBS)
def test_a_job_file_is_read_or_refused_at_once(case: str, tmp_path: Path) -> None:
    text, expected = JOBS[case]
    path = job(tmp_path, text)
    with limited("reading a bad file", 10):
        if expected is None:
            load_config(["--job.config_file", str(path)])
            return
        with pytest.raises(ConfigError, match=expected) as caught:
            load_config(["--job.config_file", str(path)])
    assert all(message.isprintable() and len(message) < 1000 for message in caught.value.messages)
    assert any(message.startswith(f"{path}:") for message in caught.value.messages)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--training.steps", LONG], "training.steps: an integer has too many digits"),
        (["--model.converters", "[" * 2000], "model.converters: lists are nested too deeply"),
        (["--debug.seed", str(2**64)], "expected an integer of 0 or more"),
        (["--job.dump_folder", "a" * 300], "File name too long"),
        (["--job.config_file", "a" * 300], "File name too long"),
        (["--job.description", "\udcff"], "not UTF-8"),
        (["--job.description\udcff", "1"], "not UTF-8"),
    ],
)
def test_a_word_of_the_command_line_is_refused(words: list[str], expected: str) -> None:
    messages = refused(*words)
    assert expected in messages[0]
    assert all(message.isprintable() for message in messages)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    with limited("reading a bad file", 10):
        assert refused("--job.config_file", tmp_path / "pipe") == [
            f"{tmp_path}/pipe: cannot read the job file: not a regular file"
        ]
        assert "not a regular file" in refused("--job.config_file", "/dev/zero")[0]
        assert "Too many levels" in refused("--job.config_file", tmp_path / "loop")[0]
        for key in ("training.dataset_path", "model.hf_assets_path", "job.dump_folder", "checkpoint.initial_load_path"):
            assert "Too many levels of symbolic links" in refused(f"--{key}", tmp_path / "loop")[0]
        assert "checkpoint.folder" in refused("--job.dump_folder", tmp_path, "--checkpoint.folder", "loop")[0]


@pytest.mark.parametrize(("seed", "seconds"), [(0, 1), (2**64 - 1, 10**9)])
def test_the_largest_numbers_are_taken(seed: int, seconds: int) -> None:
    config = load_config(["--debug.seed", str(seed), "--comm.init_timeout_seconds", str(seconds)])
    assert (config.debug.seed, config.comm.init_timeout_seconds) == (seed, seconds)


# JSON of the wrong type


WRONG: list[Any] = [None, True, 1, 1.5, "text", [], ["text"], [[]], {"weight_map": 1}]
WRONG_MAPS: list[Any] = [None, 3, "text", ["a"], {"a": 1}, {"a": None}, {"a": ["b"]}, {"a": "../b"}, {"a": "/b"}]


@pytest.mark.parametrize("value", [*WRONG, *({"weight_map": each} for each in WRONG_MAPS)], ids=json.dumps)
def test_an_index_of_weights_that_is_none(value: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(value))
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json: |leads out of this folder") as caught:
        weights.Folder(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Hugging Face's with weights of the debug model."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("weights")
    model = meta_model(Model(name="llama", flavor="debug"))
    tensors = {model.hf_name(name): torch.zeros(value.shape) for name, value in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    return folder


WRONG_CONFIGS: list[Any] = [
    *WRONG[:-1],
    {"hidden_size": "256"},
    {"num_attention_heads": 0},
    {"rope_scaling": "text"},
    {"rope_parameters": [1]},
    {"rope_scaling": {"rope_type": ["llama3"]}},
    {"rope_theta": {}},
]


@pytest.mark.parametrize("value", WRONG_CONFIGS, ids=json.dumps)
def test_a_config_json_that_is_none(value: Any, bundle: Path) -> None:
    (bundle / "config.json").write_text(json.dumps(value))
    given = ["--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path", str(bundle)]
    with pytest.raises(ConfigError, match=r"config\.json: ") as caught:
        start.check([*DEBUG, *given], {"NGPU": "1"})
    assert all(len(message.splitlines()) == 1 for message in caught.value.messages)


@pytest.mark.parametrize(
    "value", [*WRONG[:-1], {"bos_token": 1}, {"eos_token": {}}, {"eos_token": {"content": 1}}], ids=json.dumps
)
def test_settings_of_a_tokenizer_that_are_none(value: Any, tmp_path: Path) -> None:
    save_json_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(value))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: "):
        load_tokenizer(str(tmp_path))


def test_a_pipe_in_the_place_of_a_json_file_is_not_read(bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle, tmp_path / "folder"))
    save_json_tokenizer(folder)
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    given = ["--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path", str(folder)]
    with limited("reading bad files", 40):
        with pytest.raises(ConfigError, match=r"config\.json: cannot be read: not a regular file"):
            start.check([*DEBUG, *given], {"NGPU": "1"})
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json: cannot be read: not a regular file"):
            load_tokenizer(str(folder))


def _streamed(folder: Path) -> None:
    given = ["--training.dataset_path", str(folder), "--training.dataset_streaming"]
    check_stream(load_config([*given, "--training.dataset_cache", str(folder / ".cache")]))


POINTERS: dict[str, Callable[[Path], Any]] = {
    "model.safetensors": weights.Folder,
    "model.safetensors.index.json": weights.Folder,
    "config.json": lambda folder: open_source(folder, None),
    "adapter_config.json": lambda folder: check_adapters(meta_model(Model(lora=Lora(rank=2))), Lora(rank=2), folder),
    "tokenizer.json": lambda folder: load_tokenizer(str(folder)),
    "tokenizer.model": lambda folder: try_tokenizer(str(folder)),
    "llama.tiktoken": lambda folder: fingerprint(str(folder)),
    "some.txt": lambda folder: find_files(str(folder)),
    "some.jsonl": lambda folder: find_files(str(folder / "some.jsonl")),
    "some.parquet": lambda folder: find_files(f"{folder}/*"),
    "some.jsonl.gz": lambda folder: find_files(str(folder)),
    "other.parquet": _streamed,
    ".metadata": lambda folder: read_inside(folder, ".metadata"),
    "__0_0.distcp": lambda folder: _first_fault(folder, {"__0_0.distcp": [10**9, ""]}, ["__0_0.distcp"]),
}


@pytest.mark.parametrize("name", POINTERS)
def test_a_pointer_of_git_lfs_is_named_as_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / "folder"
    folder.mkdir()
    file = folder / name
    file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 976563\n")
    with pytest.raises(ConfigError) as caught:
        POINTERS[name](folder)
    (said,) = caught.value.messages
    assert said.endswith(f"{file}: a Git LFS pointer, not the file itself: run `git lfs pull` in {folder}")


def test_the_command_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert start.main(["--job.config_file", str(tmp_path / "pipe")]) == 2
    assert start.main(["--job.config_file", str(job(tmp_path, f"[debug]\nseed = {2**64}"))]) == 2
    assert "Traceback" not in capsys.readouterr().err


# Folders of strangers


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/own.txt").write_text("secret")
    return tmp_path / "secret/own.txt"


@pytest.mark.parametrize("link", ["a file", "a folder"])
def test_links_out_of_a_folder_of_texts_are_refused(link: str, secret: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "good.txt").write_text("good")
    (folder / "link.txt").symlink_to("good.txt")
    (folder / "notes.md").symlink_to(secret)
    assert len(find_files(str(folder))) == 2, "notes.md is not read beside .txt files"
    (folder / "away.txt" if link == "a file" else folder / "away").symlink_to(
        secret if link == "a file" else secret.parent
    )
    with pytest.raises(ConfigError, match=r"own\.txt, which is outside of the folder"):
        find_files(str(folder))
    streaming = ["--training.dataset_streaming", "--training.dataset_cache", str(tmp_path / "cache")]
    with pytest.raises(ConfigError, match="outside of the folder"):
        stream_spec(load_config(["--training.dataset_path", str(folder), *streaming]))
    assert len(find_files(f"{folder}/**/*.txt")) == 3, "what a user names is read"


@pytest.mark.parametrize("path", ["../secret/own.txt", "absolute"])
def test_a_readme_that_names_files_elsewhere_is_refused(
    path: str, secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "good.txt").write_text("good")
    place = path if path != "absolute" else secret
    named = f"configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {place}\n"
    (folder / "README.md").write_text(f"---\n{named}---\n")
    given = ["--training.dataset_path", str(folder), "--training.dataset_streaming"]
    with pytest.raises(ConfigError, match="which is outside of the folder"):
        check_stream(load_config([*given, "--training.dataset_cache", str(tmp_path / "cache")]))


def test_a_tokenizer_that_leads_out_of_its_folder_is_refused(secret: Path, tmp_path: Path) -> None:
    folder = save_json_tokenizer(tmp_path / "tokenizer")
    blobs = tmp_path / "models--a--b/blobs"
    blobs.mkdir(parents=True)
    snapshot = tmp_path / "models--a--b/snapshots/abc"
    snapshot.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert load_tokenizer(str(snapshot)).vocab_size == load_tokenizer(str(folder)).vocab_size
    others = ("special_tokens_map.json", "config.json", "generation_config.json")
    for name in (*others, "tokenizer_config.json", "tokenizer.json"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)
        with pytest.raises(ConfigError, match=rf"{name} leads out of its folder"):
            load_tokenizer(str(folder))
        (folder / name).unlink()


def test_a_tokenizer_larger_than_the_table_is_refused_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("In the beginning God created. " * 500)
    given = ["--training.dataset_path", str(tmp_path / "a.txt"), "--training.dataset_cache", str(tmp_path / "cache")]
    config = load_config([*given, "--training.seq_len", "16"])
    build_datasets(config, 4096)
    with pytest.raises(ConfigError, match=r"hf_assets_path = .*: 4096 tokens, but llama debug has a table of 4095"):
        build_datasets(config, 4095)
