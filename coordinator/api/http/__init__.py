"""The HTTP door: OpenAI's and Anthropic's APIs over the engine, and what operators ask for."""
