"""The environment `reasoning-gym`: a task of the package reasoning-gym by name, with its own difficulty and scorer.

In order: the tasks of the installed package, the import of one of them, the environment.
"""

import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec
from itertools import count as count_up, islice
from pathlib import Path
from typing import Any, cast

from composer_stages.data_files import load_toml
from composer_stages.envs.answered import AnsweredEnv, Question
from composer_stages.envs.base import Grade, Split, Task, Work
from composer_stages.envs.skills import drawing
from composer_stages.errors import InfrastructureError, UsageError
from composer_stages.messages import Message
from composer_stages.runs import store

PACKAGE = "reasoning_gym"
DECLARED = re.compile(r'^DATASET_NAME = "([a-z0-9_]+)"$', re.M)
REFUSED = load_toml(__package__, "reasoning_gym.toml")


@cache
def modules() -> dict[str, str]:
    """Return the module of every task of the installed package; nothing of it is imported.

    Raises UsageError where the package is not installed.
    """
    spec = PathFinder.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("envs.skills.package-not-installed", package=PACKAGE)
    root = Path(next(iter(spec.submodule_search_locations)))
    module_by_task = {}
    for path in sorted(root.rglob("*.py")):
        if name := DECLARED.search(path.read_text("utf-8")):
            module_by_task[name[1]] = ".".join([PACKAGE, *path.relative_to(root).with_suffix("").parts])
    return module_by_task


def dataset_classes(task: str) -> tuple[type, type]:
    """Import the module of a task alone, and return the classes of its data set and of its configuration.

    Raises UsageError for an unknown task, one that lacks a package, one whose scorer would execute answers, and those
    that are unfit.
    """
    if task not in modules():
        raise UsageError("envs.skills.unknown-task", task=task, tasks=sorted(modules()))
    if task in REFUSED["executes"]:
        raise UsageError("envs.skills.scorer-executes-answers", task=task)
    for fault, tasks in REFUSED["unfit"].items():
        if task in tasks:
            raise UsageError("envs.skills.task-unfit", task=task, fault=fault)
    module = modules()[task]
    names = module.split(".")[:-1]
    # The packages around a module import every task, and so all that any of them needs: they stay empty meanwhile.
    empty = [name for end in range(len(names)) if (name := ".".join(names[: end + 1])) not in sys.modules]
    try:
        for name in empty:
            sys.modules[name] = module_from_spec(cast(ModuleSpec, find_spec(name)))
        importlib.import_module(module)
        classes: tuple[type, type] = importlib.import_module(f"{PACKAGE}.factory").DATASETS[task]
    except ModuleNotFoundError as error:
        raise UsageError("envs.skills.task-needs-package", task=task, requirement=error.name) from None
    finally:
        for name in empty:
            sys.modules.pop(name, None)
    return classes


class ReasoningGymEnv(AnsweredEnv):
    """Implements Environment and HasSolutions. The reward is 1 for a full score of the task's own scorer, else 0.

    A partial score is kept as the metric `score` and not rewarded: many scorers pay a long text in which the answer
    occurs. `task`: a name of reasoning-gym, `--env reasoning-gym:letter_counting`. `config`: fields of the task's
    configuration, `--set env.config.max_words=3`. `shots`: worked examples before the question.
    """

    name, system = "reasoning-gym", drawing.SYSTEM

    def __init__(self, task: str = "", config: Mapping[str, Any] | None = None, shots: int = 3) -> None:
        if not task:
            raise UsageError("envs.skills.task-not-named")
        self._dataset, self._config = dataset_classes(task)
        self.task, self.config, self.shots = task, dict(config or {}), drawing.check_shots(shots)
        self.source = f"reasoning-gym:{task}"
        settings = [field.name for field in fields(self._config) if field.name not in ("seed", "size")]
        if unknown := [name for name in self.config if name not in settings]:
            raise UsageError("envs.skills.unknown-setting", source=self.source, key=unknown[0], settings=settings)
        self._made(0)  # the settings are checked before anything is paid for

    def _made(self, seed: int) -> Any:
        """Return the data set under a seed."""
        try:
            return self._dataset(self._config(**self.config, seed=seed))
        except (AssertionError, TypeError, ValueError) as error:
            raise UsageError(
                "envs.skills.settings-refused", source=self.source, config=self.config, error=str(error)
            ) from error

    def _entries(self, words: str) -> Iterator[tuple[Mapping[str, Any], dict[str, int]]]:
        """Yield the entries under a seed with the place of each."""
        seed = int(store.digest([self.source, words])[:8], 16) >> 2  # numpy takes 32 bits, to which an index is added
        dataset = self._made(seed)
        for index in count_up():
            yield dataset[index], {"seed": seed, "index": index}

    def questions(self, split: Split, count: int, seed: int) -> list[Question]:
        """Return `count` distinct questions of the split, dealt by a digest; fewer where the task has no more."""
        # The same for every question, so that a policy reads them once.
        examples = drawing.distinct(self._entries("examples"), _text, drawing.EXAMPLES)
        shots = [[entry["question"], _answer(entry)] for entry, _ in islice(examples, self.shots)]
        entries = drawing.distinct(self._entries(f"{split}/{seed}"), _text, drawing.split_parts(split))
        questions = []
        for entry, address in islice(entries, count):
            question_id = f"{self.task}-{store.digest([entry['question'], self.config])[:10]}"
            data = {"place": address, "shots": shots}
            questions.append(Question(question_id, entry["question"], _answer(entry), data=data))
        return questions

    def reset(self, task: Task) -> list[Message]:
        """Return the opening; the entry, which a scorer reads, is drawn again from its place."""
        address = task.data["place"]
        self._scorer = self._made(address["seed"])
        self._entry = self._scorer[address["index"]]
        if self._entry["question"] != task.prompt:
            raise InfrastructureError("envs.skills.question-changed", source=self.source, task_id=task.task_id)
        return super().reset(task)

    def score(self, answer: str, question: Question) -> float:
        """Return the score of the task's own scorer, between 0 and 1."""
        score = self._scorer.score_answer
        try:
            return float(score(answer.strip(), self._entry))
        except Exception:
            # Some scorers cannot parse a wrong answer; one that does not know the right answer either is at fault.
            if score(question.answer, self._entry) < 1:
                raise
            return 0.0

    def grade(self) -> Grade:
        """Grade the answer: a reward for the full score only."""
        grade = super().grade()
        passed = bool(grade.hidden_pass)
        return Grade(
            float(passed), passed, protocol_ok=grade.protocol_ok, work=Work(metrics={"score": grade.reward or 0.0})
        )

    def correction(self, answer: str, question: Question) -> str:
        """Return which answer was wrong, and the right one."""
        return drawing.correction(answer, question.answer)


def _text(pair: tuple[Mapping[str, Any], dict[str, int]]) -> str:
    return str(pair[0]["question"])


def _answer(entry: Mapping[str, Any]) -> str:
    if entry["answer"] is None:
        raise UsageError("envs.skills.no-right-answers", task=entry["metadata"]["source_dataset"])
    return str(entry["answer"])
