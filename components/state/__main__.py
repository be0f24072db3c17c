"""Saved checkpoints: list, verify and compare them, write weights as a folder for transformers, and upload a folder."""

import argparse
import sys

import torch
import torch.distributed as dist

from components.config import ConfigError
from components.config.bounds import hub_repository, local_path, path_argument
from components.data.tokenizer import fitting_tokenizer
from components.launch.ending import run_to_exit
from components.launch.exit_codes import ExitCode
from components.state.adapters import export_run, merge, try_card
from components.state.folder import chosen_model, find_checkpoint, separator_of
from components.state.push import push
from components.state.show import diff, ls, open_checkpoint, verify
from models import sizes
from parallelize.groups import init_distributed


def main(argv: list[str]) -> int:
    """The command line; returns an exit code: 1 where verify finds a fault or diff a difference. Raises ConfigError."""
    options = _parser().parse_args(argv)
    if options.command in ("export", "merge") and options.folder.exists():
        raise ConfigError(f"{options.folder}: is there already")
    if options.command == "push":
        print(push(options.folder, options.repository, not options.public))
        return ExitCode.DONE
    if not dist.is_initialized():
        init_distributed(300)
    try:
        return _export(options) if options.command in ("export", "merge") else _show(options)
    except OSError as error:
        raise ConfigError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m components.state", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    exporting = commands.add_parser("export", help="a run's checkpoint for Hugging Face; of adapters, for PEFT")
    merging = commands.add_parser("merge", help="a run's adapters and their base as one model for Hugging Face")
    for command in (exporting, merging):
        command.add_argument("run", type=path_argument, help="a run's dump_folder")
        command.add_argument("--step", type=int, help="step of the checkpoint (default: the newest that verifies)")
        command.add_argument("--tokenizer", type=local_path, help="file or folder (default: the run's)")
        command.add_argument("--dtype", default="float32", choices=["float16", "bfloat16", "float32"])
    exporting.add_argument("folder", type=path_argument, help="folder to write; must not exist")
    merging.add_argument("--to", dest="folder", type=path_argument, required=True, help="as FOLDER of export")
    command = commands.add_parser("push", help="upload a folder that export or merge wrote to the Hugging Face hub")
    command.add_argument("folder", type=path_argument, help="the folder")
    command.add_argument("repository", type=hub_repository, help="org/name; made if it is not there")
    command.add_argument("--public", action="store_true", help="the repository is public (default: private)")
    command = commands.add_parser("ls", help="steps, sizes, when, how many ranks wrote, which branch")
    command.add_argument("run", type=path_argument, help="a run's dump_folder, or a folder of checkpoints")
    command = commands.add_parser("verify", help="compare every file with the size and hash in the manifest")
    command.add_argument("run", type=path_argument, help="a run's dump_folder, or a folder of checkpoints")
    command.add_argument("--step", type=int, help="only this step")
    command = commands.add_parser("diff", help="tensors in which two checkpoints differ")
    command.add_argument(
        "run", type=path_argument, help="a dump_folder (its newest good checkpoint), or a step-N folder"
    )
    command.add_argument("other", type=path_argument, help="likewise")
    return parser


def _show(options: argparse.Namespace) -> int:
    lines, good = [], True
    if options.command == "ls":
        lines = [*ls(options.run)]
    elif options.command == "verify":
        lines, good = verify(options.run, options.step)
    else:
        lines, good = diff(open_checkpoint(options.run), open_checkpoint(options.other))
    print(*lines, sep="\n")
    return ExitCode.DONE if good else ExitCode.ERROR


def _export(options: argparse.Namespace) -> int:
    config, checkpoint = find_checkpoint(options.run, options.step)
    chosen = chosen_model(config)
    merges, adapters = options.command == "merge", chosen.lora
    if merges and not adapters.rank:
        raise ConfigError(f"{options.run}: trained without adapters; use export")
    if options.tokenizer and adapters.rank and not merges:
        raise ConfigError(f"--tokenizer {options.tokenizer}: adapters are written without a tokenizer; leave it out")
    config["model"]["hf_assets_path"] = tokenizer = options.tokenizer or config["model"]["hf_assets_path"]
    if merges or not adapters.rank:  # before anything is written
        fitting_tokenizer(tokenizer, chosen.name, sizes(chosen).vocab_size, separator_of(config))
    write = merge if merges else export_run
    write(config, checkpoint, options.folder, getattr(torch, options.dtype))
    try_card(options.folder, options.run, checkpoint, config)
    said = f", onto the base in {adapters.base}, with which they were trained" if merges and adapters.base else ""
    print(f"{checkpoint} -> {options.folder}{said}")
    return ExitCode.DONE


if __name__ == "__main__":
    run_to_exit(main, sys.argv[1:])
