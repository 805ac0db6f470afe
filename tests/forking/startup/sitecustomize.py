"""Python imports this first wherever tests put its folder into PYTHONPATH: it saves programs their imports.

A process that is about to run `shard_worker` or `coordinator` hands its command line, environment and open files to
that program's fork server (`tests/forking/server.py`), which has the modules imported already and forks the process
that runs. This one passes signals on and ends as that one ends; its name tells that one's id. All other programs,
coordinators with a terminal, and what finds no server start as ever.
"""

from __future__ import annotations

import os
import sys

FOLDER = "FLASHSPLIT_TESTS_FORK_SERVERS"


def _stand_in(path: str) -> None:
    """Have the program forked and wait for it; does not return, unless there is no server."""
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
    with open("/proc/self/comm", "w") as name:
        name.write(f"forked {int.from_bytes(server.recv(8), 'little')}")
    status = int.from_bytes(server.recv(8), "little")
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _is_forked() -> bool:
    program = sys.orig_argv[2:3] if sys.orig_argv[1:2] == ["-m"] else []
    return program == ["shard_worker"] or (program == ["coordinator"] and not any(map(os.isatty, range(3))))


if FOLDER in os.environ and _is_forked():
    _stand_in(f"{os.environ[FOLDER]}/{sys.orig_argv[2]}.sock")
