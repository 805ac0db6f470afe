"""What a placement takes and how fast it decodes, before anything is loaded: sizes, memory, edges, step time, split."""
