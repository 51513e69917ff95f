"""Questions to teachers: the teacher table, the messages of each distinct state, and the row that an answer becomes.

A run may be larger than memory: conversations are copied into a file of plain lines, because the table holds the
rollouts in another order than teachers are asked.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, lru_cache, partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from threading import Lock
from typing import Any

import orjson

from composer_stages import envs
from composer_stages.envs import task_table
from composer_stages.envs.base import Environment, Task
from composer_stages.errors import UsageError
from composer_stages.messages import OMITTED, Message, with_thought
from composer_stages.policy.base import VLLM, Sample, Turn
from composer_stages.rollouts.distinct import DistinctState, DistinctStates
from composer_stages.rollouts.trace import collected_with, states, tools_by_rollout
from composer_stages.runs import store
from composer_stages.runs.kinds import STEP, TASK, Row
from composer_stages.runs.run import Run
from composer_stages.runs.store import Spool
from composer_stages.teachers.config import TeacherConfig
from composer_stages.words import Sentence


def dependent_votes(teachers: Sequence[TeacherConfig], rollouts: Run) -> list[str]:
    """Return notes on teachers that are one model, and on one that is the policy which collected these rollouts."""
    same = defaultdict[tuple[str, str], list[TeacherConfig]](list)
    for teacher in teachers:
        same[_model_and_server(teacher.model, teacher.base_url)].append(teacher)
    notes: list[str] = [
        Sentence(
            "teachers.teachers-of-one-model",
            names=[teacher.name for teacher in shared],
            model=shared[0].model,
            base_url=shared[0].base_url,
        )
        for shared in same.values()
        if len(shared) > 1
    ]
    # Only there: rollouts of or by a training were sampled from weights that its settings do not name.
    of_settings = rollouts.manifest.stage == "collect" and "student" not in rollouts.manifest.inputs
    if of_settings and (policy := rollouts.manifest.config.get("policy")):
        notes += [
            Sentence(
                "teachers.teacher-is-student",
                teacher=teacher.name,
                model=teacher.model,
                has_prompt=bool(teacher.prompt_in_words()),
            )
            for teacher in same.get(_model_and_server(policy["model"], policy["base_url"]), [])
        ]
    return notes


def _model_and_server(model: str, base_url: str | None) -> tuple[str, str]:
    """Return what two settings of one model share: its name, and the server unless that is vLLM's of this model."""
    return model.removeprefix(VLLM), "" if model.startswith(VLLM) else (base_url or "").rstrip("/")


CONVERSATION_COLUMNS = ["rollout_id", "step", "new_messages_json", "history"]
"""Columns of step rows from which conversations are rebuilt."""
CACHED_CONVERSATIONS = 4
"""Conversations in memory in addition to those being asked about."""


class RecordedStates(AbstractContextManager["RecordedStates"]):
    """The distinct states of a run with their messages and tools; `folder` holds what memory does not."""

    def __init__(self, rollouts: Run, folder: Path) -> None:
        self.distinct = DistinctStates(rollouts, folder)
        self._rollouts, self._folder = rollouts, folder
        self._spool, self._places, self._lock = Spool(folder), dict[str, list[int]](), Lock()
        self._history = "history" in rollouts.scan(STEP).columns
        read = lru_cache(64)(orjson.loads)  # most rollouts have the same tools
        self.tools: dict[str, list[Any]] = {name: read(text) for name, text in tools_by_rollout(rollouts).items()}
        self._conversation = lru_cache(CACHED_CONVERSATIONS)(self._read)
        self._environments = dict[str, Environment]()

    def __exit__(self, *error: object) -> None:
        self.distinct.__exit__(*error)
        self._spool.close()
        for environment in self._environments.values():
            environment.close()

    def messages(self, state: DistinctState) -> list[Message]:
        """Return the messages before a state's action, as the policy was shown them."""
        return self._conversation(state.rollout_id)[state.step]

    def opened(self, teacher: TeacherConfig, state: DistinctState) -> list[Message]:
        """Return the messages of a state, with the opening that the teacher's own options of the environment give."""
        messages = self.messages(state)
        if not teacher.opening:
            return messages
        recorded, task = self._conversation(state.rollout_id)[0], self._tasks[state.task_id]
        with self._lock:
            if teacher.name not in self._environments:
                self._environments[teacher.name] = self._opener(teacher)
            return [*self._environments[teacher.name].reset(task), *messages[len(recorded) :]]

    @cached_property
    def _tasks(self) -> dict[str, Task]:
        return {row["task_id"]: task_table.read_task(row) for row in self._rollouts.scan(TASK).rows()}

    def _opener(self, teacher: TeacherConfig) -> Environment:
        """Return the environment of the rollouts with a teacher's options; `UsageError` where they have none."""
        env = collected_with(self._rollouts).get("env")
        if env is None:
            raise UsageError(
                "teachers.opening-without-environment",
                teacher=teacher.name,
                opening=teacher.opening,
                path=self._rollouts.path,
            )
        return envs.load(env["name"], {**env["options"], **teacher.opening})

    def keep(self, rollout_ids: Container[str]) -> None:
        """Copy the conversations of these rollouts to disk; reading another conversation later copies all."""
        columns = CONVERSATION_COLUMNS if self._history else CONVERSATION_COLUMNS[:-1]
        self._spool.close()
        self._spool, self._places = Spool(self._folder), {}
        for name, rows in groupby(self._rollouts.scan(STEP).rows(columns), key=itemgetter("rollout_id")):
            if name in rollout_ids:
                self._places.setdefault(name, []).append(self._spool.add(store.encode(list(rows))))

    def _read(self, rollout_id: str) -> dict[int, list[Message]]:
        """Return the messages before each step of a rollout, by the number of the step."""
        # Local models ask in the main thread while servers are asked in that of the event loop.
        with self._lock:
            if rollout_id not in self._places:
                self.keep(set(self.distinct.rollout_ids()))
        rows = [row for line in self._places[rollout_id] for row in orjson.loads(self._spool.line(line))]
        rows.sort(key=itemgetter("step"))
        return {row["step"]: messages for row, messages in zip(rows, states(rows), strict=True)}

    def with_media(self) -> int:
        """Return the number of states with a picture or a sound, of which teachers see only a placeholder."""
        question = "SELECT DISTINCT rollout_id FROM steps WHERE contains(new_messages_json, ?)"
        named = {name for (name,) in self.distinct.database.execute(question, [OMITTED]).fetchall()}
        if not named:
            return 0
        self.keep(named)
        return sum(
            state.rollout_id in named and any(OMITTED in message["content"] for message in self.messages(state))
            for state in self.distinct
        )


OF_STATE = ("task_id", "rollout_id", "step", "num_steps")
OF_SAMPLE = (
    *("reasoning", "served_model", "provider", "finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens"),
    *("usage_by", "error_type", "error", "attempts", "latency_s"),
)
"""Fields that `teacher_action` rows have as columns of the same names."""


class TeacherQuestion:
    """One question: a state, a teacher, a sample index.

    identity: the teacher's settings that affect answers. read_messages: reads the state's messages when they are
    needed. tools: the tools of the rollout that reached the state first.
    """

    __slots__ = ("_read_messages", "key", "sample_idx", "state", "teacher", "tools")

    def __init__(
        self,
        teacher: TeacherConfig,
        identity: dict[str, Any],
        state: DistinctState,
        read_messages: Callable[[DistinctState], list[Message]],
        sample_idx: int,
        seed: int,
        tools: Sequence[Any] = (),
    ) -> None:
        self.teacher, self.state, self.sample_idx, self.tools = teacher, state, sample_idx, tools
        self._read_messages = read_messages
        about = [teacher.name, identity, state.digest, sample_idx, seed]
        # Answers to questions without tools keep the keys that they had before tools were recorded.
        self.key = store.digest([*about, tools] if tools else about)[:24]

    @property
    def turn(self) -> Turn:
        """Return the turn that the policy is asked."""
        messages = self.teacher.add_prompt(self._read_messages(self.state))
        return Turn(messages, int(self.key[:15], 16), tools=self.tools)

    def row(self, sample: Sample) -> Row:
        """Return the `teacher_action` row of an answer."""
        return {
            "unit_id": self.key,
            "state_sha256": self.state.digest,
            **{name: getattr(self.state, name) for name in OF_STATE},
            "teacher": self.teacher.name,
            "model": self.teacher.model,
            "sample_idx": self.sample_idx,
            "action": None if sample.error_type else with_thought(sample.text, sample.reasoning),
            "cost_usd": sample.cost_usd if sample.price_known else None,
            **{name: getattr(sample, name) for name in OF_SAMPLE},
        }


class TeacherQuestions:
    """The questions to one teacher, in the order in which states were first recorded; made anew by each iteration."""

    def __init__(self, recorded: RecordedStates, teacher: TeacherConfig, answers_per_state: int, seed: int) -> None:
        self.recorded, self.teacher, self._answers_per_state, self._seed = recorded, teacher, answers_per_state, seed
        self._identity = teacher.identity()  # reads all bytes of a local model folder

    def __len__(self) -> int:
        return len(self.recorded.distinct) * self._answers_per_state

    def __iter__(self) -> Iterator[TeacherQuestion]:
        read, tools = partial(self.recorded.opened, self.teacher), self.recorded.tools
        for state in self.recorded.distinct:
            for index in range(self._answers_per_state):
                declared = tools.get(state.rollout_id, ())
                yield TeacherQuestion(self.teacher, self._identity, state, read, index, self._seed, declared)


QuestionsByTeacher = Mapping[str, TeacherQuestions | list[TeacherQuestion]]
"""The questions to each teacher, by its name."""


def questions(
    recorded: RecordedStates, teachers: Sequence[TeacherConfig], answers_per_state: int, seed: int
) -> dict[str, TeacherQuestions]:
    """Return the questions to each teacher, by its name."""
    return {teacher.name: TeacherQuestions(recorded, teacher, answers_per_state, seed) for teacher in teachers}
