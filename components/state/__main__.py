"""A run's saved weights, as a folder that transformers loads."""

import argparse
import sys
from pathlib import Path

import torch

from components.config import ConfigError
from components.launch.ending import run_to_exit
from components.launch.exit_codes import ExitCode
from components.state.folder import find_checkpoint
from components.state.weights import export
from models import meta_model
from parallelize.groups import init_distributed


def main(argv: list[str]) -> int:
    """The command line; returns an exit code. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="python -m components.state", description=__doc__)
    command = parser.add_subparsers(required=True).add_parser("export", help="a run's checkpoint for Hugging Face")
    command.add_argument("run", type=Path, help="a run's dump_folder")
    command.add_argument("folder", type=Path, help="folder to write; must not exist")
    command.add_argument("--step", type=int, help="step of the checkpoint (default: the newest that verifies)")
    command.add_argument("--dtype", default="float32", choices=["float16", "bfloat16", "float32"])
    options = parser.parse_args(argv)
    if options.folder.exists():
        raise ConfigError(f"{options.folder}: is there already")
    init_distributed(300)
    config, checkpoint = find_checkpoint(options.run, options.step)
    model = meta_model(config["model"]["name"], config["model"]["flavor"])
    export(model, checkpoint, options.folder, config["model"]["hf_assets_path"], getattr(torch, options.dtype))
    print(f"{checkpoint} -> {options.folder}")
    return ExitCode.DONE


if __name__ == "__main__":
    run_to_exit(main, sys.argv[1:])
