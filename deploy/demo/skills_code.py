"""Chats that ask for a short Python function or for the value of an expression."""

import random

from skills_numbers import ask
from skills_text import WORDS

# (what the function does, its name, parameters, docstring, body); {n} is a drawn number.
FUNCTIONS = (
    ("adds {n} to a number", "add_{n}", "x", "Return x plus {n}.", ["return x + {n}"]),
    ("multiplies a number by {n}", "times_{n}", "x", "Return x times {n}.", ["return x * {n}"]),
    ("checks if a number is divisible by {n}", "is_divisible_by_{n}", "x",
     "Return True if x is divisible by {n}.", ["return x % {n} == 0"]),
    ("adds {n} to every number of a list", "add_{n}_to_all", "numbers",
     "Return a new list with {n} added to every number.",
     ["return [number + {n} for number in numbers]"]),
    ("keeps the numbers of a list that are larger than {n}", "larger_than_{n}", "numbers",
     "Return the numbers that are larger than {n}.",
     ["return [number for number in numbers if number > {n}]"]),
    ("returns the first {n} items of a list", "first_{n}", "items",
     "Return the first {n} items.", ["return items[:{n}]"]),
    ("returns the last {n} items of a list", "last_{n}", "items",
     "Return the last {n} items.", ["return items[-{n}:]"]),
    ("repeats a string {n} times", "repeat_{n}", "text",
     "Return the text repeated {n} times.", ["return text * {n}"]),
    ("prints the numbers from 1 to {n}", "count_to_{n}", "",
     "Print the numbers from 1 to {n}.",
     ["for number in range(1, {n} + 1):", "    print(number)"]),
    ("returns the multiples of {n} up to a limit", "multiples_of_{n}", "limit",
     "Return the multiples of {n} up to limit.", ["return list(range({n}, limit + 1, {n}))"]),
    ("raises a number to the power of {n}", "power_{n}", "x",
     "Return x to the power of {n}.", ["return x ** {n}"]),
    ("counts how often {n} occurs in a list", "count_{n}", "numbers",
     "Return how often {n} occurs.", ["return numbers.count({n})"]),
)  # fmt: skip
PLAIN_FUNCTIONS = (
    ("reverses a string", "reverse_string", "text", "Return the text reversed.",
     ["return text[::-1]"]),
    ("checks if a string is a palindrome", "is_palindrome", "text",
     "Return True if the text reads the same backwards.", ["return text == text[::-1]"]),
    ("returns the largest number of a list", "largest", "numbers",
     "Return the largest number.", ["return max(numbers)"]),
    ("sums a list of numbers", "total", "numbers", "Return the sum of the numbers.",
     ["result = 0", "for number in numbers:", "    result += number", "return result"]),
    ("computes the factorial of n", "factorial", "n", "Return the factorial of n.",
     ["result = 1", "for i in range(2, n + 1):", "    result *= i", "return result"]),
    ("computes the n-th Fibonacci number", "fibonacci", "n",
     "Return the n-th Fibonacci number.",
     ["a, b = 0, 1", "for _ in range(n):", "    a, b = b, a + b", "return a"]),
    ("checks if a number is prime", "is_prime", "n", "Return True if n is a prime number.",
     ["if n < 2:", "    return False", "for i in range(2, int(n ** 0.5) + 1):",
      "    if n % i == 0:", "        return False", "return True"]),
    ("computes the greatest common divisor of two numbers", "gcd", "a, b",
     "Return the greatest common divisor of a and b.",
     ["while b:", "    a, b = b, a % b", "return a"]),
    ("counts the vowels of a string", "count_vowels", "text",
     "Return the number of vowels in the text.",
     ['return sum(letter in "aeiou" for letter in text.lower())']),
    ("counts how often each word occurs in a text", "count_words", "text",
     "Return a dict from each word to how often it occurs.",
     ["counts = {{}}", "for word in text.split():",
      "    counts[word] = counts.get(word, 0) + 1", "return counts"]),
    ("reads a JSON file", "read_json", "path", "Return the content of a JSON file.",
     ['with open(path, encoding="utf-8") as file:', "    return json.load(file)"]),
    ("removes duplicates from a list and keeps the order", "unique", "items",
     "Return the items without duplicates, in order.", ["return list(dict.fromkeys(items))"]),
    ("computes the average of a list", "average", "numbers",
     "Return the average of the numbers.", ["return sum(numbers) / len(numbers)"]),
    ("says hello to a name", "greet", "name", "Return a greeting for name.",
     ['return f"Hello, {{name}}!"']),
    ("sorts a list with bubble sort", "bubble_sort", "items",
     "Sort the items in place and return them.",
     ["for end in range(len(items) - 1, 0, -1):", "    for i in range(end):",
      "        if items[i] > items[i + 1]:",
      "            items[i], items[i + 1] = items[i + 1], items[i]", "return items"]),
    ("finds an item in a sorted list by binary search", "binary_search", "items, wanted",
     "Return the index of wanted in items, or -1.",
     ["low, high = 0, len(items) - 1", "while low <= high:", "    middle = (low + high) // 2",
      "    if items[middle] == wanted:", "        return middle",
      "    if items[middle] < wanted:", "        low = middle + 1", "    else:",
      "        high = middle - 1", "return -1"]),
    ("merges two sorted lists", "merge", "left, right",
     "Return one sorted list with the items of both.",
     ["result = []", "while left and right:",
      "    source = left if left[0] <= right[0] else right", "    result.append(source.pop(0))",
      "return result + left + right"]),
)  # fmt: skip


def write_function(rng: random.Random) -> tuple[str, str]:
    table = FUNCTIONS if rng.random() < 0.6 else PLAIN_FUNCTIONS
    does, name, parameters, doc, body = rng.choice(table)
    n = str(rng.randint(2, 40))
    does, name = does.format(n=n), name.format(n=n)
    request = ask(
        rng,
        f"Write a Python function that {does}.",
        f"Give me a Python function that {does}.",
        f"Can you write a Python function that {does}?",
        f"Please write a function in Python that {does}.",
        f"I need a Python function that {does}.",
        f"python function that {does}",
        f"Write a function that {does}.",
    )
    lines = [f"def {name}({parameters}):", f'    """{doc.format(n=n)}"""']
    lines += ["    " + line.format(n=n) for line in body]
    imports = ["import json", "", ""] if name == "read_json" else []
    return request, "```python\n" + "\n".join(imports + lines) + "\n```"


def evaluate(rng: random.Random) -> tuple[str, str]:
    values = [rng.randint(0, 20) for _ in range(rng.randint(3, 6))]
    i, j = sorted(rng.sample(range(len(values) + 1), 2))
    word, k = rng.choice(WORDS), rng.randint(2, 5)
    expression, result, reason = rng.choice(
        (
            (f"len({values})", len(values), "len counts the items of the list"),
            (f"max({values})", max(values), "max returns the largest item"),
            (f"min({values})", min(values), "min returns the smallest item"),
            (f"sorted({values})", sorted(values), "sorted returns the items in order"),
            (f"{values}[{i}:{j}]", values[i:j], f"the slice takes the items from {i} to {j - 1}"),
            (f"{values}[::-1]", values[::-1], "a step of -1 reverses the list"),
            (f"list(range({i}, {j + 4}))", list(range(i, j + 4)), "range leaves out its end"),
            (f"'{word}' * {k}", repr(word * k), f"the text is repeated {k} times"),
            (f"'{word}'.upper()", repr(word.upper()), "upper returns capital letters"),
            (f"'{word}'.title()", repr(word.title()), "title starts words with a capital"),
            (f"[x * {k} for x in {values}]", [x * k for x in values],
             f"every item is multiplied by {k}"),
        )
    )  # fmt: skip
    request = ask(
        rng,
        f"What does this Python expression return: {expression}",
        f"What is the value of {expression} in Python?",
    )
    return request, f"It returns {result}, because {reason}."


SKILLS = {write_function: 4.0, evaluate: 1.5}
