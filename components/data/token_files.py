"""Token files of other trainers, memory-mapped as they are. A cache has what was found in them, but no tokens.

<cache_folder>/<key>/documents.bin   document ends of one file after another, in tokens of the file, int64
                     index.json      the content of each file, its numbers of tokens and documents, its largest id
"""

import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from components.config import ConfigError
from components.config.files import read_json
from components.config.keys import short
from components.data.cache import DataSpec
from components.data.formats import STREAM_END
from components.data.sources import Unread, check_inside, ending, find_files, unread_files
from components.data.tokenizer import fingerprint, load_tokenizer
from components.data.tokens import MappedTokens, Segment

_FORMAT = "tokens 1"
"""Part of the key; change it with the reading of a format or the search for document ends."""
_PIECE = 1 << 20
"""Tokens, sequences or documents that are read at once."""
_MEGATRON = struct.Struct("<9sQBQQ")
"""Header of an .idx: magic, version, code of the token type, sequences, document indices."""
_MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_LLM_C = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""Magic number of llm.c -> version, token type."""
_LLM_C_EVALUATION = 20240522
_LLM_C_HEADER = 256 * 4
_NPY = b"\x93NUMPY"
_MASKS = ("attention_mask", "loss_mask", "completion_mask", "assistant_masks")
"""Columns that may take tokens out of the loss."""


class Chunks:
    """Arrays one after another, read as one array."""

    def __init__(self, parts: list[np.ndarray]) -> None:
        self.parts = parts
        self._starts = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        numbers = np.searchsorted(self._starts, places, side="right") - 1
        found = np.empty(places.shape, np.int64)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            found[here] = self.parts[number][places[here] - self._starts[number]]
        return found


@dataclass(frozen=True)
class TokenFile:
    """The tokens of a file, in the file itself."""

    tokens: np.ndarray | Chunks
    ends: Callable[[], Iterator[np.ndarray]] | None = None
    """Yields the document ends that the file tells, in parts. None: tokens tell them. Raises ConfigError."""

    def pieces(self) -> Iterator[np.ndarray]:
        whole = self.tokens.parts if isinstance(self.tokens, Chunks) else [self.tokens]
        return (part[first : first + _PIECE] for part in whole for first in range(0, len(part), _PIECE))


def read_megatron(file: Path) -> TokenFile:
    """A .bin of Megatron-LM or NeMo, with its .idx."""
    index = file.with_suffix(".idx")
    size = index.stat().st_size
    with index.open("rb") as opened:
        head = opened.read(_MEGATRON.size)
    torn = f"{index}: {size:,} bytes are not a whole index of Megatron-LM: copy it again"
    if len(head) < _MEGATRON.size:
        raise ConfigError(torn)
    magic, version, code, sequences, documents = _MEGATRON.unpack(head)
    if magic != b"MMIDIDX\0\0" or version != 1:
        old = "; the older formats TNTIDX have to be converted" if magic.startswith(b"TNTIDX") else ""
        raise ConfigError(f"{index}: not an index of Megatron-LM (MMIDIDX, version 1){old}")
    if code not in _MEGATRON_DTYPES:
        raise ConfigError(f"{index}: token type {code} is not an integer type of Megatron-LM")
    whole = _MEGATRON.size + 12 * sequences + 8 * documents
    if sequences and size == whole + sequences:
        raise ConfigError(f"{index}: a multimodal dataset (it has modes), whose sequences are not all text")
    if size != whole or not sequences or not documents:
        raise ConfigError(torn)
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    lengths = np.memmap(index, "<i4", "r", _MEGATRON.size, (sequences,))
    starts = np.memmap(index, "<i8", "r", _MEGATRON.size + 4 * sequences, (sequences,))
    indices = np.memmap(index, "<i8", "r", _MEGATRON.size + 12 * sequences, (documents,))
    named, found = int(starts[-1]) + int(lengths[-1]) * dtype.itemsize, file.stat().st_size
    if named != found:
        reason = f"but the last sequence of {dtype} in {index.name} ends at byte {named:,}"
        raise ConfigError(f"{file}: {found:,} bytes, {reason}: copy both files again")
    tokens = np.memmap(file, dtype, "r")

    def ends() -> Iterator[np.ndarray]:
        start = before = 0
        for first in range(0, sequences, _PIECE):
            sizes = lengths[first : first + _PIECE].astype(np.int64) * dtype.itemsize
            expected = start + np.cumsum(sizes) - sizes
            if (sizes < 0).any() or not np.array_equal(starts[first : first + _PIECE], expected):
                raise ConfigError(f"{index}: lengths and places of the sequences contradict each other")
            start = int(expected[-1] + sizes[-1])
        for first in range(0, documents, _PIECE):
            part = indices[first : first + _PIECE]
            if (np.diff(part, prepend=before) < 0).any() or part[-1] > sequences or (not first and part[0] != 0):
                raise ConfigError(f"{index}: document indices do not grow from 0 to {sequences:,} sequences")
            before = int(part[-1])
            found = np.where(part < sequences, starts[np.minimum(part, sequences - 1)] // dtype.itemsize, len(tokens))
            yield found[0 if first else 1 :]
        if before != sequences:
            raise ConfigError(f"{index}: documents end with sequence {before:,} of {sequences:,}")

    return TokenFile(tokens, ends)


def read_llm_c(file: Path) -> TokenFile:
    """A .bin of llm.c or modded-nanogpt: a header of 256 int32, then tokens."""
    magic, version, tokens = np.fromfile(file, "<i4", 3).tolist()
    if magic == _LLM_C_EVALUATION:
        raise ConfigError(f"{file}: an evaluation file of llm.c, which holds questions and no documents")
    right, dtype = _LLM_C[magic]
    if version != right:
        raise ConfigError(f"{file}: version {version} of llm.c's token files; version {right} is read")
    size, whole = file.stat().st_size, _LLM_C_HEADER + tokens * np.dtype(dtype).itemsize
    if size != whole:
        raise ConfigError(
            f"{file}: {size:,} bytes, not {whole:,} for the {tokens:,} tokens of its header: copy it again"
        )
    return TokenFile(np.memmap(file, dtype, "r", _LLM_C_HEADER) if tokens else np.empty(0, dtype))


def read_npy(file: Path) -> TokenFile:
    """A .npy with a header."""
    try:
        tokens = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ConfigError(f"{file}: not a whole .npy file: {short(str(error))}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        reason = f"{tokens.dtype} of shape {tokens.shape}; expected one dimension of integers"
        raise ConfigError(f"{file}: an array of {reason}")
    return TokenFile(tokens)


def read_raw(file: Path, dtype: str) -> TokenFile:
    """An array without a header: a .bin of nanoGPT, a .npy of OLMo."""
    return TokenFile(np.memmap(file, np.dtype(dtype).newbyteorder("<"), "r"))


def read_arrow(file: Path) -> TokenFile:
    """An .arrow of datasets' save_to_disk, with a column of token lists; a row is a document."""
    import pyarrow
    from pyarrow import compute, ipc, types

    try:
        source = pyarrow.memory_map(str(file))
        is_file = source.read(6) == b"ARROW1"
        open_ = ipc.open_file if is_file else ipc.open_stream
        source.seek(0)
        table = open_(source).read_all()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{file}: cannot be read as Arrow: {str(error).splitlines()[0]}") from None
    source.seek(source.size() - 8)
    if not is_file and source.read() != STREAM_END:  # as formats.arrow_rows
        raise ConfigError(f"{file}: an IPC stream without its end")
    if "input_ids" not in table.column_names:
        raise ConfigError(f'{file}: no column "input_ids"; it has {", ".join(table.column_names)}')
    others = [name for name in ("labels", *_MASKS) if name in table.column_names]
    for name in ("input_ids", *others):
        kind = table.schema.field(name).type
        lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        is_mask = name in _MASKS and lists and types.is_boolean(kind.value_type)
        if not is_mask and not (lists and types.is_integer(kind.value_type)):
            raise ConfigError(f'{file}: column "{name}" is {kind}; expected lists of integers')

    def flat(column: Any) -> np.ndarray:
        values = column.flatten()
        if column.null_count or values.null_count:
            raise ConfigError(f"{file}: a list of tokens or labels is missing (null)")
        return np.asarray(values.to_numpy(zero_copy_only=not types.is_boolean(values.type)))

    def ends() -> Iterator[np.ndarray]:
        total = rows = 0
        for batch in table.to_batches():
            lengths = compute.list_value_length(batch["input_ids"]).to_numpy(zero_copy_only=False)
            for name in others:
                wanted = flat(batch["input_ids"]) if name == "labels" else np.ones(lengths.sum(), bool)
                if not np.array_equal(flat(batch[name]), wanted):
                    reason = "takes tokens out of the loss, and all tokens are trained here"
                    raise ConfigError(
                        f'{file}: column "{name}" in rows {rows:,} to {rows + len(lengths) - 1:,} {reason}: '
                        f'remove it, or train on chats (training.dataset_format = "chat")'
                    )
            yield total + np.cumsum(lengths, dtype=np.int64)
            total, rows = total + int(lengths.sum()), rows + len(lengths)

    return TokenFile(Chunks([flat(chunk) for chunk in table["input_ids"].chunks]), ends)


READERS: dict[Callable[..., TokenFile], str] = {
    read_megatron: "Megatron-LM",
    read_llm_c: "llm.c",
    read_npy: ".npy",
    read_arrow: "Arrow",
    read_raw: "no header",
}


def reader_of(file: Path) -> Callable[..., TokenFile]:
    """The reader of a file, by its ending, the file beside it and its first bytes."""
    if ending(file) == ".arrow":
        return read_arrow
    if ending(file) == ".bin" and file.with_suffix(".idx").exists():
        return read_megatron
    with file.open("rb") as opened:
        head = opened.read(_LLM_C_HEADER)
    if head.startswith(_NPY):
        return read_npy
    magic = int.from_bytes(head[:4], "little")
    return read_llm_c if len(head) == _LLM_C_HEADER and magic in (*_LLM_C, _LLM_C_EVALUATION) else read_raw


def read_token_file(file: Path, dtype: str | None) -> TokenFile:
    """The tokens of a file; dtype: training.token_dtype, for arrays without a header. Raises ConfigError."""
    reader = reader_of(file)
    return read_raw(file, str(dtype)) if reader is read_raw else reader(file)


def check_raw(file: Path, dtype: str | None, vocab_size: int) -> None:
    """Raises ConfigError if the bytes of an array without a header are not of this type, judged by its first MiB."""
    size, likely = file.stat().st_size, None
    for name in ("int64", "uint32", "uint16"):  # two tokens of 2 bytes, read as one of 4 bytes, are a very large id
        tokens = np.fromfile(file, f"<{name[0]}{np.dtype(name).itemsize}", (1 << 20) // np.dtype(name).itemsize)
        if size % tokens.itemsize == 0 and 0 <= tokens.min() <= tokens.max() < vocab_size:
            likely = name
            break
    use = f'"{likely}" fits its bytes' if likely else f"no type gives ids below the tokenizer's {vocab_size:,}"
    given = f'{file}: training.token_dtype = "{dtype}": {size:,} bytes'
    if dtype is None:
        beside = ", or put the .idx of Megatron-LM beside it" if ending(file) == ".bin" else ""
        raise ConfigError(f"{file}: tokens without a header: set training.token_dtype ({use}){beside}")
    if size % np.dtype(dtype).itemsize:
        raise ConfigError(f"{given} are no whole number of tokens; {use}")
    if likely and np.dtype(likely).itemsize != np.dtype(dtype).itemsize:
        raise ConfigError(f"{given} of other tokens; {use}")


def check_ids(segment: Segment, most: int, table: str) -> None:
    """Raises ConfigError, with the words about the table, if a file has ids that a table of `most` tokens lacks."""
    if segment.largest and segment.largest[0] >= most:
        number, place = segment.largest
        raise ConfigError(f"{segment.path}: token {place:,} has the id {number:,}, but {table}")


@dataclass(frozen=True)
class TokenSpec(DataSpec):
    """Token files to read."""

    token_dtype: str | None = field(default=None, kw_only=True)
    """training.token_dtype"""

    endings = (".arrow", ".bin", ".npy")
    keeps_tokens = False

    def files(self) -> list[Path]:
        """The files of tokens. Raises ConfigError as find_files does, or if files are missing or of several splits."""
        given = Path(self.path)
        paired = self.path.removesuffix(".idx") + ".bin"
        if (ending(given) == ".idx" or not given.exists()) and Path(paired).is_file():
            raise ConfigError(f"data {self.path}: name the file of tokens: {paired}")
        found = find_files(self.path, self.endings)
        if given.is_dir():
            indices = sorted({index for folder in {file.parent for file in found} for index in folder.glob("*.idx")})
            check_inside(given, indices)
            named = {*found}
            if alone := [index for index in indices if index.with_suffix(".bin") not in named]:
                raise ConfigError(f"{alone[0]}: its .bin is missing or empty: copy it again, or remove the index")
        folders = {index.parent for file in found if (index := file.with_suffix(".idx")).exists()}
        for file in found:
            if ending(file) == ".bin" and file.parent in folders and not file.with_suffix(".idx").exists():
                raise ConfigError(f"{file}: its .idx is missing; other files of the folder have one")
        for folder in sorted({file.parent for file in found if ending(file) == ".arrow"}):
            whole = folder.parent / "dataset_dict.json"
            splits = {file.parent.name for file in found if file.parent.parent == folder.parent}
            if whole.exists() and len(splits) > 1:
                raise ConfigError(f"{folder.parent}: has the splits {', '.join(sorted(splits))}: name one, as {folder}")
            if (state := folder / "state.json").exists():  # other files are results of `map`
                try:
                    shards = {folder / each["filename"] for each in read_json(state)["_data_files"]}
                except (ValueError, KeyError, TypeError):
                    raise ConfigError(f"{state}: not the state of a dataset: save it again by save_to_disk") from None
                if given.is_dir() and (lacking := sorted(shards - {*found})):
                    raise ConfigError(f"{lacking[0]}: is missing or empty, but {state.name} names it: copy it again")
                found = [file for file in found if file.parent != folder or file in shards]
        return found

    def unread(self) -> Unread | None:
        """Compressed token files. Texts beside token files are what the tokens were made from."""
        left = unread_files(self.path, self.endings)
        files = [file for file in left.files if ending(Path(file.stem)) in self.endings] if left else []
        size = sum(file.stat().st_size for file in files)
        return replace(left, files=files, size_bytes=size, remedy="decompress them") if left and files else None

    def parts(self, file: Path) -> list[Path]:
        return [file, file.with_suffix(".idx")] if reader_of(file) is read_megatron else [file]

    def settings(self) -> tuple[str, ...]:
        return (_FORMAT, str(self.token_dtype), fingerprint(self.tokenizer_path, self.separator))

    def documents(self, file: Path) -> Iterator[Any]:
        """No document is text; raises ConfigError if the file cannot be read."""
        self._read(file, load_tokenizer(self.tokenizer_path, self.separator).vocab_size)
        return iter(())

    def _read(self, file: Path, vocab_size: int) -> TokenFile:
        if reader_of(file) is read_raw:
            check_raw(file, self.token_dtype, vocab_size)
        return read_token_file(file, self.token_dtype)

    def tokenize(
        self, files: list[Path], folder: Path, name: str, pool: ProcessPoolExecutor, workers: int
    ) -> dict[str, Any]:
        """Writes the document ends, after reading all tokens once. Raises ConfigError for a file that is not whole.

        The pool gets no task, and so starts no process.
        """
        tokenizer, started = load_tokenizer(self.tokenizer_path, self.separator), time.perf_counter()
        counts = []
        bar = tqdm(unit=" tokens", unit_scale=True, desc=f"reading {name}", file=sys.stderr)
        with bar, (folder / "documents.bin").open("wb") as ends:
            for file in files:
                found = self._read(file, tokenizer.vocab_size)
                counts.append(_scan(file, found, tokenizer.bos_id, tokenizer.eos_id, ends, bar))
        tokens, documents = (sum(each[column] for each in counts) for column in (0, 1))
        seconds = time.perf_counter() - started
        print(f"read {name}: {tokens:,} tokens in {documents:,} documents, {seconds:.1f} s", flush=True)
        return {"tokens": tokens, "documents": documents, "counts": counts, "skipped_records": []}

    def segments(self, files: list[tuple[Path, Segment]]) -> list[Segment]:
        """Whole files as segments. Raises ConfigError if a file has an id that the tokenizer lacks."""
        most, made = load_tokenizer(self.tokenizer_path, self.separator).vocab_size, []
        table = f"{self.tokenizer_path} has {most:,} tokens: model.hf_assets_path must be the tokenizer of the files"
        for file, cached in files:
            open_ = OpenTokens(
                cached.path, cached.first_document, cached.documents, cached.tokens, self.token_dtype, most
            )
            made.append(Segment(file, 0, cached.tokens, 0, cached.documents, open_, cached.largest))
            check_ids(made[-1], most, table)
        return made


def _scan(file: Path, found: TokenFile, first: int | None, last: int | None, ends: BinaryIO, bar: Any) -> list[int]:
    """Writes the document ends. Returns the number of tokens, the number of documents, the largest id and its place."""
    total = documents = place = 0
    largest = -1
    told = found.ends is not None
    if found.ends is not None:
        documents = sum(ends.write(part.astype(np.int64).tobytes()) for part in found.ends()) // 8
    elif first == last and len(found.tokens) and isinstance(found.tokens, np.ndarray):
        # GPT-2's token stands before each document in files of llm.c, and after it in files of nanoGPT and OLMo.
        is_first = first in (None, found.tokens[0]) or found.tokens[-1] != first
        first, last = (first, None) if is_first else (None, last)
    written = 0
    for piece in found.pieces():
        if piece.min() < 0:
            raise ConfigError(f"{file}: token {total + int(piece.argmin()):,} has the id {piece.min()}")
        if piece.max() > largest:
            largest, place = int(piece.max()), total + int(piece.argmax())
        if not told:
            after = np.flatnonzero(piece == last) + 1 if last is not None else np.empty(0, np.int64)
            before = np.flatnonzero(piece == first) if first is not None else np.empty(0, np.int64)
            new = total + np.union1d(after, before).astype(np.int64)
            new = new[new > written]  # the last document may have ended with the last piece
            if len(new):
                written = int(new[-1])
                documents += ends.write(new.tobytes()) // 8
        total += len(piece)
        bar.update(len(piece))
    if not told and written < total:
        documents += ends.write(np.int64(total).tobytes()) // 8
    return [total, documents, largest, place]


@dataclass(frozen=True)
class OpenTokens:
    """Opens a token file, whose document ends are in a cache."""

    cache: Path
    first_document: int
    documents: int
    tokens: int
    token_dtype: str | None
    vocab_size: int

    def __call__(self, file: Path) -> MappedTokens:
        """Raises ConfigError if the file or the cache is no longer as it was."""
        found = MappedTokens()
        try:
            found.tokens = read_token_file(file, self.token_dtype).tokens  # type: ignore[assignment]
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{file}: changed since it was read: {error}: start again") from None
        found.vocab_size = self.vocab_size
        if len(found.tokens) != self.tokens:
            raise ConfigError(f"{file}: {len(found.tokens):,} tokens, but it had {self.tokens:,}: start again")
        ends = self.cache / "documents.bin"
        if ends.stat().st_size < 8 * (self.first_document + self.documents):
            raise ConfigError(f"{ends}: too short: remove {self.cache} to read the files again")
        found.document_ends = np.memmap(ends, np.int64, "r", 8 * self.first_document, (self.documents,))
        return found


def summary(segments: Sequence[Segment]) -> str:
    """Files, tokens, documents and largest id of token files, in a line."""
    kinds = sorted({READERS[reader_of(segment.path)] for segment in segments})
    tokens, documents = (sum(getattr(each, name) for each in segments) for name in ("tokens", "documents"))
    largest = max(segments, key=lambda segment: segment.largest)
    return (
        f"{len(segments):,} files ({', '.join(kinds)}): {tokens:,} tokens in {documents:,} documents; largest id "
        f"{largest.largest[0]:,} ({largest.path}, token {largest.largest[1]:,})"
    )
