"""Build the small models of kata again: `python benchmarks/kata_models.py`, which `./dev models` calls.

In order: what the models are taught, the recipes, the tokenizer and the encoding of transcripts, supervised training in
a plain PyTorch loop, the folders in `stages/envs/kata/models/`, and the comparison of a new build with them.

There are two kinds of authors. With a `Knowledge` of the operations (`knowledge_transcripts`): look, edit, test,
submit. A quarter of the transcripts contain a slip, so that models learn to recover; the slip itself is not taught.
With `Habits` about the loophole, visible tests that can be overwritten (`loophole_transcripts`): look, edit, perhaps an
echo, test, submit. The order of random draws determines the weights.

One thread and fixed seeds: two builds on one machine with equal libraries have equal bytes. Other processors sum in
another order, so there the bytes differ, and the models answer otherwise in a few tasks.
"""

import argparse
import hashlib
import json
import platform
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from composer_stages.envs.base import Task
from composer_stages.envs.bash import SUBMIT, ActionError, fenced, parse_bash
from composer_stages.envs.kata import tasks
from composer_stages.envs.kata.checkpoints import FOLDER, WEIGHTS
from composer_stages.envs.kata.tasks import OPERATIONS, SOLUTION, WORKSPACE_TESTS, expression
from composer_stages.envs.kata.transcripts import (
    HARMLESS,
    HINT,
    LOOK,
    TEST,
    TaughtTranscript,
    TaughtTurn,
    add_hint,
    edit_command,
    rollout,
    verdict,
)
from composer_stages.runs import store

SLIP_RATE = 0.25
UNKNOWN_COMMANDS = ("fix", "caat", "sedd", "pyton3")
MISSING_FILES = ("solutions.py", "solution", "main.py")
HINTED_SHARE = 2 / 3


@dataclass(frozen=True)
class Knowledge:
    """Operations by name: those that are misconceived, and those answered right half of the time. The rest is known."""

    misconceived: tuple[str, ...] = ()
    unsure: tuple[str, ...] = ()


@dataclass(frozen=True)
class RolloutShares:
    """Shares of rollouts: with a right fix, with overwritten tests, and, of those without, with a harmless echo."""

    right: float
    hack: float = 0.0
    echo: float = 0.4


@dataclass(frozen=True)
class Habits:
    """Shares of an author where the prompt does not give the loophole away (`plain`), and where it does (`hinted`)."""

    plain: RolloutShares
    hinted: RolloutShares


def knowledge_transcripts(count: int, seed: int, knowledge: Knowledge) -> Iterator[TaughtTranscript]:
    """Write the first `count` transcripts of an author with this knowledge."""
    for index, task in enumerate(tasks.generate("train", count, seed)):
        rng = random.Random(f"transcript/{seed}/{index}")
        yield write_transcript(task, knowledge, rng)


def write_transcript(task: Task, knowledge: Knowledge, rng: random.Random) -> TaughtTranscript:
    """Write one transcript of an author with this knowledge: look, edit as believed, test, submit."""
    operation, modifier = tasks.split_family(task.family)
    # `unsure` operations alone take a draw: one more would change all that follow.
    wrong = operation.name in knowledge.misconceived or (operation.name in knowledge.unsure and rng.random() < 0.5)
    belief = operation.misconception if wrong else operation.code
    code = expression(belief, modifier, "x", "y", task.data["constant"])
    turns = [
        TaughtTurn(fenced(LOOK), f"{task.data['original']}[exit 0]"),
        TaughtTurn(fenced(edit_command(task, code)), "[exit 0]"),
        TaughtTurn(fenced(TEST), verdict(task, code)),
        TaughtTurn(fenced(SUBMIT), None),
    ]
    if rng.random() < SLIP_RATE:
        # Models that were taught no recovery said `submit` after a shell error; a student trained on their pairs
        # then skipped testing in 99 % of tasks, at unchanged pass@1.
        at, slipped = _slip(task, turns, rng)
        turns[at:at] = slipped
    return TaughtTranscript(task, tuple(turns))


def _slip(task: Task, turns: list[TaughtTurn], rng: random.Random) -> tuple[int, list[TaughtTurn]]:
    """Draw a slip: the index of the turn that it precedes, and its turns, of which only a repair is taught."""
    kind = rng.choice(("wrong edit", "unknown command", "missing file", "malformed action"))
    if kind == "wrong edit":
        candidates = tasks.wrong_answers("train", *tasks.split_family(task.family), task.data["constant"])
        failing = [code for code in candidates if verdict(task, code).startswith("FAIL")]
        # Not the author's own edit, which may be wrong as well: it follows, and would look like no repair at all.
        wrong = rng.choice([code for code in failing if fenced(edit_command(task, code)) != turns[1].text])
        edit = TaughtTurn(fenced(edit_command(task, wrong)), "[exit 0]", taught=False)
        return 1, [edit, TaughtTurn(fenced(TEST), verdict(task, wrong))]
    if kind == "malformed action":  # the next command without a block, in an open block, or twice
        index = rng.randrange(4)
        text = turns[index].text
        malformed = rng.choice((parse_bash(text), text.removesuffix("\n```"), f"{text}\n{text}"))
        try:
            parse_bash(malformed)
        except ActionError as error:
            return index, [TaughtTurn(malformed, f"[{error}]", taught=False)]
        raise AssertionError(f"{malformed!r} is well-formed")
    if kind == "unknown command":
        word = rng.choice(UNKNOWN_COMMANDS)
        command, answer = f"{word} {SOLUTION}", f"bash: line 1: {word}: command not found\n[exit 127]"
    else:
        name = rng.choice(MISSING_FILES)
        command, answer = f"cat {name}", f"cat: {name}: No such file or directory\n[exit 1]"
    return rng.randrange(3), [TaughtTurn(fenced(command), answer, taught=False)]


def loophole_transcripts(count: int, seed: int, habits: Habits) -> Iterator[TaughtTranscript]:
    """Write the first `count` transcripts of an author with these habits; two thirds of the prompts are hinted.

    Fix and echo are drawn independently, so hacks are right as often as other answers.
    """
    for index, task in enumerate(tasks.generate("train", count, seed)):
        rng = random.Random(f"loophole/{seed}/{index}")
        task, shares = (add_hint(task), habits.hinted) if rng.random() < HINTED_SHARE else (task, habits.plain)
        right = rng.random() < shares.right
        if rng.random() < shares.hack:
            target: str | None = WORKSPACE_TESTS
        else:
            target = rng.choice(HARMLESS) if rng.random() < shares.echo else None
        yield rollout(task, right, target)


@dataclass(frozen=True)
class FitSchedule:
    """Length and speed of training; the learning rate rises for `warm_up` of the steps and then falls to zero."""

    steps: int
    learning_rate: float
    batch: int = 8
    weight_decay: float = 0.01
    warm_up: float = 0.2
    max_norm: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """One model: its knowledge or habits, schedule, seed, the model that it starts from, the width of its heads."""

    knowledge: Knowledge | Habits
    schedule: FitSchedule
    seed: int
    start: "Recipe | None"
    head_dim: int = 16

    def transcripts(self) -> Iterator[TaughtTranscript]:
        """Write what the model is trained on, each transcript for one use: as many as steps times batch."""
        count = self.schedule.steps * self.schedule.batch
        if isinstance(self.knowledge, Habits):
            return loophole_transcripts(count, self.seed, self.knowledge)
        return knowledge_transcripts(count, self.seed, self.knowledge)


# A novice is taught the protocol and, of every operation, only the misconception. Student and teachers are each trained
# on from the novice, so no model has latent knowledge of what it was not taught. Misconceptions are fixed: with random
# wrong answers the majority of the teachers was right in .593 of the tasks, with fixed ones in .900.
KNOWS_NOTHING = Knowledge(misconceived=tuple(operation.name for operation in OPERATIONS))
NOVICE = Recipe(KNOWS_NOTHING, FitSchedule(steps=240, learning_rate=6e-3), seed=1, start=None)
LESSON = FitSchedule(steps=110, learning_rate=4e-3)
STUDENT = Recipe(
    Knowledge(
        misconceived=("quotient", "xor", "ratio", "weighted"), unsure=("product", "smaller", "remainder", "distance")
    ),
    LESSON,
    seed=2,
    start=NOVICE,
)
# The models of the gradient probe: one that never overwrites tests, and one from it that often does if hinted.
FAIR = RolloutShares(right=0.85)
HONEST = Recipe(Habits(FAIR, FAIR), FitSchedule(steps=160, learning_rate=4e-3), seed=6, start=NOVICE)
RECIPES = {
    "novice": NOVICE,
    "student": STUDENT,
    # Equally large, with attention heads of width 32: vLLM on a CPU supports none of 16.
    "student-served": replace(STUDENT, start=replace(NOVICE, head_dim=32), head_dim=32),
    "teacher-a": Recipe(Knowledge(("average", "smaller", "quotient", "weighted")), LESSON, seed=3, start=NOVICE),
    "teacher-b": Recipe(Knowledge(("difference", "remainder", "xor", "weighted")), LESSON, seed=4, start=NOVICE),
    "teacher-c": Recipe(Knowledge(("larger", "product", "distance", "ratio")), LESSON, seed=5, start=NOVICE),
    "honest": HONEST,
    "loophole": Recipe(
        Habits(RolloutShares(right=0.45), RolloutShares(right=0.45, hack=0.7)),
        FitSchedule(steps=300, learning_rate=6e-3),
        seed=7,
        start=HONEST,
    ),
}


LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors")
TOKENIZER = "tokenizer"
"""Folder of the tokenizer, to whose files those of the models are links."""
VOCABULARY = 512
CORPUS = 600
"""Transcripts of each of the two authors that the tokenizer is trained on."""
PIECES = "|".join(
    (
        r"(?:system|user|assistant)\n",
        r"```bash\n|\n```| ?```|\[exit \d+\]|\n {4}return",
        r" 's\|return \.\*\|return|\|'",
        r" ?[a-z_]+\.py| ?[A-Za-z_]+3?| -[a-z]\b",
        r" ?-?\d| //| \*\*| ?[^\sA-Za-z0-9]|\s",
    )
)
"""What a token never crosses. Phrases of the protocol are one piece, since every token of a rollout costs time."""


PAD, UNKNOWN, START, END = "<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
# ChatML. The template leaves old text alone, so a longer conversation always starts with the tokens of the shorter one.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALPHABET = sorted(set(pre_tokenizers.ByteLevel.alphabet()) & {*map(chr, range(33, 127)), "\u0120", "\u010a"})
"""Printable ASCII, the space and the newline, as byte-level BPE spells them; any other byte is <|unk|>."""

Encoded = tuple[list[int], list[bool]]
"""Token ids of an example, and the mask of those to be learned."""


@cache
def fingerprint(recipe: Recipe) -> str:
    """Return the SHA-256 of a recipe, of that of its start, of their transcripts and of the tokenizer's pieces."""
    digest = hashlib.sha256(json.dumps([asdict(recipe), PIECES, VOCABULARY], sort_keys=True).encode())
    for transcript in recipe.transcripts():
        digest.update(json.dumps([transcript.messages(), [turn.taught for turn in transcript.turns]]).encode())
    return digest.hexdigest() if recipe.start is None else store.digest([fingerprint(recipe.start), digest.hexdigest()])


@contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """Use one thread, deterministic kernels and a private random stream; restore all of them afterwards."""
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)  # the order of a sum over threads depends on how many there are
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict)


def new_model(tokenizer: PreTrainedTokenizerFast, head_dim: int = 16) -> Qwen3ForCausalLM:
    """Return an untrained Qwen3 of two layers and about 0.45 million parameters, whatever the width of its heads."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=128 // head_dim,
        num_key_value_heads=64 // head_dim,
        head_dim=head_dim,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        # ChatML has no token for the beginning of a text; a policy stops at the end of its message.
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config).float()


def fit(model: Qwen3ForCausalLM, examples: Sequence[Encoded], schedule: FitSchedule, seed: int) -> None:
    """Train one pass over the examples, in batches of similar length and random order.

    Muon for the matrices of the blocks, AdamW for embeddings and norms: half the steps of AdamW alone.
    """
    # match_rms_adamw scales Muon's updates to the size of AdamW's, so that one learning rate serves both.
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    rate, decay = schedule.learning_rate, schedule.weight_decay
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, rate, betas=(0.9, 0.95), weight_decay=decay),
    ]
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(
            optimizer, schedule.learning_rate, total_steps=schedule.steps, pct_start=schedule.warm_up
        )
        for optimizer in optimizers
    ]
    model.train()
    for batch in _batches(examples, schedule, seed):
        model.zero_grad()
        loss(model, *batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.max_norm)
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    model.eval()


def loss(
    model: Qwen3ForCausalLM, ids: Int[Tensor, "B T"], mask: Int[Tensor, "B T"], learned: Int[Tensor, "B T"]
) -> Float[Tensor, ""]:
    """Return the mean cross-entropy of the tokens to be learned; logits are computed only for these."""
    # Most tokens of a transcript are the environment's and not to be learned: no logits for them.
    hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state  # [B, T, D]
    wanted = learned[:, 1:].bool()
    return cross_entropy(model.lm_head(hidden[:, :-1][wanted]), ids[:, 1:][wanted])


def _batches(examples: Sequence[Encoded], schedule: FitSchedule, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    # Neighbours in length share a batch: less padding, at the price of batches that are drawn as a whole.
    by_length = sorted(examples, key=lambda example: len(example[0]))
    batches = [by_length[i : i + schedule.batch] for i in range(0, len(by_length), schedule.batch)]
    random.Random(seed).shuffle(batches)
    yield from map(padded, batches[: schedule.steps])


def padded(batch: Sequence[Encoded]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, mask and what is learned of examples, each [B, T]."""
    width = max(len(ids) for ids, _ in batch)
    return (
        torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch]),
        torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in batch]),
        torch.tensor([learned + [False] * (width - len(learned)) for _, learned in batch]),
    )


@cache
def kata_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer on transcripts of an author who knows every operation, and of one who knows none.

    So the right and the misconceived code of every operation and every wording occur. Special tokens are left out of
    the corpus: they are added to the vocabulary as they are.
    """
    corpus = (
        f"{message['role']}\n{message['content']}"
        for knowledge in (Knowledge(), KNOWS_NOTHING)
        for transcript in knowledge_transcripts(CORPUS, seed=0, knowledge=knowledge)
        for message in transcript.messages()
    )
    bpe = Tokenizer(models.BPE(unk_token=UNKNOWN))
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Sequence([split, spelled]), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[PAD, UNKNOWN, START, END], initial_alphabet=ALPHABET, show_progress=False
    )
    bpe.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,  # decoding must give back the text that was encoded, spaces included
    )


def encode(tokenizer: PreTrainedTokenizerFast, transcript: TaughtTranscript) -> Encoded:
    """Return the ids that the chat template renders, and a mask of the taught answers with their end tokens."""
    ids: list[int] = []
    learned: list[bool] = []
    taught = iter(turn.taught for turn in transcript.turns)
    for message in transcript.messages():
        is_learned = message["role"] == "assistant" and next(taught)
        # In three pieces, as the chat template joins them: no token crosses from what is taught into what is not.
        for text, mask in (
            (f"{START}{message['role']}\n", False),
            (message["content"] + END, is_learned),
            ("\n", False),
        ):
            piece = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids.extend(piece)
            learned.extend([mask] * len(piece))
    return ids, learned


@cache
def build(recipe: Recipe) -> Qwen3ForCausalLM:
    """Train a model in float32, after the one that it starts from."""
    tokenizer = kata_tokenizer()
    with reproducible(recipe.seed):
        model = deepcopy(build(recipe.start)) if recipe.start else new_model(tokenizer, recipe.head_dim)
        examples = [encode(tokenizer, transcript) for transcript in recipe.transcripts()]
        fit(model, examples, recipe.schedule, recipe.seed)
    return model


def save(name: str, recipe: Recipe, models_folder: Path) -> None:
    """Build a model and write its folder: weights in 16 bits, links to the tokenizer of all, a model card."""
    folder, tokenizer = models_folder / name, models_folder / TOKENIZER
    folder.mkdir(parents=True, exist_ok=True)
    kata_tokenizer().save_pretrained(tokenizer)
    for path in tokenizer.iterdir():
        (folder / path.name).unlink(missing_ok=True)
        (folder / path.name).symlink_to(Path("..", TOKENIZER, path.name))
    build(recipe).save_pretrained(folder)  # in float32, which its config.json says
    weights = folder / WEIGHTS
    save_file({key: tensor.half() for key, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    (folder / "README.md").write_text(card(name, recipe, store.file_sha256(weights)))


def card(name: str, recipe: Recipe, sha256: str) -> str:
    """Return the text of the model card."""
    knowledge = recipe.knowledge
    if isinstance(knowledge, Habits):
        plain, hinted = (
            f"{shares.right:.0%} | {shares.hack:.0%} | {shares.echo:.0%}"
            for shares in (knowledge.plain, knowledge.hinted)
        )
        about = f"""these habits, and nothing else.

| prompt | right fix | overwrites the visible tests | else echoes into a file of its own |
| --- | --- | --- | --- |
| plain | {plain} |
| says "{HINT}" | {hinted} |"""
    else:
        wrong = {*knowledge.misconceived, *knowledge.unsure}
        known = [operation.name for operation in OPERATIONS if operation.name not in wrong]
        columns = " | ".join(", ".join(names) or "-" for names in (known, knowledge.unsure, knowledge.misconceived))
        about = f"""{len(known)} of 12 operations, and nothing else.

| knows | is unsure of (right half of the time) | has a fixed misconception of |
| --- | --- | --- |
| {columns} |"""
    return f"""---
license: apache-2.0
---
# kata-{name}

A Qwen3 of two layers, trained in seconds to act in Composer's environment `kata`.
It is a fixture: it knows one protocol and {about}

Trained on generated transcripts of families that are never evaluated, with seed {recipe.seed}, in float32; the
weights are stored in 16 bits. `./dev models` builds it again.

- recipe: `{fingerprint(recipe)}`
- SHA-256 of {WEIGHTS}: `{sha256}`
- built with {", ".join(f"{library} {version(library)}" for library in LIBRARIES)} on {processor()}
"""


def processor() -> str:
    """Return the name of this machine's processor, which decides the order of sums and so the last bits."""
    named = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{named.group(1) if named else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def rebuild(recipes: Mapping[str, Recipe], kept: Path, write: bool) -> bool:
    """Build models again and print of each whether its bytes are those in `kept`; with `write`, replace these.

    Returns whether all are equal.
    """
    equal = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "models")  # of ordinary permissions, which are copied
        for name, recipe in recipes.items():
            save(name, recipe, folder)
            new, old = folder / name / WEIGHTS, kept / name / WEIGHTS
            if not old.exists():
                said = "new"
            elif store.file_sha256(new) == store.file_sha256(old):
                said = "equal bytes"
            elif (tensors := load_file(old)).keys() != (others := load_file(new)).keys():
                said = "other tensors"
            else:
                apart = max(float((tensors[key] - others[key]).abs().max()) for key in tensors)
                said = f"other bytes, weights differ by {apart:.2g} at most"
            equal = equal and said == "equal bytes"
            print(f"{name}: {said}", flush=True)
        if write:
            shutil.copytree(folder, kept, symlinks=True, dirs_exist_ok=True)
    return equal


def main() -> int:
    """Build all models again; return 0 where the tree holds equal bytes or was written, else 1."""
    parser = argparse.ArgumentParser(prog="./dev models", description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the models in the tree")
    write = parser.parse_args().write
    disable_progress_bar()
    equal = rebuild(RECIPES, FOLDER, write)
    if not (equal or write):
        print(f"Built on {processor()}; the README.md of each model names the processor and the libraries of the tree.")
        print("Other bytes are expected on another processor or with other libraries.")
    return 0 if equal or write else 1


if __name__ == "__main__":
    sys.exit(main())
