"""Mutated recipes, command lines and JSON files: each is taken, or is one sentence. Number n is always the same one."""

import faulthandler
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from components.commands import start
from components.config import ROOT, ConfigError, JobConfig, Model, to_dict
from components.data import PackedSequences, TokenCache
from components.data.tokenizer import TiktokenTokenizer, load_tokenizer
from components.observe.report import _read_run, about_cells
from components.state.folder import find_checkpoint
from components.state.weights import check_weights
from models import meta_model
from parallelize.mesh import resolve_degrees
from parallelize.rules import warnings
from tests.jobs import OURS
from tests.limits import limited

MOST_SECONDS = 20
"""Processor time of a check, on any machine: most take a few milliseconds."""
_WORDS = """\
0 -1 1 2 3 7 64 1000 2147483647 2147483648 4611686018427387904 9223372036854775807 18446744073709551616 0xffff 1e400
-0.0 0.5 1e-320 1e308 nan -inf inf true false "" " " "a" "1" "true" "../.." "/" "/dev/null" "/proc/self/mem" "~" "~x"
"*" "**/*" "a/b" "a/b:c@d" "\\u0000" "\\n" "\\u202e" "\\U0001F600" "%s%n" "{}" "$HOME" "llama" "debug" "c4" "op"
[] [1] [[]] [""] ["a"] [["layers.0"]] {} {a=1} 2026-11-22 2026-11-22T01:02:03 01:02:03 ''' = [ ] { # \\"""
VALUES = [
    *_WORDS.split(),
    "9" * 5000,
    "0x" + "f" * 6000,
    "[" * 1500,
    f'"{"a" * 300}"',
    f'"{"a/" * 3000}"',
    "1" + "_0" * 20,
]
"""What stands in the place of a value, as TOML."""
JSON_VALUES: list[Any] = [
    *(
        None,
        True,
        0,
        -1,
        1.5,
        1e308,
        2**63,
        2**200,
        "",
        "a",
        "\0",
        "../../etc/passwd",
        "/etc/passwd",
        "\ud800",
        "a" * 5000,
    ),
    *([], [1], [[]], {}, {"a": 1}, {"content": 1}, {"rope_type": "llama3"}),
]
Check = Callable[[], object]


def mutate_bytes(draw: random.Random, content: bytes) -> bytes:
    """One to four changes: bytes that are flipped, left out, doubled, moved or drawn; or the end is cut off."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at, length = draw.randrange(len(changed) + 1), draw.choice([1, 1, 1, 2, 8, 64, 1000])
        piece = bytes(changed[at : at + length])
        match draw.randrange(6):
            case 0:
                changed[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del changed[at : at + length]
            case 2:
                changed[at:at] = piece * draw.choice([1, 2, 500])
            case 3:
                changed[at:at] = draw.choice(
                    [b'"', b"[", b"]", b"{", b"}", b"=", b"#", b"\n", b"\0", b"\xff", b"\xef\xbb\xbf"]
                )
            case 4:
                to = draw.randrange(len(changed) + 1)
                changed[to:to] = piece
            case _:
                if draw.random() < 0.3:
                    del changed[at:]
    return bytes(changed)


def mutate_lines(draw: random.Random, text: str) -> str:
    """One to three changes of a TOML file's lines: another value, a line left out, doubled or moved, another key."""
    lines = text.splitlines()
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(lines))
        key, equals, _ = lines[at].partition("=")
        match draw.randrange(6):
            case 0 | 1 | 2:
                lines[at] = f"{key}= {draw.choice(VALUES)}" if equals else f"[{draw.choice(VALUES)}]"
            case 3:
                lines.insert(draw.randrange(len(lines)), lines[at])
            case 4:
                table, _, last = draw.choice(sorted(OURS)).rpartition(".")
                lines += [f"[{table}]", f"{last} = {draw.choice(VALUES)}"]
            case _:
                if len(lines) > 1:
                    del lines[at]
    return "\n".join(lines)


def mutate_value(draw: random.Random, value: Any) -> Any:
    """A JSON value with one of its parts left out or replaced."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.1:
        return draw.choice(JSON_VALUES)
    key = draw.choice(sorted(value)) if isinstance(value, dict) else draw.randrange(len(value))
    changed = dict(value) if isinstance(value, dict) else list(value)
    if draw.random() < 0.15:
        del changed[key]
    else:
        changed[key] = mutate_value(draw, value[key])
    return changed


def words(draw: random.Random) -> list[str]:
    """A command line: one to four keys with values, some of them torn."""
    given: list[str] = []
    for _ in range(draw.randint(1, 4)):
        key, value = draw.choice(sorted(OURS)), draw.choice(VALUES).strip('"')
        if draw.random() < 0.15:
            key = mutate_bytes(draw, key.encode()).decode("utf-8", "surrogateescape").replace("\0", "")
        given += draw.choice([[f"--{key}", value], [f"--{key}={value}"], [f"--{key}"], [value]])
    return given


def check(argv: list[str]) -> None:
    """All that components/commands/start.py checks before it prepares data and starts ranks."""
    config, settings = start.check(argv, {"NGPU": "4"})
    warnings(config, resolve_degrees(config, settings.world_size), settings.ranks, on_cpu=True)


class Mutations:
    """The checks of numbered mutations, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipes = [
            path.read_text() for name in ("recipes", "tests/titan_v02") for path in (ROOT / name).glob("*.toml")
        ]
        self.recipes.sort()
        model = meta_model(Model(name="llama", flavor="debug"))
        self.model = model
        tensors = {model.hf_name(name): torch.zeros(value.shape) for name, value in model.named_parameters()}
        weights = folder / "weights"
        weights.mkdir()
        save_file(tensors, weights / "model.safetensors")
        numbers = np.arange(1000, dtype=np.uint16)
        (folder / "cache").mkdir()
        numbers.tofile(folder / "cache" / "tokens.bin")
        np.asarray([1000]).tofile(folder / "cache" / "documents.bin")
        bundled = load_tokenizer("assets/tokenizer")
        assert isinstance(bundled, TiktokenTokenizer)
        (folder / "tokenizer").mkdir()
        bundled.to_json().save(str(folder / "tokenizer/tokenizer.json"))
        index = {"key": "k", "dtype": "uint16", "vocab_size": 1000, "tokens": 1000, "documents": 1}
        added = {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|end_of_text|>"}}
        git, versions = {"revision": "a", "dirty": False}, {"torch": "2"}
        run = {"config": to_dict(JobConfig()), "layout": "1", "ranks": 1, "versions": versions, "git": git}
        made = json.loads((folder / "tokenizer/tokenizer.json").read_text())
        where = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
        self.files: list[tuple[Path, bytes, Check]] = [
            self._file("weights/config.json", model.hf_config(), self._weights),
            self._file("weights/model.safetensors.index.json", where, self._weights),
            self._file("tokenizer/tokenizer.json", made, self._tokenizer),
            self._file("tokenizer/tokenizer_config.json", added, self._tokenizer),
            self._file("run/run.json", run, self._run),
            self._file("cache/index.json", index, self._cache),
        ]

    def _file(self, name: str, value: Any, read: Check) -> tuple[Path, bytes, Check]:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value))
        return path, path.read_bytes(), read

    def _weights(self) -> None:
        check_weights(self.model, self.folder / "weights")

    def _tokenizer(self) -> None:
        """In a process of its own, as try_tokenizer does: the library aborts on some files."""
        if child := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code not in (0, 2, -signal.SIGABRT):
                raise RuntimeError(f"exit code {code} of the process that reads the tokenizer")
            return
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            tokenizer = load_tokenizer(str(self.folder / "tokenizer"))
            tokenizer.decode(tokenizer.encode("In the beginning God created naïve 日本 <|eot_id|>"))
            os._exit(0)
        except ConfigError:
            os._exit(2)
        finally:
            os._exit(1)

    def _run(self) -> None:
        about_cells(_read_run(self.folder / "run"))
        find_checkpoint(self.folder / "run", None)

    def _cache(self) -> None:
        PackedSequences(TokenCache(self.folder / "cache"), 16).get(np.array([0, 1]))

    def argv(self, number: int) -> list[str]:
        """Mutation `number` as words of ./run_train.sh; its recipe is written into the folder."""
        draw = random.Random(number)
        if number % 3 == 0:
            return ["--job.config_file", str(start.DEFAULT_RECIPE), *words(draw)]
        recipe, path = draw.choice(self.recipes), self.folder / "job.toml"
        mutated = mutate_lines(draw, recipe).encode() if number % 3 == 1 else mutate_bytes(draw, recipe.encode())
        path.write_bytes(mutated)
        return ["--job.config_file", str(path)]

    def fault(self, number: int) -> str | None:
        """What is wrong with how mutation `number` is taken: None if nothing is."""
        path, content, read = self._prepared(number)
        try:
            with limited("a check", MOST_SECONDS):
                read()
        except ConfigError as error:
            bad = [line for line in error.messages if len(line.splitlines()) != 1 or len(line) > 5000]
            return f"{number}: not one line: {bad[0][:200]!r}" if bad else None
        except (Exception, SystemExit) as error:
            return f"{number}: {type(error).__name__}: {str(error)[:200]}"
        finally:
            if path:
                path.write_bytes(content)
        return None

    def _prepared(self, number: int) -> tuple[Path | None, bytes, Check]:
        """The JSON file that mutation `number` has changed, if it is one, its right content, and what reads it."""
        if number % 4:
            argv = self.argv(number)
            return None, b"", lambda: check(argv)
        draw = random.Random(number)
        path, content, read = draw.choice(self.files)
        whole = draw.random() < 0.7
        value = mutate_value(draw, json.loads(content)) if whole else None
        path.write_bytes(json.dumps(value).encode() if whole else mutate_bytes(draw, content))
        return path, content, read
