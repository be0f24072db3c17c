"""torchrun's agent (torch.distributed.elastic), which starts and restarts the ranks of a node.

This module implements the four abstract methods of the agent, because torchrun's local agent is unsuitable:
- It kills ranks 30 seconds after one rank has ended, even if they are still saving.
- It signals loader workers too.
- It dies of SIGUSR1.
- It breaks progress bars into lines.
- It always exits with 1.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from components.launch.meeting import Meeting

if TYPE_CHECKING:
    from components.launch.ranks import Ranks
    from components.launch.settings import Settings


def run_agent(ranks: Ranks, settings: Settings) -> None:
    """Starts the ranks, restarts them up to settings.restarts times, and returns when they have ended.

    Errors of the agent are stored in ranks.error. Restarts are counted in rounds, not in failures of one node, so that
    all nodes have the same number of restarts left.
    """
    try:
        meeting = Meeting(settings)
        spec = WorkerSpec(
            role="trainer",
            local_world_size=settings.ranks,
            rdzv_handler=meeting,
            entrypoint=ranks.main,
            args=tuple(ranks.argv),
            max_restarts=settings.restarts,
        )
        try:
            _Agent(spec, ranks, meeting).run()
        finally:
            meeting.shutdown()
    except Exception as error:
        ranks.kill()
        ranks.error = error


class _Agent(SimpleElasticAgent):
    """An agent that starts and watches its ranks through Ranks."""

    def __init__(self, spec: WorkerSpec, ranks: Ranks, meeting: Meeting) -> None:
        super().__init__(spec)
        self._ranks, self._meeting = ranks, meeting

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._ranks.meeting = True
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Starts the ranks with the environment variables that torchrun documents."""
        spec = worker_group.spec
        self._remaining_restarts = max(0, spec.max_restarts + 1 - self._meeting.rounds)
        shared = {
            "MASTER_ADDR": worker_group.master_addr,
            "MASTER_PORT": worker_group.master_port,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "GROUP_RANK": worker_group.group_rank,
            "GROUP_WORLD_SIZE": worker_group.group_world_size,
            "ROLE_NAME": spec.role,
            "TORCHELASTIC_RESTART_COUNT": self._meeting.rounds - 1,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
        }
        variables = {
            worker.global_rank: {
                **shared,
                "RANK": worker.global_rank,
                "LOCAL_RANK": worker.local_rank,
                "WORLD_SIZE": worker.world_size,
                "ROLE_RANK": worker.role_rank,
                "ROLE_WORLD_SIZE": worker.role_world_size,
            }
            for worker in worker_group.workers
        }
        pids = self._ranks.start(variables)
        return {worker.local_rank: pids[worker.global_rank] for worker in worker_group.workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._ranks.running():
            return RunResult(state=WorkerState.HEALTHY)
        if self._ranks.failed():
            if not self._ranks.worth_restarting():
                self._remaining_restarts = 0
            elif self._remaining_restarts:
                self._ranks.report_failure("starting all ranks again")
            return RunResult(state=WorkerState.FAILED)
        return RunResult(
            state=WorkerState.SUCCEEDED, return_values={worker.global_rank: None for worker in worker_group.workers}
        )

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._ranks.kill()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._ranks.kill()
