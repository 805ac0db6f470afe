"""Generated chats: every request has exactly one right answer, worked out in small steps.

Each function in ``SKILLS`` draws one (request, answer) pair. A request belongs to the split that
its own hash decides, so no held-out request is ever trained on, whatever drew it.
"""

import random
from collections.abc import Callable

import skills_code
import skills_numbers
import skills_text
import skills_units
import smalltalk
from corpus import fraction

Chat = tuple[str, str]
Skill = Callable[[random.Random], Chat]

SKILLS: dict[Skill, float] = {
    **skills_numbers.SKILLS,
    **skills_units.SKILLS,
    **skills_text.SKILLS,
    **skills_code.SKILLS,
    **smalltalk.SKILLS,
}
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a small demo model. Answer briefly and correctly.",
    "You are a careful assistant that shows its work.",
    "Be concise.",
)


def is_heldout(request: str) -> bool:
    return fraction(request) < 0.03


def draw(rng: random.Random, heldout: bool = False) -> Chat:
    """One request of the wanted split with its answer."""
    skills = list(SKILLS)
    weights = list(SKILLS.values())
    while True:
        request, answer = rng.choices(skills, weights)[0](rng)
        if is_heldout(request) == heldout:
            return request, answer


def distinct(rng: random.Random, count: int, heldout: bool) -> list[Chat]:
    """``count`` chats with different requests."""
    found: dict[str, str] = {}
    while len(found) < count:
        request, answer = draw(rng, heldout)
        found.setdefault(request, answer)
    return list(found.items())


def conversation(rng: random.Random) -> list[dict[str, str]]:
    """A few turns, sometimes under a system prompt, all from the training split."""
    messages = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    for _ in range(rng.choices((1, 2, 3), (0.75, 0.17, 0.08))[0]):
        request, answer = draw(rng)
        messages.append({"role": "user", "content": request})
        messages.append({"role": "assistant", "content": answer})
    return messages


def render(messages: list[dict[str, str]], reply: bool = False) -> str:
    """ChatML text; with ``reply`` it ends where the assistant begins to speak."""
    text = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    return text + "<|im_start|>assistant\n" if reply else text


def render_request(request: str) -> str:
    return render([{"role": "user", "content": request}], reply=True)
