"""`python -m components.data teach RECIPE --teacher FOLDER`: a teacher's likeliest tokens of all of a job's data.

The teacher runs at the job's layout, on the packed sequences that the student sees, with the student's mask. A killed
command goes on where it was.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from components.config import ConfigError, JobConfig
from components.config.model import Model
from components.config.optimizer import Optimizer
from components.config.outputs import Checkpoint
from components.config.tables import ActivationCheckpoint, Balancing, Distill
from components.data.datasets import build_datasets, open_datasets, sources_of
from components.data.loader import batch_of
from components.data.packed import PackedSequences
from components.data.teacher import fill, hash_of_teacher, made_up
from components.data.teacher_rows import Taught
from components.data.tokenizer import load_tokenizer
from components.state.init import give_memory, initialize_weights
from components.state.weights import check_weights, load_weights
from models import meta_model, sizes
from parallelize import parallelize_model
from parallelize.groups import init_distributed, print_on_rank_0
from parallelize.mesh import Mesh, batch_rank, resolve_degrees
from parallelize.precision import set_product_precision
from parallelize.rules import check_device, check_layout
from parallelize.rules.chosen import resolved
from parallelize.runner import build_runner
from parallelize.scores import Scorer
from parallelize.together import together

MADE_UP = "made_up"
"""The hash of a teacher whose rows are made by a hash."""


def job_of_teacher(config: JobConfig, folder: Path) -> JobConfig:
    """The job's data and layout, with the folder's model instead of its own. Raises ConfigError."""
    if not (folder / "config.json").exists():
        of_run = "; a run's weights become such a folder by python -m components.state export"
        reason = "has no config.json, as a folder of Hugging Face's has" if folder.is_dir() else "no such folder"
        raise ConfigError(f"--teacher {folder}: {reason}{of_run if (folder / 'run.json').exists() else ''}")
    chosen = resolved(JobConfig(model=Model(name="", flavor=str(folder.absolute())))).model
    own = config.model
    model = replace(chosen, attention_kernel=own.attention_kernel, hf_assets_path=own.hf_assets_path)
    return replace(
        config,
        model=model,
        distill=Distill(),
        experts=Balancing(),
        optimizer=Optimizer(),
        checkpoint=Checkpoint(),
        activation_checkpoint=ActivationCheckpoint(),
        origins={},
    )


def check_tokens(student: str, teacher: Path) -> None:
    """Raises ConfigError if a token means one text to the student and another to the teacher.

    student: the path of its tokenizer. A folder without a tokenizer is taken to have the student's.
    """
    try:
        theirs = load_tokenizer(str(teacher))
    except ConfigError:
        return print_on_rank_0(f"{teacher} has no tokenizer: its tokens are taken to be those of {student}")
    ours = load_tokenizer(student)
    for token in range(min(ours.vocab_size, theirs.vocab_size)):
        if (here := ours.decode([token])) != (there := theirs.decode([token])):
            raise ConfigError(
                f"--teacher {teacher}: token {token} is {there!r}, and {here!r} in {student}: a teacher needs the "
                "student's tokenizer (model.hf_assets_path)"
            )
    return None


def teach(config: JobConfig, folder: Path) -> list[Path]:
    """teach_on the device of this rank, which joins the others."""
    return teach_on(init_distributed(config.comm.init_timeout_seconds, config.comm.share_gpus), config, folder)


def teach_on(device: torch.device, config: JobConfig, folder: Path) -> list[Path]:
    """Write the rows of a teacher for a job; returns their folders. Called by all ranks. Raises ConfigError."""
    job = job_of_teacher(config, folder)
    degrees = resolve_degrees(job, dist.get_world_size())
    check_layout(job, degrees)
    check_device(job, torch.cuda.get_device_capability(device) if device.type == "cuda" else None)
    vocab_size, top, temperature = sizes(job.model).vocab_size, config.distill.top, config.distill.temperature
    check_tokens(config.model.hf_assets_path, folder)
    teacher = together(lambda: hash_of_teacher(config, folder), first_only=True)[0]
    parts = [source for part in build_datasets(job, vocab_size) if part is not None for source in sources_of(part)]
    # A teacher may have more rows than the tokenizer has tokens, and than the student has rows.
    known = min(vocab_size, *(sequences.cache.vocab_size for sequences in parts))
    if top > known:
        raise ConfigError(f"distill.top = {top}: the teacher knows {known} tokens; use a smaller number")
    set_product_precision(job.training.float32_matmul_precision, device)
    mesh, whole = Mesh(degrees, device.type, job.parallelism.pipeline_first), meta_model(job.model, job.training.dtype)
    check_weights(whole, folder)
    stages = parallelize_model(job.model.name)(whole, mesh, job)
    give_memory(stages, torch.device("cpu") if job.training.enable_cpu_offload else device)
    for stage in stages:
        initialize_weights(stage, stage.init_std, job.debug.seed, device)
    load_weights(stages, folder)
    scorer = Scorer(stages, build_runner(stages, meta_model(job.model).config, mesh, job, device), mesh, job)
    local = job.training.local_batch_size

    def of(sequences: PackedSequences) -> Callable[[np.ndarray], Taught]:
        def score(numbers: np.ndarray) -> Taught:
            own = numbers[batch_rank(mesh) * local :][:local]
            batch = batch_of(sequences, own, job.training.masks_documents)
            found = scorer.of_batch(batch, top, known, temperature)
            ids, logs = (scorer.joined(part).cpu().numpy() for part in (found.ids.int(), found.likeliest.float()))
            return ids, logs

        return score

    folders = []
    named = replace(config, distill=replace(config.distill, teacher_path=str(folder)))
    for sequences in parts:
        first = dist.get_rank() == 0
        given = of(sequences), local * degrees.batch_ranks, lambda action: together(action, first_only=True)[0], first
        folders.append(fill(named, sequences, teacher, known, *given))
        print_on_rank_0(f"taught {len(sequences):,} sequences of {sequences.seq_len} tokens: {folders[-1]}")
    return folders


def make_up(config: JobConfig) -> None:
    """Write made-up rows for a job with a teacher, for proofs of layouts. Each process may call this by itself."""
    if not config.distill.alpha:
        return
    job, vocab_size = replace(config, distill=replace(config.distill, alpha=0.0)), sizes(config.model).vocab_size
    for sequences in (
        source for part in open_datasets(job, vocab_size) if part is not None for source in sources_of(part)
    ):
        known = sequences.cache.vocab_size  # models with more rows share what is made up
        fill(config, sequences, MADE_UP, known, made_up(config.distill.top, known, sequences), 4096)
