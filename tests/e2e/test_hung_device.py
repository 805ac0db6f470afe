"""One thread of a worker, the one that owns its device, is stopped: all others go on, and yet nothing is computed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.net.channel import connect
from tests.e2e.conftest import end, until
from tests.e2e.server import PAIR, Server, get, serving
from tests.e2e.stopped_thread import device_thread, stopped
from tests.e2e.test_recovery import worker

pytestmark = pytest.mark.usefixtures("own_processes")


def ask(server: Server) -> str:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        reply = client.completions.create(model="target", prompt="One, two,", max_tokens=20, temperature=0)
    return reply.choices[0].text


def health(address: str) -> int:
    """What the worker there answers to a health check."""

    async def check() -> int:
        channel = await connect(address, timeout_s=5)
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            return int(answer.status)
        finally:
            await channel.close()

    return asyncio.run(check())


def test_a_hung_device_is_noticed(tmp_path: Path) -> None:
    """Steps have a deadline: requests end with an error that names stage and device, the worker says that it does not
    serve and the server is not ready; when the thread goes on all is as before."""
    process, address = worker(tmp_path, "only"), f"unix:{tmp_path}/only.sock"
    try:
        options = ("--target-devices", address, "--no-prefix-cache", "--no-resume")
        with serving(tmp_path, *PAIR, *options) as server:
            before = ask(server)
            assert ask(server) == before
            with stopped(device_thread(process.pid)):
                with pytest.raises(openai.APIStatusError, match="the device cpu of .* hangs") as refused:
                    ask(server)
                assert refused.value.status_code == 503
                until(lambda: get(f"{server.url}/ready")[0] == 503, 10)
                assert health(address) == health_pb2.HealthCheckResponse.NOT_SERVING
                assert "hangs" in get(f"{server.url}/v1/status")[1]
            until(lambda: get(f"{server.url}/ready")[0] == 200, 40)
            assert health(address) == health_pb2.HealthCheckResponse.SERVING
            assert ask(server) == before
    finally:
        end(process)
