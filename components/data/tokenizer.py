"""Tokenizers from local files: tiktoken rank files (Llama 3's tokenizer.model) and Hugging Face's tokenizer.json.

python -m components.data tokenizer train --input assets/kjv --vocab-size 4096 --output assets/tokenizer/tokenizer.model
"""

import argparse
import base64
import difflib
import hashlib
import itertools
import os
import shutil
import subprocess
import sys
from bisect import bisect_right
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from components.config import ConfigError, JobConfig, here_or_in_repository, mistake, python_path
from components.config.bounds import path_argument
from components.config.files import inside, read_json, refuse_pointer, write_json
from components.config.keys import short
from components.data.sources import ending, find_files, unread, walk
from components.data.special_tokens import (
    AUTO,
    CHAT_TEMPLATE,
    NAMING,
    NONE,
    SETTINGS,
    SpecialToken,
    around_documents,
    in_settings,
)
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
    """The token before each document."""
    eos_id: int | None
    """The token after each document, which also ends a generated text. If it is bos_id, it is not repeated."""
    special: dict[str, int]
    """Content -> id of the special tokens."""

    def token_id(self, content: str) -> int | None:
        """The id of a token; None if there is no such token."""

    def encode(self, text: str) -> list[int]: ...

    def encode_template(self, text: str) -> list[int]:
        """Token ids of text whose special tokens are meant as such."""

    def encode_parts(self, parts: list[str]) -> list[list[int]] | None:
        """As encode_template for the joined parts: the token ids of each part, or None if a token is of two parts."""

    def decode(self, ids: list[int]) -> str: ...


class TiktokenTokenizer:
    """A rank file with lines "<base64 of the bytes> <rank>"; the split and the special tokens are Llama 3's."""

    def __init__(self, path: Path, separator: str = AUTO) -> None:
        import tiktoken

        if is_sentencepiece(path):
            beside = path.with_name("tokenizer.json")
            use = beside if beside.exists() else "a tokenizer.json, which transformers' save_pretrained writes"
            raise ConfigError(f"{path}: not a tiktoken rank file but a SentencePiece model: use {use}")
        try:
            lines = [line.split() for line in path.read_bytes().splitlines() if line]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
        except ValueError as error:
            raise ConfigError(f"{path}: not a tiktoken rank file: {error}") from None
        if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
            raise ConfigError(f"{path}: not a whole tiktoken rank file: a byte has no rank, or ranks have gaps")
        self.special = {token: len(ranks) + number for number, token in enumerate(SPECIAL_TOKENS)}
        self._encoding = tiktoken.Encoding(
            path.stem, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=self.special
        )
        self.vocab_size = self.rows = len(ranks) + len(self.special)
        self.bos_id, self.eos_id = (_id(self, token) for token in _around(path, separator))

    def token_id(self, content: str) -> int | None:
        return self.special.get(content)

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
        if self.bos_id is not None:
            first = (SPECIAL_TOKENS[0], self.bos_id)
            tokenizer.post_processor = processors.TemplateProcessing(single=f"{first[0]} $A", special_tokens=[first])
        return tokenizer

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def encode_template(self, text: str) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")

    def encode_parts(self, parts: list[str]) -> list[list[int]] | None:
        found = [self.encode_template(part) for part in parts]
        return found if [*itertools.chain(*found)] == self.encode_template("".join(parts)) else None

    def decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)


class JsonTokenizer:
    """A tokenizer.json; files in the same folder name its BOS and EOS tokens (special_tokens.py)."""

    def __init__(self, path: Path, separator: str = AUTO) -> None:
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises no narrower type
            raise ConfigError(f"{path}: not a tokenizer.json: {short(str(error))}") from None
        self._tokenizer.encode_special_tokens = True
        # Some files ask for padding, and for truncation, which would lose the rest of a document.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.post_processor = None  # it adds special tokens, and cuts spaces off the places of tokens
        # Ids may have gaps.
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = {token.content: number for number, token in added.items() if token.special}
        self.bos_id, self.eos_id = (_id(self, token) for token in _around(path, separator))
        # Some models have fewer embedding rows than their tokenizer has tokens: Gemma 3's last token is for images.
        unused = {*self.special.values()} - {self.bos_id, self.eos_id}
        used = {*self._tokenizer.get_vocab(with_added_tokens=True).values()} - unused
        self.rows = 1 + max(used, default=-1)

    def token_id(self, content: str) -> int | None:
        return self._tokenizer.token_to_id(content)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_template(self, text: str) -> list[int]:
        return self._encode_template(text).ids

    def _encode_template(self, text: str) -> Any:
        self._tokenizer.encode_special_tokens = False
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True

    def encode_parts(self, parts: list[str]) -> list[list[int]] | None:
        found = self._encode_template("".join(parts))
        starts, ends = zip(*found.offsets, strict=True) if found.offsets else ((), ())
        edges = [*itertools.accumulate(map(len, parts))]
        cuts = [bisect_right(ends, edge) for edge in edges]
        if any(starts[cut] < edge for cut, edge in zip(cuts, edges, strict=True) if cut < len(starts)):
            return None
        return [found.ids[first:last] for first, last in itertools.pairwise([0, *cuts])]

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _around(file: Path, separator: str) -> tuple[SpecialToken, SpecialToken]:
    """The tokens before and after each document; a rank file has Llama 3's."""
    if file.suffix == ".json":
        return around_documents(file, separator)
    first, last = (SpecialToken(token, str(file)) for token in SPECIAL_TOKENS[:2])
    named = {AUTO: last}.get(separator, SpecialToken(separator, "training.dataset_separator"))
    return (SpecialToken(), SpecialToken()) if separator == NONE else (first, named)


def _id(tokenizer: Tokenizer, special: SpecialToken) -> int | None:
    """The token's id. A config.json may have the ids of another tokenizer, so only special tokens count.

    Raises ConfigError if the tokenizer does not have a token that is named by its content.
    """
    if isinstance(special.token, int):
        return special.token if special.token in tokenizer.special.values() else None
    found = None if special.token is None else tokenizer.token_id(special.token)
    if special.token is not None and found is None:
        raise ConfigError(f'{special.origin}: names a token "{special.token}" that the tokenizer does not have')
    return found


def is_sentencepiece(file: Path) -> bool:
    """Whether a tokenizer.model is a SentencePiece model (protobuf), which has zero bytes; a rank file is text."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return b"\0" in opened.read(1024)


def find_tokenizer(path: str) -> Path:
    """The tokenizer's file: path, or the tokenizer file in the folder path, a SentencePiece model last.

    A relative path starts at the current folder or, if nothing is there, at the repository. Raises ConfigError that
    says how to get a tokenizer.
    """
    found = here_or_in_repository(path)
    if found.is_dir():
        candidates = [found / "tokenizer.model", *sorted(found.glob("*.tiktoken")), found / "tokenizer.json"]
        candidates.sort(key=is_sentencepiece)
        folder, found = found, next((candidate for candidate in candidates if candidate.exists()), found)
        for file in (found, *(folder / name for name in (*NAMING, CHAT_TEMPLATE))):
            if not inside(folder, file):
                raise ConfigError(
                    f"model.hf_assets_path: {file} leads out of its folder: give the path that it leads to"
                )
    if not found.is_file():
        raise ConfigError(
            f"model.hf_assets_path: no tokenizer at {path}: give a tiktoken rank file or a tokenizer.json, or the "
            f"folder that holds one (from the model's page on huggingface.co); assets/tokenizer is in this repository"
        )
    refuse_pointer(found)
    return found


def load_tokenizer(path: str, separator: str = AUTO) -> Tokenizer:
    """Loads the tokenizer that find_tokenizer finds; separator: training.dataset_separator. Raises ConfigError."""
    file = find_tokenizer(path)
    return (JsonTokenizer if file.suffix == ".json" else TiktokenTokenizer)(file, separator)


def fitting_tokenizer(path: str, model: str, rows: int, separator: str = AUTO) -> Tokenizer:
    """Loads the tokenizer of a saved model, whose table has `rows` rows. Raises ConfigError that names --tokenizer."""
    try:
        tokenizer = load_tokenizer(path, separator)
    except ConfigError as error:
        raise ConfigError([f"{message}; --tokenizer takes another path" for message in error.messages]) from None
    if tokenizer.rows > rows:
        raise ConfigError(f"{path}: {tokenizer.rows} tokens, but {model} has a table of {rows}; see --tokenizer")
    return tokenizer


def try_tokenizer(path: str, separator: str = AUTO) -> int:
    """Tries a tokenizer and returns its `rows`. A subprocess does the test, because the library aborts on some files.

    Raises ConfigError.
    """
    file = find_tokenizer(path)
    command = [sys.executable, "-P", "-m", "components.data", "tokenizer", "try", "--input", str(file.absolute())]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command.append(f"--separator={separator}")
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
    if done.returncode == ExitCode.CONFIG:
        raise ConfigError(done.stderr.strip())
    if done.returncode:
        raise ConfigError(f"{file}: the tokenizer's library breaks down on it (exit code {done.returncode})")
    return int(done.stdout)


def with_rows(config: JobConfig) -> JobConfig:
    """The job, with the number of rows that the tokenizer needs for model.sizes.vocab_size = "tokenizer".

    Raises ConfigError if the tokenizer cannot be read.
    """
    model = config.model
    if model.sizes.get("vocab_size") != "tokenizer":
        return config
    rows, unit = try_tokenizer(model.hf_assets_path, config.training.dataset_separator), model.vocab_multiple
    return replace(config, model=replace(model, sizes={**model.sizes, "vocab_size": -(-rows // unit) * unit}))


def _try(file: str, separator: str) -> None:
    """Runs in the subprocess of try_tokenizer."""
    tokenizer = load_tokenizer(file, separator)
    tokenizer.decode(tokenizer.encode("In the beginning, naïve 日本 <|eot_id|>\n"))
    print(tokenizer.rows)


def fingerprint(path: str, separator: str = AUTO) -> str:
    """Hash that changes whenever the tokenizer's encoding, or a token around documents, changes."""
    file = find_tokenizer(path)
    settings = file.with_name(SETTINGS)
    content = file.read_bytes() + (settings.read_bytes() if settings.exists() else b"")
    # The content covers the tokens that tokenizer_config.json names. Only other tokens are hashed, so that old caches
    # keep their keys. For old caches no other file was read, and a token that is both BOS and EOS was written twice.
    named = [special.token for special in _around(file, separator)]
    before = [special.token for special in (in_settings(file) if file.suffix == ".json" else _around(file, AUTO))]
    if named != before or named[0] == named[1]:
        tokenizer = load_tokenizer(path, separator)
        ids = [tokenizer.bos_id, None if tokenizer.eos_id == tokenizer.bos_id else tokenizer.eos_id]
        if ids != [tokenizer.token_id(token) if isinstance(token, str) else None for token in before]:
            content += repr(ids).encode()
    return hashlib.blake2b(SPLIT_PATTERN.encode() + content, digest_size=16).hexdigest()


def passed_over(path: str) -> list[str]:
    """A line if a SentencePiece model lies beside the tokenizer.json that is read instead."""
    file = find_tokenizer(path)
    other = file.with_name("tokenizer.model")
    return [f"{file} is read, not the SentencePiece model {other.name} beside it"] if is_sentencepiece(other) else []


def check_tokenizer(config: JobConfig) -> list[str]:
    """Lines that a start prints about the tokenizer: a file that is passed over, documents without an end token.

    Raises ConfigError if the tokenizer lacks the token of training.dataset_separator.
    """
    path, separator = config.model.hf_assets_path, config.training.dataset_separator
    lines = passed_over(path)
    if config.training.has_chats:  # a template has the tokens around a chat
        return lines
    if separator not in (AUTO, NONE):
        tokenizer = load_tokenizer(path, NONE)
        if tokenizer.token_id(separator) is None:
            reason = f'not a token of {path}; use {_listed(separator, tokenizer)}, "{AUTO}" or "{NONE}"'
            raise ConfigError(mistake(config, "training.dataset_separator", reason))
    elif separator == AUTO and not isinstance(_around(find_tokenizer(path), AUTO)[1].token, str):
        tokenizer = load_tokenizer(path)
        if tokenizer.eos_id is None:
            use = _listed("<|endoftext|></s>", tokenizer)
            together, meant = "documents have no end token, only BOS", ""
            if tokenizer.bos_id is None:
                together, meant = "documents run together", f' or, if this is meant, to "{NONE}"'
            reason = f"no file of {path} names an end token; set training.dataset_separator to {use}{meant}"
            lines.append(f"{together}: {reason}")
    return lines


def _listed(wanted: str, tokenizer: Tokenizer) -> str:
    """Three special tokens, the nearest to the wanted one first."""
    near = difflib.get_close_matches(wanted, tokenizer.special, 3, 0.0)
    return ", ".join(f'"{token}"' for token in near) or "a token of the tokenizer"


def export_tokenizer(path: str, folder: Path, separator: str = AUTO) -> dict[str, int | None]:
    """Writes the tokenizer, with the names of its BOS and EOS tokens, in the format of transformers.

    Returns bos_token_id, eos_token_id and pad_token_id for config.json; a missing token is None.
    """
    file = find_tokenizer(path)
    tokenizer = load_tokenizer(path, separator)
    content: dict[Any, str] = {number: token for token, number in tokenizer.special.items()}
    named = [content.get(each.token, each.token) for each in _around(file, separator)]
    names = dict(zip(("bos_token", "eos_token"), named, strict=True))
    if isinstance(tokenizer, TiktokenTokenizer):
        tokenizer.to_json().save(str(folder / "tokenizer.json"))
        # null, because transformers' class for a model type, such as qwen2, would add tokens of its own to the table.
        names |= {"unk_token": None, "pad_token": None}
        settings = {"tokenizer_class": _CLASS, **names, "clean_up_tokenization_spaces": False}
        write_json(folder / SETTINGS, settings)
    else:
        shutil.copyfile(file, folder / "tokenizer.json")
        for name in (SETTINGS, "special_tokens_map.json", CHAT_TEMPLATE):
            if (source := file.with_name(name)).exists():
                shutil.copyfile(source, folder / name)
        if named != [each.token for each in _around(file, AUTO)]:
            for name, default in ((SETTINGS, {"tokenizer_class": _CLASS}), ("special_tokens_map.json", {})):
                write_json(folder / name, (read_json(folder / name) if (folder / name).exists() else default) | names)
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": None}


_CLASS = "PreTrainedTokenizerFast"


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
    parser = argparse.ArgumentParser(prog="python -m components.data tokenizer")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("train", help="train a byte-level BPE on text files")
    command.add_argument("--input", type=path_argument, required=True, help="a text file, or a folder of .txt files")
    command.add_argument("--vocab-size", type=int, required=True, help="entries, with the 256 special tokens")
    command.add_argument("--output", type=path_argument, required=True, help="the rank file to write")
    trying = commands.add_parser("try", help="load a tokenizer, and print the size of its vocabulary")
    trying.add_argument("--input", required=True, help="its file")
    trying.add_argument("--separator", default=AUTO, help="training.dataset_separator")
    arguments = parser.parse_args(argv)
    if arguments.command == "try":
        return _try(arguments.input, arguments.separator)
    files = [arguments.input]
    if arguments.input.is_dir():
        files = [file for file in find_files(str(arguments.input)) if ending(file) in (".txt", ".text")]
        if left := unread(walk(arguments.input), files, "a tokenizer is trained on .txt files"):
            print(f"warning: {left}", file=sys.stderr)
    train_bpe(files, arguments.vocab_size, arguments.output)
    return print(f"{arguments.output}: {load_tokenizer(str(arguments.output)).vocab_size} tokens")
