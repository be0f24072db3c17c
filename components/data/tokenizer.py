"""Tokenizers from local files: tiktoken rank files (Llama 3's tokenizer.model) and Hugging Face's tokenizer.json.

python -m components.data.tokenizer train --input assets/kjv --vocab-size 4096 --output assets/tokenizer/tokenizer.model
"""

import argparse
import base64
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from components.config import ConfigError, here_or_in_repository, python_path
from components.config.bounds import path_argument
from components.config.files import inside, read_json_as, write_json
from components.config.keys import short
from components.launch.exit_codes import ExitCode

# From Llama 3's tokenizer.py: the split of text before bytes are merged, and 256 special tokens, whose ids follow the
# ranks.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{number}|>" for number in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{number}|>" for number in range(5, 251)),
]


class Tokenizer(Protocol):
    """Converts text to token ids and back. Text that looks like a special token is encoded as plain text."""

    vocab_size: int
    rows: int
    """Embedding rows needed: 1 + the largest id of text, BOS or EOS."""
    bos_id: int | None
    eos_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class TiktokenTokenizer:
    """A rank file with lines "<base64 of the bytes> <rank>"; the split and the special tokens are Llama 3's."""

    def __init__(self, path: Path) -> None:
        import tiktoken

        try:
            lines = [line.split() for line in path.read_bytes().splitlines() if line]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        except ValueError as error:
            raise ConfigError(f"{path}: not a tiktoken rank file: {error}") from None
        if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
            raise ConfigError(f"{path}: not a whole tiktoken rank file: a byte has no rank, or ranks have gaps")
        specials = {token: len(ranks) + number for number, token in enumerate(SPECIAL_TOKENS)}
        self._encoding = tiktoken.Encoding(
            path.stem, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=specials
        )
        self.vocab_size = self.rows = len(ranks) + len(specials)
        self.bos_id: int | None = specials["<|begin_of_text|>"]
        self.eos_id: int | None = specials["<|end_of_text|>"]

    def to_json(self) -> Any:
        """Converts this tokenizer to a tokenizers.Tokenizer, for a tokenizer.json."""
        import tokenizers
        from tokenizers import models, processors

        character_of = {byte: character for character, byte in _bytes_of_characters().items()}
        ranks = self._encoding._mergeable_ranks
        text = {token: "".join(character_of[byte] for byte in token) for token in ranks}
        # A token merges the two parts that remain after all merges of lower rank.
        parts = [(token, _merge(token, ranks)) for token in sorted(ranks, key=lambda token: ranks[token]) if token[1:]]
        merges = [(text[pair[0]], text[pair[1]]) for _, pair in parts if len(pair) == 2]
        vocabulary = {text[token]: rank for token, rank in ranks.items()}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
        _split_as_llama(tokenizer)
        tokenizer.add_special_tokens(SPECIAL_TOKENS)
        first = (SPECIAL_TOKENS[0], self.bos_id)
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{first[0]} $A", special_tokens=[first])
        return tokenizer

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)


@dataclass
class _AddedToken:
    content: str


@dataclass
class _Settings:
    """The fields of tokenizer_config.json that are read."""

    bos_token: str | _AddedToken | None = None
    eos_token: str | _AddedToken | None = None


class JsonTokenizer:
    """A tokenizer.json; tokenizer_config.json in the same folder names its BOS and EOS tokens."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises no narrower type
            raise ConfigError(f"{path}: not a tokenizer.json: {short(str(error))}") from None
        self._tokenizer.encode_special_tokens = True
        # Some files ask for truncation and padding: that would lose the rest of a document.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Ids may have gaps.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        settings_file = path.with_name("tokenizer_config.json")
        settings = read_json_as(_Settings, settings_file) if settings_file.exists() else _Settings()
        self.bos_id = self._special(settings.bos_token, settings_file)
        self.eos_id = self._special(settings.eos_token, settings_file)
        # Some models have fewer embedding rows than their tokenizer has tokens: Gemma 3's last token is for images.
        added = self._tokenizer.get_added_tokens_decoder()
        unused = {number for number, token in added.items() if token.special} - {self.bos_id, self.eos_id}
        used = {*self._tokenizer.get_vocab(with_added_tokens=True).values()} - unused
        self.rows = 1 + max(used, default=-1)

    def _special(self, token: "str | _AddedToken | None", settings_file: Path) -> int | None:
        content = token.content if isinstance(token, _AddedToken) else token
        found = None if content is None else self._tokenizer.token_to_id(content)
        if content is not None and found is None:
            raise ConfigError(f'{settings_file}: names a token "{content}" that the tokenizer does not have')
        return found

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def find_tokenizer(path: str) -> Path:
    """The tokenizer's file: path, or the tokenizer file in the folder path.

    A relative path starts at the current folder or, if nothing is there, at the repository. Raises ConfigError that
    says how to get a tokenizer.
    """
    found = here_or_in_repository(path)
    if found.is_dir():
        candidates = [found / "tokenizer.model", *sorted(found.glob("*.tiktoken")), found / "tokenizer.json"]
        folder, found = found, next((candidate for candidate in candidates if candidate.exists()), found)
        for file in (found, folder / "tokenizer_config.json"):
            if not inside(folder, file):
                raise ConfigError(
                    f"model.hf_assets_path: {file} leads out of its folder: give the path that it leads to"
                )
    if not found.is_file():
        raise ConfigError(
            f"model.hf_assets_path: no tokenizer at {path}: give a tiktoken rank file or a tokenizer.json, or the "
            f"folder that holds one (from the model's page on huggingface.co); assets/tokenizer is in this repository"
        )
    return found


def load_tokenizer(path: str) -> Tokenizer:
    """Loads the tokenizer that find_tokenizer finds. Raises ConfigError."""
    file = find_tokenizer(path)
    return JsonTokenizer(file) if file.suffix == ".json" else TiktokenTokenizer(file)


def fitting_tokenizer(path: str, model: str, rows: int) -> Tokenizer:
    """Loads the tokenizer of a saved model, whose table has `rows` rows. Raises ConfigError that names --tokenizer."""
    try:
        tokenizer = load_tokenizer(path)
    except ConfigError as error:
        raise ConfigError([f"{message}; --tokenizer takes another path" for message in error.messages]) from None
    if tokenizer.rows > rows:
        raise ConfigError(f"{path}: {tokenizer.rows} tokens, but {model} has a table of {rows}; see --tokenizer")
    return tokenizer


def try_tokenizer(path: str) -> int:
    """Tries a tokenizer and returns its `rows`. A subprocess does the test, because the library aborts on some files.

    Raises ConfigError.
    """
    file = find_tokenizer(path)
    command = [sys.executable, "-P", "-m", "components.data.tokenizer", "try", "--input", str(file.absolute())]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
    if done.returncode == ExitCode.CONFIG:
        raise ConfigError(done.stderr.strip())
    if done.returncode:
        raise ConfigError(f"{file}: the tokenizer's library breaks down on it (exit code {done.returncode})")
    return int(done.stdout)


def _try(file: str) -> None:
    """Runs in the subprocess of try_tokenizer."""
    tokenizer = load_tokenizer(file)
    tokenizer.decode(tokenizer.encode("In the beginning, naïve 日本 <|eot_id|>\n"))
    print(tokenizer.rows)


def fingerprint(path: str) -> str:
    """Hash that changes whenever the tokenizer's encoding changes."""
    file = find_tokenizer(path)
    settings = file.with_name("tokenizer_config.json")
    content = file.read_bytes() + (settings.read_bytes() if settings.exists() else b"")
    return hashlib.blake2b(SPLIT_PATTERN.encode() + content, digest_size=16).hexdigest()


def export_tokenizer(path: str, folder: Path) -> dict[str, int]:
    """Writes the tokenizer in the format of transformers; returns bos_token_id and eos_token_id for config.json."""
    file = find_tokenizer(path)
    tokenizer = load_tokenizer(path)
    if isinstance(tokenizer, TiktokenTokenizer):
        tokenizer.to_json().save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|end_of_text|>",
            "clean_up_tokenization_spaces": False,
        }
        write_json(folder / "tokenizer_config.json", settings)
    else:
        shutil.copyfile(file, folder / "tokenizer.json")
        for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
            if (source := file.with_name(name)).exists():
                shutil.copyfile(source, folder / name)
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    return {name: number for name, number in ids.items() if number is not None}


def train_bpe(files: list[Path], vocab_size: int, output: Path) -> None:
    """Trains a byte-level BPE on text files and writes it as a rank file. vocab_size includes the special tokens.

    Raises ConfigError if vocab_size is too small for the 256 bytes and the special tokens.
    """
    if vocab_size < 256 + len(SPECIAL_TOKENS):
        raise ConfigError(f"a vocabulary of {vocab_size}: 256 bytes and {len(SPECIAL_TOKENS)} special tokens need more")
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    _split_as_llama(tokenizer)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train([str(file) for file in files], trainer)
    # The library writes each byte as a printable character. Its ids are in merge order, like ranks.
    byte_of = _bytes_of_characters()
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("wb") as file:
        for token, rank in tokens:
            file.write(base64.b64encode(bytes(byte_of[character] for character in token)) + b" %d\n" % rank)


def _split_as_llama(tokenizer: Any) -> None:
    """Sets Llama 3's split of text before merging, and GPT-2's printable characters for bytes."""
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    split = pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()


def _merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The parts of a token after all merges whose rank is lower than the token's rank."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 1:
        pairs = [ranks.get(left + right, ranks[token]) for left, right in itertools.pairwise(parts)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        if pairs[best] >= ranks[token]:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's printable character -> byte. Printable Latin-1 bytes are themselves; other bytes are 256, 257, ..."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m components.data.tokenizer")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("train", help="train a byte-level BPE on text files")
    command.add_argument("--input", type=path_argument, required=True, help="a text file, or a folder of .txt files")
    command.add_argument("--vocab-size", type=int, required=True, help="entries, with the 256 special tokens")
    command.add_argument("--output", type=path_argument, required=True, help="the rank file to write")
    trying = commands.add_parser("try", help="load a tokenizer, and print the size of its vocabulary")
    trying.add_argument("--input", required=True, help="its file")
    arguments = parser.parse_args(argv)
    if arguments.command == "try":
        return _try(arguments.input)
    files = sorted(arguments.input.rglob("*.txt")) if arguments.input.is_dir() else [arguments.input]
    train_bpe(files, arguments.vocab_size, arguments.output)
    return print(f"{arguments.output}: {load_tokenizer(str(arguments.output)).vocab_size} tokens")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(ExitCode.CONFIG)
