"""How launchers meet before ranks are started, at the start and at every restart: what torch calls a rendezvous."""

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
    """Numbers the nodes, and gives the ranks of each round a store of their own.

    torch's handler gives all rounds one store without a prefix, so that restarted ranks find the addresses of dead ones
    and wait for them (pytorch#135712). Several nodes meet by torch's handler; one node has nobody to wait for.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises RendezvousConnectionError if the endpoint cannot be listened on, or not be reached."""
        self.rounds = 0
        self._endpoint, self._node_rank = settings.endpoint, settings.node_rank
        self._nodes = get_rendezvous_handler(_parameters(settings)) if settings.nodes > 1 else None
        self._store: dist.TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all nodes are there. Raises RendezvousError if they cannot meet, or two have one number."""
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
        """Nodes that ask for another round: theirs has lost a rank, or the node itself was started again."""
        try:
            return self._nodes.num_nodes_waiting() if self._nodes else 0
        except RendezvousConnectionError:
            return 0  # the launcher at the endpoint is gone: all ranks save and stop, as its own do

    @property
    def use_agent_store(self) -> bool:
        """Ranks are clients of the store here, which outlives them."""
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
        """Nodes that still want to meet end too, instead of waiting for this one."""
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
    """A store on a free port that only this machine reaches; torch's own listens on all interfaces."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    host, port = listener.getsockname()
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
