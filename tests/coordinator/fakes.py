"""A chain of workers that is a script, and a checkpoint's text side small enough to read: what tests of the coordinator
put in the places of a cluster and a model.

The scripted model says one thing, token by token, whatever it is asked; it keeps the rules of a chain all the same:
one commit for each step, in order, verified draft tokens, proposals only where they were asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from coordinator.answer import Request
from coordinator.cluster.cluster import SnapshotPlace
from coordinator.engine.engine import Engine
from coordinator.text.chat_template import ChatTemplate
from coordinator.text.model_files import ModelFiles
from coordinator.text.tokenizer import Tokenizer
from services.errors import CLOSED, FlashsplitError, NotFound
from services.layers import LayerRange
from services.messages.description import DraftDescription, TargetDescription, WorkerDescription
from services.messages.snapshots import KeptSnapshot, SnapshotOwner
from services.messages.steps import (
    Commit,
    Event,
    Failure,
    FailureReason,
    Forward,
    Location,
    Proposal,
    SessionRest,
    SnapshotPart,
    SnapshotRestore,
    SnapshotRestored,
    SnapshotSave,
    SnapshotSaved,
    StageIdentity,
    StageTiming,
    StepKind,
    StepLimit,
    TokenLogprobs,
)
from services.processes.launch import DEFAULT_LAUNCH
from services.rpc.stage import StageSession
from tests.services.fakes import WORKER

END = 256
"""The id of <|im_end|>; the ids below are bytes."""

START = 257
CONTEXT = 4096
PLACE = Location(0, "alpha", "cpu", "alpha:7001")
CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
HERMES = CHATML + '{#- <tool_call>\n{"name": ... -#}'
"""A template that teaches tool calls in the format of Hermes."""

THINKER = CHATML + "{#- <think> -#}"
"""A template whose model may think first."""


def byte_tokenizer(*special: str) -> Tokenizer:
    """A tokenizer with one token for each byte and two special ones, so that characters may be cut anywhere.

    special: more special tokens.
    """
    alphabet = {character: byte for byte, character in _byte_characters().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>", "<|im_start|>", *special])
    return Tokenizer(backend)


def _byte_characters() -> dict[int, str]:
    """The visible character by which byte-level vocabularies write each byte (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in plain}
    others = [byte for byte in range(256) if byte not in table]
    return table | {byte: chr(256 + index) for index, byte in enumerate(others)}


def model_files(template: str | None = CHATML, *, tokenizer: bool = True) -> ModelFiles:
    """The text side of a checkpoint whose answers end with END."""
    return ModelFiles(
        path=Path("/nowhere/demo"),
        num_layers=12,
        tokenizer=byte_tokenizer() if tokenizer else None,
        chat_template=None if template is None else ChatTemplate(template),
        stop_token_ids=frozenset({END}),
        text_fingerprint="text",
    )


def says(text: str) -> tuple[int, ...]:
    """The tokens by which the model says a text and ends."""
    return (*text.encode(), END)


@dataclass
class Script:
    """What a fake chain does.

    answer: the tokens that follow every prompt; behind its last one END follows for ever. guess: what the draft
    proposes for the token at an index of the answer. failures: what happens instead of the answer to a step, by the
    step's number. hold: while it is there and not set, steps are not answered. open_error: why sessions don't open.
    held: what the stages hold, of which there are so many, once the session rested.
    """

    answer: tuple[int, ...] = says("hello")
    guess: Callable[[int], int] | None = None
    failures: Mapping[int, FlashsplitError | Failure] = field(default_factory=dict)
    hold: asyncio.Event | None = None
    open_error: FlashsplitError | None = None
    logprob: float = -0.5
    held: tuple[int, ...] | None = None

    def token(self, index: int) -> int:
        """The answer's token of this index."""
        return self.answer[index] if index < len(self.answer) else END

    def proposal(self, index: int) -> int:
        """What the draft proposes for it."""
        return self.token(index) if self.guess is None else self.guess(index)

    def block(self, first: int, count: int) -> tuple[int, ...]:
        """What it proposes for so many tokens from that index on."""
        return tuple(self.proposal(first + index) for index in range(count))


class ScriptedSession:
    """A `StageSession` of one stage that says what the script says; `kept` are the snapshots of its worker.

    forwards: the steps that it took, of which `sent` were sent; the others followed by themselves. limits: how far they
    were to follow, one change behind the other.
    """

    stages = (StageIdentity(PLACE, LayerRange(0, 12)),)
    max_tensor_bytes = 64 << 20
    max_feature_slices = 16
    step_lane = None

    def __init__(self, script: Script, opening: Mapping[str, Any], kept: dict[str, int]) -> None:
        self.script, self.opening, self.kept = script, opening, kept
        rest: SessionRest | None = opening.get("rest")
        if rest is not None and rest.token_ids and script.held is not None:
            self.stages = tuple(replace(self.stages[0], held_length=length) for length in script.held)
        self.forwards: list[Forward] = []
        self.restores: list[SnapshotRestore] = []
        self.saves: list[SnapshotSave] = []
        self.closed = self.draft_lost = False
        self.sent = 0
        self.limits: list[StepLimit] = []
        self._following: Forward | None = None
        """The step that begins by itself once the answer to the one before has been read."""
        self._events: asyncio.Queue[Event | FlashsplitError] = asyncio.Queue()

    async def forward(self, forward: Forward) -> None:
        assert self._following is None, "steps still follow by themselves"
        self.sent += 1
        self.limits.append(StepLimit(forward.step + forward.more, forward.propose_tokens))
        self._take(forward)

    async def limit_steps(self, limit: StepLimit) -> None:
        self.limits.append(limit)

    def _take(self, forward: Forward) -> None:
        self.forwards.append(forward)
        event = self.script.failures.get(forward.step)
        if event is not None:
            self._answer(event)
            self.draft_lost = isinstance(event, Failure) and event.reason is FailureReason.DRAFT_LOST
            if not self.draft_lost:
                return
        tokens = self._produced(forward)
        length = forward.base_position + len(forward.token_ids)
        if forward.kind is StepKind.VERIFY:
            length = forward.base_position + len(tokens)
        of_prompt = max(0, min(self.opening["prompt_length"], length) - max(1, forward.base_position))
        commit = Commit(
            forward.step,
            length,
            tokens,
            (StageTiming(1000, 2000),) * len(self.stages),
            self._logprobs(self.opening["logprobs"], len(tokens)),
            prompt_logprobs=self._logprobs(self.opening["prompt_logprobs"], of_prompt),
            propose_tokens=forward.propose_tokens if len(tokens) > forward.least_accepted else 0,
        )
        left = self.opening["max_length"] - length - 1
        followed = forward.more and tokens and tokens[-1] not in self.opening["stop_token_ids"] and left > 0
        self._answer(replace(commit, more=forward.more if followed else 0))
        proposal: tuple[int, ...] = ()
        if commit.propose_tokens:
            first = length + 1 - self.opening["prompt_length"]
            count = 0 if self.draft_lost else forward.propose_tokens
            proposal = self.script.block(first, count)
            self._answer(Proposal(forward.step, proposal, 500))
        if followed:
            block = proposal[: left - 1]
            kind = StepKind.VERIFY if block else StepKind.DECODE
            self._following = Forward(forward.step + 1, length, (tokens[-1], *block), kind)

    def _answer(self, event: Event | FlashsplitError) -> None:
        """Tell what comes of the last step."""
        self._events.put_nowait(event)

    def _follow(self) -> None:
        """Begin the step that follows by itself, if there is one, as it is to be by now."""
        following, self._following = self._following, None
        if following is not None:
            limit = self.limits[-1]
            more = max(0, limit.last_step - following.step)
            self._take(replace(following, propose_tokens=limit.propose_tokens, more=more))

    def _logprobs(self, alternatives: int | None, count: int) -> tuple[TokenLogprobs, ...]:
        """What the script says of so many tokens, which have rank 3."""
        if alternatives is None:
            return ()
        number, ids = self.script.logprob, tuple(range(65, 65 + alternatives))
        return (TokenLogprobs(number, ids, (number,) * alternatives, 3),) * count

    def _produced(self, forward: Forward) -> tuple[int, ...]:
        """The tokens that a step adds to the answer."""
        if forward.kind is StepKind.PREFILL:
            return ()
        rows = forward.token_ids[1:] if forward.kind is StepKind.VERIFY else ()
        behind = forward.base_position + (1 if forward.kind is StepKind.VERIFY else len(forward.token_ids))
        index = behind - self.opening["prompt_length"]
        accepted = 0
        while accepted < len(rows) and rows[accepted] == self.script.token(index + accepted):
            accepted += 1
        return tuple(self.script.token(index + offset) for offset in range(accepted + 1))

    async def save_snapshot(self, save: SnapshotSave) -> None:
        self.saves.append(save)
        self.kept[save.snapshot_id] = save.length
        self._events.put_nowait(SnapshotSaved(save.snapshot_id, save.length, (SnapshotPart(PLACE, 1000, 10),)))

    async def restore_snapshot(self, restore: SnapshotRestore) -> None:
        self.restores.append(restore)
        if self.kept.get(restore.snapshot_id, -1) < restore.length:
            self._events.put_nowait(NotFound("the snapshot is not kept here"))
            return
        self._events.put_nowait(
            SnapshotRestored(restore.snapshot_id, restore.length, (SnapshotPart(PLACE, 1000, 2_000_000),))
        )

    async def events(self) -> AsyncIterator[Event]:
        while True:
            event = await self._events.get()
            if self.script.hold is not None:
                await self.script.hold.wait()
            if isinstance(event, FlashsplitError):
                raise event
            if self._events.empty():
                # Before its answer is heard of: a step that may follow is not taken back any more.
                self._follow()
            yield event

    async def close(self, why: str = CLOSED) -> None:
        self.closed = True


class ScriptedSnapshots:
    """The prefixes that the scripted worker keeps since before its coordinator began: none."""

    async def list_snapshots(self) -> list[KeptSnapshot]:
        return []


class ScriptedCluster:
    """The cluster of one scripted stage, with a draft of blocks of `block_size` rows beside it, or without one."""

    addresses = (PLACE.address,)
    launch = DEFAULT_LAUNCH
    draft_address = None
    exact = False

    def __init__(self, script: Script | None = None, *, block_size: int = 0, vocab_size: int = START + 1) -> None:
        self.script = script or Script()
        target = WORKER.target
        assert target is not None
        described = replace(target, layers=LayerRange(0, 12), vocab_size=vocab_size, max_position=CONTEXT)
        draft = None
        if block_size and WORKER.draft is not None:
            draft = replace(WORKER.draft, block_size=block_size, max_position=CONTEXT, vocab_size=vocab_size)
        self.workers: tuple[WorkerDescription, ...] = (replace(WORKER, target=described, draft=draft),)
        self.target: TargetDescription = described
        self.draft: DraftDescription | None = draft
        self.draft_worker = self.workers[0] if draft is not None else None
        self.alive, self.trouble = True, None
        self.degraded: str | None = None
        self.sessions: list[ScriptedSession] = []
        self.kept: dict[str, int] = {}
        """The lengths of the snapshots that the worker keeps."""
        self.lost_drafts: list[Failure] = []
        """What sessions reported of the draft."""

    def report_lost_draft(self, failure: Failure) -> None:
        self.lost_drafts.append(failure)

    async def open(self, **opening: Any) -> StageSession:
        if self.script.open_error is not None:
            raise self.script.open_error
        self.sessions.append(ScriptedSession(self.script, opening, self.kept))
        return self.sessions[-1]

    async def explain(self, error: FlashsplitError) -> FlashsplitError:
        return error

    def loss(self, index: int) -> str | None:
        """Why a worker cannot be asked how it does: nobody is there."""
        return f"stage {index} is a script"

    def snapshot_places(self, *, with_draft: bool) -> tuple[SnapshotPlace, ...]:
        places = [SnapshotPlace(PLACE.address, SnapshotOwner.STAGE, LayerRange(0, 12), self.target.fingerprint)]
        if with_draft and self.draft is not None:
            places.append(SnapshotPlace(PLACE.address, SnapshotOwner.DRAFT, None, self.draft.fingerprint))
        return tuple(places)

    async def snapshots(self, _address: str) -> ScriptedSnapshots:
        return ScriptedSnapshots()

    @property
    def session(self) -> ScriptedSession:
        """The session that was opened last."""
        return self.sessions[-1]


def engine(script: Script | None = None, *, template: str | None = CHATML, block_size: int = 0, **more: Any) -> Engine:
    """An engine over a scripted cluster, which is its `cluster`."""
    files: ModelFiles = more.pop("files", None) or model_files(template)
    tokens = START + 1 if files.tokenizer is None else files.tokenizer.vocab_size
    cluster: Any = ScriptedCluster(script, block_size=block_size, vocab_size=tokens)
    return Engine(cluster, files, None, name="demo", **more)


def request(prompt: Sequence[int] | str = "hi", **fields: Any) -> Request:
    """A request for at most 64 tokens that ends with END."""
    ids = tuple(prompt.encode()) if isinstance(prompt, str) else tuple(prompt)
    return Request(
        **{"request_id": "r", "max_tokens": 64, "stop_token_ids": frozenset({END}), **fields, "prompt_ids": ids}
    )
