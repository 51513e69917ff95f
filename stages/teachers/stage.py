"""What `replay-teachers` does: its plan, its run, and the share of a worker."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from composer_stages.envs.config import EnvStageConfig
from composer_stages.errors import Incomplete, UsageError
from composer_stages.pairs.actions import action_form
from composer_stages.pairs.evidence import PASSED_COLUMNS, passed_by_rollout
from composer_stages.policy import available, open_policy
from composer_stages.policy.base import FINAL, AsyncPolicy
from composer_stages.policy.requests import price_bound, probe_price_bound
from composer_stages.policy.served import answered_by, policy_notes
from composer_stages.policy.tool_calls import PROBED_FIELDS
from composer_stages.rollouts.trace import collected_with
from composer_stages.runs.kinds import ROLLOUT, TEACHER_ACTION, Row
from composer_stages.runs.run import Inputs, Run, RunWriter
from composer_stages.runs.settings import StageConfig
from composer_stages.runs.stage import Plan
from composer_stages.teachers.asking import Policies, ask_teachers, probe_servers
from composer_stages.teachers.config import Config, TeacherConfig
from composer_stages.teachers.questions import QuestionsByTeacher, RecordedStates, dependent_votes, questions
from composer_stages.teachers.selection import ask_selected
from composer_stages.teachers.spending import Spending, Tally, judge, table
from composer_stages.words import Sentence

KATA = "kata"
"""The environment that the built-in teachers know."""


def _require_teachers(config: Config, envs: set[str | None]) -> None:
    """Raise `UsageError` if rollouts are of another environment than that of the built-in teachers."""
    if "teachers" not in config.model_fields_set and envs - {KATA}:
        raise UsageError("teachers.no-teachers")


def check_reads(config: Config, reads: Sequence[tuple[str, StageConfig]]) -> None:
    """Raise `UsageError` where a chain collects in another environment than the built-in teachers'."""
    _require_teachers(config, {read.env.name for _, read in reads if isinstance(read, EnvStageConfig)})


def _environments(rollouts: Run) -> set[str | None]:
    """Return the environments of the rollouts: the one of the settings, else those of imported rows."""
    env = collected_with(rollouts).get("env")
    return {env["name"]} if env else {row["env"] for row in rollouts.scan(ROLLOUT).rows(["env"])}


def plan(inputs: Inputs, config: Config) -> Plan:
    """Return the number of answers and an upper bound of their cost."""
    _require_teachers(config, _environments(inputs.one("rollouts")))
    with TemporaryDirectory() as folder, RecordedStates(inputs.one("rollouts"), Path(folder)) as recorded:
        by_teacher = questions(recorded, config.teachers, config.answers_per_state, config.seed)
        count = sum(map(len, by_teacher.values()))
        tokens = sum(len(by_teacher[t.name]) * available.longest_answer(t) for t in config.teachers)
        paid = [t for t in config.teachers if t.cost(1, 1) and by_teacher[t.name]]
        cost = sum(price_bound(t, (question.turn for question in by_teacher[t.name])) for t in paid)
        cost += sum(map(probe_price_bound, paid))
        states = len({question.state.digest for of_teacher in by_teacher.values() for question in of_teacher})
    unknown = [t.name for t in config.teachers if not t.priced]
    notes: tuple[str, ...] = (
        Sentence("teachers.questions-planned", num_teachers=len(by_teacher), num_states=states),
        *([Sentence("teachers.price-unknown", teachers=unknown)] if unknown else []),
    )
    lengths = tuple(f"{t.name}: {note}" for t in config.teachers for note in available.notes(t))
    same = tuple(dependent_votes(config.teachers, inputs.one("rollouts")))
    return Plan(
        units=count, what="answers", max_completion_tokens=tokens, max_cost_usd=cost, notes=notes + lengths + same
    )


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Ask every question that has no answer yet, then write the table of answers and the report of their cost."""
    _require_teachers(config, _environments(inputs.one("rollouts")))
    with RecordedStates(inputs.one("rollouts"), out.scratch("asked")) as recorded:
        by_teacher = questions(recorded, config.teachers, config.answers_per_state, config.seed)
        policies = _opened(recorded, by_teacher, config.teachers, out)
        for name, policy in policies.items():
            out.model(name, **policy.facts())
        spared = Counter[str]()
        if config.selection.rule == "off" and not config.selection.failed_only:
            if config.deal == "teachers":
                # Workers will ask the servers; what these accept is recorded here, in the run's own manifest.
                probe_servers(by_teacher, policies, out)
                out.spread([[question.key for question in questions] for questions in by_teacher.values()], "answers")
            ask_teachers(by_teacher, policies, out)
        else:
            passed = passed_by_rollout(inputs.one("rollouts").scan(ROLLOUT).rows(PASSED_COLUMNS))
            steps = recorded.distinct.steps()
            form = action_form(inputs.one("rollouts"))
            spared = ask_selected(by_teacher, steps, policies, config.teachers, config.selection, passed, form, out)
        answers = AnswerSummary(recorded.distinct.rollout_ids())
        keys = (question.key for questions in by_teacher.values() for question in questions)
        out.table(TEACHER_ACTION, map(answers.add, (record["answer"] for record in out.journal.read(keys))))
        omitting = recorded.with_media()
    for name, policy in policies.items():
        if isinstance(policy, AsyncPolicy):
            out.model(name, **policy.facts())  # what was found while asking
    _report(answers, omitting, spared, dependent_votes(config.teachers, inputs.one("rollouts")), config, out)


def work(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Ask the teachers of this worker's questions: models on its machine, and with deal = "teachers" servers."""
    with RecordedStates(inputs.one("rollouts"), out.scratch("asked")) as recorded:
        by_teacher = {
            name: rows
            for name, rows in questions(recorded, config.teachers, config.answers_per_state, config.seed).items()
            if not all(out.finished(question.key) for question in rows)
        }
        ask_teachers(by_teacher, _opened(recorded, by_teacher, config.teachers, out), out)


def _opened(
    recorded: RecordedStates, by_teacher: QuestionsByTeacher, teachers: Sequence[TeacherConfig], out: RunWriter
) -> Policies:
    """Copy the conversations of unanswered questions to disk, and open the policies of the teachers in `asked`."""
    # A resumed run needs few of the conversations.
    recorded.keep(
        {q.state.rollout_id for questions in by_teacher.values() for q in questions if not out.finished(q.key)}
    )
    opener = partial(open_policy, cache=out.cache, budget=out.budget, listener=out.progress)
    return {teacher.name: opener(teacher) for teacher in teachers if teacher.name in by_teacher}


class AnswerSummary:
    """Counts of the answers for the report, collected while the table is written. rollout_ids: of all rollouts."""

    def __init__(self, rollout_ids: Sequence[str]) -> None:
        self.by_teacher, self.total = defaultdict[str, Tally](partial(Tally, rollout_ids)), Tally(rollout_ids)
        self.rollouts, self.unfinished, self.bound = len(rollout_ids), 0, 0
        self.served = defaultdict[str, Counter[tuple[str | None, ...]]](Counter)
        self.first: Row | None = None  # the first failed answer that --resume asks for again

    def add(self, row: Row) -> Row:
        """Count a row and return it unchanged."""
        for tally in (self.by_teacher[row["teacher"]], self.total):
            tally.add(row)
        if any(named := (row["served_model"], row["provider"], None)):
            self.served[row["teacher"]][named] += 1
        self.bound += row["usage_by"] == "bound" and row["error_type"] is None
        if row["error_type"] not in FINAL:
            self.unfinished, self.first = self.unfinished + 1, self.first or row
        return row


def _report(
    answers: AnswerSummary, omitting: int, spared: Counter[str], same: Sequence[str], config: Config, out: RunWriter
) -> None:
    """Write the counts, the verdict and the report; raise `Incomplete` when answers are to be asked for again."""
    # By teacher in the order of the table, and a last line for all of them.
    total = answers.total.line("all")
    spent = [*(tally.line(name) for name, tally in answers.by_teacher.items()), total]
    out.set_summary(
        teachers=[asdict(line) for line in spent], rollouts=answers.rollouts, possibly_usd=out.budget.possibly
    )
    judgement = judge(out.path, out.manifest.summary, config)
    out.manifest.outcome = out.manifest.outcome.judged(judgement)
    out.count(
        planned=total.answers,
        done=total.answers - total.failed,
        failed=total.failed,
        truncated=total.truncated,
        empty=total.empty,
        **({"not_asked": spared.total()} if spared else {}),
        **({"states_with_media": omitting} if omitting else {}),
    )
    out.manifest.tokens.update(
        prompt=total.prompt_tokens, cached=total.cached_tokens, completion=total.completion_tokens
    )
    notes = _notes(answers, spent, omitting, spared, out)
    for teacher in config.teachers:
        served = answers.served[teacher.name]
        notes += [
            *answered_by(served, teacher.model, teacher.name),
            *policy_notes(out.manifest.models.get(teacher.name, {})),
        ]
    notes += [f"Note: {note}." for note in [*(t.prompt_in_words() for t in config.teachers), *same] if note]
    out.write_report([table(spent), ""], judgement.line, notes)
    if answers.first is not None:
        name = answers.first["teacher"]
        entry = next(teacher for teacher in config.teachers if teacher.name == name)
        unnamed = entry.base_url and entry.base_url not in answers.first["error"]
        raise Incomplete(
            "teachers.answers-failed",
            failed=answers.unfinished,
            answers=total.answers,
            teacher=name,
            model=entry.model,
            base_url=entry.base_url if unnamed else None,
            error=answers.first["error"],
        )


def _notes(
    answers: AnswerSummary, spent: list[Spending], omitting: int, spared: Counter[str], out: RunWriter
) -> list[str]:
    """Return the notes below the table: what its numbers leave out or bound."""
    unpriced, budget = [line.teacher for line in spent[:-1] if line.unpriced], out.budget
    notes: list[tuple[object, str]] = [
        (answers.bound, Sentence("teachers.tokens-are-bounds", number=answers.bound)),
        (unpriced, Sentence("teachers.prices-unknown", unpriced=unpriced)),
        (budget.possibly, Sentence("teachers.possibly-paid", usd=budget.possibly)),
        (
            budget.understated,
            Sentence("teachers.understated-bills", number=budget.understated, usd=budget.understated_usd),
        ),
        (omitting, Sentence("teachers.media-left-out", omitting=omitting)),
        (spared, Sentence("teachers.not-asked", spared=sorted(spared.items()))),
    ]
    lines = [note for holds, note in notes if holds]
    # Which request fields each server's probe was refused.
    models = out.manifest.models
    accepted = {name: facts["accepts"] for name, facts in models.items() if "accepts" in facts}
    for name, accepts in accepted.items():
        if lacks := [field for field in PROBED_FIELDS if accepts[field] is False]:
            lines.append(Sentence("teachers.fields-refused", name=name, lacks=lacks))
    lines += [
        Sentence("teachers.answers-damaged", number=facts["damaged_in_cache"], teacher=name)
        for name, facts in models.items()
        if "damaged_in_cache" in facts
    ]
    lines += [
        Sentence("teachers.probe-failed", teacher=name, error=accepts["error"])
        for name, accepts in accepted.items()
        if accepts["error"]
    ]
    return lines
