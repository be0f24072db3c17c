"""The rendezvous of launchers, before the first start of ranks and before every restart."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

if TYPE_CHECKING:
    from components.launch.settings import Settings

RUN_ID = "meshwright"


class Meeting(RendezvousHandler):
    """A rendezvous that numbers the nodes and makes a new store for the ranks of each round.

    torch's handler uses one store without a prefix for all rounds. Restarted ranks then find the addresses of dead
    ranks and wait for them (pytorch#135712). torch's handler is used only to let several nodes meet.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises RendezvousConnectionError if this node cannot listen on the endpoint, or cannot reach it."""
        self.rounds = 0
        self._endpoint, self._node_rank = settings.endpoint, settings.node_rank
        self._nodes = get_rendezvous_handler(_parameters(settings)) if settings.nodes > 1 else None
        self._store: dist.TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits until all nodes have joined. Raises RendezvousError if they cannot meet or two have the same number."""
        self.rounds += 1
        if self._nodes is None:
            self._store = _local_store()
            return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(self._store.host, self._store.port))
        met = self._nodes.next_rendezvous()
        number = met.rank if self._node_rank is None else self._node_rank
        if met.store.add(f"node {number}", 1) > 1:
            raise RendezvousError(f"two nodes have the number {number}: set NODE_RANK on all nodes, or on none")
        if number == 0:
            host = socket.getfqdn() if self._node_rank is None else self._endpoint.rpartition(":")[0]
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            met.store.set("ranks meet at", f"{host}:{self._store.port}")
        host, _, port = met.store.get("ranks meet at").decode().rpartition(":")
        return RendezvousInfo(met.store, number, met.world_size, RendezvousStoreInfo(host, int(port)))

    def num_nodes_waiting(self) -> int:
        """Number of nodes that wait for another round, after the loss of a rank or a restart of the node."""
        try:
            return self._nodes.num_nodes_waiting() if self._nodes else 0
        except RendezvousConnectionError:
            return 0  # the launcher at the endpoint is gone; all ranks save and stop, like the ranks of that launcher

    @property
    def use_agent_store(self) -> bool:
        """True, because ranks are clients of the agent's store, which outlives the ranks."""
        return True

    def get_backend(self) -> str:
        return "c10d"

    def get_run_id(self) -> str:
        return RUN_ID

    def is_closed(self) -> bool:
        return self._nodes is not None and self._nodes.is_closed()

    def set_closed(self) -> None:
        if self._nodes:
            self._nodes.set_closed()

    def shutdown(self) -> bool:
        """Closes the rendezvous, so that other nodes end too instead of waiting for this node."""
        return self._nodes is None or self._nodes.shutdown()


def _parameters(settings: Settings) -> RendezvousParameters:
    host: dict[str, Any] = {} if settings.node_rank is None else {"is_host": settings.node_rank == 0}
    return RendezvousParameters(
        backend="c10d",
        endpoint=settings.endpoint,
        run_id=RUN_ID,
        min_nodes=settings.nodes,
        max_nodes=settings.nodes,
        **host,
    )


def _local_store() -> dist.TCPStore:
    """A store on a free port of the loopback interface; a store that torch opens listens on all interfaces."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    host, port = listener.getsockname()
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
