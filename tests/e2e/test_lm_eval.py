"""lm-evaluation-harness against a running server: its figures are those that transformers gives on the same checkpoint.

For both, the harness itself makes the prompts, cuts them into tokens and windows, and computes the figures.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.models.api_models import JsonChatStr
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel

from tests.e2e.server import DEMO, Server
from tests.reference import target

# What it depends on warns of its own calls.
pytestmark = pytest.mark.filterwarnings("ignore")

SLOW = pytest.mark.slow
TOKENIZER = {"tokenizer": str(DEMO / "target"), "tokenizer_backend": "huggingface"}
ROWS: list[dict[str, Any]] = [
    {
        "question": "def add(a, b):\n    return",
        "choices": [" a + b", " b - a - a", " [None]"],
        "text": "def add(a, b):\n    return a + b\n",
    },
    {
        "question": "Once upon",
        "choices": [" a time", " purple numbers"],
        "text": "Once upon a time there was a small dog, who lived in a small house by the sea.",
    },
    {"question": "The colour of grass is", "choices": [" green", "é"], "text": "Die Straße ist naß. €5."},
]
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": [",", "\n\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def server(demo_server: Server) -> Server:
    return demo_server


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """The tasks as files that a user writes, over rows in a file of this host."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = {"data_files": {"test": str(rows)}, "cache_dir": str(folder / "cache")}
    for name, task in TASKS.items():
        whole = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **task}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(whole))
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return target.load(DEMO / "target")


class Reference(LocalCompletionsAPI):
    """What the harness asks of a server, answered by transformers in this process."""

    def __init__(self, transformer: PreTrainedModel, **options: Any) -> None:
        super().__init__(model="reference", base_url="nobody", **options)
        self._transformer = transformer

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        found = []
        for _, context, continuation in requests:
            ids = (context + continuation)[-self.max_length :]
            rows = target.logits(self._transformer, ids).log_softmax(-1)[-len(continuation) - 1 : -1]
            own = rows[range(len(continuation)), continuation]
            found.append((float(own.sum()), rows.argmax(-1).tolist() == continuation))
        return found

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        return [self._answer(*request.args) for request in requests]

    def _answer(self, prompt: Any, options: dict[str, Any]) -> str:
        text = prompt
        if isinstance(prompt, JsonChatStr):
            chat = json.loads(prompt.prompt)
            text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        said: str = self.tokenizer.decode(target.greedy(self._transformer, ids, options["max_gen_toks"]))
        ends = [said.find(stop) for stop in (*options["until"], self.tokenizer.eos_token) if stop in said]
        return said[: min(ends, default=None)]


@dataclass(frozen=True)
class Results:
    """What came of some tasks.

    figures: those of each task by name. said: for each row of each task what the model said: the log-likelihood of each
    choice and whether it is what the model would say, a text's log-likelihood, or a text.
    """

    figures: dict[str, dict[str, float]]
    said: dict[str, list[Any]]


def evaluated(lm: LocalCompletionsAPI, tasks: TaskManager, names: Sequence[str], **more: Any) -> Results:
    """Have the harness evaluate some of the tasks."""
    done: Any = simple_evaluate(lm, tasks=list(names), task_manager=tasks, bootstrap_iters=0, **more)
    figures = {name: {k: v for k, v in done["results"][name].items() if isinstance(v, float)} for name in names}
    return Results(figures, {name: [row["filtered_resps"] for row in done["samples"][name]] for name in names})


def check(served: Results, expected: Results) -> None:
    """Every figure, log-likelihood, greedy choice and text is the reference's."""
    for name, figures in expected.figures.items():
        assert len(figures) == len(TASKS[name]["metric_list"])
        assert served.figures[name] == pytest.approx(figures, rel=1e-4)
    for name, rows in expected.said.items():
        for row, theirs in zip(served.said[name], rows, strict=True):
            if name == "choice":
                assert [number for number, _ in row] == pytest.approx([number for number, _ in theirs], abs=1e-3)
                assert [greedy for _, greedy in row] == [greedy for _, greedy in theirs]
            else:
                assert row == (theirs if name == "generate" else pytest.approx(theirs, abs=1e-3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "names"),
    [
        pytest.param({"batch_size": 4}, tuple(TASKS), id="several prompts of token ids at once"),
        pytest.param({"tokenized_requests": False, "num_concurrent": 4}, tuple(TASKS), id="texts", marks=SLOW),
        pytest.param(
            {"tokenizer": None, "tokenizer_backend": "auto"}, ("perplexity",), id="the server's tokenizer", marks=SLOW
        ),
        pytest.param({"max_length": 9}, ("perplexity",), id="windows shorter than the texts", marks=SLOW),
    ],
)
def test_completions(
    options: dict[str, Any], names: tuple[str, ...], server: Server, tasks: TaskManager, model: PreTrainedModel
) -> None:
    """Choices by log-likelihood, perplexities, and greedy answers."""
    url = f"{server.url}/v1/completions"
    lm = LocalCompletionsAPI(model="demo", base_url=url, **{**TOKENIZER, **options})
    served = evaluated(lm, tasks, names)
    expected = evaluated(Reference(model, **{**options, **TOKENIZER}), tasks, names)
    check(served, expected)
    if "choice" in names:
        # Not all the same: some choices are what the model would say, and most are not.
        assert {greedy for row in served.said["choice"] for _, greedy in row} == {True, False}


@pytest.mark.slow
def test_chat_completions(server: Server, tasks: TaskManager, model: PreTrainedModel) -> None:
    """Answers to chats; the harness asks chats for no log-likelihoods."""
    lm = LocalChatCompletion(model="demo", base_url=f"{server.url}/v1/chat/completions")
    served = evaluated(lm, tasks, ["generate"], apply_chat_template=True)
    reference = Reference(model, **TOKENIZER, tokenized_requests=False)
    check(served, evaluated(reference, tasks, ["generate"], apply_chat_template=True))
