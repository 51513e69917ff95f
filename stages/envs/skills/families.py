"""The families of questions: a template with parameters each, which draw a question and its right answer.

In order: the templates, the table of families, which `families.toml` holds with all words. The last family of each
template is held out, so that an evaluation asks for skills that are related to the trained ones and were not trained.
"""

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import partial
from itertools import count as count_up
from random import Random
from typing import Any

from composer_stages.data_files import load_toml

DATA = load_toml(__package__, "families.toml")
WORDS, NAMES, CITIES = (DATA[key].split() for key in ("words", "names", "cities"))
BELOW_TWENTY, TENS = DATA["below_twenty"].split(), DATA["tens"].split()
FIRST_DAY, DAYS = date(1950, 1, 1), 36_500


@dataclass(frozen=True)
class Exercise:
    """A question and its right answer.

    check: how an answer is compared, JSON-able. Empty: texts. {"json": True}: values. {"argument": name, "cases":
    [[value, result], ...]}: what a Python expression returns.
    """

    question: str
    answer: str
    check: Mapping[str, Any] = field(default_factory=dict)


Draw = Callable[[Random], Exercise]

SPELLINGS: dict[str, Callable[[list[str]], str]] = {
    "CamelCase": lambda words: "".join(word.capitalize() for word in words),
    "Title Case": lambda words: " ".join(word.capitalize() for word in words),
    "snake_case": "_".join,
    "kebab-case": "-".join,
    "dots": ".".join,
    "spaces": " ".join,
}
CHANGES: dict[str, Callable[[list[Any]], Any]] = {
    "reversed": lambda items: items[::-1],
    "ascending": sorted,
    "descending": lambda items: sorted(items, reverse=True),
    "without first": lambda items: items[1:],
    "without last": lambda items: items[:-1],
    "largest": max,
    "smallest": min,
}
RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "greater": operator.gt,
    "less": operator.lt,
    "even sum": lambda first, second: (first + second) % 2 == 0,
    "same last digit": lambda first, second: (first - second) % 10 == 0,
}


def dates(form: str, rng: Random) -> Exercise:
    """Rewrite a date as YYYY-MM-DD."""
    day = FIRST_DAY + timedelta(rng.randrange(DAYS))
    return Exercise(f"Write the date as YYYY-MM-DD: {form.format(day)}", day.isoformat())


def times(form: str, rng: Random) -> Exercise:
    """Rewrite a time in the morning as HH:MM."""
    hour, minute = rng.randrange(1, 12), rng.randrange(60)
    return Exercise(f"Write the time as HH:MM: {form.format(h=hour, m=minute)}", f"{hour:02}:{minute:02}")


def cases(task: str, source: str, target: str, num: int, rng: Random) -> Exercise:
    """Rewrite a name of several words in another case."""
    words = rng.sample(WORDS, num)
    return Exercise(f"{task}: {SPELLINGS[source](words)}", SPELLINGS[target](words))


def counts(letters: str, num_words: int, rng: Random) -> Exercise:
    """Count a letter."""
    letter = rng.choice(letters)
    # Most words have the letter: a model that always answers 0 is rewarded seldom.
    with_letter = [word for word in WORDS if letter in word]
    words = [rng.choice(with_letter if rng.random() < 0.75 else WORDS) for _ in range(num_words)]
    text = " ".join(words)
    return Exercise(f'How many times does the letter "{letter}" occur in "{text}"?', str(text.count(letter)))


def lengths(separator: str, rng: Random) -> Exercise:
    """Count words."""
    words = rng.sample(WORDS, rng.randint(2, 6))
    return Exercise(f"How many words are in this list: {separator.join(words)}", str(len(words)))


def digits(rng: Random) -> Exercise:
    """Count the digits of a number."""
    number = rng.randrange(10 ** rng.randrange(1, 6))
    return Exercise(f"How many digits has the number: {number}", str(len(str(number))))


def nth(ordinal: str, index: int, num: int, rng: Random) -> Exercise:
    """Pick a word by its position."""
    words = rng.sample(WORDS, num)
    return Exercise(f"What is the {ordinal} word of: {' '.join(words)}", words[index])


def rearranged(task: str, change: str, num: int, rng: Random) -> Exercise:
    """Write words in another order, or without some of them."""
    words = rng.sample(WORDS, num)
    return Exercise(f"{task}: {' '.join(words)}", " ".join(CHANGES[change](words)))


def numbers(task: str, change: str, num: int, high: int, rng: Random) -> Exercise:
    """Choose among numbers, or sort them."""
    values = rng.sample(range(2, high), num)
    result = CHANGES[change](values)
    answer = ", ".join(map(str, result)) if isinstance(result, list) else str(result)
    return Exercise(f"{task}: {', '.join(map(str, values))}", answer)


def decided(task: str, relation: str, rng: Random) -> Exercise:
    """Answer a question about two numbers with yes or no, each as often."""
    answer = rng.random() < 0.5
    pairs = ([rng.randrange(10, 100), rng.randrange(10, 100)] for _ in count_up())
    pair = next(pair for pair in pairs if RELATIONS[relation](*pair) == answer)
    return Exercise(task.format(*pair), "yes" if answer else "no")


def lists(task: str, separator: str, new_separator: str, num: int, rng: Random) -> Exercise:
    """Write a list with other separators."""
    words = rng.sample(WORDS, num)
    return Exercise(f"{task}: {separator.join(words)}", new_separator.join(words))


def objects(keys: Sequence[str], rng: Random) -> Exercise:
    """Write a JSON object with the given keys."""
    pool = {
        "name": rng.choice(NAMES),
        "age": rng.randrange(18, 90),
        "city": rng.choice(CITIES),
        "item": rng.choice(WORDS),
        "count": rng.randrange(2, 100),
        "pets": rng.sample(["cat", "dog", "bird", "fish", "horse"], 2),
    }
    values = {key: pool[key] for key in keys}
    text = ", ".join(DATA["clauses"][key].format(**values) for key in keys)
    task = f"Write a JSON object with the keys {' and '.join([', '.join(keys[:-1]), keys[-1]])}: {text}"
    return Exercise(task, json.dumps(values), {"json": True})


def draw_texts(rng: Random, number: int) -> list[str]:
    """Draw five texts of three words."""
    del number
    return [" ".join(rng.sample(WORDS, 3)) for _ in range(5)]


def draw_lists(rng: Random, number: int) -> list[list[int]]:
    """Draw lists that hold `number` none to three times."""
    lists = [[rng.randrange(-50, 100) for _ in range(rng.randrange(10, 14))] for _ in range(5)]
    return [sorted([*some, *[number] * (index % 4)], key=lambda _: rng.random()) for index, some in enumerate(lists)]


def draw_integers(rng: Random, number: int) -> list[int]:
    """Draw integers around `number`, at which comparisons differ, one that it divides, and others."""
    return [number - 1, number, number + 1, 3 * number, *(rng.randrange(-60, 120) for _ in range(4))]


INPUTS: dict[str, Callable[[Random, int], list[Any]]] = {
    "texts": draw_texts,
    "lists": draw_lists,
    "integers": draw_integers,
}


def python(names: str, kind: str, low: int, high: int, expressions: Sequence[Sequence[str]], rng: Random) -> Exercise:
    """Write a Python expression, which is compared by its values for hidden inputs.

    expressions: in words and as code, in `{v}`, the variable, and `{n}`, a number from low to high.
    """
    expression, name = rng.choice(expressions), rng.choice(names.split())
    number = rng.randint(low, high)
    words, code = (text.format(v=name, n=number) for text in expression)
    inputs = INPUTS[kind](rng, number)
    # Of the right code alone, which is text of families.toml: an answer is executed in a sandbox.
    results = [eval(code, {}, {name: value}) for value in inputs]  # noqa: S307
    check = {"argument": name, "cases": [list(pair) for pair in zip(inputs, results, strict=True)]}
    return Exercise(f"Write a Python expression for {words}.", code, check)


def products(factors: Sequence[int], form: str, rng: Random) -> Exercise:
    """Multiply a number with a simple one."""
    factor, number = rng.choice(factors), rng.randrange(2, 100)
    return Exercise(form.format(factor, number), str(factor * number))


def neighbours(task: str, step: int, low: int, high: int, rng: Random) -> Exercise:
    """Name the number before or after another, or between two."""
    number = rng.randrange(low, high)
    return Exercise(task.format(number, number + 2), str(number + step))


def extracted(task: str, sentence: str, answer: str, rng: Random) -> Exercise:
    """Copy parts of a sentence."""
    name, word = rng.choice(NAMES), rng.choice(WORDS)
    parts = {
        "name": name,
        "word": word,
        "city": rng.choice(CITIES),
        "year": str(rng.randrange(1950, 2030)),
        "price": f"${rng.randrange(2, 90)}.{rng.randrange(10, 100)}",
        "count": str(rng.randrange(2, 100)),
        "email": f"{name.lower()}.{word}@example.com",
    }
    return Exercise(f"{task}: {sentence.format(**parts)}", answer.format(**parts))


def numerals(to_words: bool, low: int, high: int, rng: Random) -> Exercise:
    """Write a number in digits or in words."""
    number = rng.randrange(low, high)
    words = in_words(number)
    task = f"Write the number in words: {number}" if to_words else f"Write the number in digits: {words}"
    return Exercise(task, words if to_words else str(number))


def in_words(number: int) -> str:
    """Return a number below 1,000 in English words."""
    if number >= 100:
        below_hundred = f" and {in_words(number % 100)}" if number % 100 else ""
        return f"{BELOW_TWENTY[number // 100]} hundred{below_hundred}"
    if number < 20:
        return BELOW_TWENTY[number]
    return TENS[number // 10] + (f"-{BELOW_TWENTY[number % 10]}" if number % 10 else "")


def replaced(index: int, rng: Random) -> Exercise:
    """Replace one number of three by another."""
    *values, new = rng.sample(range(2, 100), 4)
    answer = [new if position == index else value for position, value in enumerate(values)]
    task = f"Replace {values[index]} with {new}: {', '.join(map(str, values))}"
    return Exercise(task, ", ".join(map(str, answer)))


DRAWS: tuple[Callable[..., Exercise], ...] = (
    *(dates, times, cases, counts, lengths, digits, nth, rearranged, numbers, decided, lists, objects, python),
    *(products, neighbours, extracted, numerals, replaced),
)
DRAW_BY_NAME = {draw.__name__: draw for draw in DRAWS}
TEMPLATES: dict[str, dict[str, Draw]] = {
    template: {variant: partial(DRAW_BY_NAME[name], *arguments) for variant, (name, *arguments) in variants.items()}
    for template, variants in DATA["templates"].items()
}
"""Template, then variant: the family `date-dotted` is the variant `dotted` of the template `date`."""

FAMILIES: dict[str, Draw] = {
    f"{template}-{variant}": draw for template, variants in TEMPLATES.items() for variant, draw in variants.items()
}
HELD_OUT = frozenset(f"{template}-{list(variants)[-1]}" for template, variants in TEMPLATES.items())
"""Families that are held out: the last of each template."""
