"""The Hugging Face hub: resolves revisions and fetches files. huggingface_hub is imported only inside functions."""

import errno
import glob
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from components.config import ROOT, ConfigError, JobConfig, Training, mistake
from components.config.files import read_json_if_whole, write_json
from components.config.rule import value_of
from components.data.sources import HUB
from components.data.special_tokens import NAMING

FETCHED = ".cache/huggingface/repository.json"
"""File of a fetched folder that names its repository and commit."""
Kind = Literal["model", "dataset"]
_NAME = re.compile(r"(?P<path>[^/:@]+/[^/:@]+)(:(?P<config>[^:@]+))?(@(?P<revision>[^:@]+))?")
_TOKENIZER = ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "*.tiktoken"]
_WEIGHTS = ["config.json", "generation_config.json", "model*.safetensors", "model*.safetensors.index.json"]
_KINDS = ("parquet", "json", "text", "csv", "arrow")
_TRANSPORTS = ("httpx", "httpx2", "httpcore", "requests", "urllib3", "aiohttp")
_PARTS = {"tokenizer": [*_TOKENIZER, *NAMING], "weights": _WEIGHTS}


@contextmanager
def hub_errors(repository: str, kind: Kind, *, remedy: str = "") -> Iterator[None]:
    """Turns errors of the hub into a ConfigError of one line. `remedy` is appended if the hub cannot be reached."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise ConfigError(
            f"{repository} is gated: ask for access at {_page(repository, kind)}, then set HF_TOKEN to a token of yours"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError(
            f"no {kind} {repository} on the hub that you may read; if it is private, set HF_TOKEN to a token of yours"
        ) from None
    except errors.HFValidationError as error:
        raise ConfigError(f"{repository}: not a name of the hub: {first_line(error)}") from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"{repository} has no such revision; see {_page(repository, kind)}/commits/main") from None
    except errors.HfHubHTTPError as error:
        raise ConfigError(f"{repository}: the hub refused: {first_line(error)}") from None
    except (ConnectionError, errors.LocalEntryNotFoundError) as error:
        raise ConfigError(f"{repository}: the hub cannot be reached: {first_line(error)}{remedy}") from None
    except OSError as error:
        if error.errno is None:
            raise ConfigError(f"{repository}: {first_line(error)}") from None
        raise ConfigError(f"{repository}: cannot write: {error.strerror}{_REMEDIES.get(error.errno, '')}") from None
    except Exception as error:
        if not is_of_network(error):
            raise
        raise ConfigError(f"{repository}: the hub cannot be reached: {first_line(error)}{remedy}") from None


_REMEDIES = {
    errno.ENOSPC: "; what is there stays, the same command goes on from it",
    errno.EACCES: "; --into FOLDER names another folder",
    errno.EROFS: "; --into FOLDER names another folder",
}


def is_of_network(error: Exception) -> bool:
    """Whether an error comes from the network or from the hub."""
    from huggingface_hub import errors

    # The type of a connection error depends on the library's transport, which changes between versions.
    is_transport = type(error).__module__.partition(".")[0] in _TRANSPORTS
    hub = (ConnectionError, TimeoutError, errors.HfHubHTTPError, errors.LocalEntryNotFoundError)
    return is_transport or isinstance(error, hub)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _page(repository: str, kind: Kind) -> str:
    return f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{repository}"


def _dataset_revision(repository: str, revision: str | None, key: str, streams: bool) -> str:
    """The commit hash of a dataset's branch, tag or commit (default: main). Raises ConfigError."""
    from huggingface_hub import HfApi

    remedy = (
        f". On a machine with network: python -m components.data fetch {repository} --kind dataset; "
        f'then here {key}_path = "assets/{repository.rpartition("/")[2]}"'
        + ", training.dataset_streaming = true"
        * streams
    )
    with hub_errors(repository, "dataset", remedy=remedy):
        api = HfApi()
        info = api.dataset_info(repository, revision=revision)
        api.auth_check(repository, repo_type="dataset")  # a gated dataset has public information, but private files
        return str(info.sha)


def is_of_hub(training: Training) -> bool:
    """Whether the training data are a dataset of the hub."""
    local = training.dataset_path or training.mixture
    return not local and (training.dataset in HUB or "/" in training.dataset)


def _key(source: int) -> str:
    return f"training.mixture[{source}].dataset" if source else "training.dataset"


def hub_place(config: JobConfig, source: int = 0) -> tuple[str, str | None, str]:
    """(repository, its configuration, commit) of training.dataset, or of the mixture's source with this number.

    Raises ConfigError.
    """
    key = _key(source)
    name = value_of(config, key)
    match = _NAME.fullmatch(HUB.get(name, name))
    if not match:
        reason = 'expected "org/name", "org/name:config" or "org/name:config@revision"'
        raise ConfigError(mistake(config, key, reason))
    streams = not source and config.training.dataset_format == "text"
    try:
        return match["path"], match["config"], _dataset_revision(match["path"], match["revision"], key, streams)
    except ConfigError as error:
        raise ConfigError(mistake(config, key, str(error))) from None


def train_split(path: str, part: str | None, revision: str | None) -> Any:
    """The library's builder of a dataset of the hub, or of a folder. Its config.data_files["train"] are file names.

    Raises ConfigError if the kind of the dataset's files is not supported, or if it has no split "train".
    """
    import datasets

    datasets.disable_progress_bars()
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # it logs what it raises
    builder = datasets.load_dataset_builder(path, part, revision=revision)
    if builder.name not in _KINDS:
        raise ConfigError(f"data {path}: files of the kind {builder.name}; {', '.join(_KINDS)} are read")
    splits = builder.config.data_files or {}
    if "train" not in splits:
        only = ", ".join(map(str, splits))
        raise ConfigError(f'data {path}: the split "train" is read; it has only {only}')
    return builder


def download_split(config: JobConfig, into: Path, source: int = 0) -> Path:
    """Downloads the split train of hub_place into a folder of `into`, which the commit names; returns the folder.

    An interrupted download is continued. Raises ConfigError.
    """
    from huggingface_hub import snapshot_download

    path, part, revision = hub_place(config, source)
    folder = into / f"{path.replace('/', '--')}-{part or 'default'}-{revision}"
    try:
        with hub_errors(path, "dataset"):
            files = train_split(path, part, revision).config.data_files["train"]
            wanted = [glob.escape(file.partition(f"@{revision}/")[2]) for file in files]
            if not all(wanted):
                raise ConfigError(f"{path} names files outside of its repository: download them yourself")
            options: Any = {"repo_type": "dataset", "revision": revision, "allow_patterns": wanted}
            snapshot_download(path, local_dir=folder, **options)
    except (ConfigError, ValueError) as error:  # a ValueError of the library: no such configuration
        raise ConfigError(mistake(config, _key(source), first_line(error))) from None
    return folder


def fetch(repository: str, kind: Kind, only: list[str], revision: str | None, into: Path | None) -> None:
    """Downloads files of a repository into a folder (default: assets/<its name>) and prints the keys to set.

    `only`: names of parts (tokenizer, weights, all) or globs of file names. An interrupted download is continued.
    Raises ConfigError if the hub cannot be reached, has no such files, or the files cannot be written; also if they
    would replace or join files of another origin.
    """
    from huggingface_hub import HfApi, snapshot_download

    folder = into or ROOT / "assets" / repository.rpartition("/")[2]
    with hub_errors(repository, kind):
        api = HfApi()
        info = (api.dataset_info if kind == "dataset" else api.model_info)(repository, revision=revision)
        api.auth_check(repository, repo_type=kind)
        names = sorted(file.rfilename for file in info.siblings or [])
        wanted = _wanted(names, kind, only)
        if not wanted:
            raise ConfigError(f"{repository} has no {' or '.join(only)}; it has {', '.join(names[:20]) or 'no files'}")
        there = [name for name in wanted if (folder / name).exists()] if into else [*folder.glob("[!.]*")]
        if there and read_json_if_whole(folder / FETCHED).get("repository") != repository:
            raise ConfigError(f"{folder}: has files of another origin than {repository}; name another --into")
        (folder / FETCHED).parent.mkdir(parents=True, exist_ok=True)
        write_json(folder / FETCHED, {"repository": repository, "revision": info.sha})
        snapshot_download(repository, repo_type=kind, revision=info.sha, local_dir=folder, allow_patterns=wanted)
    size = sum((folder / name).stat().st_size for name in wanted)
    print(f"{folder}: {len(wanted):,} files of {repository} at {info.sha}, {size / 2**30:,.3f} GiB")
    if "tokenizer.json" in wanted and "tokenizer.model" in {*names} - {*wanted}:
        print("tokenizer.model was left out: tokenizer.json is read")
    if kind == "dataset":
        print(f'training.dataset_path = "{folder}"\ntraining.dataset_streaming = true')
    if kind == "model" and any(name.endswith(".safetensors") for name in wanted):
        print(f'model.flavor = "{folder}"\ncheckpoint.initial_load_in_hf = true')
    elif kind == "model" and _matching(wanted, _TOKENIZER):
        print(f'model.hf_assets_path = "{folder}"')


def _wanted(names: list[str], kind: Kind, only: list[str]) -> list[str]:
    """The file names that `only` selects. Default: tokenizer and weights of a model, all files of a dataset."""
    if "all" in only or not only:
        only = ["tokenizer", "weights"] if kind == "model" else ["*"]
    parts = {part: patterns for part, patterns in _PARTS.items() if part != "tokenizer" or _matching(names, _TOKENIZER)}
    patterns = [pattern for part in only for pattern in parts.get(part, [part])]
    if "tokenizer.json" in names and "tokenizer.model" not in only:  # which may have an unsupported format
        patterns = [pattern for pattern in patterns if pattern != "tokenizer.model"]
    return _matching(names, patterns)


def _matching(names: list[str], patterns: list[str]) -> list[str]:
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]
