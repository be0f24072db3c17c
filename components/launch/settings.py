"""Settings of the start of ranks on this node, from environment variables and the layout."""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from components.config import ConfigError, JobConfig
from components.config.environment import wrong
from components.config.keys import FIELDS, describe_type
from components.config.names import UNAVAILABLE_VALUES
from components.launch.joining import rank_variables
from components.launch.process import cores
from parallelize.mesh import minimum_ranks


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one node."""

    ranks: int
    """Ranks on this node."""
    nodes: int = 1
    node_rank: int | None = None
    """None numbers the nodes in the order of their names."""
    endpoint: str = ""
    """host:port where nodes meet; empty for one node, which uses a free port."""
    shown: frozenset[int] | None = frozenset([0])
    """Ranks whose output is shown on the console; None shows all ranks."""
    restarts: int = 0
    shutdown_seconds: int = 300
    """Time from a signal to SIGKILL."""
    joined: int = 0
    """Ranks of all nodes if another launcher has started them, maybe not as many on each node; else 0."""

    @property
    def world_size(self) -> int:
        return self.joined or self.ranks * self.nodes

    @property
    def threads(self) -> int:
        """Threads per rank: this node's cores divided by its ranks, at least 1."""
        return max(1, cores() // self.ranks)


def read_settings(config: JobConfig, environment: Mapping[str, str]) -> Settings:
    """Reads the settings of this node. Raises ConfigError with every wrong variable."""
    mistakes: list[str] = []
    rank = rank_variables(environment)
    joined, local = (int(rank.get(name, 0)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if rank:
        place = {"RDZV_ENDPOINT": f"{rank['MASTER_ADDR']}:{rank['MASTER_PORT']}", "LOG_RANK": "all", "NODE_RANK": ""}
        environment = {**environment, "NGPU": str(local), "NNODES": str(-(-joined // local)), **place}

    def integer(name: str, default: int, least: int, most: float = float("inf")) -> int:
        text = environment.get(name, "") or str(default)
        if re.fullmatch(r"\d{1,9}", text.strip()) and least <= int(text) <= most:
            return int(text)
        allowed = f"an integer of {least} or more" if most == float("inf") else f"an integer from {least} to {most}"
        mistakes.append(wrong(environment, name, f"expected {allowed}"))
        return default

    for name, (idle, ours, remedy) in OTHERS.items():
        if environment.get(name, "") not in ("", idle) and not environment.get(ours):
            mistakes.append(wrong(environment, name, remedy))
    nodes = integer("NNODES", 1, 1)
    ranks = integer("NGPU", 1, 1) if environment.get("NGPU") else _default_ranks(config, nodes)
    node_rank = integer("NODE_RANK", 0, 0, nodes - 1) if environment.get("NODE_RANK") else None
    endpoint = environment.get("RDZV_ENDPOINT", "")
    if nodes > 1 and not endpoint:
        mistakes.append(wrong(environment, "NNODES", "RDZV_ENDPOINT is needed too: host:port of one of the nodes"))
    if endpoint and not environment.get("NNODES"):
        mistakes.append(wrong(environment, "RDZV_ENDPOINT", "NNODES is needed too: how many nodes meet there"))
    if endpoint and not (re.fullmatch(r".+:\d{1,5}", endpoint) and 0 < int(endpoint.rpartition(":")[2]) < 2**16):
        mistakes.append(wrong(environment, "RDZV_ENDPOINT", "expected host:port"))
    integer("TORCH_FR_BUFFER_SIZE", 0, 0)  # torch would end on another value
    # One number per level of nested parallelism. OpenMP would ignore any other value, and use all cores.
    if (value := environment.get("OMP_NUM_THREADS")) and not re.fullmatch(r"[1-9]\d{0,8}(,[1-9]\d{0,8})*", value):
        mistakes.append(wrong(environment, "OMP_NUM_THREADS", "expected an integer of 1 or more"))
    if (value := environment.get("LOGLEVEL")) and value not in logging.getLevelNamesMapping():
        mistakes.append(wrong(environment, "LOGLEVEL", f"expected {' or '.join(logging.getLevelNamesMapping())}"))
    shown, text = None, environment.get("LOG_RANK", "") or "0"
    if text != "all":
        try:
            shown = frozenset(int(word) for word in text.split(","))
        except ValueError:
            shown = frozenset([-1])
        if not mistakes and not all(0 <= rank < ranks * nodes for rank in shown):
            reason = f'expected all, or ranks from 0 to {ranks * nodes - 1} as "0,1"'
            mistakes.append(wrong(environment, "LOG_RANK", reason))
    settings = Settings(
        ranks=ranks,
        nodes=nodes,
        node_rank=node_rank,
        endpoint=endpoint,
        shown=shown,
        restarts=integer("MAX_RESTARTS", 0, 0),
        shutdown_seconds=integer("SHUTDOWN_TIMEOUT_SECONDS", 300, 0),
        joined=joined,
    )
    if mistakes:
        raise ConfigError(mistakes)
    return settings


def with_variables(argv: list[str], environment: Mapping[str, str]) -> list[str]:
    """The options that CONFIG_FILE and COMM_MODE stand for, as in torchtitan, followed by argv, which wins.

    Raises ConfigError for a COMM_MODE that does not exist.
    """
    config_file, mode = environment.get("CONFIG_FILE"), environment.get("COMM_MODE")
    if mode and mode not in ("default", "fake_backend"):
        reason = UNAVAILABLE_VALUES.get(("comm.mode", mode), f"expected {describe_type(FIELDS['comm.mode'])}")
        raise ConfigError(wrong(environment, "COMM_MODE", reason))
    given = (("--job.config_file", config_file), ("--comm.mode", mode))
    return [word for option, value in given if value for word in (option, value)] + argv


OTHERS = {
    "TRAIN_FILE": ("torchtitan.train", "", "train.py is the loop of every recipe: unset it"),
    "TORCHFT_LIGHTHOUSE": ("", "", "torchft is not available: unset it; MAX_RESTARTS starts lost ranks again"),
    "PET_NNODES": ("1", "NNODES", "only torchrun reads it; set NNODES and RDZV_ENDPOINT"),
    "PET_NPROC_PER_NODE": ("", "NGPU", "only torchrun reads it; set NGPU"),
    "OMPI_COMM_WORLD_SIZE": ("1", "NNODES", "mpirun starts one launcher a node: set NNODES, RDZV_ENDPOINT and NGPU"),
    "WORLD_SIZE": ("1", "NNODES", "set NNODES, RDZV_ENDPOINT and NGPU to start ranks, or LOCAL_RANK too to be one"),
}
"""Variables of torchtitan's and torchrun's launchers: the value without effect, the variable that replaces them here,
and the remedy."""


def _default_ranks(config: JobConfig, nodes: int) -> int:
    """Number of GPUs of this node; on CPU the number of ranks that the layout needs, or 2 if any number works.

    If ranks may share GPUs, there are at least as many ranks as the layout needs.
    """
    needed, degrees = minimum_ranks(config), config.parallelism
    any_number = -1 in (degrees.data_parallel_replicate_degree, degrees.data_parallel_shard_degree)
    least = 2 if any_number and needed == 1 else max(1, needed // nodes)
    if config.comm.share_gpus:
        return max(gpus(), least)
    return gpus() or least


def gpus() -> int:
    """Number of CUDA devices that torch can use. Imports torch only if there is a driver."""
    drivers = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
    if not any(os.path.exists(path) for path in drivers) or os.environ.get("CUDA_VISIBLE_DEVICES", "all") == "":
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
