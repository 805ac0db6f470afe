"""Values of enumerations and their numbers in protobuf."""

from __future__ import annotations

import pytest

from flashsplit.shard.v1 import model_pb2
from services.errors import InvalidArgument
from services.messages.description import HEAD_PLACES, HeadPlace


def test_every_value_has_a_number_of_its_own() -> None:
    """A value comes back from its number."""
    for place in HeadPlace:
        assert HEAD_PLACES.value(HEAD_PLACES.number(place), "head_place") is place
        assert HEAD_PLACES.get(HEAD_PLACES.number(place)) is place


@pytest.mark.parametrize("number", [model_pb2.HEAD_PLACE_UNSPECIFIED, 99, -1])
def test_unknown_numbers_are_refused(number: int) -> None:
    """They are refused with the field, the number and those that are known; who asks without refusing gets None."""
    known = r"1 \(shared\), 2 \(loaded\), 3 \(projected\)"
    with pytest.raises(InvalidArgument, match=rf"place is {number}, not one of {known}") as refused:
        HEAD_PLACES.value(number, "place")
    assert refused.value.where["field"] == "place"
    assert HEAD_PLACES.get(number) is None
