"""Saved checkpoints: list, verify and compare them, write weights as a folder for transformers, and upload a folder."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from components.config import ConfigError
from components.config.bounds import hub_repository, local_path, path_argument
from components.data.tokenizer import fitting_tokenizer
from components.launch.ending import run_to_exit
from components.launch.exit_codes import ExitCode
from components.state.adapters import export_run, merge, open_run, try_card, what
from components.state.folder import chosen_model, find_checkpoint, separator_of
from components.state.merging import METHODS, merge_folders
from components.state.push import push
from components.state.show import diff, ls, open_checkpoint, verify
from components.state.tensors import SavedWeights
from models import sizes
from parallelize.groups import init_distributed


def main(argv: list[str]) -> int:
    """The command line; returns an exit code: 1 where verify finds a fault or diff a difference. Raises ConfigError."""
    options = _parser().parse_args(argv)
    if options.command in _WRITING and options.folder.exists():
        raise ConfigError(f"{options.folder}: is there already")
    if options.command == "push":
        print(push(options.folder, options.repository, not options.public))
        return ExitCode.DONE
    if not dist.is_initialized():
        init_distributed(300)
    try:
        return _WRITING.get(options.command, _show)(options)
    except OSError as error:
        raise ConfigError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m components.state", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    exporting = commands.add_parser("export", help="a run's checkpoint for Hugging Face; of adapters, for PEFT")
    averaging = commands.add_parser("average", help="the mean of the weights in several of a run's checkpoints")
    merging = commands.add_parser("merge", help="a run's adapters and their base, or several folders, as one model")
    for command in (exporting, averaging, merging):
        several: dict[str, Any] = {"nargs": "+", "metavar": "RUN_OR_FOLDERS"} if command is merging else {}
        more = ", or folders in Hugging Face's format of one model" if several else ""
        command.add_argument("run", type=path_argument, help=f"a run's dump_folder{more}", **several)
        command.add_argument("--tokenizer", type=local_path, help="file or folder (default: the run's)")
        command.add_argument("--dtype", default="float32", choices=["float16", "bfloat16", "float32"])
        if command is not averaging:
            command.add_argument("--step", type=int, help="step of the checkpoint (default: the newest that verifies)")
            command.add_argument("--averages", action="store_true", help="the moving average (averages.ema_decay)")
        if command is not exporting:
            command.add_argument("--to", dest="folder", type=path_argument, required=True, help="as FOLDER of export")
    exporting.add_argument("folder", type=path_argument, help="folder to write; must not exist")
    averaging.add_argument("--steps", type=_integers, required=True, help="steps of the checkpoints, as 800,900,1000")
    merging.add_argument("--weights", type=_numbers, help="of folders: their shares, as 0.5,0.5 (default: equal)")
    merging.add_argument("--method", choices=[*METHODS], help="of folders (default: linear)")
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


def _integers(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: expected steps, as 800,900,1000") from None


def _numbers(text: str) -> list[float]:
    try:
        return [float(each) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: expected numbers, as 0.5,0.5") from None


def _export(options: argparse.Namespace) -> int:
    config, checkpoint = open_run(options.run, options.step)
    _prepare(options, config, with_tokenizer=not chosen_model(config).lora.rank)
    weights = SavedWeights([checkpoint], options.averages)
    export_run(config, weights, options.folder, getattr(torch, options.dtype))
    return _told(options, [checkpoint], config, what(config, [], options.averages))


def _average(options: argparse.Namespace) -> int:
    find_checkpoint(options.run, None)
    if len({*options.steps}) < max(2, len(options.steps)):
        raise ConfigError(f"--steps {','.join(map(str, options.steps))}: give two or more different steps")
    found = [open_run(options.run, step) for step in options.steps]
    config, checkpoints = found[0][0], [checkpoint for _, checkpoint in found]
    if chosen_model(config).lora.rank:
        reason = "the product of mean matrices is not the mean of the adapters; merge each step, then merge the folders"
        raise ConfigError(f"{options.run}: has adapters, and {reason}")
    if other := [checkpoint for each, checkpoint in found if each["model"] != config["model"]]:
        raise ConfigError(f"{other[0]}: trained with other contexts or RoPE scaling than {checkpoints[0]}")
    _prepare(options, config, with_tokenizer=True)
    export_run(config, SavedWeights(checkpoints), options.folder, getattr(torch, options.dtype))
    return _told(options, checkpoints, config, what(config, options.steps, averages=False))


def _merge(options: argparse.Namespace) -> int:
    several = len(options.run) > 1
    of_run = {"--step": options.step, "--tokenizer": options.tokenizer, "--averages": options.averages}
    of_folders = {"--weights": options.weights, "--method": options.method}
    given = of_run if several else of_folders
    if wrong := [name for name, value in given.items() if value is not None and value is not False]:
        raise ConfigError(f"{wrong[0]}: belongs to {'one run' if several else 'several folders'}; leave it out")
    if several:
        how = options.weights, options.method or "linear"
        merge_folders(options.run, options.folder, getattr(torch, options.dtype), *how)
        print(f"{', '.join(map(str, options.run))} -> {options.folder}")
        return ExitCode.DONE
    (options.run,) = options.run
    config, checkpoint = open_run(options.run, options.step)
    adapters = chosen_model(config).lora
    if not adapters.rank:
        raise ConfigError(f"{options.run}: trained without adapters; use export")
    _prepare(options, config, with_tokenizer=True)
    merge(config, checkpoint, options.folder, getattr(torch, options.dtype), options.averages)
    said = f", onto the base in {adapters.base}, with which they were trained" if adapters.base else ""
    return _told(options, [checkpoint], config, what(config, [], options.averages), said)


def _prepare(options: argparse.Namespace, config: dict[str, Any], with_tokenizer: bool) -> None:
    """Choose the tokenizer and check it, before anything is written."""
    if options.tokenizer and not with_tokenizer:
        raise ConfigError(f"--tokenizer {options.tokenizer}: adapters are written without a tokenizer; leave it out")
    config["model"]["hf_assets_path"] = tokenizer = options.tokenizer or config["model"]["hf_assets_path"]
    if with_tokenizer:
        chosen = chosen_model(config)
        fitting_tokenizer(tokenizer, chosen.name, sizes(chosen).vocab_size, separator_of(config))


def _told(
    options: argparse.Namespace, checkpoints: list[Path], config: dict[str, Any], averaged: str, said: str = ""
) -> int:
    try_card(options.folder, options.run, checkpoints[-1], config, averaged)
    print(f"{', '.join(map(str, checkpoints))} -> {options.folder}{said}")
    return ExitCode.DONE


_WRITING = {"export": _export, "average": _average, "merge": _merge}
"""Commands that write a folder."""


if __name__ == "__main__":
    run_to_exit(main, sys.argv[1:])
