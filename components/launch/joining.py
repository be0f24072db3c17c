"""Ranks that another launcher has started: torchrun, accelerate launch, srun, or Ray (docs/launch/ray_train.py).

The environment of such a process is that of one rank. The process then becomes this rank instead of starting ranks.
"""

import os
import re
from collections.abc import Mapping

from components.config import ConfigError
from components.config.environment import wrong
from components.launch import orphan

_NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""torchrun's variables without which a rank cannot meet the other ranks."""
_OF_SLURM = ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
_OF_ACCELERATE = {
    "ACCELERATE_MIXED_PRECISION": ("no", "training.mixed_precision_param"),
    "ACCELERATE_DYNAMO_BACKEND": ("no", "compile.enable"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1", "training.global_batch_size"),
    **dict.fromkeys(
        (f"ACCELERATE_USE_{name}" for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")),
        ("false", "the keys of [parallelism]"),
    ),
}
"""Choices of accelerate launch that would change the run: the value without effect, and the key that replaces them."""


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables of the rank that this process shall become; empty if this process starts ranks itself.

    Raises ConfigError if variables are missing, or contradict those of ./run_train.sh.
    """
    rank = _from_torchrun(environment) or _from_slurm(environment)
    mistakes = _of_accelerate(environment) + (_contradictions(environment, rank) if rank else [])
    if mistakes:
        raise ConfigError(mistakes)
    return rank


def starter(environment: Mapping[str, str]) -> str:
    """The name of the launcher that has started this rank."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return "accelerate launch" if "ACCELERATE_MIXED_PRECISION" in environment else "torchrun"
    return "another launcher" if environment.get("RANK") else "srun"


def _from_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    # Operators of Kubernetes number nodes by RANK and WORLD_SIZE. Only a rank has a LOCAL_RANK too.
    if not environment.get("LOCAL_RANK"):
        return {}
    if missing := [name for name in _NEEDED if not environment.get(name)]:
        reason = f"a rank needs {' and '.join(missing)} too; use torchrun, which sets them, or unset LOCAL_RANK"
        raise ConfigError(wrong(environment, "LOCAL_RANK", reason))
    for number, count in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        words = environment[number], environment[count]
        if not (all(re.fullmatch(r"\d{1,9}", word) for word in words) and int(words[0]) < int(words[1])):
            raise ConfigError(wrong(environment, number, f"expected an integer below {count} = {words[1]}"))
    return {name: environment[name] for name in _NEEDED}


def _from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a task of srun, if srun has started several tasks on a node; each task is then a rank.

    srun alone sets SLURM_STEP_NUM_TASKS: the shells of sbatch and salloc have no rank.
    """
    tasks, nodes = (int(environment.get(f"SLURM_STEP_NUM_{name}") or 1) for name in ("TASKS", "NODES"))
    if tasks == 1 or environment.get("NNODES") == str(tasks) or (tasks == nodes and environment.get("NNODES") == "1"):
        return {}  # each task starts the ranks of a node, of one run or of a run of its own
    if environment.get("NNODES"):
        reason = f"srun has started {tasks} tasks on {nodes} nodes; use --ntasks-per-node=1, or unset NNODES"
        raise ConfigError(wrong(environment, "NNODES", f"{reason} to make each task a rank"))
    if tasks == nodes:
        reason = (
            "one task a node starts the ranks of its node: set NNODES and RDZV_ENDPOINT, as docs/launch/slurm.sbatch, "
            "or NNODES=1 for a run on each node"
        )
        raise ConfigError(wrong(environment, "SLURM_STEP_NUM_TASKS", reason))
    if missing := [name for name in _OF_SLURM if not environment.get(name)]:
        reason = f"a task of srun needs {' and '.join(missing)} too; start it by srun, or unset SLURM_STEP_NUM_TASKS"
        raise ConfigError(wrong(environment, "SLURM_STEP_NUM_TASKS", reason))
    first, each = environment["SLURM_STEP_NODELIST"], environment["SLURM_STEP_TASKS_PER_NODE"]
    job, step = (int(environment.get(name) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_WORLD_SIZE": str(tasks_by_node(each)[int(environment["SLURM_NODEID"])]),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(first),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(20000 + (job + step) % 10000),
    }


def tasks_by_node(text: str) -> list[int]:
    """The number of tasks on each node, of Slurm's "2(x3),1"."""
    words = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word) for word in text.split(",")]
    return [int(word[1]) for word in words if word for _ in range(int(word[2] or 1))]


def first_host(text: str) -> str:
    """The first host of Slurm's "node[07-09,12],login1"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", text)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0]) if first else ""


def _of_accelerate(environment: Mapping[str, str]) -> list[str]:
    """A message for every choice of accelerate launch. A single process that it starts has no variables of a rank."""
    return _set_otherwise(
        environment,
        {
            name: (idle, f"the job file decides: use {key}, and leave out the option of accelerate launch")
            for name, (idle, key) in _OF_ACCELERATE.items()
        },
    )


def _contradictions(environment: Mapping[str, str], rank: Mapping[str, str]) -> list[str]:
    """A message for every variable that the rank would ignore, or that contradicts the launcher."""
    who, local, world = starter(environment), int(rank["LOCAL_WORLD_SIZE"]), int(rank["WORLD_SIZE"])
    refused = {
        "NGPU": (str(local), f"{who} has started {local} ranks on this node; unset NGPU"),
        "NNODES": (str(-(-world // local)), f"{who} has started {world} ranks, {local} on this node; unset NNODES"),
        "NODE_RANK": (environment.get("GROUP_RANK"), f"{who} has numbered the ranks; unset NODE_RANK"),
        "RDZV_ENDPOINT": ("", "the ranks meet at MASTER_ADDR and MASTER_PORT; unset RDZV_ENDPOINT"),
        "MAX_RESTARTS": ("0", f"only {who} can start its ranks again; unset MAX_RESTARTS, and use its own option"),
        "LOG_RANK": ("all", f"{who} shows and logs the output of its ranks; unset LOG_RANK, and use its own option"),
    }
    return _set_otherwise(environment, refused)


def _set_otherwise(environment: Mapping[str, str], refused: Mapping[str, tuple[str | None, str]]) -> list[str]:
    """A message for each variable that has another value than the one without effect."""
    return [
        wrong(environment, name, reason)
        for name, (idle, reason) in refused.items()
        if environment.get(name, "").lower() not in ("", idle)
    ]


def watch_starter(grace_seconds: float) -> dict[str, str]:
    """Environment variables by which a rank notices the end of the process that has started it.

    The rank then saves and stops, as a rank of ./run_train.sh does after the end of its launcher. It has grace_seconds
    for this; the same time holds after a signal, because this rank has no launcher that would kill it.
    """
    try:
        ended = os.pidfd_open(os.getppid())  # readable once the process has ended
    except (AttributeError, OSError):  # a Mac, an old kernel, or a parent outside of this container
        ended, _ = os.pipe()  # never readable
    return {orphan.LAUNCHER_PIPE: str(ended), **orphan.variables("", grace_seconds)}
