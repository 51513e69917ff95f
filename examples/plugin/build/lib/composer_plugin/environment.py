"""capitals: name the capital of a country."""

from composer_post_training.environments import AnsweredEnv, Question, Split

CAPITALS = {
    "train": {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo"},
    "eval": {"Peru": "Lima", "Kenya": "Nairobi"},
}


class Capitals(AnsweredEnv):
    """Questions with one right answer each."""

    name = "capitals"

    def questions(self, split: Split, count: int, seed: int) -> list[Question]:
        """Return the first `count` questions of a split."""
        countries = list(CAPITALS[split].items())[:count]
        return [Question(country, f"What is the capital of {country}?", capital) for country, capital in countries]
