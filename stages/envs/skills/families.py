"""The families of questions: a template with parameters each, which draw a question and its right answer.

In order: words and names, the templates, the table of families. The last family of each template is held out, so that
an evaluation asks for skills that are related to the trained ones and were not trained.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import partial
from itertools import count as count_up
from random import Random
from typing import Any

WORDS = """
apple arrow autumn bank basket bell bird boat book bottle branch bread bridge brush bucket butter button candle carpet
castle chair cheese circle city clock cloud coat coffee corner cotton cup desk dinner doctor door dream drum eagle
engine evening field finger fire flag flower forest fork garden gate glass glove grass hammer harbor hat hill honey
horse house island jacket key kitchen ladder lake lamp leaf lemon letter lion market meadow milk mirror money moon
morning mountain music nail needle nest night ocean onion orange paper pencil pepper piano picture pillow plate pocket
potato queen rabbit radio rain ring river road roof rope salt school shadow sheep ship shirt shoe silver sister snow
soap spoon spring star stone storm street sugar summer sun table teacher ticket tiger tower train tree valley village
wagon wall water whale wheel window winter wolf wood yellow
""".split()  # noqa: SIM905 - a list of literals would be one word a line
NAMES = """
Anna Ben Carla David Emma Felix Grace Hugo Ida Jonas Karen Leo Maria Nina Oscar Paul Rosa Simon Tara Victor
""".split()  # noqa: SIM905
CITIES = """
Athens Berlin Cairo Dublin Geneva Lima London Madrid Oslo Paris Prague Rome Sofia Tokyo Vienna Warsaw
""".split()  # noqa: SIM905
BELOW_TWENTY = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen
""".split()  # noqa: SIM905
TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
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


# --- templates


def dates(form: Callable[[date], str], rng: Random) -> Exercise:
    """Rewrite a date as YYYY-MM-DD."""
    day = FIRST_DAY + timedelta(rng.randrange(DAYS))
    return Exercise(f"Write the date as YYYY-MM-DD: {form(day)}", day.isoformat())


def times(form: str, rng: Random) -> Exercise:
    """Rewrite a time in the morning as HH:MM."""
    hour, minute = rng.randrange(1, 12), rng.randrange(60)
    return Exercise(f"Write the time as HH:MM: {form.format(h=hour, m=minute)}", f"{hour:02}:{minute:02}")


def cases(
    asked: str, shown: Callable[[list[str]], str], wanted: Callable[[list[str]], str], num: int, rng: Random
) -> Exercise:
    """Rewrite a name of several words in another case."""
    words = rng.sample(WORDS, num)
    return Exercise(f"{asked}: {shown(words)}", wanted(words))


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


def nth(which: str, index: int, num: int, rng: Random) -> Exercise:
    """Pick a word by its place."""
    words = rng.sample(WORDS, num)
    return Exercise(f"What is the {which} word of: {' '.join(words)}", words[index])


def rearranged(asked: str, how: Callable[[list[str]], Iterable[str]], num: int, rng: Random) -> Exercise:
    """Write words in another order, or without some of them."""
    words = rng.sample(WORDS, num)
    return Exercise(f"{asked}: {' '.join(words)}", " ".join(how(words)))


def numbers(asked: str, how: Callable[[list[int]], int | list[int]], num: int, high: int, rng: Random) -> Exercise:
    """Choose among numbers, or sort them."""
    given = rng.sample(range(2, high), num)
    answer = how(given)
    wanted = ", ".join(map(str, answer)) if isinstance(answer, list) else str(answer)
    return Exercise(f"{asked}: {', '.join(map(str, given))}", wanted)


def decided(asked: str, holds: Callable[[int, int], bool], rng: Random) -> Exercise:
    """Answer a question about two numbers with yes or no, each as often."""
    wanted = rng.random() < 0.5
    pairs = ([rng.randrange(10, 100), rng.randrange(10, 100)] for _ in count_up())
    left, right = next(pair for pair in pairs if holds(*pair) == wanted)
    return Exercise(asked.format(left, right), "yes" if wanted else "no")


def lists(asked: str, shown: str, wanted: str, num: int, rng: Random) -> Exercise:
    """Write a list with other separators."""
    words = rng.sample(WORDS, num)
    return Exercise(f"{asked}: {shown.join(words)}", wanted.join(words))


def objects(keys: Sequence[str], rng: Random) -> Exercise:
    """Write a JSON object with the given keys."""
    every = {
        "name": rng.choice(NAMES),
        "age": rng.randrange(18, 90),
        "city": rng.choice(CITIES),
        "item": rng.choice(WORDS),
        "count": rng.randrange(2, 100),
        "pets": rng.sample(["cat", "dog", "bird", "fish", "horse"], 2),
    }
    told = {
        "name": "{name}",
        "age": "is {age} years old",
        "city": "lives in {city}",
        "item": "the {item}",
        "count": "{count} pieces",
        "pets": "has a {pets[0]} and a {pets[1]}",
    }
    values = {key: every[key] for key in keys}
    text = ", ".join(told[key].format(**values) for key in keys)
    asked = f"Write a JSON object with the keys {' and '.join([', '.join(keys[:-1]), keys[-1]])}: {text}"
    return Exercise(asked, json.dumps(values), {"json": True})


@dataclass(frozen=True)
class Expression:
    """A Python expression in `{v}` and `{n}`, what it is in words, its inputs for an `n`, and the bounds of `n`."""

    words: str
    code: str
    inputs: Callable[[Random, int], list[Any]]
    low: int = 2
    high: int = 9


def python(names: str, expressions: Sequence[Expression], rng: Random) -> Exercise:
    """Write a Python expression, which is compared by its values for hidden inputs."""
    one, name = rng.choice(expressions), rng.choice(names.split())
    number = rng.randint(one.low, one.high)
    code, words = (text.format(v=name, n=number) for text in (one.code, one.words))
    inputs = one.inputs(rng, number)
    # Of the right code alone, which is text of this module: an answer is executed in a sandbox.
    results = [eval(code, {}, {name: value}) for value in inputs]  # noqa: S307
    check = {"argument": name, "cases": [list(pair) for pair in zip(inputs, results, strict=True)]}
    return Exercise(f"Write a Python expression for {words}.", code, check)


def products(factors: Sequence[int], form: str, rng: Random) -> Exercise:
    """Multiply a number with a simple one."""
    left, right = rng.choice(factors), rng.randrange(2, 100)
    return Exercise(form.format(left, right), str(left * right))


def neighbours(asked: str, step: int, low: int, high: int, rng: Random) -> Exercise:
    """Name the number before or after another, or between two."""
    number = rng.randrange(low, high)
    return Exercise(asked.format(number, number + 2), str(number + step))


def extracted(asked: str, form: str, wanted: str, rng: Random) -> Exercise:
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
    return Exercise(f"{asked}: {form.format(**parts)}", wanted.format(**parts))


def numerals(to_words: bool, low: int, high: int, rng: Random) -> Exercise:
    """Write a number in digits or in words."""
    number = rng.randrange(low, high)
    words = in_words(number)
    asked = f"Write the number in words: {number}" if to_words else f"Write the number in digits: {words}"
    return Exercise(asked, words if to_words else str(number))


def in_words(number: int) -> str:
    """Return a number below 1,000 in English words."""
    if number >= 100:
        rest = f" and {in_words(number % 100)}" if number % 100 else ""
        return f"{BELOW_TWENTY[number // 100]} hundred{rest}"
    if number < 20:
        return BELOW_TWENTY[number]
    return TENS[number // 10] + (f"-{BELOW_TWENTY[number % 10]}" if number % 10 else "")


def replaced(index: int, rng: Random) -> Exercise:
    """Replace one number of three by another."""
    *given, new = rng.sample(range(2, 100), 4)
    wanted = [new if place == index else number for place, number in enumerate(given)]
    asked = f"Replace {given[index]} with {new}: {', '.join(map(str, given))}"
    return Exercise(asked, ", ".join(map(str, wanted)))


# --- the table


def _title(words: list[str]) -> str:
    return " ".join(word.capitalize() for word in words)


def _camel(words: list[str]) -> str:
    return "".join(word.capitalize() for word in words)


def _texts(rng: Random, number: int) -> list[str]:
    del number
    return [" ".join(rng.sample(WORDS, 3)) for _ in range(5)]


def _lists(rng: Random, number: int) -> list[list[int]]:
    """Return lists that hold `number` none to three times."""
    lists = [[rng.randrange(-50, 100) for _ in range(rng.randrange(10, 14))] for _ in range(5)]
    return [sorted([*some, *[number] * (index % 4)], key=lambda _: rng.random()) for index, some in enumerate(lists)]


def _integers(rng: Random, number: int) -> list[int]:
    """Return integers around `number`, at which comparisons differ, one that it divides, and others."""
    return [number - 1, number, number + 1, 3 * number, *(rng.randrange(-60, 120) for _ in range(4))]


SNAKE, SNAKE_ASKED = "_".join, "Write in snake_case"
TEMPLATES: dict[str, dict[str, Draw]] = {
    "date": {
        "long": partial(dates, lambda day: f"{day:%B} {day.day}, {day.year}"),
        "dotted": partial(dates, lambda day: f"{day:%d.%m.%Y}"),
        "short": partial(dates, lambda day: f"{day.day} {day:%b} {day.year}"),
        "full": partial(dates, lambda day: f"{day.day} {day:%B} {day.year}"),
        "weekday": partial(dates, lambda day: f"{day:%A}, {day:%B} {day.day}, {day.year}"),
    },
    "time": {
        "colon": partial(times, "{h}:{m:02} AM"),
        "letters": partial(times, "{h}h{m:02}"),
        "dotted": partial(times, "{h}.{m:02} am"),
    },
    "snake": {
        "camel2": partial(cases, SNAKE_ASKED, _camel, SNAKE, 2),
        "camel3": partial(cases, SNAKE_ASKED, _camel, SNAKE, 3),
        "title3": partial(cases, SNAKE_ASKED, _title, SNAKE, 3),
        "kebab3": partial(cases, SNAKE_ASKED, "-".join, SNAKE, 3),
        "camel4": partial(cases, SNAKE_ASKED, _camel, SNAKE, 4),
    },
    "case": {
        "kebab": partial(cases, "Write in kebab-case", _title, "-".join, 3),
        "camel": partial(cases, "Write in CamelCase", " ".join, _camel, 2),
        "dots": partial(cases, "Write with dots", " ".join, ".".join, 3),
        "title": partial(cases, "Write in Title Case", SNAKE, _title, 3),
    },
    "count": {
        "a": partial(counts, "a", 1),
        "e": partial(counts, "e", 1),
        "two": partial(counts, "aeo", 2),
        "rst": partial(counts, "rst", 1),
    },
    "length": {
        "words": partial(lengths, " "),
        "digits": digits,
        "items": partial(lengths, ", "),
    },
    "nth": {
        "first": partial(nth, "first", 0, 5),
        "second": partial(nth, "second", 1, 4),
        "third": partial(nth, "third", 2, 3),
        "last": partial(nth, "last", -1, 4),
    },
    "reverse": {
        "two": partial(rearranged, "Write the words in reverse order", reversed, 2),
        "three": partial(rearranged, "Write the words in reverse order", reversed, 3),
        "numbers": partial(numbers, "Write the numbers in reverse order", lambda given: given[::-1], 3, 100),
    },
    "sort": {
        "pair": partial(numbers, "Sort the numbers from small to large", sorted, 2, 100),
        "numbers": partial(numbers, "Sort the numbers from small to large", sorted, 3, 100),
        "descending": partial(
            numbers, "Sort the numbers from large to small", lambda given: sorted(given, reverse=True), 3, 100
        ),
    },
    "drop": {
        "first": partial(rearranged, "Write the words without the first", lambda words: words[1:], 2),
        "last": partial(rearranged, "Write the words without the last", lambda words: words[:-1], 4),
        "number": partial(numbers, "Write the numbers without the first", lambda given: given[1:], 3, 100),
    },
    "choose": {
        "largest3": partial(numbers, "Which number is the largest", max, 3, 100),
        "largest4": partial(numbers, "Which number is the largest", max, 4, 100),
        "smallest3": partial(numbers, "Which number is the smallest", min, 3, 100),
    },
    "json": {
        "item-city-count": partial(objects, ("item", "city", "count")),
        "item-count": partial(objects, ("item", "count")),
        "name-pets": partial(objects, ("name", "pets")),
        "name-age-city": partial(objects, ("name", "age", "city")),
    },
    "python": {
        "slice": partial(
            python,
            "s text word title line name",
            (
                Expression("the first {n} characters of {v}", "{v}[:{n}]", _texts),
                Expression("the last {n} characters of {v}", "{v}[-{n}:]", _texts),
                Expression("{v} without its first {n} characters", "{v}[{n}:]", _texts),
                Expression("the character of {v} at index {n}", "{v}[{n}]", _texts),
            ),
        ),
        "arithmetic": partial(
            python,
            "x y n k total value",
            (
                Expression("{v} plus {n}", "{v} + {n}", _integers, 2, 40),
                Expression("{v} times {n}", "{v} * {n}", _integers, 2, 40),
                Expression("the remainder of {v} divided by {n}", "{v} % {n}", _integers, 2, 40),
                Expression("the square of {v} plus {n}", "{v} ** 2 + {n}", _integers, 2, 40),
            ),
        ),
        "compare": partial(
            python,
            "x y n k total value",
            (
                Expression("whether {v} is greater than {n}", "{v} > {n}", _integers, 2, 60),
                Expression("whether {v} is less than {n}", "{v} < {n}", _integers, 2, 60),
                Expression("whether {v} is divisible by {n}", "{v} % {n} == 0", _integers, 2, 60),
                Expression("the larger of {v} and {n}", "max({v}, {n})", _integers, 2, 60),
            ),
        ),
        "list": partial(
            python,
            "xs values items numbers data rows",
            (
                Expression("the first {n} elements of the list {v}", "{v}[:{n}]", _lists),
                Expression("the last {n} elements of the list {v}", "{v}[-{n}:]", _lists),
                Expression("the sum of the list {v} plus {n}", "sum({v}) + {n}", _lists),
                Expression("how often {n} occurs in the list {v}", "{v}.count({n})", _lists),
            ),
        ),
    },
    "decide": {
        "greater": partial(decided, "Is {} greater than {}?", lambda left, right: left > right),
        "even": partial(decided, "Is the sum of {} and {} even?", lambda left, right: (left + right) % 2 == 0),
        "ending": partial(
            decided, "Do {} and {} end with the same digit?", lambda left, right: (left - right) % 10 == 0
        ),
        "less": partial(decided, "Is {} less than {}?", lambda left, right: left < right),
    },
    "list": {
        "commas": partial(lists, "Write the words with commas", " and ", ", ", 3),
        "plus": partial(lists, "Write the words with plus signs", " and ", " + ", 3),
        "arrows": partial(lists, "Write the words with arrows", ", ", " -> ", 3),
        "slashes": partial(lists, "Write the words with slashes", ", ", " / ", 3),
    },
    "product": {
        "tens": partial(products, (10, 100), "{} * {} ="),
        "hundreds": partial(products, (100, 1000), "What is {} times {}?"),
    },
    "next": {
        "after": partial(neighbours, "Which number comes after {}?", 1, 10, 1000),
        "before": partial(neighbours, "Which number comes before {}?", -1, 10, 1000),
        "between": partial(neighbours, "Which number is between {} and {}?", 1, 10, 1000),
    },
    "find": {
        "both": partial(
            extracted, "Write the name and the year only", "{name} moved to {city} in {year}", "{name}, {year}"
        ),
        "email": partial(
            extracted,
            "Write the email address only",
            "{name} from {city} has the address {email} since {year}",
            "{email}",
        ),
        "thing": partial(
            extracted, "Write what was bought only", "{name} bought the {word} for {price} in {city}", "{word}"
        ),
        "city": partial(
            extracted, "Write the city only", "{name} sold the {word} in {city} for {price} in {year}", "{city}"
        ),
    },
    "number": {
        "digits": partial(numerals, False, 20, 400),
        "words": partial(numerals, True, 20, 100),
        "hundreds": partial(numerals, False, 400, 1000),
    },
    "replace": {
        "first": partial(replaced, 0),
        "middle": partial(replaced, 1),
        "last": partial(replaced, 2),
    },
}
"""Template, then variant: the family `date-dotted` is the variant `dotted` of the template `date`."""

FAMILIES: dict[str, Draw] = {
    f"{template}-{variant}": draw for template, variants in TEMPLATES.items() for variant, draw in variants.items()
}
HELD_OUT = frozenset(f"{template}-{list(variants)[-1]}" for template, variants in TEMPLATES.items())
"""Families that are held out: the last of each template."""
