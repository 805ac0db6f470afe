"""What processes say to each other as frozen dataclasses, and their one translation to and from protobuf.

Whatever comes from another process is checked here as far as that is possible without knowing the model. It must not
know streams, channels or who sends a message.

A new field touches the `.proto` file with its stubs, the dataclass, and the two functions beside it that fill and read
the message. A new frame of a session touches besides a `case` of `request_to_messages` or `event_to_message`, a row of
the table of frames at the end of `session_frames` (or `draft_session`), and the module of `services.rpc` that takes it.
"""
