"""Clients that ask one server for everything it offers, one after the other and many at once, and note what fails."""

from __future__ import annotations

import asyncio
import collections
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai

MODEL = "target"
STORY = "The keeper of the lighthouse counts the ships, and writes each name down. "
SUMS = [(4729, 3485), (17, 4), (812, 9), (5555, 4321)]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "greet",
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 8}},
                "required": ["name"],
                "additionalProperties": False,
            },
        },
    }
]
PERSON: Any = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@dataclass
class Tally:
    """What the clients have seen. answered: answers by kind of request. failures: each one in full."""

    answered: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[str] = field(default_factory=list)


@dataclass
class MixedClient:
    """One client that asks questions of all kinds, in an order of its own.

    alone: the answers to SUMS without anybody beside, with which those under load are compared.
    """

    chats: openai.AsyncOpenAI
    claude: anthropic.AsyncAnthropic
    random: random.Random
    alone: list[str]

    async def ask_until(self, deadline: float, tally: Tally) -> None:
        """Ask one question after the other until `time.monotonic()` reaches `deadline`."""
        kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "chat": self.sum_whole,
            "stream": self.sum_streamed,
            "plain": self.sum_without_draft,
            "new prompt": self.new_prompt,
            "conversation": self.conversation,
            "choices": self.several_choices,
            "log-probabilities": self.log_probabilities,
            "echo": self.echoed_completion,
            "completions": self.several_completions,
            "tools": self.forced_call,
            "schema": self.structured,
            "messages": self.messages,
            "response": self.response,
            "hung up": self.hang_up,
            "cancelled": self.cancel,
        }
        while time.monotonic() < deadline:
            kind = self.random.choice([*kinds])
            began = time.monotonic()
            try:
                await kinds[kind]()
                tally.answered[kind] += 1
            except Exception as error:
                said = getattr(getattr(error, "response", None), "text", "")
                after = time.monotonic() - began
                tally.failures.append(f"{kind} after {after:.1f} s: {type(error).__name__}: {error} {said}")

    async def sum_whole(self) -> None:
        number = self.random.randrange(len(SUMS))
        assert await calculate(self.chats, number) == self.alone[number]

    async def sum_without_draft(self) -> None:
        number = self.random.randrange(len(SUMS))
        assert await calculate(self.chats, number, extra_body={"speculate": False}) == self.alone[number]

    async def sum_streamed(self) -> None:
        number = self.random.randrange(len(SUMS))
        text, finish = await self.streamed(sum_of(number), temperature=0)
        assert text == self.alone[number]
        assert finish == "stop"

    async def new_prompt(self) -> None:
        """A prompt that nobody has sent, of any length; its prefix is kept, and others go for it."""
        words = " ".join(str(self.random.randrange(10**6)) for _ in range(self.random.randrange(1, 300)))
        _, finish = await self.streamed(words, temperature=0, max_tokens=self.random.randrange(1, 60))
        assert finish in ("stop", "length")

    async def conversation(self) -> None:
        """Turns that build on each other, each of which finds the one before."""
        messages: list[Any] = [{"role": "system", "content": STORY * self.random.randrange(2, 20)}]
        for turn in range(3):
            messages.append({"role": "user", "content": f"What does he count on day {turn}?"})
            made = await self.chats.chat.completions.create(
                model=MODEL, messages=messages, temperature=0.7, seed=turn, max_tokens=24
            )
            messages.append({"role": "assistant", "content": made.choices[0].message.content or "Ships."})

    async def several_choices(self) -> None:
        made = await self.chats.chat.completions.create(
            model=MODEL, messages=asked("Tell me a story."), n=3, temperature=1.2, max_tokens=30
        )
        assert [choice.index for choice in made.choices] == [0, 1, 2]

    async def log_probabilities(self) -> None:
        made = await self.chats.chat.completions.create(
            model=MODEL, messages=asked("Hello"), logprobs=True, top_logprobs=5, max_tokens=20
        )
        assert made.choices[0].logprobs is not None
        assert all(len(token.top_logprobs) == 5 for token in made.choices[0].logprobs.content or [])

    async def echoed_completion(self) -> None:
        made = await self.chats.completions.create(
            model=MODEL, prompt=STORY * self.random.randrange(1, 12), echo=True, logprobs=1, max_tokens=1
        )
        assert made.choices[0].logprobs is not None
        tokens = made.choices[0].logprobs.token_logprobs or []
        assert made.usage is not None
        assert len(tokens) == made.usage.total_tokens

    async def several_completions(self) -> None:
        made = await self.chats.completions.create(
            model=MODEL, prompt=["def add(a, b):", "import ", STORY], temperature=0, max_tokens=12
        )
        assert len(made.choices) == 3

    async def forced_call(self) -> None:
        made = await self.chats.chat.completions.create(
            model=MODEL, messages=asked("Hello, I am Ann."), tools=TOOLS, tool_choice="required", max_tokens=60
        )
        calls = made.choices[0].message.tool_calls or []
        assert calls
        for call in calls[: -1 if made.choices[0].finish_reason == "length" else None]:
            assert call.type == "function"
            assert {*json.loads(call.function.arguments)} == {"name"}

    async def structured(self) -> None:
        made = await self.chats.chat.completions.create(
            model=MODEL,
            messages=asked("Describe a person."),
            max_tokens=60,
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        )
        assert {*json.loads(made.choices[0].message.content or "")} == {"name", "age"}

    async def messages(self) -> None:
        number = self.random.randrange(len(SUMS))
        async with self.claude.messages.stream(
            model=MODEL, messages=asked(sum_of(number)), max_tokens=400, extra_body={"temperature": 0}
        ) as stream:
            assert await stream.get_final_text() == self.alone[number]

    async def response(self) -> None:
        number = self.random.randrange(len(SUMS))
        made = await self.chats.responses.create(model=MODEL, input=sum_of(number), temperature=0)
        assert made.output_text == self.alone[number]

    async def hang_up(self) -> None:
        """Leave a stream after some pieces."""
        fields: Any = {"temperature": 1.5, "max_tokens": 1000}
        pieces = self.random.randrange(1, 6)
        async with await self.chats.chat.completions.create(
            model=MODEL, messages=asked(STORY), stream=True, **fields
        ) as chunks:
            async for _ in chunks:
                pieces -= 1
                if not pieces:
                    return

    async def cancel(self) -> None:
        """Leave a request at any moment: while it waits, in its prefill, or in its answer."""
        asking = asyncio.ensure_future(
            self.chats.chat.completions.create(model=MODEL, messages=asked(STORY * 30), max_tokens=1000)
        )
        await asyncio.wait([asking], timeout=self.random.random() * 4)
        if asking.done():
            assert asking.result().choices
        asking.cancel()
        await asyncio.wait([asking])

    async def streamed(self, text: str, **fields: Any) -> tuple[str, str | None]:
        """The text of an answer that came in pieces, and why it ended."""
        said, finish = "", None
        async with await self.chats.chat.completions.create(
            model=MODEL, messages=asked(text), stream=True, stream_options={"include_usage": True}, **fields
        ) as chunks:
            async for chunk in chunks:
                for choice in chunk.choices:
                    said += choice.delta.content or ""
                    finish = choice.finish_reason or finish
        return said, finish


async def ask_for(seconds: float, url: str, clients: int) -> Tally:
    """Let so many clients ask the server at `url` for so long, and return what they saw."""
    tally = Tally()
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as chats,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=300) as claude,
    ):
        alone = [await calculate(chats, number) for number in range(len(SUMS))]
        deadline = time.monotonic() + seconds
        everyone = [MixedClient(chats, claude, random.Random(number), alone) for number in range(clients)]
        await asyncio.gather(*(client.ask_until(deadline, tally) for client in everyone))
    return tally


async def calculate(chats: openai.AsyncOpenAI, number: int, **fields: Any) -> str:
    """The whole answer to one of SUMS."""
    made = await chats.chat.completions.create(model=MODEL, messages=asked(sum_of(number)), temperature=0, **fields)
    return made.choices[0].message.content or ""


def sum_of(number: int) -> str:
    """The question for one of SUMS."""
    return "Calculate {} + {}.".format(*SUMS[number])


def asked(text: str) -> Any:
    """A chat of one message."""
    return [{"role": "user", "content": text}]
