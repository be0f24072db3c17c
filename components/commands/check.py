"""`./run_train.sh --check [usual arguments]`: all that can be known before a run, as a list of ticks and crosses.

Starts no ranks and leaves nothing behind. If a check fails, the others still run, except those that need it.
"""

import datetime
import errno
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path

from components.commands.start import (
    check_devices,
    check_evaluation,
    check_folders,
    check_initial_weights,
    check_prompts,
    output_folders,
    with_recipe,
)
from components.config import ROOT, ConfigError, JobConfig, load_config, mistake, python_path, to_json
from components.config.bounds import is_url
from components.config.files import writable
from components.data.cache import DataSpec, is_made
from components.data.datasets import (
    about,
    mixtures,
    of_source,
    open_datasets,
    source_numbers,
    sources_of,
    spec_of,
    specs_beside,
)
from components.data.hub import hub_place, is_of_hub
from components.data.remote import list_data, remote_data
from components.data.sources import BadRecord, Unread, is_compressed
from components.data.store import Store, within
from components.data.stream import check_stream, is_stream
from components.data.teacher import command
from components.data.tokenizer import check_tokenizer, try_tokenizer, with_rows
from components.launch.exit_codes import ExitCode
from components.launch.settings import Settings, gpus, read_settings, with_variables
from components.observe.trackers import check_trackers, enabled
from components.optim.averages import average_bytes
from components.optim.optimizer import state_bytes
from components.state.folder import steps_in
from components.state.push import check_push
from models import meta_model, sizes
from parallelize.mesh import global_batch_size, resolve_degrees
from parallelize.plan.auto import filled
from parallelize.rules import check_layout, warnings
from parallelize.rules.chosen import resolved

_GIB = 2**30
_APART_SECONDS = 60
"""Clocks of two machines that share a folder may differ by this much."""


class Job:
    """The job under check: its configuration, already found valid, and the settings that would start its ranks."""

    def __init__(self, config: JobConfig, settings: Settings) -> None:
        self.config, self.settings = config, settings
        self.dump = Path(config.job.dump_folder).absolute()
        self.checkpoints = self.dump / config.checkpoint.folder


def layout(job: Job) -> str:
    degrees = resolve_degrees(job.config, job.settings.world_size)
    check_devices(job.config, job.settings, os.environ)
    check_layout(job.config, degrees)
    found = warnings(job.config, degrees, job.settings.ranks, on_cpu=not gpus())
    return "; ".join([f"{degrees}, {degrees.world_size} ranks", *found])


def folders(job: Job) -> str:
    """The folders of the run's outputs can be made and written."""
    check_folders(job.config)
    for key, folder in output_folders(job.config).items():
        there = _nearest(folder.absolute())
        try:
            with tempfile.TemporaryFile(dir=there) as file:
                file.write(b"x")
        except OSError as error:
            raise ConfigError(mistake(job.config, key, f"cannot write in {there}: {error.strerror}")) from None
    return str(job.dump)


def tracking(job: Job) -> str:
    """Trackers are installed, and take their settings."""
    check_trackers(job.config)
    return ", ".join(["metrics.jsonl", *(kind.title for kind in enabled(job.config).values())])


def prompts_and_tasks(job: Job) -> str:
    """Prompts of [samples] and tasks of [evaluation] can be used."""
    check_prompts(job.config)
    check_evaluation(job.config)
    return f"{len(job.config.samples.prompts)} prompts, {len(job.config.evaluation.tasks)} tasks"


def tokenizer(job: Job) -> str:
    model, notes = job.config.model, check_tokenizer(job.config)
    found, most = try_tokenizer(model.hf_assets_path, job.config.training.dataset_separator), sizes(model).vocab_size
    if found > most:
        table = f"{model.name} {model.flavor} has a table of {most}; model.sizes.vocab_size = {found} grows it"
        reason = f"{found} tokens, but {table}"
        raise ConfigError(mistake(job.config, "model.hf_assets_path", reason))
    return "; ".join([f"{found:,} tokens, and a table of {most:,}", *notes])


def data(job: Job) -> str:
    """The data are there, the first record of each file can be read, and a step has sequences for every rank."""
    training = job.config.training
    remote = remote_data(job.config)
    said = [_in_store(job, key, *given) for key, given in remote.items()]
    for key, spec in specs_beside(job.config).items():
        with about(job.config, key):
            said += [] if is_url(spec.path) else [_own(job, spec)]
    if is_stream(training) and not is_url(training.dataset_path):
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
            left = check_stream(job.config)
        return "; ".join(["the first document of the stream was read", *_not_read(left), *said])
    here = [number for number in source_numbers(training) if not is_url(of_source(training, number).dataset_path)]
    found = [_own(job, source=number) for number in here]
    if training.mixture and not any(is_of_hub(of_source(training, number)) for number in here) and not remote:
        found.append(_epochs(job))
    return "; ".join([*found, *said])


def _epochs(job: Job) -> str:
    """How often the run sees each source of a mixture. Raises ConfigError if that is more than max_epochs."""
    specs = [spec_of(job.config, source=number) for number in source_numbers(job.config.training)]
    if not all(is_made(spec, spec.files()) for spec in specs):
        return "epochs are known once all sources are tokenized"
    mixture, _ = mixtures(job.config, sys.maxsize)  # whether tokens fit the model is not asked here
    batch = global_batch_size(job.config, resolve_degrees(job.config, job.settings.world_size))
    return "; ".join(mixture.describe(job.config.training.steps * batch))


def _in_store(job: Job, key: str, url: str, endings: Collection[str]) -> str:
    """About data in a store, which are listed and not copied."""
    try:
        listed = list_data(url, endings)
        left = _not_read(listed.left)
    except ConfigError as error:
        raise ConfigError(mistake(job.config, key, str(error))) from None
    return "; ".join([f"the start copies {len(listed.files):,} files, {listed.size / _GIB:.3f} GiB of {url}", *left])


def _own(job: Job, beside: DataSpec | None = None, source: int = 0) -> str:
    """About the training data of a source, or about the data of a validation."""
    training = job.config.training
    if beside is None and is_of_hub(of_source(training, source)):
        place, part, revision = hub_place(job.config, source)
        return f"the start downloads {place} ({part or 'default'}) at {revision}"
    spec = beside or spec_of(job.config, source=source)
    files, left = spec.files(), _not_read(spec.unread())
    for file in files:
        for document in islice(spec.documents(file), 1):
            if isinstance(document, BadRecord) and not spec.skip_errors:
                raise ConfigError(document.reason)
    size = sum(file.stat().st_size for file in files)
    batch = global_batch_size(job.config, resolve_degrees(job.config, job.settings.world_size))
    if not writable(spec.cache_folder) and not is_made(spec, files):
        reason = f"no permission to write in {spec.cache_folder}, and {spec.path} is not tokenized there yet"
        raise ConfigError(mistake(job.config, "training.dataset_cache", reason))
    said = f"{len(files):,} files, {size / _GIB:.3f} GiB in {spec.path}, tokens in {spec.cache_folder}"
    # A token has at least one byte. The bytes in a compressed file are not known before the file is read.
    known = beside is None and not any(is_compressed(file) for file in files)
    if known and size < training.seq_len:
        raise ConfigError(f"data {spec.path}: {size:,} bytes are less than one sequence")
    if known and not source and size < batch * training.seq_len:
        said += f", less than the {batch} sequences of one step: each is seen several times in it"
    return "; ".join([said, *left])


def _not_read(left: Unread | None) -> list[str]:
    """Tells which data are not read, if any. Raises ConfigError if the unread files have most of the bytes."""
    if left and left.is_most:
        raise ConfigError(f"most of the data is {left}")
    return [str(left)] if left else []


def teacher(job: Job) -> str:
    """The teacher's rows of all data are there."""
    if not job.config.distill.alpha:
        return "none asked for"
    numbers = source_numbers(job.config.training)
    hub = any(is_of_hub(of_source(job.config.training, number)) for number in numbers)
    if hub or remote_data(job.config):
        return "its rows are looked up once the data are here"
    specs = [spec_of(job.config, source=number) for number in numbers]
    if not all(is_made(spec, spec.files()) for spec in specs):
        raise ConfigError(mistake(job.config, "distill.alpha", f"no data are taught yet: {command(job.config)}"))
    trained, _ = open_datasets(job.config, sizes(job.config.model).vocab_size)
    return "; ".join(str(each.teacher) for each in sources_of(trained))


def initial_weights(job: Job) -> str:
    path = job.config.checkpoint.initial_load_path
    if path is None:
        return "none asked for"
    check_initial_weights(job.config)
    if job.config.checkpoint.initial_load_in_hf:
        from components.state.weights import left_out

        return path + left_out(meta_model(job.config.model), Path(path))
    return path


def storage(job: Job) -> str:
    """checkpoint.remote can be listed, written and cleared."""
    url, name = job.config.checkpoint.remote, f".check-{secrets.token_hex(4)}"
    if not url:
        return "no store"
    store = Store(url)

    def ask() -> int:
        steps = {file.partition("/")[0] for file in store.files() if file.endswith("/manifest.json")}
        if not job.config.checkpoint.load_only:
            store.write(name, b"x")
            store.remove(name)
        return len(steps)

    try:
        steps = within(ask)
    except OSError as error:
        raise ConfigError(mistake(job.config, "checkpoint.remote", str(error.strerror))) from None
    written = "" if job.config.checkpoint.load_only else "; a small file was written there"
    return f"{steps:,} checkpoints in {url}{written}"


def upload(job: Job) -> str:
    """checkpoint.hf_repo can be written, or made."""
    try:
        return check_push(job.config) or "no upload"
    except OSError as error:
        raise ConfigError(mistake(job.config, "checkpoint.hf_repo", error.strerror or str(error))) from None


def disk(job: Job) -> str:
    """A checkpoint, and one more that is being written, fit on the disk."""
    checkpoint = job.config.checkpoint
    if not checkpoint.enable or checkpoint.load_only:
        return "no checkpoint is saved"
    model = meta_model(job.config.model, job.config.training.dtype)
    kept = [each for each in model.parameters() if each.requires_grad or not model.adapted]
    size = sum(each.nbytes for each in kept) + state_bytes([model], job.config.optimizer)
    size += average_bytes([model], job.config.averages.ema_decay)
    free = shutil.disk_usage(_nearest(job.checkpoints)).free
    more = checkpoint.keep_latest_k - len(steps_in(job.checkpoints)) + 1
    said = f"{free / _GIB:,.1f} GiB are free, a checkpoint takes {size / _GIB:,.1f} GiB"
    if free < size:
        raise ConfigError(f"{job.checkpoints}: {said}")
    short = checkpoint.keep_latest_k and free < more * size
    return said + (f"; too little for {more} more (checkpoint.keep_latest_k)" if short else "")


def memory(job: Job) -> str:
    """The memory that rank 0 needs in a dry run fits its device."""
    command = [sys.executable, "-P", "-m", "components.commands.dry_run", "--json", to_json(job.config)]
    numbers = {"RANK": "0", "WORLD_SIZE": str(job.settings.world_size), "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **numbers, "PYTHONPATH": python_path()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    try:
        needed = json.loads(done.stdout.splitlines()[-1])["highest"] / _GIB
    except (IndexError, ValueError):
        raise ConfigError((done.stderr.strip().splitlines() or ["the dry run said nothing"])[-1]) from None
    there = _memory_gib(job.settings)
    said = f"rank 0 holds {needed:,.2f} GiB at the highest point, of {there:,.1f} GiB"
    if needed > there:
        raise ConfigError(said)
    return said


def _memory_gib(settings: Settings) -> float:
    """Memory for one rank: all of its GPU's memory, or its share of the memory that is available on this node."""
    if gpus():
        import torch

        sharing = -(-settings.ranks // gpus())
        return torch.cuda.get_device_properties(0).total_memory / _GIB / sharing
    try:
        left = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        left = None
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (int(left[1]) * 1024 if left else pages) / _GIB / settings.ranks


def port(job: Job) -> str:
    """RDZV_ENDPOINT has a free port of this node, or its host name resolves to the address of another node."""
    if not job.settings.endpoint:
        return "one node takes a port that is free"
    if job.settings.joined:
        return f"the launcher of these ranks has {job.settings.endpoint}"
    host, _, number = job.settings.endpoint.rpartition(":")
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host.strip("[]"), int(number), type=socket.SOCK_STREAM)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"RDZV_ENDPOINT = {job.settings.endpoint}: {error}") from None
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            return f"{job.settings.endpoint} is free on this node"
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise ConfigError(f"RDZV_ENDPOINT = {job.settings.endpoint}: {error.strerror}") from None
    with socket.socket(family, kind) as probe:
        probe.settimeout(3)
        answers = probe.connect_ex(address) == 0
    return f"{job.settings.endpoint} is of another node, which {'answers' if answers else 'does not listen yet'}"


def clock(job: Job) -> str:
    """The clock is not before this code was written, and no checkpoint of the run is from the future."""
    now = time.time()
    newest = max([path.stat().st_mtime for _, path in steps_in(job.checkpoints)], default=0)
    said = datetime.datetime.fromtimestamp(now).isoformat(" ", "seconds")
    if now < (ROOT / "train.py").stat().st_mtime - _APART_SECONDS:
        raise ConfigError(f"it is {said}, which is before this code was written")
    if now < newest - _APART_SECONDS:
        raise ConfigError(f"it is {said}, and the newest checkpoint is {newest - now:.0f} s younger")
    return said


CHECKS: dict[str, Callable[[Job], str]] = {
    "layout": layout,
    "folders": folders,
    "tracking": tracking,
    "tokenizer": tokenizer,
    "prompts, tasks": prompts_and_tasks,
    "data": data,
    "teacher": teacher,
    "initial weights": initial_weights,
    "storage": storage,
    "upload": upload,
    "disk": disk,
    "memory": memory,
    "port": port,
    "clock": clock,
}
"""The checks after the check of the configuration, in their order. Each returns its finding, or raises ConfigError."""
NEEDS = {
    **dict.fromkeys(("tokenizer", "data", "initial weights", "disk", "memory"), "layout"),
    "prompts, tasks": "tokenizer",
    "teacher": "data",
}
"""Check -> the check that it needs."""


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest of its parents that is there."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def main(argv: list[str]) -> int:
    """Print a tick or a cross for each check; 0 if there is no cross, else 2."""
    crosses = set()
    try:
        argv = with_recipe(with_variables(argv, os.environ))
        config = resolved(with_rows(load_config(argv)))
        settings = read_settings(config, os.environ)
        job = Job(filled(config, settings.world_size, settings.nodes, bool(gpus())), settings)
        print(f"✓ {'configuration':16} {len(config.origins)} keys are set", flush=True)
    except ConfigError as error:
        print(f"✗ {'configuration':16} " + f"\n{'':19}".join(error.messages))
        return ExitCode.CONFIG
    for name, look in CHECKS.items():
        if NEEDS.get(name) in crosses:
            print(f"- {name:16} not checked: needs {NEEDS[name]}", flush=True)
            continue
        try:
            print(f"✓ {name:16} {look(job)}", flush=True)
        except ConfigError as error:
            crosses.add(name)
            print(f"✗ {name:16} " + f"\n{'':19}".join(error.messages), flush=True)
    return ExitCode.CONFIG if crosses else ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
