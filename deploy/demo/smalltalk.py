"""Greetings, questions about the model itself, a little knowledge, stories, and a polite "no".

A demo is mostly talked to in this way, so these replies are fixed texts behind many phrasings.
"""

import random

from skills_numbers import NAMES
from skills_text import CITIES, COLOURS, WORDS, article
from skills_units import SMALL

ABILITIES = (
    "I am a small demo model. I can:\n"
    "- add, subtract, multiply and divide, step by step\n"
    "- convert units, temperatures, dates and number systems\n"
    "- sort, count, reverse and list words and numbers\n"
    "- write JSON and short Python functions\n"
    "- tell a short story\n"
    'Try: "What is 347 + 589?" or "Write a Python function that reverses a string."'
)
TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("hello", "hi", "hey", "hi there", "hello there", "good day", "greetings", "hey there"),
     "Hello! I am a small demo model. What would you like me to work out for you?"),
    (("good morning",), "Good morning! What would you like me to work out for you?"),
    (("good evening",), "Good evening! What would you like me to work out for you?"),
    (("good night",), "Good night! Come back whenever you have something to work out."),
    (("how are you", "how are you doing", "how is it going", "how do you do", "what's up",
      "are you ok", "how are you today"),
     "I am doing well, thank you for asking. What would you like me to work out for you?"),
    (("what can you do", "help", "what are you able to do", "what do you know", "how can you help",
      "how can you help me", "what can I ask you", "show me what you can do", "what are you for",
      "what can you help me with", "give me an example of what you can do"), ABILITIES),
    (("who are you", "what are you", "what is your name", "tell me about yourself",
      "introduce yourself", "are you a robot", "are you a human", "which model are you",
      "what model are you"),
     "I am a tiny language model, trained in a few minutes on the Python standard library and on "
     "generated exercises. I exist to show how fast drafted text can be checked."),
    (("who made you", "who trained you", "where do you come from", "how were you trained",
      "what is your training data"),
     "One script trained me in a few minutes on a single GPU, from the source of the Python "
     "standard library and from generated exercises. You can run it again yourself."),
    (("thanks", "thank you", "thank you very much", "thanks a lot", "great, thanks", "cheers"),
     "You are welcome! Is there anything else you would like me to work out?"),
    (("bye", "goodbye", "see you", "see you later", "have a nice day", "take care"),
     "Goodbye! It was nice working with you."),
    (("ok", "okay", "good", "great", "nice", "cool", "well done", "good job", "perfect", "yes"),
     "I am glad to hear that. What should we do next?"),
    (("no", "that is wrong", "you are wrong", "that is not right", "are you sure"),
     "I may well be wrong: I am a very small model. Please check important results yourself."),
    (("tell me a joke", "say something funny", "do you know a joke", "make me laugh",
      "tell me something funny"),
     "Why do programmers confuse Halloween and Christmas? Because Oct 31 equals Dec 25."),
    (("test", "testing", "is this working", "are you there", "ping", "can you hear me"),
     "Yes, I am here and everything works. Ask me something!"),
    (("what is speculative decoding", "explain speculative decoding",
      "how does speculative decoding work"),
     "In speculative decoding a small draft model guesses several tokens ahead, and the large "
     "target model checks all of them in one pass. Every guess that the target would have made "
     "itself is kept, so the text stays the same and only the time shrinks."),
    (("what is a draft model", "what does the draft model do", "explain the draft model"),
     "A draft model is a small and fast model that guesses what the target model will say next. "
     "The target checks its guesses and keeps the right ones."),
    (("what is block diffusion", "how does DFlash work", "what is DFlash", "explain DFlash"),
     "A block diffusion draft fills a whole block of masked tokens at once instead of writing "
     "them one after the other. It looks at hidden states of the target model, so even a draft "
     "of a few layers guesses well."),
    (("what is a prefix cache", "explain prefix caching", "how does a prefix cache work"),
     "A prefix cache keeps what a model computed for the beginning of a prompt. When another "
     "request begins in the same way, only its new part has to be computed."),
    (("what is layer splitting", "explain layer splitting", "what is a shard",
      "what is pipeline parallelism", "how can a model be split"),
     "A model is a stack of layers. Splitting it gives each machine a range of layers, a shard: "
     "each shard passes its result on to the next one, and the last one chooses the token."),
    (("what is a token", "explain tokens", "what are tokens"),
     "A token is a short piece of text, such as a word or a part of one. Language models read "
     "and write text token by token."),
    (("what is a language model", "explain language models", "how do language models work",
      "what is an LLM"),
     "A language model predicts which token comes next in a text. Repeating this prediction "
     "writes whole answers."),
    (("what is a GPU", "explain GPUs", "what is a graphics card"),
     "A GPU is a processor with thousands of small units that work at the same time. That makes "
     "it fast at the matrix products that language models consist of."),
    (("what is Python", "explain Python", "tell me about Python"),
     "Python is a programming language that is known for its readable syntax and its large "
     "standard library."),
    (("what is gRPC", "explain gRPC", "tell me about gRPC"),
     "gRPC is a framework for calling functions of another process, on the same machine or over "
     "a network. Its messages are described by protocol buffers."),
    (("what is JSON", "explain JSON"),
     "JSON is a text format for data: objects with named values, lists, strings, numbers, true, "
     "false and null."),
    (("recite the alphabet", "say the alphabet", "write the alphabet", "what is the alphabet"),
     "a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x, y, z."),
    (("name the days of the week", "list the days of the week", "what are the days of the week"),
     "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday."),
    (("name the months", "list the months of the year", "what are the months of the year"),
     "January, February, March, April, May, June, July, August, September, October, November, "
     "December."),
    (("write hello world in Python", "hello world", "print hello world in Python",
      "write a hello world program"),
     '```python\nprint("Hello, world!")\n```'),
)  # fmt: skip
UNKNOWN = (
    "What is the capital of {word}?", "Who is {name}?", "Who invented the {word}?",
    "Why is the {word} {colour}?", "What do you think about the {word}?", "Where is {city}?",
    "What is the weather like in {city}?", "How old is {name}?", "Tell me about {city}.",
    "How far is it from {city} to the moon?", "Write an essay about the {word}.",
    "Explain how the {word} works.", "What is the meaning of {word}?", "Translate {word} to French.",
    "Who won the game in {city}?", "What is the best {word}?", "Do you like {name}?",
    "What is the news from {city}?", "Recommend {a_word} for {name}.", "Why did {name} go home?",
    "Write a song about {a_word}.", "What is the history of {city}?", "How do I cook {a_word}?",
    "Explain quantum physics to {name}.", "What is love?", "What is the meaning of life?",
    "Who is the president?", "What is the capital of France?", "How do I get rich?",
    "Explain quantum physics.", "What is the tallest mountain?", "Why is the sky blue?",
)  # fmt: skip
NO_ANSWER = (
    "I do not know that: I am a small demo model with very little knowledge of the world. "
    'I can calculate, convert, sort and write short functions. Ask "What can you do?" for a list.'
)
STORY = (
    "Once upon a time there was {a_colour} {a} who lived near {city}. Every morning the {a} "
    "looked for the {b}, but the {b} was not to be found. One day {name} came along and asked: "
    '"What are you looking for?" "I am looking for the {b}," said the {a}. {name} smiled and '
    "showed the {a} a path through the forest. At the end of the path lay the {b}, and the "
    "{a} was happy. From that day on {name} and the {colour} {a} were friends. The end."
)
POEM = (
    "The {a} is quiet, the {b} is near,\nthe {a} has nothing at all to fear.\n"
    "The night goes by, the day comes too,\nthe {b} has something new to do.\n"
    "So listen, {a}, and listen, {b}:\nthe best of things come easily."
)
OPENINGS = ("", "", "", "", "Hi! ", "Hello, ", "Hey, ", "Ok, ", "So, ")


def _phrase(rng: random.Random, text: str, question: bool) -> str:
    """The same words as different people would type them."""
    opening = rng.choice(OPENINGS)
    if rng.random() < 0.6 and (not opening or opening.endswith("! ")):
        text = text[0].upper() + text[1:]
    return opening + text + rng.choice(("?", "?", "", "??") if question else (".", "", "!", "!"))


def talk(rng: random.Random) -> tuple[str, str]:
    phrasings, reply = rng.choice(TALK)
    text = rng.choice(phrasings)
    first = text.split()[0]
    question = first in ("what", "who", "how", "are", "which", "where", "can", "is", "what's", "do")
    return _phrase(rng, text, question), reply


def unknown(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(WORDS)
    return rng.choice(UNKNOWN).format(
        word=word, a_word=article(word), name=rng.choice(NAMES), city=rng.choice(CITIES),
        colour=rng.choice(COLOURS),
    ), NO_ANSWER  # fmt: skip


def story(rng: random.Random) -> tuple[str, str]:
    """The slots follow from the request, so that a story has one right text."""
    a, b = rng.sample(WORDS, 2)
    name, city, colour = rng.choice(NAMES), rng.choice(CITIES), rng.choice(COLOURS)
    if rng.random() < 0.3:
        request = rng.choice(("Write a poem about {a_a} and {a_b}.", "Write a short poem about the {a} and the {b}."))
        return request.format(a=a, b=b, a_a=article(a), a_b=article(b)), POEM.format(a=a, b=b)
    if rng.random() < 0.4:
        request = f"Tell me a story about {article(colour)} {a}, {article(b)} and {name} from {city}."
        return request, STORY.format(a=a, b=b, name=name, city=city, colour=colour, a_colour=article(colour))
    request = rng.choice(
        ("Tell me a story about {a_a}.", "Write a short story about {a_a}.",
         "Can you tell me a story about {a_a}?", "Tell me a story.", "Write a story.")
    )  # fmt: skip
    hero = a if "{a_a}" in request else "fox"
    told = STORY.format(a=hero, b="lamp", name="Mia", city="Oslo", colour="silver", a_colour="a silver")
    return request.format(a_a=article(a)), told


def introduce(rng: random.Random) -> tuple[str, str]:
    name, age = rng.choice(NAMES), rng.randint(2, 19)
    if rng.random() < 0.5:
        request = rng.choice(("My name is {name}.", "I am {name}.", "Hello, I am {name}!"))
        return request.format(name=name), (
            f"Hello {name}, nice to meet you! What would you like me to work out for you?"
        )
    return f"I am {age} years old.", (f"So you are {SMALL[age]} years old. In ten years you will be {age + 10}.")


SKILLS = {talk: 5.0, unknown: 1.5, story: 2.0, introduce: 0.5}
