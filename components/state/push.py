"""Uploads exported weights to the Hugging Face hub, and asks the hub before a run whether it would take them.

python -m components.state push FOLDER org/name            any export, at any time
"""

import shlex
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from components.config import ConfigError, JobConfig, mistake
from components.data.hub import first_line, is_of_network
from components.data.store import within

_ANSWER_SECONDS = 10.0
"""Time for the hub to answer before a run."""
_REPLACED = ("*.safetensors", "*.json", "*.jinja", "*.model")
"""Files of an earlier upload that a new one removes if it does not have them; others may be a person's."""


def check_push(config: JobConfig) -> str:
    """A line that says who may write checkpoint.hf_repo; empty if the run uploads nothing.

    Raises ConfigError if the hub would refuse the upload. Raises OSError if the hub gives no answer, which is no reason
    to refuse a run, because its weights stay on the disk and can be uploaded later.
    """
    checkpoint = config.checkpoint
    if not checkpoint.hf_repo:
        return ""
    try:
        return within(partial(_allowed, checkpoint.hf_repo, checkpoint.hf_repo_private), _ANSWER_SECONDS)
    except ConfigError as error:
        raise ConfigError(mistake(config, "checkpoint.hf_repo", str(error))) from None


def _allowed(repository: str, private: bool) -> str:
    """As check_push; leaves no trace on the hub."""
    from huggingface_hub import HfApi, errors, get_token, is_offline_mode

    if is_offline_mode():
        raise ConfigError("HF_HUB_OFFLINE forbids the upload: unset it, or leave checkpoint.hf_repo out")
    if not get_token():
        raise ConfigError("no token: set HF_TOKEN to one that may write, or run `hf auth login`")
    api = HfApi()
    try:
        try:
            _check_visibility(repository, api.model_info(repository).private, private)
            api.auth_check(repository, write=True)
            return f"{repository} is there, and the token may write it"
        except errors.RepositoryNotFoundError:
            return _may_make(repository, api.whoami(), private)
    except errors.HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise ConfigError(f"the token may not write there: {first_line(error)}") from None
        raise OSError(f"{repository}: the hub gave no answer: {first_line(error)}") from None
    except Exception as error:
        if is_of_network(error):
            raise OSError(f"{repository}: the hub cannot be reached: {first_line(error)}") from None
        raise


def _may_make(repository: str, who: dict, private: bool) -> str:
    """A line about a repository that is to be made. Raises ConfigError if the token may not make it.

    who: the hub's answer to whoami. A fine-grained token is taken, because the answer does not list all of its rights.
    """
    role = who.get("auth", {}).get("accessToken", {}).get("role")
    spaces = [who["name"], *(org["name"] for org in who.get("orgs", ()))]
    if role == "read":
        raise ConfigError(f"the token of {who['name']} may only read: make one that may write")
    if role != "fineGrained" and repository.partition("/")[0] not in spaces:
        raise ConfigError(f"the token of {who['name']} may write to {', '.join(spaces)}")
    return f"{repository} will be made, {'private' if private else 'public'}, by {who['name']}"


def _check_visibility(repository: str, is_private: bool | None, private: bool) -> None:
    """Raises ConfigError if a repository that is there is public and should be private, or the other way round."""
    if bool(is_private) != private:
        words = "public: to upload there, use hf_repo_private = false, or --public of `push`"
        if not private:
            words = "private: to upload there, use hf_repo_private = true, or leave --public of `push` out"
        raise ConfigError(f"{repository} is {words}")


def push(folder: Path, repository: str, private: bool) -> str:
    """Upload the files of an export in one commit, so that nobody sees half a model; returns the commit's address.

    Makes the repository if it is not there. Files of an earlier upload are replaced, and removed if the export lacks
    them. Raises ConfigError if the folder is no export, or if the hub does not take the upload.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    files = {file.name: file for file in sorted(folder.glob("[!.]*")) if file.is_file()}
    if not {"config.json", "adapter_config.json"} & {*files} or not any(
        name.endswith(".safetensors") for name in files
    ):
        raise ConfigError(f"{folder}: no exported weights there; python -m components.state export RUN {folder}")
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        info = api.model_info(repository)
        _check_visibility(repository, info.private, private)
        old = {file.rfilename for file in info.siblings or ()} - {*files}
        gone = sorted(name for name in old if "/" not in name and any(fnmatch(name, each) for each in _REPLACED))
        operations: list[Any] = [
            *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in files.items()),
            *(CommitOperationDelete(path_in_repo=name) for name in gone),
        ]
        return api.create_commit(repository, operations, commit_message="Upload weights with Meshwright").commit_url
    except ConfigError:
        raise
    except Exception as error:  # of the hub, of a transport, of a thread of the library: the reader acts alike
        raise ConfigError(f"{repository}: {first_line(error.__cause__ or error)}") from error


def push_last(folder: Path, repository: str, private: bool) -> None:
    """push at the end of a run: a failure is told, with the command that uploads later, and is no error of the run."""
    words = [
        "python",
        "-m",
        "components.state",
        "push",
        str(folder.absolute()),
        repository,
        *["--public"] * (not private),
    ]
    # This comes first, because a signal ends the process at once.
    print(f"uploading {folder} to {repository}; if this is interrupted: {shlex.join(words)}", flush=True)
    try:
        print(f"uploaded: {push(folder, repository, private)}", flush=True)
    except ConfigError as error:
        print(f"not uploaded: {error}\nThe weights are in {folder}. To upload them: {shlex.join(words)}", flush=True)
