"""The words of the contract as frozen dataclasses, and their one translation to and from protobuf.

Whatever comes from another process is checked here as far as that is possible without knowing the model. It must not
know streams, channels or who sends a message.
"""
