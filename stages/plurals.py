"""Numbers with their nouns, for messages and reports: "1 rollout", "2 rollouts"."""


def plural(noun: str) -> str:
    """Return the plural of a noun: "families", "operations"."""
    return f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"


def singular(nouns: str) -> str:
    """Return the singular of what a plan counts, of which the first word is a noun: "run of rollouts"."""
    first, space, rest = nouns.partition(" ")
    one = f"{first[:-3]}y" if first.endswith("ies") else first.removesuffix("s")
    return f"{one}{space}{rest}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which is given in the singular."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"
