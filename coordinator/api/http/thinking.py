"""How clients say whether and how much the model shall think, as variables of its chat template."""

from __future__ import annotations

from typing import Any

from coordinator.text.chat_template import ChatTemplate
from coordinator.text.parsers.reasoning import tags_in
from coordinator.text.parsers.tools import HARMONY, detect
from services.errors import InvalidArgument

_SWITCHES = frozenset({"enable_thinking", "thinking"})
"""Names by which templates let thinking be switched."""


def thinking_variables(template: ChatTemplate | None, wanted: bool, field: str) -> dict[str, Any]:
    """Return the variables that switch the model's thinking on or off.

    field: what the client calls its wish. Raises InvalidArgument where the template can do neither.
    """
    if template is None:
        return {}
    switches = _SWITCHES & template.variables
    thinks = tags_in(template.source) is not None or detect(template.source) == HARMONY
    if not switches and wanted != thinks:
        always = "always thinks" if thinks else "knows no thinking"
        # Of the clients' fields only Anthropic's can switch it on.
        instead = ", or give the type adaptive, which thinks where the model can" if wanted else ""
        raise InvalidArgument(
            f"{field} switches thinking {'on' if wanted else 'off'}, and this model's chat template {always}: leave it "
            f"out{instead}",
            field=field,
        )
    return dict.fromkeys(switches, wanted)


def effort_variables(template: ChatTemplate | None, effort: str | None, field: str) -> dict[str, Any]:
    """Return the variables for an effort of reasoning in OpenAI's words; None says nothing, "none" is no thinking.

    A template that does not read `reasoning_effort` thinks as it does. Errors as in `thinking_variables`.
    """
    if effort is None:
        return {}
    if effort == "none":
        return thinking_variables(template, False, field)
    return {"reasoning_effort": effort, **adaptive_variables(template)}


def adaptive_variables(template: ChatTemplate | None) -> dict[str, Any]:
    """Return the variables that let the model think if it can."""
    return {} if template is None else dict.fromkeys(_SWITCHES & template.variables, True)
