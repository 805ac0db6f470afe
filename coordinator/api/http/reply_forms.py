"""How every API tells its answers, by its path: what a journal must know to read what another process has written."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.api.http.anthropic import MessageReply
from coordinator.api.http.chat import ChatReply
from coordinator.api.http.completions import CompletionReply
from coordinator.api.http.field_decisions import Api
from coordinator.api.http.kept_answers import KEEP_S, KeptAnswers
from coordinator.api.http.reply_form import ReplyForm
from coordinator.api.http.responses import ResponseReply
from coordinator.engine.engine import Engine
from coordinator.journal.directory import Journal

FORMS: Mapping[str, type[ReplyForm]] = {
    Api.CHAT: ChatReply,
    Api.COMPLETIONS: CompletionReply,
    Api.RESPONSES: ResponseReply,
    Api.MESSAGES: MessageReply,
}


def new_answers(engine: Engine, journal: Journal | None = None, *, keep_s: float = KEEP_S) -> KeptAnswers:
    """Return the kept answers of a server; the arguments are those of `KeptAnswers`."""
    return KeptAnswers(engine, FORMS, journal, keep_s=keep_s)
