"""`python -m components.data prepare`: tokenize a job's data ahead of time."""

import sys

from components.config import ConfigError, JobConfig, load_config
from components.data.cache import data_spec, prepare
from components.exit_codes import ExitCode


def prepare_all(config: JobConfig) -> None:
    """Make the token caches of training and validation data, where they are not there yet. Raises ConfigError."""
    prepare(data_spec(config.training, config.model.hf_assets_path))
    if config.validation.enable and config.validation.dataset_path:
        prepare(data_spec(config.training, config.model.hf_assets_path, config.validation.dataset_path))


if __name__ == "__main__":
    if sys.argv[1:2] != ["prepare"]:
        sys.exit("usage: python -m components.data prepare --job.config_file FILE [--table.key value ...]")
    try:
        prepare_all(load_config(sys.argv[2:]))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(ExitCode.CONFIG)
