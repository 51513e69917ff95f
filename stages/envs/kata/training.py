"""How a model of kata learns: transcripts as token ids, of which only the taught answers count."""

from collections.abc import Callable, Iterable

from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from stages.envs.kata.recipes import Recipe
from stages.envs.kata.transcripts import TaughtTranscript
from stages.tiny_models.tokenizer import END, START
from stages.tiny_models.training import Encoded, fit


def learn(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    taught: Iterable[TaughtTranscript],
    recipe: Recipe,
    progress: Callable[[int, int], None],
) -> None:
    """Train a model on transcripts, each seen once: as many as the recipe's schedule has steps times batch."""
    examples = [encode(tokenizer, transcript) for transcript in taught]
    fit(model, examples, recipe.schedule, recipe.seed, progress)


def encode(tokenizer: PreTrainedTokenizerFast, transcript: TaughtTranscript) -> Encoded:
    """Ids as the chat template renders them; to be learned are the taught answers with their end tokens."""
    ids: list[int] = []
    learned: list[bool] = []

    def add(text: str, learn: bool) -> None:
        piece = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids.extend(piece)
        learned.extend([learn] * len(piece))

    taught = iter(turn.taught for turn in transcript.turns)
    for message in transcript.messages():
        add(f"{START}{message['role']}\n", False)
        add(message["content"] + END, message["role"] == "assistant" and next(taught))
        add("\n", False)
    return ids, learned
