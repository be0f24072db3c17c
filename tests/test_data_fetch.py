"""The hub: what is fetched, what is streamed from it, and every way in which it does not answer."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.config import ROOT, load_config
from components.data import datasets
from components.data.__main__ import prepare_all
from components.data.hub import FETCHED, _wanted, is_of_hub
from tests import limits
from tests.caches import prepared, spec_of
from tests.chats import said, save
from tests.hub import COMMIT, GATED, serving
from tests.processes import small_disk

CHATS = [said("Hi", "Hello"), said("a", "b", "c", "d")]
AS_CHATS = ["--training.dataset_format", "chat", "--chat.template", "assets/templates/llama3.jinja"]
NOWHERE = "http://127.0.0.1:9"
TEXTS = [line for line in (ROOT / "assets/kjv/02-exodus.txt").read_text(encoding="utf-8").splitlines() if line.strip()]
# Each line of standard input is a command; what it printed and its exit code go to standard output as JSON. In a
# process of its own, because the hub's address is read when the library is imported; in one, because that takes long.
COMMANDS = """
import contextlib, io, json, sys
from components.config import ConfigError
from components.data.__main__ import main
for line in sys.stdin:
    out, code = io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(out):
            main(json.loads(line))
    except ConfigError as error:
        code = str(error)
    print(json.dumps([out.getvalue(), code]), flush=True)
"""
STREAM = """
import sys
from pathlib import Path
from components.config import load_config
from components.data.stream import StreamCache, start_writer, stream_spec
spec = stream_spec(load_config(["--training.dataset", "org/books:en", "--training.dataset_cache", sys.argv[1]]))
cache = StreamCache(spec, start_writer(spec))
cache.reach(1 << 30)
print(spec.key)
print(spec.folder)
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Its address, and the folder that it serves: a dataset in two parts, as c4 is, and a model."""
    folder = tmp_path_factory.mktemp("hub")
    books, model = folder / "datasets/org/books", folder / "models/org/model"
    for part in ("en", "xx"):
        (books / part).mkdir(parents=True)
        for number in range(2):
            lines = [json.dumps({"text": text}) for text in TEXTS[number * 100 : number * 100 + 100]]
            with gzip.open(books / part / f"c4-train.{number:05}-of-00002.json.gz", "wt") as file:
                file.write("\n".join(lines))
    configs = [
        {"config_name": part, "data_files": [{"split": "train", "path": f"{part}/*.json.gz"}]} for part in ("en", "xx")
    ]
    (books / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\nBooks.\n")
    save(folder / "datasets/org/chats/data", CHATS, "train.jsonl")
    save(folder / "datasets/org/chats/data", [said("held", "out")], "test.jsonl")
    (folder / "datasets" / GATED).mkdir(parents=True)
    (folder / "datasets/org/plain").mkdir()
    (folder / "datasets/org/plain/train.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    (folder / "datasets/org/kjv").mkdir()
    shutil.copy(ROOT / "assets/kjv/08-ruth.txt", folder / "datasets/org/kjv")
    model.mkdir(parents=True)
    shutil.copy(ROOT / "assets/tokenizer/tokenizer.model", model)
    for name in ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "train.bin"):
        (model / name).write_bytes(name.encode() * 1000)
    both = folder / "models/org/both"
    both.mkdir()
    for name in ("tokenizer.json", "tokenizer.model"):
        (both / name).touch()
    with serving(folder) as address:
        yield address, folder


def environment(address: str, home: Path) -> dict[str, str]:
    """Variables for a process that asks this hub, and keeps what it learns in a home of its own."""
    more = {"HF_ENDPOINT": address, "HF_HOME": str(home), "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return {**os.environ, **more}


def run(commands: list[list[str]], address: str, home: Path) -> list[tuple[str, str | int]]:
    """What `python -m components.data` prints for each of them, and its error."""
    lines = "".join(json.dumps(command) + "\n" for command in commands)
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input=lines,
        env=environment(address, home),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [(out, code) for out, code in map(json.loads, done.stdout.splitlines())]


def test_what_is_fetched_and_which_key_wants_it(hub: tuple[str, Path], tmp_path: Path) -> None:
    address, folder = hub
    books, part, model, tokenizer = (str(tmp_path / name) for name in ("books", "part", "model", "tokenizer"))
    dataset = ["fetch", "org/books", "--kind", "dataset"]
    results = run(
        [
            [*dataset, "--into", books],
            [*dataset, "--only", "xx/*0001-of*", "--revision", COMMIT, "--into", part],
            ["fetch", "org/model", "--into", model],
            ["fetch", "org/model", "--only", "tokenizer", "--into", tokenizer],
            ["fetch", "org/model", "--only", "weights", "--into", tokenizer],
            ["fetch", "org/both", "--into", str(tmp_path / "both")],
        ],
        address,
        tmp_path / "home",
    )
    assert [code for _, code in results] == [0] * 6
    assert results.pop()[0].splitlines()[1] == "tokenizer.model was left out: tokenizer.json is read"
    keys = [[line.partition(" = ")[0] for line in out.splitlines()[1:]] for out, _ in results]
    data = ["training.dataset_path", "training.dataset_streaming"]
    weights = ["model.flavor", "checkpoint.initial_load_in_hf"]
    assert keys == [data, data, weights, ["model.hf_assets_path"], weights]
    assert results[0][0].startswith(f"{books}: 5 files of org/books at {COMMIT}")
    for served, name in ((folder / "datasets/org/books", books), (folder / "models/org/model", model)):
        for file in Path(name).rglob("*"):
            if file.is_file() and ".cache" not in file.parts:
                assert file.read_bytes() == (served / file.relative_to(name)).read_bytes()

    note = json.loads((Path(model) / FETCHED).read_text())
    assert note == {"repository": "org/model", "revision": COMMIT}

    def names(path: str) -> set[str]:
        files = (file for file in Path(path).rglob("*") if file.is_file())
        return {str(file.relative_to(path)) for file in files if ".cache" not in file.parts}

    assert len(names(books)) == 5
    assert names(part) == {"xx/c4-train.00001-of-00002.json.gz"}
    assert (
        names(model)
        == names(tokenizer)
        == {file.name for file in (folder / "models/org/model").iterdir()} - {"train.bin"}
    )


def test_a_tokenizer_comes_with_the_files_that_name_its_tokens() -> None:
    weights = ["config.json", "generation_config.json", "model.safetensors"]
    names = [*weights, "special_tokens_map.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
    left_out = {"tokenizer.model"}
    assert {*_wanted(names, "model", ["tokenizer"])} == {*names} - {"model.safetensors"} - left_out
    assert {*_wanted(names, "model", [])} == {*names} - left_out
    assert _wanted(names, "model", ["tokenizer.model"]) == ["tokenizer.model"]
    assert _wanted(weights, "model", ["tokenizer"]) == []
    assert _wanted(weights, "model", []) == weights


def test_what_the_hub_does_not_have_is_told_in_one_line(hub: tuple[str, Path], tmp_path: Path) -> None:
    into = ["--into", str(tmp_path / "into")]
    prepares = ["prepare", "--training.dataset_cache", str(tmp_path / "cache"), "--training.dataset"]
    cases: list[tuple[list[str], str]] = [
        (["fetch", "org/none", *into], "no model org/none on the hub that you may read"),
        (["fetch", GATED, "--kind", "dataset", *into], f"{GATED} is gated: ask for access at https://"),
        (["fetch", "org/model", "--revision", "v9", *into], "org/model has no such revision"),
        (["fetch", "org/model", "--only", "*.gguf", *into], "org/model has no *.gguf; it has config.json, "),
        (["fetch", "a/b/c", *into], "a/b/c: not a name of the hub"),
        ([*prepares, "c4"], 'command line: training.dataset = "c4": no dataset allenai/c4 on the hub'),
        ([*prepares, GATED], f'command line: training.dataset = "{GATED}": {GATED} is gated: ask for access'),
        ([*prepares, "org/books:en@v9"], "org/books has no such revision"),
        ([*prepares, "org/books:de"], "BuilderConfig 'de' not found. Available: ['en', 'xx']"),
        ([*prepares, "org/books"], "Config name is missing. Please pick one among the available configs"),
        ([*prepares, "org/chats:de", *AS_CHATS], "BuilderConfig 'de' not found. Available: ['default']"),
        ([*prepares, GATED, *AS_CHATS], f"{GATED} is gated: ask for access"),
        (
            [*prepares, "org/books:en", "--training.dataset_text_field", "body"],
            'a file has no "body" (training.dataset_text_field); it has text',
        ),
    ]
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text("mine")
    cases += [
        (["fetch", "org/model", "--into", str(own)], f"{own}: has files of another origin than org/model"),
        (["fetch", "org/kjv", "--kind", "dataset"], "kjv: has files of another origin than org/kjv"),
    ]
    for (command, told), (_, error) in zip(cases, run([command for command, _ in cases], hub[0], tmp_path / "home")):
        assert told in str(error), command
        assert len(str(error).splitlines()) == 1, command
    assert not (tmp_path / "into").exists()
    assert (own / "config.json").read_text() == "mine"


def test_a_dataset_of_the_hub_is_streamed_as_its_files_are_tokenized(hub: tuple[str, Path], tmp_path: Path) -> None:
    address, _ = hub
    script = [sys.executable, "-c", STREAM, str(tmp_path)]
    done = limits.run(script, env=environment(address, tmp_path / "home"), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    key, folder = done.stdout.splitlines()
    assert key.startswith(f"org/books:en@{COMMIT}/")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:200]))
    right = prepared(spec_of(tmp_path / "data.jsonl", tmp_path), 1)
    for name in ("tokens.bin", "documents.bin"):
        assert (Path(folder) / name).read_bytes() == (right.folder / name).read_bytes()


def test_chats_of_the_hub_are_downloaded_and_tokenized_as_files(hub: tuple[str, Path], tmp_path: Path) -> None:
    address, folder = hub
    job = ["--training.dataset_cache", str(tmp_path), "--training.seq_len", "64", *AS_CHATS]
    local = str(folder / "datasets/org/chats/data/train.jsonl")
    shown = run(
        [
            ["show", "--json", *job, "--training.dataset", "org/chats"],
            ["show", "--json", *job, "--training.dataset", f"org/chats@{COMMIT}"],
            ["show", "--json", *job, "--training.dataset_path", local],
        ],
        address,
        tmp_path / "home",
    )
    rows = [out.splitlines()[-1] for out, code in shown if code == 0]
    assert len(rows) == 3
    assert len({*rows}) == 1
    files = {str(file.relative_to(tmp_path / "hub")) for file in (tmp_path / "hub").rglob("*.jsonl")}
    assert files == {f"org--chats-default-{COMMIT}/data/train.jsonl"}


def test_a_mixture_downloads_its_sources(hub: tuple[str, Path], tmp_path: Path) -> None:
    """Texts and chats; a mistake names its key."""
    job = ["--training.dataset_cache", str(tmp_path), "--training.seq_len", "64", "--training.steps", "9", *AS_CHATS]
    job += ["--training.global_batch_size", "8", "--training.mixture_temperature", "1"]

    def mixed(texts: str) -> list[str]:
        words = "--training.mixture[1].name=chats --training.mixture[1].dataset=org/chats "
        words += "--training.mixture[2].name=texts --training.mixture[2].dataset_format=text "
        words += "--training.mixture[2].dataset_text_field=body "
        return ["show", *job, *words.split(), f"--training.mixture[2].dataset={texts}"]

    (found, *wrong) = run(
        [mixed(texts) for texts in (f"org/plain@{COMMIT}", "org/none", "a/b/c")],
        hub[0],
        tmp_path / "home",
    )
    assert found[1] == 0
    assert [line.split()[-1] for line in found[0].splitlines()[-2:]] == ["chats", "texts"]
    names = {str(file.relative_to(tmp_path / "hub")) for file in (tmp_path / "hub").rglob("*.jsonl")}
    assert names == {
        f"org--{name}-default-{COMMIT}/{file}.jsonl" for name, file in (("chats", "data/train"), ("plain", "train"))
    }
    key = "command line: training.mixture[2].dataset = "
    reasons = ("no dataset org/none on the hub", 'expected "org/name"')
    for (_, error), told in zip(wrong, reasons, strict=True):
        assert str(error).startswith(key), error
        assert told in str(error)


def test_ranks_find_downloaded_chats_without_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "download_split", lambda *given: tmp_path / "chats")
    save(tmp_path / "chats", CHATS)
    words = [*AS_CHATS, "--training.dataset", "org/chats", "--training.dataset_cache", str(tmp_path / "cache")]
    training = prepare_all(load_config(words)).training
    assert training.dataset_path == str(tmp_path / "chats")
    assert not is_of_hub(training)
    hub, local = (f"--training.mixture[{number}]." for number in (1, 2))
    words += [f"{hub}name=a", f"{hub}dataset=org/chats", f"{local}name=b", f"{local}dataset_path={tmp_path / 'chats'}"]
    sources = prepare_all(load_config(words)).training.mixture
    assert [(each.dataset, each.dataset_path) for each in sources] == [("", str(tmp_path / "chats"))] * 2


def test_without_network_a_job_is_refused_before_it_starts(tmp_path: Path) -> None:
    cache = ["--training.dataset_cache", str(tmp_path)]
    job = ["./run_train.sh", "--training.dataset", "c4", "--validation.no_enable", *cache]
    fetch = [sys.executable, "-m", "components.data", "fetch", "org/model", "--into", str(tmp_path / "into")]
    dump = ["--job.dump_folder", str(tmp_path / "out")]
    variables = {**environment(NOWHERE, tmp_path / "home"), "PYTHON": sys.executable, "NGPU": "1"}
    lines = []
    for command in ([*job, *dump], fetch):
        done = limits.run(command, env=variables, cwd=ROOT)
        assert done.returncode == 2
        lines.append(done.stderr)
    assert [line.count("\n") for line in lines] == [1, 1]
    assert lines[0].startswith('command line: training.dataset = "c4": allenai/c4: the hub cannot be reached: ')
    assert "python -m components.data fetch allenai/c4 --kind dataset" in lines[0]
    assert lines[1].startswith("org/model: the hub cannot be reached: ")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_told_and_the_same_command_goes_on(hub: tuple[str, Path], tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "60k") as disk:
        fetch = ["fetch", "org/model", "--only", "tokenizer", "weights", "--into", str(disk)]
        ((_, full),) = run([fetch], hub[0], tmp_path / "home")
        assert full == (
            "org/model: cannot write: No space left on device; what is there stays, the same command goes on from it"
        )
        subprocess.run(["mount", "-o", "remount,size=10M", str(disk)], check=True)
        ((out, code),) = run([fetch], hub[0], tmp_path / "home")
        assert code == 0, out
        assert (disk / "tokenizer.model").read_bytes() == (ROOT / "assets/tokenizer/tokenizer.model").read_bytes()


def test_two_commands_lead_from_the_hub_to_a_loss(hub: tuple[str, Path], tmp_path: Path) -> None:
    """README's, with the folder of a small Llama; no file is edited."""
    transformers = pytest.importorskip("transformers")
    address, served = hub
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=4096, pad_token_id=None)
    transformers.LlamaForCausalLM(config).save_pretrained(served / "models/org/tiny")
    shutil.copy(ROOT / "assets/tokenizer/tokenizer.model", served / "models/org/tiny")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pattern = r"^    (\S*python -m components.data fetch \S+SmolLM2.*)\n    ((?:.*\\\n)*.*)"
    ((fetch, train),) = re.findall(pattern, readme, re.M)
    fetched = fetch.replace(".venv/bin/python", sys.executable).replace("HuggingFaceTB/SmolLM2-135M", "org/tiny")
    trained = train.replace("assets/SmolLM2-135M", str(tmp_path / "tiny")).replace(
        "outputs/smollm2", str(tmp_path / "run")
    )
    commands = f"{fetched} --into {tmp_path / 'tiny'}\n{trained} --training.steps 1 --validation.no_enable"
    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        env=environment(address, tmp_path / "home") | {"NGPU": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f'model.flavor = "{tmp_path / "tiny"}"' in done.stdout
    assert f"weights from {tmp_path / 'tiny'}" in done.stdout
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert abs(row["loss"] - 8.32) < 0.1, "of 4,096 tokens that are nearly alike"
