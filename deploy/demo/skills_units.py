"""Chats that convert: units, temperatures, number systems, words, times of day."""

import random

from skills_numbers import ask

UNITS = (
    ("kilometres", "metres", 1000),
    ("metres", "centimetres", 100),
    ("centimetres", "millimetres", 10),
    ("kilograms", "grams", 1000),
    ("tonnes", "kilograms", 1000),
    ("litres", "millilitres", 1000),
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("years", "months", 12),
    ("dozens", "pieces", 12),
)
# Hundreds, tens and ones are written alike, each with the signs of its own for one, five and ten.
ROMAN = tuple(
    tuple(digit.translate(str.maketrans("IVX", signs)) for digit in ("", *"I II III IV V VI VII VIII IX".split()))
    for signs in ("CDM", "XLC", "IVX")
)
SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()


def unit(rng: random.Random) -> tuple[str, str]:
    big, small, factor = rng.choice(UNITS)
    n = rng.randint(2, 99 if factor in (10, 100, 1000) else 12)
    request = ask(
        rng,
        f"Convert {n} {big} to {small}.",
        f"How many {small} are {n} {big}?",
        f"What is {n} {big} in {small}?",
    )
    return request, (
        f"To convert {big} to {small}, multiply by {factor}: {n} * {factor} = {n * factor}. "
        f"So {n} {big} are {n * factor} {small}."
    )


def temperature(rng: random.Random) -> tuple[str, str]:
    c = 5 * rng.randint(0, 40)
    request = ask(rng, f"Convert {c} degrees Celsius to Fahrenheit.", f"What is {c} °C in Fahrenheit?")
    return request, (
        f"Divide by 5: {c} / 5 = {c // 5}. Multiply by 9: {c // 5} * 9 = {c // 5 * 9}. "
        f"Add 32: {c // 5 * 9} + 32 = {c // 5 * 9 + 32}. "
        f"So {c} degrees Celsius are {c // 5 * 9 + 32} degrees Fahrenheit."
    )


def to_binary(rng: random.Random) -> tuple[str, str]:
    n = rng.randint(1, 255)
    request = ask(rng, f"Convert {n} to binary.", f"What is {n} in binary?")
    lines, rest = [], n
    while rest:
        lines.append(f"{rest} / 2 = {rest // 2} remainder {rest % 2}")
        rest //= 2
    lines.append(f"Read the remainders from the last to the first: {n:b}.")
    return request, "\n".join(lines)


def from_binary(rng: random.Random) -> tuple[str, str]:
    n = rng.randint(2, 127)
    powers = [1 << i for i in range(n.bit_length() - 1, -1, -1) if n >> i & 1]
    request = ask(rng, f"Convert binary {n:b} to decimal.", f"What is {n:b} (binary) in decimal?")
    return request, (
        f"The ones stand for {', '.join(map(str, powers))}. "
        f"{' + '.join(map(str, powers))} = {n}, so {n:b} in decimal is {n}."
    )


def to_hex(rng: random.Random) -> tuple[str, str]:
    n = rng.randint(16, 255)
    request = ask(rng, f"Convert {n} to hexadecimal.", f"What is {n} in hex?")
    return request, (
        f"{n} = {n // 16} * 16 + {n % 16}. {n // 16} is written {n // 16:X} and {n % 16} is "
        f"written {n % 16:X}, so {n} in hexadecimal is {n:X}."
    )


def roman(rng: random.Random) -> tuple[str, str]:
    n = rng.randint(1, 999)
    parts = [(n // 100 * 100, ROMAN[0][n // 100]), (n // 10 % 10 * 10, ROMAN[1][n // 10 % 10])]
    parts.append((n % 10, ROMAN[2][n % 10]))
    steps = ", ".join(f"{value} is {letters}" for value, letters in parts if value)
    request = ask(rng, f"Write {n} in Roman numerals.", f"What is {n} as a Roman numeral?")
    return request, f"{steps}. So {n} in Roman numerals is {''.join(part[1] for part in parts)}."


def words(rng: random.Random) -> tuple[str, str]:
    n = rng.randint(1, 999)
    request = ask(rng, f"Write {n} in words.", f"Spell out the number {n}.")
    below = n % 100
    tail = SMALL[below] if below < 20 else TENS[below // 10]
    if below >= 20 and below % 10:
        tail += "-" + SMALL[below % 10]
    if n >= 100:
        tail = f"{SMALL[n // 100]} hundred" + (f" and {tail}" if below else "")
    return request, f"The number {n} is written {tail}."


def clock(rng: random.Random) -> tuple[str, str]:
    hour, minute, more = rng.randint(0, 22), 5 * rng.randint(0, 11), 5 * rng.randint(1, 11)
    start, total = f"{hour:02d}:{minute:02d}", minute + more
    request = ask(rng, f"What time is it {more} minutes after {start}?", f"Add {more} minutes to {start}.")
    if total < 60:
        return request, f"{minute} + {more} = {total}, so it is {hour:02d}:{total:02d}."
    return request, (
        f"{minute} + {more} = {total}, which is one hour and {total - 60} minutes, "
        f"so it is {hour + 1:02d}:{total - 60:02d}."
    )


SKILLS = {
    unit: 1.5, temperature: 0.7, to_binary: 1.0, from_binary: 1.0, to_hex: 0.7, roman: 1.0,
    words: 0.7, clock: 1.0,
}  # fmt: skip
