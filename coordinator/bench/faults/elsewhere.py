"""Workers that run apart from the cluster which they serve, as on other hosts: it calls them, and can neither end nor
start them. Each can be paused, or ended, or cut off from all others, for a time.

It owns the processes of the workers and the directory of their sockets, and the switch that connects them where they
are to be cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from coordinator.bench.faults.cases import Fault, Shape, Site
from coordinator.bench.faults.switch import Switch
from coordinator.cluster.placement import WorkerPlace, threads_each
from services.messages.description import Role
from services.processes.launch import DEFAULT_COMMAND, Launch, vendor_of
from services.processes.scratch import Scratch
from services.processes.worker_process import WorkerProcess
from services.rpc.payload_transport import PayloadTransport

PORT = 7001
"""The TCP port of workers that have an address of their own."""


class Elsewhere:
    """The workers of a cluster of one shape. Use as `async with`; then `addresses`, in the order of `Shape.workers`."""

    def __init__(self, shape: Shape, places: Sequence[WorkerPlace], launch: Launch) -> None:
        """places: the devices of each worker. launch: what the workers have in common."""
        self._launch = replace(launch, threads=launch.threads or threads_each(places))
        self._places, self._sockets = places, Scratch()
        self._switch = Switch() if shape.site is Site.LINKED else None
        self.processes: list[WorkerProcess] = []

    async def __aenter__(self) -> Elsewhere:
        try:
            if self._switch is not None:
                self._switch.__enter__()
            for number in range(len(self._places)):
                self.processes.append(self._process(number))
            await asyncio.gather(*(process.start() for process in self.processes))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def addresses(self) -> list[str]:
        """Where the workers are called."""
        return [process.address for process in self.processes]

    async def close(self) -> None:
        """End the workers. Safe to call twice."""
        await asyncio.gather(*(process.stop() for process in self.processes))
        self._sockets.remove()
        if self._switch is not None:
            self._switch.close()

    def strike(self, address: str, fault: Fault) -> Callable[[], Awaitable[None]]:
        """Pause or end the worker at an address, or cut it off, and return what brings it back; safe to call twice."""
        number = self.addresses.index(address)
        if fault is Fault.CUT:
            switch = self._switch
            assert switch is not None
            switch.pull(number)

            async def plug() -> None:
                switch.plug(number)

            return plug
        process = self.processes[number]
        process_id = process.process_id
        assert process_id is not None
        if fault is Fault.REBOOT:
            os.kill(process_id, signal.SIGKILL)

            async def start_again() -> None:
                if self.processes[number] is process:
                    # Before anything is awaited, so that `close` ends it too.
                    again = self.processes[number] = self._process(number)
                    await process.stop()
                    Path(again.address.removeprefix("unix:")).unlink(missing_ok=True)
                    await again.start()

            return start_again
        os.kill(process_id, signal.SIGSTOP)

        async def go_on() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGCONT)

        return go_on

    def _process(self, number: int) -> WorkerProcess:
        launch, place = self._launch, self._places[number]
        assert place.devices is not None
        # Where it is the same behind an end.
        listen = f"unix:{self._sockets.path / f'{number}.sock'}"
        if self._switch is not None:
            listen = f"{self._switch.add_host()}:{PORT}"
            # Hosts share no memory, and what they say to each other is for nobody else to hear.
            vendor = vendor_of(place.devices)
            words = (*self._switch.on_host(number), *launch.commands.get(vendor, DEFAULT_COMMAND), "--insecure")
            launch = replace(launch, transport=PayloadTransport.STREAM, commands={vendor: words})
        return WorkerProcess(place.devices, (Role.TARGET, Role.DRAFT), launch, place.memory, listen=listen)
