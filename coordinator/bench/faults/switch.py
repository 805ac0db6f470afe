"""A switch between this process and network namespaces, each of which stands for a host, and a plug that can be pulled.

All of it is within the network namespace of this process, which must not be the machine's own: nothing of that is
touched. The kernel removes everything when the switch is closed, or when this process ends in whatever way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from services.errors import FailedPrecondition

_PROGRAMS = ("ip", "nsenter", "unshare")

_NETWORK, _PREFIX_BITS = "10.91.0", 24
"""Of the hosts' addresses; this process is the first host."""

_OWN = "fs0"
"""What a host, and this process, calls its end of the cable to the switch."""

_SPACE_S = 5.0
"""How long a namespace may take until it is there."""

_HINT = "run it as `unshare --user --map-root-user --net flashsplit bench faults …`"


_NS_GET_USERNS = 0xB701
"""Linux's ioctl that returns which user namespace a namespace belongs to."""

_FIRST_USER_SPACE = 0xEFFFFFFD
"""The number of the user namespace that Linux begins with."""


def why_no_switch() -> str | None:
    """Return why this process cannot have a switch, as a sentence that says what to do; None where it can."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} is missing: install iproute2 and util-linux"
    if not _has_own_network():
        return f"the network here is the machine's own, which is left alone: {_HINT}"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        return f"this user may make no network namespaces: {_HINT}"
    return None


def _has_own_network() -> bool:
    """Return whether this process is surely in a network namespace that was made for it."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/1/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino
    # Where the first process is not to be looked at, the namespace must belong to a user namespace of this user's.
    with Path("/proc/self/ns/net").open("rb") as network:
        try:
            owner = fcntl.ioctl(network, _NS_GET_USERNS)
        except OSError:
            return False
    try:
        return os.fstat(owner).st_ino == os.stat("/proc/self/ns/user").st_ino != _FIRST_USER_SPACE
    finally:
        os.close(owner)


class Switch:
    """Use as a context. Its hosts are counted from 0 in the order of `add_host`.

    Every method raises FailedPrecondition where the kernel or a program refuses it.
    """

    def __init__(self) -> None:
        self._spaces: list[subprocess.Popen[bytes]] = []
        """What keeps the namespaces: the switch's own, then those of the hosts."""

    def __enter__(self) -> Switch:
        try:
            space = self._new_space()
            self._inside(space, "link", "add", "dev", "switch", "type", "bridge")
            self._inside(space, "link", "set", "dev", "switch", "up")
            self._connect(os.getpid(), 0)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *ending: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the switch and its hosts. Safe to call twice."""
        spaces, self._spaces = self._spaces, []
        if spaces:
            # The kernel would do so some time behind the namespaces' end, and another switch may come before. A switch
            # that was never plugged in has none.
            subprocess.run(["ip", "link", "del", "dev", _OWN], capture_output=True, check=False)
        for space in spaces:
            space.kill()
            space.communicate()

    def add_host(self) -> str:
        """Add a host, and return its address."""
        space = self._new_space()
        number = len(self._spaces) - 1
        self._connect(space.pid, number)
        self._inside(space, "link", "set", "dev", "lo", "up")
        return _address(number)

    def on_host(self, number: int) -> list[str]:
        """Return the words to put before those of a program, so that it runs on a host."""
        return ["nsenter", "--target", str(self._spaces[1 + number].pid), "--net", "--"]

    def pull(self, number: int) -> None:
        """Have the switch drop all that goes to a host and comes from it, without telling anybody."""
        self._inside(self._spaces[0], "link", "set", "dev", f"port{number + 1}", "nomaster")

    def plug(self, number: int) -> None:
        """Let a host be reached again. Without effect where it is."""
        self._inside(self._spaces[0], "link", "set", "dev", f"port{number + 1}", "master", "switch")

    def _new_space(self) -> subprocess.Popen[bytes]:
        # It ends when its input does, which this process holds.
        space = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self._spaces.append(space)
        deadline = time.monotonic() + _SPACE_S
        while os.readlink(f"/proc/{space.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            if space.poll() is not None or time.monotonic() > deadline:
                raise FailedPrecondition("no network namespace can be made: unshare --net cat failed")
            time.sleep(0.01)
        return space

    def _connect(self, process_id: int, number: int) -> None:
        """Plug the namespace of a process into the switch."""
        port = f"port{number}"
        switch = self._spaces[0]
        # Made in the switch, so that no name of it is taken elsewhere.
        self._inside(
            switch, *("link", "add", "dev", port, "type", "veth"), *("peer", "name", _OWN, "netns", str(process_id))
        )
        self._inside(switch, "link", "set", "dev", port, "master", "switch", "up")
        own = ["nsenter", "--target", str(process_id), "--net", "--", "ip"]
        _run([*own, "addr", "add", f"{_address(number)}/{_PREFIX_BITS}", "dev", _OWN])
        _run([*own, "link", "set", "dev", _OWN, "up"])

    @staticmethod
    def _inside(space: subprocess.Popen[bytes], *words: str) -> None:
        """Run `ip` in a namespace."""
        _run(["nsenter", "--target", str(space.pid), "--net", "--", "ip", *words])


def _address(number: int) -> str:
    return f"{_NETWORK}.{1 + number}"


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailedPrecondition(f"{' '.join(command)} failed: {done.stderr.strip()}")
