"""Pairs of votes, state after state, with counts of what was dropped and all that speaks for the pairs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from stages.envs.base import Task
from stages.pairs.evidence import Evidence, blocks, spent
from stages.pairs.report import PairAccount, report
from stages.pairs.rows import pair_row
from stages.pairs.states import AnsweredState, AnsweredStates, blindly_asked, judged
from stages.pairs.voting import Preference
from stages.rollouts.states import state_id
from stages.runs.artifact import Out, Run
from stages.runs.pair_records import TEACHER_ACTION
from stages.runs.records import Row

BILL = ["teacher", "cost_usd", "error_type"]


class Extraction:
    """One extraction from teachers' answers. passed: of each rollout, whether it did."""

    def __init__(self, states: AnsweredStates, answers: Run, passed: Mapping[str, bool | None]) -> None:
        self._states, self._answers = states, answers
        self._evidence = Evidence(states.teachers, passed)
        self._blind, self._tested = blindly_asked(answers), blocks(states.per_task())
        self.account, self.dropped = PairAccount(), Counter[str]()

    def pairs(self, votes: Iterable[tuple[AnsweredState, Row]], tasks: Mapping[str, Task]) -> Iterator[Row]:
        """The pairs in the order of the states, each once; everything else is counted on the way."""
        for state, record in votes:
            found: dict[str, Row] = {}
            sides = {(fields["chosen"], fields["rejected"]) for one in record["votes"] for fields in one["pairs"]}
            for step, one in zip(state.steps, record["votes"], strict=True):
                self.dropped[one["reason"]] += one["reason"] is not None
                for fields in one["pairs"]:
                    row = _row(state, step, fields, record["compared_by"], tasks[state.task_id], len(sides))
                    self.dropped["duplicate"] += row["pair_id"] in found
                    found.setdefault(row["pair_id"], row)
            tested = state.task_id in self._tested and self._blind(state)
            self._evidence.add(judged(state, record), tested=tested)
            for row in found.values():
                self.account.add(row)
                yield row

    def report(self, out: Out) -> None:
        """Write the report, counts and the verdict."""
        cost = spent(self._answers.scan(TEACHER_ACTION).rows(BILL))
        report(
            self.account,
            +self.dropped,
            num_traces=self._states.num_rollouts,
            num_steps=self._states.num_steps,
            out=out,
            spent=cost,
            evidence=self._evidence.verdict(cost),
        )


def _row(state: AnsweredState, step: Row, fields: Row, compared_by: str, task: Task, shared: int) -> Row:
    backing = fields["chosen_by"]
    return pair_row(
        Preference(**{name: value for name, value in fields.items() if name != "chosen_by"}),
        task,
        step | {"state_sha256": state.digest},
        state=state_id(step if step["has_ids"] else state.steps[0]),
        num_teachers=len(state.teachers),
        compared_by=compared_by,
        chosen_by=backing,
        served_models=sorted({state.models[name] for name in backing if name in state.models}),
        cost_usd=None if state.cost_usd is None else state.cost_usd / shared,
    )
