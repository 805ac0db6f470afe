"""What the coordinator itself reads of a checkpoint: its number of layers and its text side, never its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.text.chat_template import ChatTemplate
from coordinator.text.generation_defaults import GenerationDefaults
from coordinator.text.parsers.reasoning import OF_GEMMA, TAGGED, ThinkingTags, tags_in
from coordinator.text.parsers.tags import CALL, RETURN
from coordinator.text.parsers.tools import GEMMA4, HARMONY, NONE, detect
from coordinator.text.tokenizer import Tokenizer, stop_token_ids
from services.errors import InvalidArgument
from services.model.checkpoint_files import model_name, read_config
from services.model.families import read_model_config
from services.model.text_files import TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, TextFile, find_text_file

HARMONY_REASONING = "openai_gptoss"
REASONING_FORMATS = ("deepseek_r1", GEMMA4, "glm45", HARMONY_REASONING, "qwen3")
"""Names of ways to write reasoning: all but one write it between tags."""


_GEMMA_ENDS = ("<turn|>", "<|tool_response>")
"""Behind an answer's end, and behind its calls, where their results would come."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What was read of a checkpoint; tokenizer and chat_template are None where it has none.

    path: the directory or the GGUF file.
    """

    path: Path
    num_layers: int
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    stop_token_ids: frozenset[int]
    text_fingerprint: str
    """A hash of the files that turn text into tokens, tokenizer and chat template: 32 hex digits."""
    defaults: GenerationDefaults = GenerationDefaults()
    """What holds where a request says nothing."""
    last_cut: int | None = None
    """The last layer that a stage may begin with, where layers share keys and values; None for any."""
    tool_call_format: str | None = None
    """How the model writes tool calls, by the name of a format in `parsers.tools`; None for what its chat template
    teaches."""
    reasoning_format: str | None = None
    """How the model writes its reasoning, one of REASONING_FORMATS; None for what its chat template teaches."""

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture of experts. Raises what `read_model_config` raises."""
        return read_model_config(read_config(self.path, "--model")).experts is not None

    @property
    def name(self) -> str:
        """What the model is called unless told otherwise."""
        return model_name(self.path.absolute())

    @property
    def answer_format(self) -> str:
        """How answers are written, by the name of a format in `parsers.tools`."""
        if self.reasoning_format == HARMONY_REASONING:
            return HARMONY
        taught = NONE if self.chat_template is None else detect(self.chat_template.source)
        return self.tool_call_format or taught

    @property
    def thinking_tags(self) -> ThinkingTags | None:
        """What reasoning stands between with which answers may begin; None where they have none, or in Harmony."""
        if self.reasoning_format is not None:
            return {HARMONY_REASONING: None, GEMMA4: OF_GEMMA}.get(self.reasoning_format, TAGGED)
        return None if self.chat_template is None else tags_in(self.chat_template.source)


def read_model_files(path: Path, defaults: GenerationDefaults | None = None) -> ModelFiles:
    """Read a checkpoint, a directory or a GGUF file. defaults: None where requests say everything.

    Raises NotFound and InvalidArgument naming the file and key, TokenizerError and TemplateError for the tokenizer's
    and the template's files.
    """
    config = read_config(path, "--model")
    text = config.get("text_config")
    decoder = text if isinstance(text, Mapping) else config
    layers = decoder.get("num_hidden_layers")
    if not isinstance(layers, int) or layers < 1:
        raise InvalidArgument(
            f"{path}: num_hidden_layers in its configuration is {layers!r}; it must be a whole number above 0",
            field="num_hidden_layers",
        )
    files = [find_text_file(path, name) for name in (TOKENIZER, TOKENIZER_CONFIG, TEMPLATE)]
    tokenizer = None if files[0] is None else Tokenizer.from_file(files[0])
    template, stops = ChatTemplate.from_checkpoint(path), set(stop_token_ids(path, tokenizer))
    if tokenizer is not None and template is not None and detect(template.source) == HARMONY:
        # A call ends the answer, whatever the configuration says.
        stops |= {token for tag in (CALL, RETURN) if (token := tokenizer.token_id(tag)) is not None}
    if tokenizer is not None and template is not None and detect(template.source) == GEMMA4:
        stops |= {token for tag in _GEMMA_ENDS if (token := tokenizer.token_id(tag)) is not None}
    return ModelFiles(
        path=path,
        num_layers=layers,
        last_cut=read_model_config(config).last_cut if decoder.get("num_kv_shared_layers") else None,
        tokenizer=tokenizer,
        chat_template=template,
        stop_token_ids=frozenset(stops),
        text_fingerprint=_text_fingerprint(files),
        defaults=defaults or GenerationDefaults(),
    )


def _text_fingerprint(files: Sequence[TextFile | None]) -> str:
    digest = hashlib.sha256()
    for file in files:
        content = b"" if file is None else file.content
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:32]
