"""Distinct states with the teachers' actions in them, and who did what in each, by names of classes.

Steps and answers are joined and sorted on disk by DuckDB, and come one state after the other.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import TracebackType

from stages.errors import BadInput
from stages.pairs.audit import JudgedState
from stages.pairs.sorting import on_disk, rows_of
from stages.runs import store
from stages.runs.artifact import Run
from stages.runs.pair_records import TEACHER_ACTION
from stages.runs.records import STEP, Row

FIRST = "rollout_id || chr(1) || lpad(CAST(step AS VARCHAR), 9, '0')"
"""Sorts as a rollout and the number of a step do."""


@dataclass(frozen=True)
class AnsweredState:
    """A distinct state with the teachers' actions in it, one a sample; None for no answer, or one that was cut off.

    steps: all that were recorded in it, in the order of rollouts, with their rollout, task, action, whether that was
    cut off, and `has_ids`, whether their token ids are known; the first is of the rollout that reached the state
    first. A teacher that was not asked there has no samples; it counts when majorities are taken. models: what each
    teacher's server answered with. costs: of all answers in USD, None where not known.
    """

    digest: str
    steps: list[Row]
    teachers: dict[str, list[str | None]] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)
    costs: list[float | None] = field(default_factory=list)

    @property
    def cost_usd(self) -> float | None:
        """What all answers cost; None where one of them has no known price."""
        known = [cost for cost in self.costs if cost is not None]
        return sum(known) if len(known) == len(self.costs) else None

    @property
    def task_id(self) -> str:
        """The task of the rollout that reached the state first."""
        return str(self.steps[0]["task_id"])


class AnsweredStates:
    """The distinct states of a run, in the order of rollouts and steps, read anew whenever they are gone through.

    `folder` is for what does not fit into memory. `BadInput` when the answers belong to other rollouts.
    """

    def __init__(self, rollouts: Run, answers: Run, folder: Path) -> None:
        _same_origin(rollouts, answers)
        self._database = on_disk(folder, steps=rollouts.scan(STEP), answers=answers.scan(TEACHER_ACTION))
        self._database.execute(
            f"CREATE TABLE states AS SELECT state_sha256, min({FIRST}) AS first FROM steps GROUP BY state_sha256"  # noqa: S608
        )
        ordered = "SELECT teacher FROM answers GROUP BY teacher ORDER BY min(file_row_number)"
        self.teachers = [name for (name,) in self._database.execute(ordered).fetchall()]
        self._way = lru_cache(8)(self._read_way)

    def __enter__(self) -> "AnsweredStates":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._database.close()

    def __len__(self) -> int:
        return self._number("SELECT count(*) FROM states")

    def _number(self, question: str) -> int:
        ((number,),) = self._database.execute(question).fetchall()
        return int(number)

    @property
    def num_steps(self) -> int:
        """Of all rollouts."""
        return self._number("SELECT count(*) FROM steps")

    @property
    def num_rollouts(self) -> int:
        """Those that have steps."""
        return self._number("SELECT count(DISTINCT rollout_id) FROM steps")

    def per_task(self) -> dict[str, int]:
        """The number of distinct states that each task's rollouts went through."""
        question = "SELECT task_id, count(DISTINCT state_sha256) FROM steps GROUP BY task_id"
        return dict(self._database.execute(question).fetchall())

    def __iter__(self) -> Iterator[AnsweredState]:
        steps = rows_of(
            self._database,
            "SELECT first, state_sha256, task_id, rollout_id, step, action, truncated, "
            "prompt_delta_token_ids IS NOT NULL AS has_ids "
            "FROM steps JOIN states USING (state_sha256) ORDER BY first, rollout_id, step",
        )
        answers = groupby(
            rows_of(
                self._database,
                "SELECT first, teacher, CASE WHEN finish_reason IS DISTINCT FROM 'length' THEN action END AS whole, "
                "coalesce(nullif(served_model, ''), model) AS served, cost_usd, error_type "
                "FROM answers JOIN states USING (state_sha256) ORDER BY first, file_row_number",
            ),
            key=itemgetter("first"),
        )
        at, given = next(answers, ("", iter(())))
        for first, rows in groupby(steps, key=itemgetter("first")):
            recorded = list(rows)
            state = AnsweredState(recorded[0]["state_sha256"], recorded, {name: [] for name in self.teachers})
            if at == first:
                for row in given:
                    state.teachers[row["teacher"]].append(row["whole"])
                    state.models[row["teacher"]] = row["served"]
                    state.costs.append(_cost(row))
                at, given = next(answers, ("", iter(())))
            yield state

    def way(self, state: AnsweredState) -> list[tuple[str, str]]:
        """What was done and observed before a state, in the rollout that reached it first."""
        return self._way(state.steps[0]["rollout_id"])[: state.steps[0]["step"]]

    def _read_way(self, rollout_id: str) -> list[tuple[str, str]]:
        question = "SELECT action, observation FROM steps WHERE rollout_id = ? ORDER BY step"
        with self._database.cursor() as cursor:
            return cursor.execute(question, [rollout_id]).fetchall()


def explored(digest: str, share: float) -> bool:
    """Whether a state is in a random share of all: by its digest, so that everybody agrees on it."""
    return int(digest[:12], 16) < share * 16**12


def _cost(row: Row) -> float | None:
    """In USD; a call that failed without a bill cost nothing."""
    cost: float | None = row["cost_usd"]
    return 0.0 if cost is None and row["error_type"] is not None else cost


def _same_origin(rollouts: Run, answers: Run) -> None:
    asked = answers.manifest.inputs["rollouts"][0]
    if asked.content != rollouts.manifest.content:
        raise BadInput(
            f"{answers.path} answers the rollouts of {asked.path}, not those of {rollouts.path}. "
            "Give the rollouts it was asked about, or rerun replay-teachers on these."
        )


@lru_cache(65_536)
def _short(name: str) -> str:
    return store.digest(name)[:16]


def names(state: AnsweredState, known: Mapping[str, str | None]) -> Row:
    """Who did what, by short names of classes that mean the same in every state."""
    short = {text: None if name is None else _short(name) for text, name in known.items()}
    return {
        "students": [None if step["truncated"] else short[step["action"]] for step in state.steps],
        "teachers": {name: [t and short[t] for t in texts] for name, texts in state.teachers.items()},
    }


def judged(state: AnsweredState, record: Row) -> JudgedState:
    """A state with what was done in it, by the names of classes."""
    return JudgedState(
        task=state.task_id,
        step=state.steps[0]["step"],
        students=record["students"],
        rollouts=[step["rollout_id"] for step in state.steps],
        teachers=record["teachers"],
    )


def blindly_asked(answers: Run) -> Callable[[AnsweredState], bool]:
    """Whether a state has answers that were not asked for because of others: any has, where there was no gate."""
    gate = answers.manifest.config.get("gate") or {"rule": "off"}

    def blind(state: AnsweredState) -> bool:
        return any(state.teachers.values()) and (gate["rule"] == "off" or explored(state.digest, gate["explore"]))

    return blind
