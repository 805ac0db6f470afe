"""One session's way past the event loops: steps that follow by themselves, from the thread that computes to the next.

Down the chain goes a step with its activation, up the chain the step that follows, as soon as the last stage knows it.
Everything here runs on the thread that reads the socket but where it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from flashsplit.shard.v1 import shared_memory_pb2, stage_service_pb2 as pb
from services.errors import FlashsplitError, InvalidArgument
from services.messages import session_frames as frames
from services.messages.known_step import KnownStep, token_bytes
from services.messages.steps import Forward
from services.messages.tensors import IncomingTensor, WireTensor
from services.same_host.link import SharedLink
from services.same_host.ring import Payload
from services.same_host.step_socket import StepSocket

FROM_BYTES = 32 << 10
"""Larger tensors go through the segment, so that packets stay small."""


class StepLane:
    """One end. Use `close`."""

    def __init__(self, link: SharedLink, socket: StepSocket, stream_id: int) -> None:
        self._link, self._socket, self._stream_id = link, socket, stream_id
        self._sent: list[int] = []
        self._expected: KnownStep | None = None
        self._known_came: Callable[[memoryview], None] = lambda _: None
        self._prepared: tuple[KnownStep, Payload | None] | None = None
        self._begun: Forward | None = None
        """A step whose features are still to come."""

    def expect(self, forward: Forward, came: Callable[[memoryview], None], *, features_follow: bool = False) -> None:
        """This step comes next, in all likelihood, but with an activation of other bytes, or with other tokens where it
        has none. came: called first of all with those when it does; they last only for the call."""
        payload = None
        if forward.activation is not None and forward.activation.size_bytes >= FROM_BYTES:
            # All of them are as long.
            payload = self._link.name(Payload(1, 1, forward.activation.size_bytes))
        self._expected = KnownStep.of(forward, features_follow=features_follow, payload=payload)
        self._known_came = came

    def prepare(self, forward: Forward) -> None:
        """`send` will be called with this step when its activation is there, or its tokens are where it has none, and
        with a wait for its features."""
        payload = message = None
        self._free()
        if forward.activation is not None and forward.activation.size_bytes >= FROM_BYTES:
            payload = self._link.reserve_step(forward.activation.size_bytes)
            if payload is None:
                return
            self._sent.append(payload.sequence)
            message = self._link.name(payload)
        known = KnownStep.of(forward, features_follow=bool(forward.features), payload=message)
        self._prepared = None if known is None else (known, payload)

    def listen(
        self,
        took: Callable[[Forward], None],
        failed: Callable[[FlashsplitError], None],
        *,
        begun: Callable[[Forward, bool], None] = lambda _, __: None,
        max_tensor_bytes: int = 0,
        max_feature_slices: int = 0,
    ) -> None:
        """From any thread. took: called with every step; failed: instead of it, where one is malformed. begun: called
        before, as soon as a step and its activation are there, with whether that is all of it and `took` comes next;
        not for a step that was expected."""

        def then(message: memoryview) -> None:
            expected, self._expected = self._expected, None
            data = None if expected is None else expected.read(message)
            try:
                if expected is not None and data is not None:
                    if expected.shared:
                        data = self._payload(data, expected.forward)
                    self._known_came(data)
                    forward, whole = expected.whole(data), not expected.features_follow
                else:
                    forward, whole = self._parse(message, max_tensor_bytes, max_feature_slices)
                    if not forward.features:
                        begun(forward, whole)
                if not whole:
                    self._begun = forward
            except FlashsplitError as error:
                failed(error)
            else:
                if whole:
                    took(forward)

        self._socket.join(self._stream_id, then)

    def send(self, forward: Forward, there: Callable[[], object] | None = None) -> bool:
        """False where it has to go another way. One step of a session is on its way at a time: what the one before left
        in the segment is free.

        there: waits for the features, which then follow in a packet of their own; the activation is there already.
        """
        prepared, self._prepared = self._prepared, None
        apart = there is not None and bool(forward.features)
        if prepared is not None and prepared[0].is_for(forward, features_follow=apart):
            sent = self._send_prepared(*prepared, forward)
        else:
            self._free()
            sent = self._send(frames.forward_to_messages(forward, self, features=not apart))
        if not sent:
            self._free()
            return False
        if there is not None and apart:
            there()
            return self._send(frames.features_to_messages(forward, self))
        return True

    def _send_prepared(self, known: KnownStep, payload: Payload | None, forward: Forward) -> bool:
        tensor = forward.activation
        data = token_bytes(forward.token_ids) if tensor is None else memoryview(tensor.data).cast("B")
        if payload is not None:
            if not self._link.write_step(payload, data):
                return False
            data = memoryview(self._link.name(payload).SerializeToString())
        return self._socket.send(self._stream_id, known.before, data, known.behind)

    def _send(self, messages: Iterator[pb.RunStageRequest]) -> bool:
        """Whether they were one, and it was sent."""
        packet = next(messages).SerializeToString()
        return next(messages, None) is None and self._socket.send(self._stream_id, packet)

    def close(self) -> None:
        """Safe to call twice."""
        self._socket.leave(self._stream_id)
        self._free()

    # --- as frames ask for shared memory

    def put(self, data: memoryview) -> shared_memory_pb2.SharedPayload | None:
        """As `Sender.put`."""
        payload = self._link.put_step(data) if len(data) >= FROM_BYTES else None
        if payload is None:
            return None
        self._sent.append(payload.sequence)
        return self._link.name(payload)

    def take(self, message: shared_memory_pb2.SharedPayload, into: bytearray) -> None:
        """As `SharedLinks.take`."""
        self._link.take_step(message, into)

    # ---

    def _payload(self, name: memoryview, forward: Forward) -> memoryview:
        """The activation of an expected step, which lies under that name."""
        assert forward.activation is not None
        message, data = shared_memory_pb2.SharedPayload(), bytearray()
        _parse_into(message, name)
        if message.size_bytes != forward.activation.size_bytes:
            raise InvalidArgument(
                f"shared.size_bytes is {message.size_bytes}; the activation takes {forward.activation.size_bytes}",
                field="shared.size_bytes",
            )
        self.take(message, data)
        return memoryview(data)

    def _parse(self, message: memoryview, max_tensor_bytes: int, max_feature_slices: int) -> tuple[Forward, bool]:
        """And whether it is whole."""
        request = pb.RunStageRequest()
        _parse_into(request, message)
        match request.WhichOneof("frame"):
            case "forward_from_tokens":
                return frames.from_tokens(request.forward_from_tokens), True
            case "forward_from_activation":
                step = request.forward_from_activation
                incoming = frames.incoming_tensors(step, max_tensor_bytes, max_feature_slices, self)
                return frames.from_activation(step, _whole(incoming)), not step.features_follow
            case "step_features":
                features = request.step_features
                incoming = frames.incoming_features(features, max_tensor_bytes, max_feature_slices, self)
                begun, self._begun = self._begun, None
                if begun is None or begun.step != features.step:
                    raise InvalidArgument(f"features of step {features.step} came without it", field="step")
                return replace(begun, features=frames.slices_from_messages(features, _whole(incoming))), True
            case other:
                raise InvalidArgument(f"frame {other} is not expected here", field="frame")

    def _free(self) -> None:
        for sequence in self._sent:
            self._link.release_step(sequence)
        self._sent.clear()


def _parse_into(message: pb.RunStageRequest | shared_memory_pb2.SharedPayload, data: memoryview) -> None:
    try:
        message.ParseFromString(bytes(data))
    except Exception as error:
        raise InvalidArgument("a step could not be parsed", reason="GARBLED") from error


def _whole(incoming: Sequence[IncomingTensor]) -> list[WireTensor]:
    if not all(tensor.complete for tensor in incoming):
        raise InvalidArgument("a step's tensors must come whole", field="activation.data")
    return [tensor.tensor() for tensor in incoming]
