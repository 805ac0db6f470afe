"""Large payloads between processes of one host through memory that both map, announced by the frames of a stream."""
