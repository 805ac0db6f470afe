"""A process with a worker's heartbeats and nothing else. python -m tests.services.rpc.living_worker ADDRESS

It takes lines on its standard input: "compute N" and "sleep N" hold its event loop up for N seconds, with computing and
without.
"""

from __future__ import annotations

import asyncio
import sys
import time

from services.net.server import Server
from services.rpc.liveness import Life, LivenessServicer
from services.rpc.peers import Peers


async def _serve(address: str) -> None:
    server = Server(address, [LivenessServicer(Life(), Peers()).register])
    ending = asyncio.Event()

    def obey() -> None:
        what, _, seconds = sys.stdin.readline().partition(" ")
        if not what:
            ending.set()
        elif what == "sleep":
            time.sleep(float(seconds))
        else:
            until = time.monotonic() + float(seconds)
            while time.monotonic() < until:
                pass

    asyncio.get_running_loop().add_reader(sys.stdin, obey)
    await server.start()
    await ending.wait()
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
