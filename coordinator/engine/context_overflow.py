"""The refusal of what is longer than the context, in the words by which clients of OpenAI's and Anthropic's APIs know
it: many of them shorten the conversation then, and find out that they should only by these words."""

from __future__ import annotations

from services.errors import InvalidArgument

REASON = "CONTEXT_OVERFLOW"


class ContextOverflow(InvalidArgument):
    """A prompt leaves no room in the context, or none for the answer that was asked for.

    The message is in the words of OpenAI's APIs for chats and plain prompts, responses_message in those of its
    Responses API, which calls a conversation its input, anthropic_message in those of Anthropic's.
    """

    def __init__(
        self,
        context: int,
        prompt_tokens: int,
        max_tokens: int,
        *,
        chat: bool,
        field: str,
        is_lower_bound: bool = False,
    ) -> None:
        """context: most tokens of prompt and answer together. max_tokens: of the answer. field: the client's, at fault.

        is_lower_bound: the prompt has at least so many tokens; they were not counted.
        """
        least = "at least " if is_lower_bound else ""

        def said_of(prompt: str) -> str:
            return (
                f"This model's maximum context length is {context} tokens. However, you requested {least}"
                f"{prompt_tokens + max_tokens} tokens ({least}{prompt_tokens} in the {prompt}, {max_tokens} in the "
                f"completion). Please reduce the length of the {prompt} or completion."
            )

        super().__init__(said_of("messages" if chat else "prompt"), reason=REASON, field=field)
        self.responses_message = said_of("input")
        if prompt_tokens > context:
            self.anthropic_message = f"prompt is too long: {least}{prompt_tokens} tokens > {context} maximum"
        else:
            self.anthropic_message = (
                f"input length and `max_tokens` exceed context limit: {least}{prompt_tokens} + {max_tokens} > "
                f"{context}, decrease input length or `max_tokens` and try again"
            )
