"""`python -m components.data prepare` tokenizes a job's data ahead of time, `show` shows a row of chats, `teach`
writes a teacher's probabilities, `fetch` downloads files of the hub.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from components.config import ConfigError, JobConfig, check_rules, load_config
from components.config.bounds import path_argument
from components.config.contradictions import CONTRADICTIONS
from components.data.cache import prepare
from components.data.datasets import about, open_datasets, open_text, source_numbers, spec_of, specs_beside
from components.data.hub import fetch, is_of_hub
from components.data.remote import localize
from components.data.show import show
from components.data.sources import Unread
from components.data.stream import check_stream, is_stream
from components.data.tokenizer import check_tokenizer, with_rows
from components.data.tokenizer import main as tokenizer
from components.launch.exit_codes import ExitCode


def prepare_all(config: JobConfig) -> JobConfig:
    """Makes missing token caches of training and validation data; checks the first document of a stream.

    Prints warnings about the tokenizer, and about files that look like data and are not read. Returns the job, with the
    paths of data that were downloaded instead of URLs and names of the hub, so that ranks need no network. Raises
    ConfigError if the rows of a teacher are missing (distill.alpha), or validation.text_path is too short.
    """
    config = localize(config)
    _warn(*check_tokenizer(config))
    streamed = is_stream(config.training)
    _warn_unread(check_stream(config) if streamed else None)
    trained = [] if streamed else [spec_of(config, source=number) for number in source_numbers(config.training)]
    for spec in trained:
        _warn_unread(spec.unread())
        prepare(spec)
    for key, other in specs_beside(config).items():
        with about(config, key):
            _warn_unread(other.unread())
            prepare(other)
    open_text(config, sys.maxsize)  # a rank knows the number of tokens
    if is_of_hub(config.training) and not streamed:
        config = replace(config, training=replace(config.training, dataset_path=trained[0].path))
    given = zip(config.training.mixture, trained, strict=False)
    sources = [replace(each, dataset="", dataset_path=spec.path) if each.dataset else each for each, spec in given]
    config = replace(config, training=replace(config.training, mixture=sources))
    if config.distill.alpha:
        open_datasets(config, sys.maxsize)
    return config


def _teach(config: JobConfig, folder: Path | None, top: int | None) -> int:
    from components.commands.teach import teach  # imports torch

    if not (folder or config.distill.teacher_path):
        raise ConfigError("--teacher is missing: the folder of the teacher's weights, in Hugging Face's format")
    if top is not None and top < 1:
        raise ConfigError(f"--top {top}: expected 1 or more")
    given, distill = config.distill, replace(config.distill, top=top or config.distill.top)
    # The student's job may get distill.alpha later.
    check_rules(CONTRADICTIONS, replace(config, distill=replace(given, alpha=given.alpha or 0.5)))
    job = localize(with_rows(replace(config, distill=distill)))
    teach(job, folder or Path(str(config.distill.teacher_path)))
    return ExitCode.DONE


def _warn_unread(left: Unread | None) -> None:
    if left:
        _warn(f"data {left}")


def _warn(*warnings: str) -> None:
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m components.data")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prepare", help="--job.config_file FILE [--table.key value ...]", add_help=False)
    showing = commands.add_parser(
        "show", help="a row of chats, what is in token files, a mixture's shares: --job.config_file FILE ..."
    )
    showing.add_argument("--row", type=int, help="number of the row (0)")
    showing.add_argument("--json", action="store_true", help="tokens, labels, positions, documents and text as JSON")
    showing.add_argument("--html", type=path_argument, metavar="FILE", help="write the row as a page")
    showing.add_argument("--stats", action="store_true", help="what all rows hold")
    teaching = commands.add_parser("teach", help="a teacher's probabilities of a job's data: RECIPE --teacher FOLDER")
    teaching.add_argument("recipe", metavar="RECIPE", help="the student's job file; --table.key value overrides it")
    teaching.add_argument("--teacher", type=path_argument, metavar="FOLDER", help="a Hugging Face folder")
    teaching.add_argument("--top", type=int, help="likeliest tokens to keep of each token (distill.top)")
    fetching = commands.add_parser("fetch", help="files of a repository of the Hugging Face hub")
    fetching.add_argument("repository", metavar="REPO", help="org/name; HF_TOKEN opens private and gated ones")
    fetching.add_argument("--kind", choices=["model", "dataset"], default="model")
    fetching.add_argument("--only", nargs="+", default=[], help="tokenizer, weights, all, or globs of file names")
    fetching.add_argument("--revision", help="branch, tag or commit; main if left out")
    fetching.add_argument("--into", type=path_argument, help="folder; assets/NAME if left out")
    commands.add_parser("tokenizer", help="train one on text files, or try one", add_help=False)
    given, rest = parser.parse_known_args(argv)
    if given.command == "prepare":
        prepare_all(load_config(rest))
    elif given.command == "teach":
        from components.launch.ending import run_to_exit

        config = load_config(["--job.config_file", given.recipe, *rest])
        run_to_exit(lambda job: _teach(job, given.teacher, given.top), config)
    elif given.command == "tokenizer":
        tokenizer(rest)
    elif given.command == "show":
        show(localize(load_config(rest)), given.row, given.json, given.html, given.stats)
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    else:
        fetch(given.repository, given.kind, given.only, given.revision, given.into)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(ExitCode.CONFIG)
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on from here")
