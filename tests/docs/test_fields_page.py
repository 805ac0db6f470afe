"""The page of the fields is what the server does, and no published field is without a decision."""

from __future__ import annotations

import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from coordinator.api.http.field_decisions import DECISIONS, Api
from docs.fields import BODIES, PAGE, page

PUBLISHED = {
    Api.CHAT: ChatParams,
    Api.COMPLETIONS: CompletionParams,
    Api.RESPONSES: ResponseCreateParamsBase,
    Api.MESSAGES: MessageCreateParamsBase,
}
OF_VLLM = """
    best_of use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids ignore_eos min_tokens
    include_stop_str_in_output skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens bad_words
    allowed_token_ids add_special_tokens prompt_logprobs response_format structured_outputs guided_json guided_regex
    guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern structural_tag priority request_id
    logits_processors return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs
"""
OF_VLLM_IN_CHATS = """
    echo add_generation_prompt continue_final_message documents chat_template chat_template_kwargs mm_processor_kwargs
    include_reasoning thinking_token_budget reasoning_effort
"""


def test_the_page_is_current() -> None:
    """`python docs/fields.py` would write what is there."""
    assert PAGE.read_text(encoding="utf-8") == page(), "run python docs/fields.py and commit what it writes"


@pytest.mark.parametrize("api", Api)
def test_every_published_field_is_decided(api: Api) -> None:
    """What the SDKs' types and vLLM name is heeded or in the table, and in one of them only."""
    heeded = {field.alias or name for name, field in BODIES[api].model_fields.items()}
    published = set(PUBLISHED[api].__annotations__)
    if api in (Api.CHAT, Api.COMPLETIONS):
        published |= {*OF_VLLM.split(), *(OF_VLLM_IN_CHATS.split() if api is Api.CHAT else ["prompt_embeds"])}
    assert published - heeded - DECISIONS[api].keys() == set()
    assert heeded & DECISIONS[api].keys() == set()
