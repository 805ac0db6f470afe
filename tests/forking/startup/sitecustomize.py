"""Python imports this first wherever tests put its folder into PYTHONPATH: it saves workers the import of torch.

A process that is about to run `shard_worker` hands its command line, environment and open files to the fork server
(`tests/forking/server.py`), which has torch imported already and forks the worker. This process passes signals on and
ends as the worker ends. All other programs, and workers that find no server, start as ever.
"""

from __future__ import annotations

import os
import sys

ADDRESS = "FLASHSPLIT_TESTS_FORK_SERVER"


def _stand_in(path: str) -> None:
    """Have the worker forked and wait for it; does not return, unless there is no server."""
    import json
    import signal
    import socket

    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(path)
    except OSError:
        return
    files = [number for number in map(int, os.listdir("/proc/self/fd")) if number != server.fileno()]
    files = [number for number in files if os.path.exists(f"/proc/self/fd/{number}")]
    request = json.dumps(
        {"arguments": sys.orig_argv[3:], "folder": os.getcwd(), "environment": dict(os.environ), "files": files}
    ).encode()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    socket.send_fds(server, [len(request).to_bytes(8, "little")], files)
    server.sendall(request)
    for number in files:
        os.close(number)
    status = int.from_bytes(server.recv(8), "little")
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if ADDRESS in os.environ and sys.orig_argv[1:3] == ["-m", "shard_worker"]:
    _stand_in(os.environ[ADDRESS])
