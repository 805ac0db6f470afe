"""Workers that stand by, as options say them."""

from __future__ import annotations

import pytest

from coordinator.cli.options.standby import StandbyOptions
from coordinator.cluster.placement import WorkerPlace
from services.errors import InvalidArgument


def test_places_are_those_of_workers() -> None:
    """Devices and addresses, several of them, as for stages; none by default."""
    assert StandbyOptions().places == ()
    places = StandbyOptions(standby="cuda:0@8GiB, b:7003").places
    assert places == (WorkerPlace("cuda:0", None, "8GiB"), WorkerPlace(None, "b:7003"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (StandbyOptions(standby_weights="warm"), "--standby-weights warm has no effect without --standby"),
        (StandbyOptions(standby="gpu"), "--standby 'gpu' is neither a device"),
        (StandbyOptions(standby="a:1"), "--standby names a:1, which has a part already"),
        (StandbyOptions(standby="b:1,b:1"), "--standby names b:1, which has a part already"),
    ],
)
def test_refusals(options: StandbyOptions, words: str) -> None:
    """What is no worker, has another part, or has no effect."""
    with pytest.raises(InvalidArgument) as caught:
        options.check([WorkerPlace(None, "a:1")])
    assert words in caught.value.message
