"""One worker of a cluster: a child process of this one, or one that runs elsewhere and is called at its address.

It owns the child process, and knows nothing of what the worker holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.cluster.placement import WorkerPlace
from services.messages.description import Role
from services.processes.launch import Launch
from services.processes.worker_process import WorkerProcess
from services.rpc.peers import Peers


class Member:
    """A worker at a place. Use `start`, then `address`, and in any case `stop`.

    roles: what a child process is to offer. process: the child; None before `start`, and where it runs elsewhere.
    """

    def __init__(self, place: WorkerPlace, roles: Sequence[Role]) -> None:
        self.place = place
        self.roles: Sequence[Role] = roles
        self.process: WorkerProcess | None = None
        self._last_address = place.address

    @property
    def address(self) -> str:
        """Where the worker is called, once it has been started; while it is started again, where it was before."""
        address = self._last_address if self.process is None else self.process.address
        assert address is not None, "start() comes first"
        return address

    async def start(self, launch: Launch, peers: Peers, wait_s: float = 0.0) -> None:
        """Start the child unless it runs; a worker elsewhere is called for so many seconds, until it answers.

        Raises what `WorkerProcess.start` raises.
        """
        if self.place.devices is None:
            if wait_s:
                await peers.awaited(self.address, wait_s)
        elif self.process is None:
            self.process = WorkerProcess(self.place.devices, self.roles, launch, self.place.memory)
            await self.process.start()

    async def stop(self) -> None:
        """End the child, if there is one. Safe to call twice; `start` may follow."""
        process = self.process
        if process is not None:
            self._last_address = process.address
            await process.stop()
            # Not before: who is cancelled here leaves it to the next one who stops it. Another one may run by now.
            if self.process is process:
                self.process = None
