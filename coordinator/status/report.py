"""The state of a server as /v1/status reports it: one form for the page, the command line and other programs.

Sizes are in bytes, shares from 0 to 1, layer ranges half-open.
"""

from __future__ import annotations

from pydantic import BaseModel

DRAIN_PATH = "/v1/drain"
"""Where a running server is asked to have another worker take one's place."""


class Drained(BaseModel):
    """What /v1/drain came to.

    worker: what the worker was called. to: where the one is that has its place. prefixes: how many kept prefixes were
    copied, those of answers that ran among them. paused_ms: how long answers waited. computed_anew: how many came to no
    end of a step in time, and are computed anew where they have come to.
    """

    worker: str
    to: str
    prefixes: int
    paused_ms: float
    computed_anew: int


class DeviceStatus(BaseModel):
    """Sizes are 0 where the system doesn't say."""

    name: str
    product: str
    total_bytes: int
    free_bytes: int


class LayerBounds(BaseModel):
    first: int
    last: int


class Memory(BaseModel):
    """What a worker holds: weights, caches of open sessions, kept prefixes.

    host_weight_bytes: of experts in the host's memory beside a GPU, which weight_bytes does not count. pool_bytes: the
    most that pages of keys and values may take, of sessions and of prefixes on the devices; of them pool_used_bytes are
    in use.
    """

    weight_bytes: int
    host_weight_bytes: int
    session_bytes: int
    snapshot_bytes: int
    snapshot_budget_bytes: int
    pool_bytes: int
    pool_used_bytes: int


class Batches(BaseModel):
    """The steps that a stage computed in the last seconds, and how many rows and sessions each had on average."""

    steps: int
    rows: float
    sessions: float


class Shares(BaseModel):
    """Where the time of the last minute's decode steps went, seen from one worker: computing (busy, and drafting, which
    is the part of it that the draft took), messages between it and the one above (wire), and waiting for others."""

    busy: float
    drafting: float
    wire: float
    wait: float


class Versions(BaseModel):
    flashsplit: str
    torch: str
    python: str


class WorkerStatus(BaseModel):
    """One worker. error: why it could not be asked now; then the rest is what it said last.

    name: "stage 0", "draft" or "prefill drafter". layers: of the target. draft: whether the draft is here. load: share
    of the last seconds in which its devices had work. shares: null where no decode step ran. batches: null where no
    step ran lately, and for other workers than stages.
    """

    name: str
    address: str
    host: str
    device: str
    devices: list[DeviceStatus]
    process_id: int
    error: str | None
    layers: LayerBounds | None
    draft: bool
    memory: Memory
    sessions: int
    load: float
    shares: Shares | None
    batches: Batches | None
    versions: Versions


class EdgeStatus(BaseModel):
    """A connection down the chain, and what tensors and token ids travelled on it.

    step_ms: what a decode step of the last minute spent there, both ways, on average; null where none ran, and for the
    edge to the draft, whose time is part of the draft's.
    """

    source: str
    to: str
    bytes_per_s: float
    total_bytes: int
    step_ms: float | None


class StandbyStatus(BaseModel):
    """A worker that waits to take the place of a lost stage.

    layers: what it holds; null where it would read a stage's weights first. stages: those that it holds and can replace
    at once. error: why it is not ready, null while it is.
    """

    place: str
    layers: LayerBounds | None
    stages: list[int]
    error: str | None


class Requests(BaseModel):
    """finished: by how they ended, since the server began."""

    running: int
    waiting: int
    max_running: int
    max_waiting: int
    finished: dict[str, int]


class Tokens(BaseModel):
    """Since the server began, and a second over the last seconds."""

    prompt: int
    completion: int
    completion_per_s: float


class Acceptance(BaseModel):
    """What verify steps brought since the server began. block_rows: 1 without a draft.

    kept: how often a verify kept one row, two rows and so on. tokens_per_verify, recent_tokens_per_verify (the last
    minute's): null where none ran.
    """

    block_rows: int
    verifies: int
    draft_tokens: int
    accepted_tokens: int
    kept: list[int]
    tokens_per_verify: float | None
    recent_tokens_per_verify: float | None


class CacheHits(BaseModel):
    requests: int
    tokens: int


class Cache(BaseModel):
    """Prompt tokens that were not computed but taken up, by where they were kept: memory, disk."""

    enabled: bool
    prompt_tokens: int
    hits: dict[str, CacheHits]


class Status(BaseModel):
    """The whole server. version: of the server itself. degraded: why the layers are split over fewer workers than they
    should be, null while they are not."""

    model: str
    aliases: list[str]
    version: str
    uptime_s: float
    ready: bool
    draining: bool
    max_model_len: int
    num_layers: int
    dtype: str
    kv_dtype: str
    requests: Requests
    tokens: Tokens
    acceptance: Acceptance
    cache: Cache
    workers: list[WorkerStatus]
    edges: list[EdgeStatus]
    standbys: list[StandbyStatus] = []
    degraded: str | None = None
