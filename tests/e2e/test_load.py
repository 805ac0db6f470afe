"""Many clients at once, some of which vanish: the others get what they get alone, and nothing stays behind."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.server import PAIR, Server, serving

pytestmark = pytest.mark.usefixtures("own_processes")

STORY = "The keeper of the lighthouse counts the ships, and writes each name down. " * 12
CHATS: list[dict[str, Any]] = [
    {"ask": "Calculate 4729 + 3485.", "temperature": 0, "max_tokens": 60},
    {"ask": "Calculate 17 + 4.", "temperature": 0, "max_tokens": 40},
    {"ask": "Hello", "temperature": 1.0, "seed": 5, "max_tokens": 8},
    {"ask": STORY, "temperature": 0, "max_tokens": 4},
    {"ask": STORY + "What does he count?", "temperature": 0.8, "seed": 6, "max_tokens": 24},
]


async def ask(client: openai.AsyncOpenAI, chat: dict[str, Any]) -> str:
    fields = {key: value for key, value in chat.items() if key != "ask"}
    messages: Any = [{"role": "user", "content": chat["ask"]}]
    made = await client.chat.completions.create(model="target", messages=messages, **fields)
    return made.choices[0].message.content or ""


async def stream(client: openai.AsyncOpenAI, chat: dict[str, Any], pieces: int | None = None) -> str:
    """The answer piece by piece; a client that wants only some pieces hangs up then."""
    fields = {key: value for key, value in chat.items() if key != "ask"}
    messages: Any = [{"role": "user", "content": chat["ask"]}]
    text = ""
    async with await client.chat.completions.create(model="target", messages=messages, stream=True, **fields) as chunks:
        async for chunk in chunks:
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            if pieces is not None and (pieces := pieces - 1) <= 0:
                break
    return text


async def crowd(server: Server, clients: int, seconds: float, alone: list[str]) -> tuple[int, int]:
    """Have so many clients ask for so long, each at least once, however slow the machine is. Returns how many answers
    came whole, and how many clients vanished."""
    until, counts = time.monotonic() + seconds, [0, 0]

    async def one(number: int) -> None:
        rng = random.Random(number)
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            for asked in itertools.count():
                if asked and time.monotonic() >= until:
                    return
                index = rng.randrange(len(CHATS))
                if rng.random() < 0.2:
                    endless = CHATS[index] | {"max_tokens": 1000, "temperature": 1.5, "seed": rng.randrange(2**32)}
                    await stream(client, endless, rng.randrange(1, 6))
                    counts[1] += 1
                    continue
                told = await rng.choice([ask, stream])(client, CHATS[index])
                assert told == alone[index]
                counts[0] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(one(number))
    return counts[0], counts[1]


def processes(pid: int) -> list[int]:
    """The process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def held(server: Server) -> dict[str, int]:
    """Bytes in memory and open files of the server and its workers together."""
    pids = processes(server.process.pid)
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    files = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)
    return {"bytes": pages * 4096, "files": files}


async def idle(client: openai.AsyncOpenAI) -> None:
    """Wait until nothing runs, on this server's word, and no worker holds a session or a page of one."""
    async with asyncio.timeout(10):
        while True:
            status = await client.get("/v1/status", cast_to=dict[str, Any])
            requests, workers = status["requests"], status["workers"]
            held = [worker["sessions"] + worker["memory"]["pool_used_bytes"] for worker in workers]
            if not requests["running"] + requests["waiting"] + sum(held):
                return
            await asyncio.sleep(0.05)


async def settled(server: Server) -> dict[str, int]:
    """What is held once connections are closed, of which the server hears a little later than its clients."""
    found = held(server)
    for _ in range(20):
        await asyncio.sleep(0.25)
        last, found = found, held(server)
        if last["files"] == found["files"]:
            break
    return found


@pytest.mark.parametrize(
    ("clients", "seconds"),
    [
        (8, 2),
        pytest.param(16, 3, marks=pytest.mark.slow),
        pytest.param(64, 600, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
    ],
)
async def test_each_gets_its_own_answer(clients: int, seconds: float, tmp_path: Path) -> None:
    """Long and short prompts, greedy and seeded, whole and streamed, one client in five hanging up midway."""
    with serving(
        tmp_path,
        *(*PAIR, "--target-devices", "cpu,cpu", "--dtype", "float32", "--prefix-cache-bytes", "8MiB"),
        *("--max-concurrent-requests", min(16, clients // 2), "--max-waiting-requests", clients),
    ) as server:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as root:
            client = root.with_options(base_url=f"{server.url}/v1")
            alone = [await ask(client, chat) for chat in CHATS]
            # Caches fill and pools grow until here.
            for number in range(8):
                await ask(client, {"ask": f"{number}. {STORY}", "temperature": 0, "max_tokens": 1})
            counts, loads = [], []
            for _ in range(3):
                counts.append(await crowd(server, clients, seconds / 3, alone))
                await idle(root)
                loads.append(await settled(server))
    whole, vanished = map(sum, zip(*counts, strict=True))
    print(f"{whole} answers, {vanished} vanished, held behind each third {loads}")
    assert whole > clients
    assert vanished > clients / 8
    # What is opened once, when it is first needed, is opened in one of the thirds; what leaks does so in each.
    files = [load["files"] for load in loads]
    assert min(files[1] - files[0], files[2] - files[1]) <= 4
    assert loads[2]["bytes"] < loads[0]["bytes"] * 1.1 + 16 * 2**20
