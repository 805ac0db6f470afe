"""Options about workers: which combinations make sense, and what is made of them."""

from __future__ import annotations

import sys

import pytest

from coordinator.cli.options.cluster import ClusterOptions
from coordinator.cluster.placement import WorkerPlace
from services.errors import InvalidArgument
from services.messages.description import FeatureTransport, HeadPlace
from services.model.quantization import Quantization, QuantizedTo
from services.rpc.payload_transport import PayloadTransport
from tests.coordinator.cli.command_line import parse, refusal

PROGRAM = f"hip={sys.executable}"


@pytest.mark.parametrize(
    ("line", "has_draft", "words"),
    [
        ("--features sum", False, ["--features sum", "no effect without --draft"]),
        ("--draft-head projected", True, ["--draft-head projected", "no effect", "--draft-device"]),
        ("--draft-head loaded --target-devices h:1 --draft-device h:1", True, ["--draft-head loaded"]),
        ("--threads 2 --target-devices h:1,g:1", False, ["--threads 2", "no effect", "flashsplit-worker"]),
        ("--gpu-memory-utilization 0.5 --target-devices h:1", False, ["--gpu-memory-utilization 0.5", "no effect"]),
        ("--tls-cert a.pem --target-devices cpu,unix:/a", False, ["--tls-cert a.pem", "no effect", "HOST:PORT"]),
        ("--tls-server-name x", False, ["--tls-server-name x", "no effect"]),
        (f"--worker-command {PROGRAM} --target-devices cpu,h:1", False, ["--worker-command hip=", "--target-devices"]),
        ("--cuda-graphs --target-devices cpu", False, ["--cuda-graphs has no effect without a GPU"]),
        ("--no-cuda-graphs --target-devices cpu,h:1", False, ["--no-cuda-graphs has no effect", "leave it out"]),
    ],
)
def test_options_without_effect_are_refused(line: str, has_draft: bool, words: list[str]) -> None:
    """An option that would change nothing is an error that says what it needs."""
    with pytest.raises(InvalidArgument) as caught:
        parse(ClusterOptions, *line.split()).plan(12, has_draft=has_draft)

    assert all(word in caught.value.message for word in words), caught.value.message
    assert caught.value.where["field"] == words[0].split()[0]


@pytest.mark.parametrize(
    ("line", "has_draft"),
    [
        ("--features slices", True),
        ("--draft-head projected --draft-device cpu", True),
        ("--threads 2 --target-devices h:1,cpu", False),
        ("--threads 2 --target-devices h:1 --draft-device cpu --draft-head loaded", True),
        ("--tls-cert a.pem --target-devices cpu,h:1", False),
        (f"--worker-command {PROGRAM} --target-devices cpu,hip:0", False),
        (f"--worker-command {PROGRAM} --target-devices cpu --draft-device hip:0", True),
        ("--cuda-graphs --target-devices cuda:0,h:1", False),
    ],
)
def test_options_with_effect_are_taken(line: str, has_draft: bool) -> None:
    """The same options where they change something."""
    plan = parse(ClusterOptions, *line.split()).plan(12, has_draft=has_draft)

    assert plan.has_draft is has_draft


def test_a_worker_of_another_kind_counts_where_programs_are_named() -> None:
    """A program for a vendor has an effect on a worker beside the model's, too."""
    options = parse(ClusterOptions, "--worker-command", PROGRAM, "--target-devices", "cpu")

    assert options.plan(12, has_draft=False, beside=[WorkerPlace("hip:0", None)]).draft is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--draft-head shared", "'shared' is not one of 'loaded', 'projected'"),
        ("--features all", "'all' is not one of 'sum', 'slices'"),
        ("--dtype int8", "'int8' is not one of 'float32', 'bfloat16', 'float16'"),
        ("--kv-dtype fp4", "'fp4' is not one of 'auto', 'fp8'"),
        ("--threads 0", "0 is not in the range x>=1"),
        ("--wait-for-workers -1", "-1.0 is not in the range x>=0"),
        ("--payload-transport pipe", "'pipe' is not one of 'auto', 'stream', 'shared'"),
    ],
)
def test_values_that_are_none_are_refused(line: str, words: str) -> None:
    """With the flag, the value and what would be accepted."""
    text = refusal(ClusterOptions, *line.split())

    assert words in text
    assert line.split()[0] in text


def test_what_workers_are_told() -> None:
    """Words of the command line become those of the workers; what is not given is left to them."""
    options = parse(ClusterOptions)
    assert (options.placement.head_place, options.placement.transport) == (HeadPlace.LOADED, FeatureTransport.SUM)
    assert (options.compute.dtype, options.compute.workers_kv_dtype, options.compute.exact) == (None, None, False)
    assert (options.compute.quantization, options.compute.draft_quantization) == (None, None)
    assert options.compute.workers_rope_scaling is None
    launch = options.launch(7)
    assert (launch.threads, launch.cuda_graphs, launch.prefix_cache_bytes) == (None, None, 7)
    assert launch.memory_share is None
    assert (launch.transport, launch.commands) == (PayloadTransport.AUTO, {})

    words = "--draft-head projected --features slices --kv-dtype fp8 --exact --threads 3 --no-cuda-graphs "
    words += "--gpu-memory-utilization 0.7 --quantize int4 --quantize-head --quantize-draft int8"
    more = ("--rope-scaling", '{"rope_type": "linear", "factor": 2}', "--worker-command", PROGRAM)
    options = parse(ClusterOptions, *words.split(), "--payload-transport", "shared", *more)
    assert options.compute.workers_rope_scaling == '{"factor": 2, "rope_type": "linear"}'
    assert (options.placement.head_place, options.placement.transport) == (HeadPlace.PROJECTED, FeatureTransport.SLICES)
    assert (options.compute.workers_kv_dtype, options.compute.exact) == ("float8_e4m3fn", True)
    assert options.compute.quantization == Quantization(QuantizedTo.INT4, ends=True)
    assert options.compute.draft_quantization == Quantization(QuantizedTo.INT8)
    launch = options.launch()
    assert (launch.threads, launch.cuda_graphs, launch.prefix_cache_bytes) == (3, False, None)
    assert launch.memory_share == 0.7
    assert (launch.transport, dict(launch.commands)) == (PayloadTransport.SHARED, {"hip": (sys.executable,)})
