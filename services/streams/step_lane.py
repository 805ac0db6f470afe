"""One session's way past the event loops: steps that follow by themselves, from one device thread to the next.

Down the chain goes a step with its activation, up the chain the step that follows, as soon as the last stage knows it.
Everything here runs on the thread that reads the socket but where it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flashsplit.shard.v1 import shared_memory_pb2, stage_service_pb2 as pb
from services.errors import FlashsplitError, InvalidArgument
from services.messages.frames import FrameReader, TensorLimits
from services.messages.session_frames import LANE_FRAMES, request_to_messages
from services.messages.step_template import StepTemplate, tokens_to_bytes
from services.messages.steps import Forward, ForwardWithoutFeatures, StepFeatures
from services.same_host.link import SharedLink
from services.same_host.ring import Payload
from services.same_host.step_socket import StepSocket
from services.streams.batch_members import BatchMembers

MIN_SHARED_BYTES = 32 << 10
"""Tensors from this size on go through the segment, so that packets stay small."""


class StepLane:
    """One end of a session's lane. It also puts tensors into shared memory and reads them, for the frames' sake.

    Use `close` when the session is over.
    """

    def __init__(
        self, link: SharedLink, socket: StepSocket, stream_id: int, batches: BatchMembers[Any] | None = None
    ) -> None:
        """batches: the way of steps of several sessions, which this one is then part of; None where there is none."""
        self._link, self._socket, self.stream_id, self.batches = link, socket, stream_id, batches
        self._sent_payloads: list[int] = []
        self._expected: StepTemplate | None = None
        self._on_expected: Callable[[memoryview], None] = lambda _: None
        self._prepared: tuple[StepTemplate, Payload | None] | None = None
        self._without_features: Forward | None = None
        """A step whose features are still to come."""

    def expect(
        self, forward: Forward, on_arrival: Callable[[memoryview], None], *, features_follow: bool = False
    ) -> None:
        """Expect this step as the next one, but for the bytes of its activation, or for its tokens where it has none.

        on_arrival: called with these bytes before anything else when the step comes; they last only for the call.
        """
        payload = None
        if _is_shared(forward):
            assert forward.activation is not None
            # Any name will do: all of them are equally long.
            payload = self._link.name(Payload(1, 1, forward.activation.size_bytes))
        self._expected = StepTemplate.of(forward, features_follow=features_follow, payload=payload)
        self._on_expected = on_arrival

    def prepare(self, forward: Forward) -> None:
        """Make the message of the step that `send` will be called with, before its activation or its tokens are there.

        Where the step has features, `send` will be told how to wait for them.
        """
        payload = name = None
        self._free()
        if _is_shared(forward):
            assert forward.activation is not None
            payload = self._link.reserve_step(forward.activation.size_bytes)
            if payload is None:
                return
            self._sent_payloads.append(payload.sequence)
            name = self._link.name(payload)
        template = StepTemplate.of(forward, features_follow=bool(forward.features), payload=name)
        self._prepared = None if template is None else (template, payload)

    def listen(
        self,
        on_step: Callable[[Forward], None],
        on_failure: Callable[[FlashsplitError], None],
        *,
        on_begun: Callable[[Forward, bool], None] = lambda _, __: None,
        max_tensor_bytes: int = 0,
        max_feature_slices: int = 0,
    ) -> None:
        """Take steps from now on; may be called on any thread.

        on_step: called with every step that is whole. on_failure: called with the error instead, for a malformed one.
        on_begun: called before `on_step`, as soon as a step and its activation are there, with whether that is all of
        it and `on_step` comes next; not called for a step that was expected.
        """
        limits = TensorLimits(max_tensor_bytes, max_feature_slices)

        def on_message(message: memoryview) -> None:
            expected, self._expected = self._expected, None
            gap = None if expected is None else expected.gap(message)
            try:
                if expected is not None and gap is not None:
                    if expected.shared:
                        gap = self._named_payload(gap, expected.forward)
                    self._on_expected(gap)
                    forward, whole = expected.filled(gap), not expected.features_follow
                else:
                    forward, whole = self._parse(message, limits)
                    if not forward.features:
                        on_begun(forward, whole)
                if not whole:
                    self._without_features = forward
            except FlashsplitError as error:
                on_failure(error)
            else:
                if whole:
                    on_step(forward)

        self._socket.join(self.stream_id, on_message)

    def send(self, forward: Forward, wait_for_features: Callable[[], object] | None = None) -> bool:
        """Send a step; return False where it has to go another way.

        One step of a session is on its way at a time, so that what the one before left in the segment is free.
        wait_for_features: returns when the features are there, which then follow in a packet of their own; the
        activation must be there already.
        """
        prepared, self._prepared = self._prepared, None
        features_follow = wait_for_features is not None and bool(forward.features)
        if prepared is not None and prepared[0].is_for(forward, features_follow=features_follow):
            sent = self._send_prepared(*prepared, forward)
        else:
            self._free()
            sent = self._send(ForwardWithoutFeatures(forward) if features_follow else forward)
        if not sent:
            self._free()
            return False
        if wait_for_features is not None and features_follow:
            wait_for_features()
            return self._send(StepFeatures(forward.step, forward.features))
        return True

    def close(self) -> None:
        """Take and send no more steps. Safe to call twice."""
        self._socket.leave(self.stream_id)
        if self.batches is not None:
            self.batches.leave(self.stream_id)
        self._free()

    # --- shared memory, as frames ask for it

    def put(self, data: memoryview) -> shared_memory_pb2.SharedPayload | None:
        """Write a piece into shared memory and name it, as `PayloadSender` says."""
        payload = self._link.put_step(data) if len(data) >= MIN_SHARED_BYTES else None
        if payload is None:
            return None
        self._sent_payloads.append(payload.sequence)
        return self._link.name(payload)

    def memory_for(self, _: int) -> bytearray:
        """Have payloads appended, as `PayloadReader` says."""
        return bytearray()

    def read_payload(self, message: shared_memory_pb2.SharedPayload, into: bytearray | memoryview) -> None:
        """Copy a payload of the other side, as `PayloadReader` says."""
        self._link.read_step_payload(message, into)

    # ---

    def _send_prepared(self, template: StepTemplate, payload: Payload | None, forward: Forward) -> bool:
        tensor = forward.activation
        data = tokens_to_bytes(forward.token_ids) if tensor is None else memoryview(tensor.data).cast("B")
        if payload is not None:
            if not self._link.write_step(payload, data):
                return False
            data = memoryview(self._link.name(payload).SerializeToString())
        return self._socket.send(self.stream_id, template.before, data, template.after)

    def _send(self, frame: Forward | ForwardWithoutFeatures | StepFeatures) -> bool:
        """Send a frame that fits into one message; return whether it did and was sent."""
        messages = request_to_messages(frame, self)
        packet = next(messages).SerializeToString()
        return next(messages, None) is None and self._socket.send(self.stream_id, packet)

    def _named_payload(self, name: memoryview, forward: Forward) -> memoryview:
        """Return the activation of an expected step, which lies in shared memory under that name."""
        assert forward.activation is not None
        message, data = shared_memory_pb2.SharedPayload(), bytearray()
        _parse_into(message, name)
        if message.size_bytes != forward.activation.size_bytes:
            raise InvalidArgument(
                f"shared.size_bytes is {message.size_bytes}; the activation takes {forward.activation.size_bytes}",
                field="shared.size_bytes",
            )
        self.read_payload(message, data)
        return memoryview(data)

    def _parse(self, message: memoryview, limits: TensorLimits) -> tuple[Forward, bool]:
        """Return the step that a message brings or completes, and whether it is whole."""
        request = pb.RunStageRequest()
        _parse_into(request, message)
        # A new reader each time: here a frame and its tensors come in one message or not at all.
        match FrameReader(LANE_FRAMES, limits, self).read(request):
            case Forward() as forward:
                return forward, True
            case ForwardWithoutFeatures(forward):
                return forward, False
            case StepFeatures(step, features):
                begun, self._without_features = self._without_features, None
                if begun is None or begun.step != step:
                    raise InvalidArgument(f"features of step {step} came without it", field="step")
                return replace(begun, features=features), True
            case None:
                raise InvalidArgument("a step's tensors must come whole", field="activation.data")

    def _free(self) -> None:
        for sequence in self._sent_payloads:
            self._link.release_step(sequence)
        self._sent_payloads.clear()


def _is_shared(forward: Forward) -> bool:
    return forward.activation is not None and forward.activation.size_bytes >= MIN_SHARED_BYTES


def _parse_into(message: pb.RunStageRequest | shared_memory_pb2.SharedPayload, data: memoryview) -> None:
    try:
        message.ParseFromString(bytes(data))
    except Exception as error:
        raise InvalidArgument("a step could not be parsed", reason="GARBLED") from error
