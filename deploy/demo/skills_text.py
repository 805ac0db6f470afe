"""Chats about words, lists, dates and JSON: copying, ordering and reformatting what was given."""

import calendar
import datetime
import json
import random

from skills_numbers import NAMES, ask

WORDS = (
    "apple river stone cloud table green horse light music paper bread tiger lemon ocean piano queen robot "
    "salad tower uncle violin water zebra banana candle desert engine forest garden hammer island jacket "
    "kitten ladder market needle orange pencil rabbit silver ticket valley window yellow anchor bridge carpet "
    "dragon falcon guitar helmet insect jungle kettle lizard mirror napkin oyster pepper rocket shadow tunnel "
    "velvet winter cat dog sun moon star tree fish bird book lamp door road ship snow rain wind fire gold iron "
    "milk salt corn rice bean leaf seed rose frog bear wolf deer goat lion duck crab seal swan crow moth ant "
    "bee owl fox"
).split()
CITIES = "Berlin Paris Rome Madrid Vienna Oslo Lisbon Dublin Prague Warsaw Tokyo Cairo".split()
COLOURS = "red green blue yellow black white orange purple brown grey".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = list(calendar.month_name)


def some_words(rng: random.Random, low: int, high: int) -> list[str]:
    return rng.sample(WORDS, rng.randint(low, high))


def article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def uppercase(rng: random.Random) -> tuple[str, str]:
    text = " ".join(some_words(rng, 1, 4))
    if rng.random() < 0.5:
        request = ask(rng, f"Write in capital letters: {text}", f'Convert "{text}" to uppercase.')
        return request, f"In capital letters: {text.upper()}"
    request = f'Convert "{text.upper()}" to lowercase.'
    return request, f"In lowercase letters: {text}"


def spell(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(WORDS)
    kind = rng.randrange(3)
    letters = ", ".join(word)
    if kind == 0:
        request = ask(rng, f'Spell the word "{word}".', f"How do you spell {word}?")
        return request, f"The word {word} is spelled {'-'.join(word.upper())}."
    if kind == 1:
        request = ask(rng, f'How many letters has the word "{word}"?', f"Count the letters of {word}.")
        counted = ", ".join(f"{letter} ({i})" for i, letter in enumerate(word, 1))
        return request, f"Counting the letters: {counted}. So {word} has {len(word)} letters."
    request = ask(rng, f'Reverse the word "{word}".', f"Write {word} backwards.")
    backwards = ", ".join(reversed(word))
    return request, f"The letters are {letters}. From the last to the first: {backwards}."


def sort_words(rng: random.Random) -> tuple[str, str]:
    words = some_words(rng, 3, 6)
    request = ask(
        rng,
        f"Sort these words alphabetically: {', '.join(words)}",
        f"Put these words in alphabetical order: {', '.join(words)}",
    )
    return request, f"In alphabetical order: {', '.join(sorted(words))}."


def list_words(rng: random.Random) -> tuple[str, str]:
    words = some_words(rng, 3, 7)
    listed = ", ".join(words)
    kind = rng.randrange(4)
    if kind == 0:
        return f"Make a bullet list of: {listed}", "\n".join(f"- {word}" for word in words)
    if kind == 1:
        lines = "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1))
        return f"Make a numbered list of: {listed}", lines
    if kind == 2:
        return f"Reverse this list: {listed}", f"Reversed: {', '.join(reversed(words))}."
    request = f"How many words are in this list: {listed}?"
    counted = ", ".join(f"{word} ({i})" for i, word in enumerate(words, 1))
    return request, f"Counting them: {counted}. There are {len(words)} words."


def repeat(rng: random.Random) -> tuple[str, str]:
    word, times = " ".join(some_words(rng, 1, 2)), rng.randint(2, 9)
    request = ask(rng, f'Repeat "{word}" {times} times.', f'Say "{word}" {times} times.')
    return request, ", ".join([word] * times) + "."


def replace(rng: random.Random) -> tuple[str, str]:
    a, b, new = rng.sample(WORDS, 3)
    who = rng.choice(NAMES)
    verb = rng.choice(("sees", "likes", "draws", "buys", "wants", "finds"))
    sentence = f"{who} {verb} the {a} and the {b}."
    request = f'Replace "{a}" with "{new}" in this sentence: {sentence}'
    return request, f"{who} {verb} the {new} and the {b}."


def sort_numbers(rng: random.Random) -> tuple[str, str]:
    values = rng.sample(range(1, 100), rng.randint(3, 8))
    up = rng.random() < 0.6
    order = "from smallest to largest" if up else "from largest to smallest"
    request = f"Sort these numbers {order}: {', '.join(map(str, values))}"
    ordered = sorted(values, reverse=not up)
    return request, f"Sorted {order}: {', '.join(map(str, ordered))}."


def pick_numbers(rng: random.Random) -> tuple[str, str]:
    values = rng.sample(range(1, 100), rng.randint(4, 8))
    listed = ", ".join(map(str, values))
    kind = rng.choice(("even", "odd", "largest", "smallest"))
    if kind in ("even", "odd"):
        picked = [v for v in values if (v % 2 == 0) == (kind == "even")]
        found = ", ".join(map(str, picked)) if picked else "none"
        checks = ", ".join(f"{v} is {'odd' if v % 2 else 'even'}" for v in values)
        request = f"Which of these numbers are {kind}: {listed}?"
        return request, f"Checking each: {checks}. The {kind} numbers are: {found}."
    best = max(values) if kind == "largest" else min(values)
    return f"Which of these numbers is the {kind}: {listed}?", (f"The {kind} of {listed} is {best}.")


def total(rng: random.Random) -> tuple[str, str]:
    values = [rng.randint(1, 30) for _ in range(rng.randint(3, 6))]
    request = ask(
        rng,
        f"Add up these numbers: {', '.join(map(str, values))}",
        f"What is the sum of {', '.join(map(str, values))}?",
    )
    lines, running = [], values[0]
    for value in values[1:]:
        lines.append(f"{running} + {value} = {running + value}")
        running += value
    return request, "\n".join([*lines, f"The sum is {running}."])


def _person(rng: random.Random) -> dict[str, str | int | bool]:
    fields: dict[str, str | int | bool] = {"name": rng.choice(NAMES), "age": rng.randint(18, 80)}
    extra: dict[str, str | int | bool] = {
        "city": rng.choice(CITIES),
        "colour": rng.choice(COLOURS),
        "member": rng.random() < 0.5,
    }
    for key in rng.sample(list(extra), rng.randint(1, 3)):
        fields[key] = extra[key]
    return fields


def _plain(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def make_json(rng: random.Random) -> tuple[str, str]:
    person = _person(rng)
    facts = ", ".join(f"{key} {_plain(value)}" for key, value in person.items())
    request = ask(rng, f"Write a JSON object with {facts}.", f"Turn this into JSON: {facts}")
    return request, f"```json\n{json.dumps(person, indent=2)}\n```"


def read_json(rng: random.Random) -> tuple[str, str]:
    person = _person(rng)
    key = rng.choice(list(person))
    request = f'What is the value of "{key}" in this JSON? {json.dumps(person)}'
    return request, f'The value of "{key}" is {json.dumps(person[key])}.'


def change_json(rng: random.Random) -> tuple[str, str]:
    person, city = _person(rng), rng.choice(CITIES)
    request = f'Set "city" to "{city}" in this JSON: {json.dumps(person)}'
    return request, f"```json\n{json.dumps(person | {'city': city})}\n```"


def csv_json(rng: random.Random) -> tuple[str, str]:
    rows = [_person(rng) for _ in range(rng.randint(1, 3))]
    table = [{"name": row["name"], "age": row["age"]} for row in rows]
    text = "\n".join(["name,age", *(f"{row['name']},{row['age']}" for row in table)])
    request = f"Convert this CSV to JSON:\n{text}"
    inner = ",\n".join(f"  {json.dumps(row)}" for row in table)
    return request, f"```json\n[\n{inner}\n]\n```"


def _date(rng: random.Random) -> datetime.date:
    year = rng.randint(1990, 2039)
    month = rng.randint(1, 12)
    return datetime.date(year, month, rng.randint(1, calendar.monthrange(year, month)[1]))


def long_date(rng: random.Random) -> tuple[str, str]:
    day = _date(rng)
    text = f"{day.day} {MONTHS[day.month]} {day.year}"
    if rng.random() < 0.5:
        return f"Write the date {day.isoformat()} in words.", (
            f"Month {day.month:02d} is {MONTHS[day.month]}, so {day.isoformat()} is {text}."
        )
    return f"Write {text} as an ISO date.", (
        f"{MONTHS[day.month]} is month {day.month:02d}, so {text} is {day.isoformat()}."
    )


def leap(year: int) -> str:
    if year % 4:
        return f"{year} cannot be divided by 4, so it is not a leap year"
    return f"{year} can be divided by 4, so it is a leap year"


def next_day(rng: random.Random) -> tuple[str, str]:
    day = _date(rng)
    last = calendar.monthrange(day.year, day.month)[1]
    if rng.random() < 0.4:
        day = day.replace(day=last)
    following = day + datetime.timedelta(days=1)
    request = f"Which date comes after {day.isoformat()}?"
    year_note = f"{leap(day.year)}. " if day.month == 2 else ""
    note = f"{year_note}{MONTHS[day.month]} {day.year} has {last} days, so the next day is"
    return request, f"{note} {following.isoformat()}."


def month_days(rng: random.Random) -> tuple[str, str]:
    day = _date(rng)
    name, days = MONTHS[day.month], calendar.monthrange(day.year, day.month)[1]
    reason = f"{leap(day.year)}. " if day.month == 2 else ""
    return f"How many days has {name} {day.year}?", f"{reason}{name} {day.year} has {days} days."


def leap_year(rng: random.Random) -> tuple[str, str]:
    year = rng.randint(1904, 2096)
    return f"Is {year} a leap year?", f"{leap(year)}."


def weekday(rng: random.Random) -> tuple[str, str]:
    start, days = rng.randrange(7), rng.randint(1, 10)
    request = ask(
        rng,
        f"Which weekday is {days} days after {DAYS[start]}?",
        f"Today is {DAYS[start]}. Which day is it in {days} days?",
    )
    path = ", ".join(f"{i} {DAYS[(start + i) % 7]}" for i in range(1, days + 1))
    return request, f"Counting the days: {path}. So it is {DAYS[(start + days) % 7]}."


SKILLS = {
    uppercase: 1.0, spell: 1.0, sort_words: 1.0, list_words: 1.3, repeat: 0.7, replace: 1.0,
    sort_numbers: 1.5, pick_numbers: 1.3, total: 1.3, make_json: 1.5, read_json: 0.7,
    change_json: 1.0, csv_json: 1.0, long_date: 1.0, next_day: 1.0, month_days: 0.5,
    leap_year: 0.4, weekday: 1.0,
}  # fmt: skip
