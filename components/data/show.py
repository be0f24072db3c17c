"""`python -m components.data show`: a row of chats as it will be trained, what all rows or token files hold."""

import html
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from components.config import ConfigError, JobConfig, mistake
from components.config.files import write_page
from components.config.tables import Distill
from components.data.cache import prepare
from components.data.datasets import mixtures, packed, spec_of
from components.data.loader import IGNORED, batch_of
from components.data.rows import ChatRows
from components.data.token_files import summary
from components.data.tokenizer import Tokenizer, load_tokenizer
from components.data.tokens import JoinedTokens
from components.launch.settings import read_settings

_TRAINED, _PLAIN, _DIM, _END = "\033[1;32m", "", "\033[2m", "\033[0m"
_PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<style>body {{ font: 15px/1.5 monospace; max-width: 60em; margin: 2em auto; white-space: pre-wrap }}
b {{ background: #cdeccd }} hr {{ border: 0; border-top: 1px solid #bbb }}</style>
<h1>{title}</h1><p>Trained tokens are marked.</p>{body}
"""


def rows_of(config: JobConfig) -> ChatRows:
    """The training rows of a job. Raises ConfigError if it does not train on chats."""
    if not config.training.has_chats:
        reason = 'only rows of chats, of pairs and token files are shown; use "chat", "preference" or "tokens"'
        raise ConfigError(mistake(config, "training.dataset_format", reason))
    held_out = config.validation.enable and not config.validation.dataset_path
    given = ("train", config.validation.held_out_fraction) if held_out else ()
    found = packed(replace(config, distill=Distill()), prepare(spec_of(config)), config.training.seq_len, *given)
    assert isinstance(found, ChatRows)
    return found


def row_of(rows: ChatRows, number: int, tokenizer: Tokenizer) -> dict[str, list[Any]]:
    """A row as lists: tokens, labels, positions, documents, and the text of each token."""
    if not 0 <= number < len(rows):
        raise ConfigError(f"--row {number}: there are rows from 0 to {len(rows) - 1}")
    batch = batch_of(rows, np.asarray([number]), document_mask=True)
    found = {name: batch[name][0].tolist() for name in ("tokens", "labels", "positions", "document_ids")}
    found["documents"] = found.pop("document_ids")
    return found | {"text": [tokenizer.decode([token]) for token in found["tokens"]]}


def pieces(row: dict[str, list[Any]], tokenizer: Tokenizer) -> list[list[tuple[bool, str]]]:
    """The chats of a row, each as runs of tokens: (whether the run is trained, its text)."""
    found: list[list[tuple[bool, str]]] = []
    labels = [IGNORED, *row["labels"]]
    documents, positions = [*row["documents"], row["documents"][-1]], [*row["positions"], 0]
    tokens = [*row["tokens"], row["labels"][-1]]
    for document in dict.fromkeys(row["documents"]):
        runs: list[tuple[bool, list[int]]] = []
        for at, token in enumerate(tokens):
            if documents[at] == document and positions[at] >= 0 and token != IGNORED:
                trained = labels[at] != IGNORED
                if not runs or runs[-1][0] != trained:
                    runs.append((trained, []))
                runs[-1][1].append(token)
        if runs:
            found.append([(trained, tokenizer.decode(ids)) for trained, ids in runs])
    return found


def histogram(lengths: np.ndarray, bins: int = 10, width: int = 40) -> list[str]:
    """A bar for each range of lengths."""
    counts, edges = np.histogram(lengths, bins=min(bins, int(np.ptp(lengths)) + 1))
    first = np.ceil(edges).astype(int)
    last = [*(first[1:-1] - 1), lengths.max()]
    return [
        f"  {low:>7,} to {high:>7,} {'#' * -(-width * count // counts.max()):{width}} {count:,}"
        for low, high, count in zip(first, last, counts.tolist(), strict=False)
    ]


def statistics(rows: ChatRows) -> list[str]:
    """Lines about all rows."""
    tokens, space = rows.num_tokens, len(rows) * (rows.seq_len + 1)
    lengths = rows.lengths
    lines = [
        f"{len(lengths):,} sequences of chats in {len(rows):,} rows of {rows.seq_len:,} tokens; rows are "
        f"{tokens / space:.1%} full",
        f"{int(rows.labels.sum()):,} of {tokens:,} tokens are trained ({rows.labels.sum() / tokens:.1%})",
        f"tokens of a sequence: median {np.median(lengths):,.0f}",
        *histogram(lengths),
        f"too long: {rows.too_long:,} (chat.too_long: {rows.chat.too_long}); left with no trained token: "
        f"{rows.without_labels:,}",
    ]
    index = json.loads((rows.cache.folder / "index.json").read_text(encoding="utf-8"))
    skipped = index["skipped_records"]
    return [*lines, f"records: {index['records']:,}, skipped: {len(skipped):,}", *skipped[:5]]


def shares(config: JobConfig, width: int = 40) -> list[str]:
    """Lines about a mixture: how often each source is seen, and a bar of the shares in each phase."""
    from parallelize.mesh import global_batch_size, resolve_degrees

    mixture, _ = mixtures(config, sys.maxsize)  # whether tokens fit the model is not asked here
    batch = config.training.global_batch_size
    if batch == -1:
        batch = global_batch_size(config, resolve_degrees(config, read_settings(config, os.environ).world_size))
    lines = mixture.describe(config.training.steps * batch)
    for phase in mixture.shares:
        lines.append(f"from sequence {phase.start:,}")
        for name, weight in zip(phase.names, phase.weights, strict=True):
            share = weight / sum(phase.weights)
            lines.append(f"  {'#' * round(width * share):{width}} {share:7.2%} {name}")
    return lines


def token_files(config: JobConfig) -> list[str]:
    """Lines about token files: what was found, and how the first document begins."""
    tokens, tokenizer = prepare(spec_of(config)), load_tokenizer(config.model.hf_assets_path)
    assert isinstance(tokens, JoinedTokens)
    first = tokens.tokens_at(np.arange(min(32, tokens.num_tokens))[None])[0].tolist()
    return [summary(tokens.segments), f"the first tokens as text: {tokenizer.decode(first)!r}"]


def show(config: JobConfig, number: int | None, as_json: bool, page: Path | None, stats: bool) -> None:
    """Print a row, or write it as a page, or print what all rows hold.

    For a mixture print the shares, and for token files what was found.
    """
    is_mixture = bool(config.training.mixture)
    if is_mixture or config.training.dataset_format == "tokens":
        if number is not None or as_json or page or stats:
            what = "the shares of a mixture" if is_mixture else "what is in token files"
            raise ConfigError(f"show prints {what}: leave out --row, --json, --html and --stats")
        print(*(shares if is_mixture else token_files)(config), sep="\n")
        return
    rows, tokenizer = rows_of(config), load_tokenizer(config.model.hf_assets_path)
    if stats:
        print(*statistics(rows), sep="\n")
        return
    number = number or 0
    row = row_of(rows, number, tokenizer)
    if as_json:
        print(json.dumps(row))
        return
    chats = pieces(row, tokenizer)
    if page:
        body = "<hr>".join(
            "".join(f"<b>{html.escape(text)}</b>" if trained else html.escape(text) for trained, text in chat)
            for chat in chats
        )
        try:
            write_page(page, _PAGE.format(title=f"row {number} of {len(rows):,}", body=body))
        except OSError as error:
            raise ConfigError(f"--html {page}: {error.strerror}") from None
        print(f"written: {page}")
        return
    colours = (_DIM, _TRAINED) if sys.stdout.isatty() else ("", "")
    for chat in chats:
        if colours[0]:
            print("".join(f"{colours[trained]}{text}{_END}" for trained, text in chat))
        else:
            print("".join(f"[[{text}]]" if trained else text for trained, text in chat))
        print("-" * 40)
