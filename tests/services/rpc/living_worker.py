"""A process with a worker's heartbeats and nothing else. python -m tests.services.rpc.living_worker ADDRESS

It takes lines on its standard input: "compute N" and "sleep N" hold its event loop up for N seconds, with computing and
without; "hold N" holds up all threads of Python, as native code can; "load" asks for the patience that a load is given.
At the start it prints the address.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import sys
import time

from services.net.server import Server
from services.rpc.liveness import Life, LivenessServicer
from services.rpc.peers import Peers


async def _serve(address: str) -> None:
    life = Life()
    server = Server(address, [LivenessServicer(life, Peers()).register])
    ending, loading = asyncio.Event(), contextlib.ExitStack()

    def obey() -> None:
        what, _, seconds = sys.stdin.readline().partition(" ")
        if not what:
            ending.set()
        elif what == "sleep":
            time.sleep(float(seconds))
        elif what == "hold":
            # Of the C library; called so it keeps the interpreter's lock.
            ctypes.PyDLL(None).usleep(round(1e6 * float(seconds)))
        elif what.strip() == "load":
            loading.enter_context(life.patience())
        else:
            until = time.monotonic() + float(seconds)
            while time.monotonic() < until:
                pass

    asyncio.get_running_loop().add_reader(sys.stdin, obey)
    await server.start()
    print(server.address, flush=True)
    await ending.wait()
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
