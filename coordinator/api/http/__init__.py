"""The HTTP APIs for clients: OpenAI's and Anthropic's over the engine, what operators ask for, and the page.

It must not know gRPC, nor how the engine answers a request.
"""
