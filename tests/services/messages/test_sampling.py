"""The sampling parameters: one definition for both contracts, what clients leave out, what is refused."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from flashsplit.inference.v1 import generation_pb2
from flashsplit.shard.v1 import stage_pb2
from services.errors import InvalidArgument
from services.messages.sampling import (
    PARAMETERS,
    SamplingParams,
    check_sampling,
    sampling_from_message,
    sampling_to_message,
)

NUMBERS = {
    "repetition_penalty": 1.25,
    "presence_penalty": -0.5,
    "frequency_penalty": 2.0,
    "temperature": 0.75,
    "top_k": 40,
    "top_p": 0.5,
    "min_p": 0.125,
    "seed": 2**64 - 1,
    "min_tokens": 5,
}
FULL = SamplingParams({3: -1.5, 7: 0.0}, allowed_token_ids=(1, 2), bad_token_sequences=((1,), (2, 3)), **NUMBERS)
MESSAGES = [stage_pb2.Sampling, generation_pb2.Sampling]


@pytest.mark.parametrize("message", MESSAGES)
def test_the_contracts_have_the_parameters_of_the_definition(
    message: type[stage_pb2.Sampling | generation_pb2.Sampling],
) -> None:
    """A parameter that is defined but in no message, or the other way round, would be lost on its way."""
    only_clients = set() if message is generation_pb2.Sampling else {"bad_words"}
    assert set(message.DESCRIPTOR.fields_by_name) == {entry.name for entry in fields(SamplingParams)} - only_clients


@pytest.mark.parametrize("message", MESSAGES)
def test_parameters_survive_both_contracts(message: type[stage_pb2.Sampling]) -> None:
    """Every value arrives, and what was not given is still not given."""
    for sampling in (FULL, SamplingParams(), SamplingParams(top_k=0, min_p=0.0, presence_penalty=0.0)):
        raw = sampling_to_message(sampling, message).SerializeToString()
        assert sampling_from_message(message.FromString(raw)) == sampling


def test_bad_words_come_from_clients() -> None:
    """Workers get tokens in their place."""
    raw = sampling_to_message(SamplingParams(bad_words=("no", "never")), generation_pb2.Sampling)
    assert sampling_from_message(raw).bad_words == ("no", "never")
    with pytest.raises(InvalidArgument, match="bad_token_sequences has an empty one"):
        check_sampling(SamplingParams(bad_token_sequences=((1,), ())))


def test_numbers_name_what_is_given() -> None:
    """Zero is given, None is not."""
    assert SamplingParams(temperature=0.0, top_k=3).numbers() == {"temperature": 0.0, "top_k": 3}
    assert FULL.numbers() == NUMBERS
    assert set(NUMBERS) <= {parameter.name for parameter in PARAMETERS}


def test_a_request_that_says_nothing_gets_the_apis_defaults() -> None:
    """The temperature is OpenAI's, the seed a random one, and every processor is off."""
    completed = SamplingParams().completed()
    assert replace(completed, seed=None) == SamplingParams(temperature=1.0)
    assert len({SamplingParams().completed().seed for _ in range(8)}) == 8


def test_what_is_given_stays() -> None:
    """Values that a client gave reach the workers unchanged, greedy decoding too."""
    assert FULL.completed() == FULL
    assert SamplingParams(temperature=0.0, seed=0).completed() == SamplingParams(temperature=0.0, seed=0)


def test_values_that_change_nothing_switch_their_processor_off() -> None:
    """So a worker needs no penalties' counts and no sorting for them."""
    zeros = SamplingParams(presence_penalty=0.0, frequency_penalty=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
    for idle in (zeros, replace(zeros, top_k=-1, repetition_penalty=1.0)):
        assert idle.completed() == SamplingParams(temperature=1.0, seed=1)
        assert idle.completed(FULL).top_p is None


def test_defaults_hold_for_what_is_not_given_alone() -> None:
    """A client's value wins, also one that switches a processor off; seed and biases are nobody's default."""
    defaults = SamplingParams({1: 5.0}, temperature=0.6, top_k=20, top_p=0.9, seed=4)
    completed = SamplingParams(top_k=0, top_p=0.5, seed=9).completed(defaults)
    assert completed == SamplingParams(temperature=0.6, top_p=0.5, seed=9)
    assert SamplingParams().completed(defaults).seed != 4


def test_negative_seeds_are_taken_modulo_2_to_the_64() -> None:
    """HTTP clients may give one; the workers' seed has no sign."""
    assert SamplingParams(seed=-1).completed().seed == 2**64 - 1


@pytest.mark.parametrize(
    ("sampling", "field", "message"),
    [
        (SamplingParams(temperature=100.5), "temperature", "temperature is 100.5; it must be from 0 to 100"),
        (SamplingParams(temperature=float("nan")), "temperature", "temperature is nan; it must be at least 0"),
        (SamplingParams(top_k=-2), "top_k", "top_k is -2; it must be at least 1"),
        (SamplingParams(top_p=0.0), "top_p", "top_p is 0.0; it must be above 0 and at most 1"),
        (SamplingParams({2**31: 1.0}), "logit_bias", f"logit_bias has the key {2**31}; keys are token ids"),
        (SamplingParams({5: float("inf")}), "logit_bias[5]", "logit_bias[5] is inf; it must be from -1e+06 to 1e+06"),
    ],
)
def test_clients_are_refused_by_name(sampling: SamplingParams, field: str, message: str) -> None:
    """The refusal says which parameter, its value and what would be accepted."""
    with pytest.raises(InvalidArgument) as refused:
        sampling.completed()
    assert (refused.value.message, refused.value.where["field"]) == (message, field)


def test_workers_accept_what_clients_may_not_ask_for() -> None:
    """The highest temperature is a rule of the APIs alone."""
    check_sampling(SamplingParams(temperature=1e6))
    with pytest.raises(InvalidArgument, match="temperature is inf"):
        check_sampling(SamplingParams(temperature=float("inf")))
