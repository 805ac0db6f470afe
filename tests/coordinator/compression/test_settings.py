"""How much is kept: parsing, ranges, the curve."""

from __future__ import annotations

import pytest

from coordinator.compression.settings import CompressionSettings, KeepCurve, parse_keep
from services.errors import InvalidArgument
from services.messages.inference_types import CompressionMode, CompressionParams


@pytest.mark.parametrize(
    ("text", "tokens", "ratio"),
    [
        ("0.05", 1, 0.05),
        ("0", 10**6, 0.0),
        ("1", 5, 1.0),
        ("1.5", 5, 1.0),
        ("-3", 5, 0.0),
        ("1e-9", 5, 1e-9),
        ("8000:0.3,64000:0.05", 100, 0.3),
        ("8000:0.3,64000:0.05", 8000, 0.3),
        ("8000:0.3,64000:0.05", 36000, 0.175),
        ("8000:0.3,64000:0.05", 64000, 0.05),
        ("8000:0.3,64000:0.05", 10**6, 0.05),
        ("0:2,10:-1", 5, 0.5),
    ],
)
def test_ratios_and_curves(text: str, tokens: int, ratio: float) -> None:
    """A number counts for all prompts; between points of a curve shares lie on a line, beyond them they are level."""
    assert parse_keep(text).ratio(tokens) == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be a number"),
        ("much", "must be a number"),
        ("nan", "not a number"),
        ("8000:0.3,", "TOKENS:RATIO"),
        ("8000:0.3,x:0.1", "TOKENS:RATIO"),
        ("8000:0.3,8000:0.1", "ascending"),
        ("-1:0.3", "ascending"),
    ],
)
def test_what_is_no_ratio(text: str, words: str) -> None:
    """The refusal names the flag and says what would be accepted."""
    with pytest.raises(InvalidArgument, match=words) as refused:
        parse_keep(text)
    assert refused.value.where["field"] == "--prefill-keep-ratio"


def test_a_request_has_its_own_way() -> None:
    """A request may choose its mode and its share, which is brought into range; the rest stays the server's."""
    settings = CompressionSettings(CompressionMode.AUTO, 100, KeepCurve(((0, 0.1),)))
    assert settings.for_request(CompressionParams()) == settings
    asked = settings.for_request(CompressionParams(CompressionMode.ALWAYS, 7.0))
    assert (asked.mode, asked.threshold, asked.keep.ratio(5)) == (CompressionMode.ALWAYS, 100, 1.0)
    with pytest.raises(InvalidArgument):
        settings.for_request(CompressionParams(None, float("nan")))
