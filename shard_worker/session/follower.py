"""Which step follows another by itself, as `stage.proto` says. Pure."""

from __future__ import annotations

from services.messages.steps import Forward, OpenSession, StepKind


def is_followed(step: Forward, length: int, token_ids: tuple[int, ...], request: OpenSession) -> bool:
    """Whether a step with followers left has one. length: committed behind it; token_ids: what it produced."""
    return (
        bool(step.more and token_ids)
        and token_ids[-1] not in request.stop_token_ids
        and length + 1 + step.propose_tokens <= request.max_length
    )


def follower(
    step: Forward, length: int, token_ids: tuple[int, ...], draft_tokens: tuple[int, ...], request: OpenSession
) -> Forward | None:
    """The step behind `step`, if there is one. guesses: for the tokens behind what it produced. Arguments else as in
    `is_followed`."""
    if not is_followed(step, length, token_ids, request):
        return None
    return Forward(
        step.step + 1,
        length,
        (token_ids[-1], *draft_tokens),
        StepKind.VERIFY if draft_tokens else StepKind.DECODE,
        step.propose_tokens,
        more=step.more - 1,
    )


def likely_follower(step: Forward, request: OpenSession) -> Forward | None:
    """The step behind one whose rows all count, before its token is known: with one of no meaning in its place. None
    where there will be none whatever the token is."""
    length = step.base_position + len(step.token_ids)
    return follower(step, length, (-1,), (), request)
