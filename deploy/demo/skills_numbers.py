"""Chats about numbers: arithmetic written out as on paper."""

import random

PLACES = ("ones", "tens", "hundreds", "thousands", "ten thousands")
NAMES = "Anna Ben Clara David Emma Felix Grace Henry Ida Jonas Kim Leo Mia Noah Olga Paul".split()
THINGS = "apples books coins pencils stamps cards marbles cookies flowers shells".split()


def ask(rng: random.Random, *forms: str) -> str:
    return rng.choice(forms)


def number(rng: random.Random, digits: int) -> int:
    """A number whose length, not only its value, is spread evenly."""
    size = rng.randint(1, digits)
    return rng.randint(10 ** (size - 1) if size > 1 else 0, 10**size - 1)


def add(rng: random.Random) -> tuple[str, str]:
    a, b = number(rng, 4), number(rng, 4)
    request = ask(rng, f"What is {a} + {b}?", f"Calculate {a} + {b}.", f"Add {a} and {b}.", f"{a} + {b} = ?")
    lines, carry = [], 0
    for index in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**index % 10, b // 10**index % 10
        total = x + y + carry
        carried = f" + {carry}" if carry else ""
        carry = total // 10
        ending = f"write {total % 10} and carry 1" if carry else f"write {total % 10}"
        lines.append(f"Add the {PLACES[index]}: {x} + {y}{carried} = {total}, {ending}.")
    return request, "\n".join([*lines, f"{a} + {b} = {a + b}."])


def subtract(rng: random.Random) -> tuple[str, str]:
    b, a = sorted((number(rng, 4), number(rng, 4)))
    request = ask(rng, f"What is {a} - {b}?", f"Calculate {a} - {b}.", f"Subtract {b} from {a}.")
    lines, borrow = [], 0
    for index in range(len(str(a))):
        x, y = a // 10**index % 10, b // 10**index % 10
        taken = f" - {borrow}" if borrow else ""
        difference = x - y - borrow
        borrow = int(difference < 0)
        if borrow:
            result = f"{difference}, borrow 10 and write {difference + 10}"
        else:
            result = f"{difference}, write {difference}"
        lines.append(f"Subtract the {PLACES[index]}: {x} - {y}{taken} = {result}.")
    return request, "\n".join([*lines, f"{a} - {b} = {a - b}."])


def multiply(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(11, 99), rng.randint(2, 9)
    tens, ones = a // 10 * 10, a % 10
    request = ask(rng, f"What is {a} * {b}?", f"What is {a} times {b}?", f"Multiply {a} by {b}.")
    return request, (
        f"Split {a} into {tens} and {ones}.\n{tens} * {b} = {tens * b}\n{ones} * {b} = {ones * b}\n"
        f"{tens * b} + {ones * b} = {a * b}\nSo {a} * {b} = {a * b}."
    )


def divide(rng: random.Random) -> tuple[str, str]:
    b, q = rng.randint(2, 12), rng.randint(1, 12)
    rest = rng.randint(0, b - 1)
    a = b * q + rest
    request = ask(rng, f"What is {a} divided by {b}?", f"Divide {a} by {b}.", f"Calculate {a} / {b}.")
    if not rest:
        return request, f"{q} * {b} = {a}, so {a} divided by {b} is exactly {q}."
    return request, (
        f"{q} * {b} = {q * b} and {a} - {q * b} = {rest}, so {a} divided by {b} is {q} with remainder {rest}."
    )


def table(rng: random.Random) -> tuple[str, str]:
    n, last = rng.randint(2, 20), rng.choice((5, 8, 10, 12))
    request = ask(
        rng,
        f"Write the multiplication table of {n} up to {last}.",
        f"Show me the {n} times table from 1 to {last}.",
    )
    return request, "\n".join(f"{n} x {i} = {n * i}" for i in range(1, last + 1))


def count(rng: random.Random) -> tuple[str, str]:
    first, step, steps = rng.randint(0, 60), rng.choice((1, 1, 2, 3, 5, 10)), rng.randint(6, 24)
    last = first + step * steps
    request = f"Count from {first} to {last}" + (f" in steps of {step}." if step > 1 else ".")
    return request, ", ".join(str(n) for n in range(first, last + 1, step)) + "."


def story_sum(rng: random.Random) -> tuple[str, str]:
    who, what = rng.choice(NAMES), rng.choice(THINGS)
    a, b = rng.randint(5, 90), rng.randint(2, 50)
    if rng.random() < 0.5:
        request = f"{who} has {a} {what} and gets {b} more. How many {what} does {who} have now?"
        return request, (
            f"{who} starts with {a} {what} and gets {b} more, so we add: {a} + {b} = {a + b}. "
            f"{who} now has {a + b} {what}."
        )
    a += b
    request = f"{who} has {a} {what} and gives away {b}. How many {what} are left?"
    return request, (
        f"{who} starts with {a} {what} and gives away {b}, so we subtract: {a} - {b} = {a - b}. "
        f"{who} has {a - b} {what} left."
    )


def price(rng: random.Random) -> tuple[str, str]:
    what, n, each = rng.choice(THINGS), rng.randint(2, 12), rng.randint(2, 12)
    request = f"{what.title()} cost {each} euros each. How much do {n} {what} cost?"
    return request, (
        f"Each of the {n} {what} costs {each} euros, so we multiply: "
        f"{n} * {each} = {n * each}. They cost {n * each} euros."
    )


def average(rng: random.Random) -> tuple[str, str]:
    values = [rng.randint(1, 30) for _ in range(rng.randint(2, 5))]
    values[-1] += -sum(values) % len(values)
    total = sum(values)
    listed = ", ".join(map(str, values))
    request = ask(rng, f"What is the average of {listed}?", f"Find the mean of {listed}.")
    return request, (
        f"The sum is {' + '.join(map(str, values))} = {total}. There are {len(values)} numbers, "
        f"so the average is {total} / {len(values)} = {total // len(values)}."
    )


def percent(rng: random.Random) -> tuple[str, str]:
    rate, base = rng.choice((5, 10, 20, 25, 50, 75)), 20 * rng.randint(1, 60)
    request = ask(rng, f"What is {rate}% of {base}?", f"Calculate {rate} percent of {base}.")
    return request, (
        f"1% of {base} is {base / 100:g}. Multiply by {rate}: {base / 100:g} * {rate} = "
        f"{base * rate // 100}. So {rate}% of {base} is {base * rate // 100}."
    )


def compare(rng: random.Random) -> tuple[str, str]:
    a, b = rng.sample(range(10, 10000), 2)
    request = ask(rng, f"Which is larger, {a} or {b}?", f"Which number is bigger: {a} or {b}?")
    return request, f"{max(a, b)} is larger than {min(a, b)}, so the answer is {max(a, b)}."


def rectangle(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    request = f"A rectangle is {a} m long and {b} m wide. What are its area and its perimeter?"
    return request, (
        f"The area is {a} * {b} = {a * b} square metres. The perimeter is "
        f"2 * ({a} + {b}) = 2 * {a + b} = {2 * (a + b)} metres."
    )


SKILLS = {
    add: 3.0, subtract: 3.0, multiply: 2.0, divide: 1.5, table: 1.0, count: 1.0, story_sum: 1.0,
    price: 1.0, average: 1.5, percent: 1.0, compare: 1.0, rectangle: 0.7,
}  # fmt: skip
