"""What `evaluate` does: its plan, its run, the share of a worker, and the study of a planned run."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import combinations
from typing import Any

import orjson

from composer_stages import envs
from composer_stages.arms.config import Config
from composer_stages.envs.base import FULL_REWARD, Environment, Task
from composer_stages.errors import BadInput, Incomplete, UsageError
from composer_stages.evaluation import planner
from composer_stages.evaluation.arm_comparison import EvalQuestion
from composer_stages.evaluation.arm_settings import policy_differences, trained_differences
from composer_stages.evaluation.design import Design, Supply
from composer_stages.evaluation.difference import Verdict
from composer_stages.evaluation.document import verdict_document
from composer_stages.evaluation.inference import levels, parts
from composer_stages.evaluation.outcomes import AT_ZERO, START, items_table
from composer_stages.evaluation.pilot import known_items
from composer_stages.evaluation.plan_report import study_text
from composer_stages.evaluation.report import arms_chart, text_table
from composer_stages.evaluation.verdict import EvalVerdict, Look, decide
from composer_stages.evaluation.words import SENTENCES, describe_verdict
from composer_stages.policy import available, kind_of, scripted
from composer_stages.policy.adapters import CheckpointInfo, refuse_trained, trainings_of
from composer_stages.policy.base import NotFinite, PolicyConfig
from composer_stages.policy.served import answered_by, policy_notes
from composer_stages.policy.serving import Serving
from composer_stages.rollouts.agent_loop import LiveRollout, play_missing
from composer_stages.rollouts.collection_checks import SERVED
from composer_stages.rollouts.recording import action_facts, verdict_columns, work_columns
from composer_stages.rollouts.trace import collected_with, require_unmixed
from composer_stages.runs import reporting, store
from composer_stages.runs.catalog import name as run_name
from composer_stages.runs.kinds import CHECKPOINT, EVAL_ITEM, ROLLOUT, Row
from composer_stages.runs.run import Inputs, Run, RunWriter
from composer_stages.runs.settings import StageConfig, Tree, build
from composer_stages.runs.stage import Plan, blocks
from composer_stages.terms import SamplingUnit, sampling_unit_of
from composer_stages.words import Sentence

PAIR_SET = 12
"""Hexadecimal digits of the digest that names a set of pairs."""
NO_CONTROL = ("null", "none", "")
"""Texts that a file or an option gives for no control."""
LONG = frozenset({"transcript_json", "steps_json", "submission", "patch", "test_log", "metrics_json"})
"""Columns of an item that are not read where many items are."""


@dataclass(frozen=True)
class Arm:
    """One model to play: the arm's name, its training seed, where the model is, and the digest of its pairs, if any."""

    name: str
    seed: int
    policy: PolicyConfig
    pair_set: str | None = None
    trained: bool = False
    once: bool = False
    """Whether it plays a task once, however many samples are asked for: at temperature 0 it has one answer."""
    revision: str | None = None
    """Of a start on the hub, the commit that training started from."""

    def at(self, temperature: float) -> "Arm":
        """Return the same model at another temperature."""
        return replace(self, policy=self.policy.model_copy(update={"temperature": temperature}))


def arms(inputs: Inputs, config: Config, to_train: Sequence[tuple[str, int]] = ()) -> list[Arm]:
    """Return every model to play: the start, the trained models and those of the settings, in the order given.

    to_train: in a plan, by name and seed, the arms that are there once all is trained; they count where not both of the
    compared ones are there yet.
    Raises `BadInput` when there is nothing to compare, an arm is named twice or the checkpoints did not start from one
    model, and `UsageError` where the baseline or the treatment is none of them.
    """
    trained = inputs.many("arms")
    if not (trained or config.policies or to_train):
        raise BadInput("arms.nothing-to-compare")
    infos = [CheckpointInfo.of(run) for run in trained]
    played_arms = []
    for info, run in zip(infos, trained, strict=True):
        pairs = [ref.content for ref in run.manifest.inputs.get("pairs", ())]
        pair_set = (pairs[0] if len(pairs) == 1 else store.digest(pairs))[:PAIR_SET] if pairs else None
        policy = info.start.with_model(run.folder(CHECKPOINT))
        played_arms.append(Arm(info.arm, info.train_seed, policy, pair_set, trained=True))
    # A model of the settings has no training seed; like the start it counts as seed 0.
    played_arms += [Arm(name, 0, policy) for name, policy in config.policies.items()]
    names = [(arm.name, arm.seed) for arm in played_arms]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise BadInput("arms.arm-twice", arm=repeated[0], seed=repeated[1])
    # Compared by the identity of the policy and not by its path, as a folder may have been moved.
    starts = {info.start_identity: run for info, run in zip(infos, trained, strict=True)}
    if len(starts) > 1:
        raise BadInput("arms.several-starts", paths=[run.path for run in starts.values()])
    if infos and config.with_start:
        revision = trained[0].manifest.models.get("policy", {}).get("revision")
        played_arms.insert(0, Arm(START, 0, infos[0].start, revision=revision))
    if not {config.baseline, config.treatment} <= (arm_names := {arm.name for arm in played_arms}):
        played_arms += [
            Arm(*key, PolicyConfig(), trained=key[0] != START) for key in to_train if key[0] not in arm_names
        ]
    played_arms = [arm.at(config.temperature) for arm in played_arms]
    played_arms += (
        [replace(arm.at(0.0), name=arm.name + AT_ZERO, once=True) for arm in played_arms] if config.greedy else []
    )
    _require_compared([arm.name for arm in played_arms], config, Sentence("arms.give-training"))
    return played_arms


def _require_compared(names: Sequence[str], config: Config, remedy: Sentence) -> None:
    """Raise `UsageError` where two of baseline, treatment and control are one arm, or one is none of these arms.

    Inherited settings are not validated again, and are checked here.
    """
    # Else as given: the first is what was before.
    known_arms = sorted(dict.fromkeys(names), key=lambda name: name != START)
    roles = {"baseline": config.baseline, "treatment": config.treatment, "control": config.control}
    # A control that nobody gave is the name of one that there may be; TOML has no null.
    is_named = "control" in config.model_fields_set and config.control not in (None, *NO_CONTROL)
    for role in ("baseline", "treatment", *(["control"] if is_named else [])):
        if (name := roles[role]) not in names:
            raise UsageError("arms.no-arm", arm=name, role=role, arms=known_arms, remedy=remedy)
    for first, second in combinations(roles, 2):
        if roles[first] == roles[second]:
            raise UsageError("arms.arms-are-the-same", first=first, second=second, arm=roles[first], arms=known_arms)


def is_one_model(played_arms: Sequence[Arm], config: Config) -> bool:
    """Return whether baseline and treatment are one model with equal settings."""
    first, second = (
        [arm.policy for arm in played_arms if arm.name == name] for name in (config.baseline, config.treatment)
    )
    return first == second


def inherit(config: Config, reads: Sequence[tuple[str, Tree]]) -> Config:
    """Return the settings with the trainings' environment and number of steps where nobody gave others.

    reads: the settings of each run, with its stage; of pilots with the run's name, as several may be of one stage.
    The environment's options are taken with its name alone: options that were given are all there are. The sandbox is
    not taken: a run may come from anyone, and nobody but the user lets commands run unprotected. Of one trained arm
    with nothing else to compare, the start is the baseline. Raises `UsageError` where trainings differ in what would be
    taken.
    """
    trainings = {f"arm {tree['arm']} with seed {tree['seed']}": tree for stage, tree in reads if stage == "train"}
    sources = trainings or {name: tree for name, tree in reads if tree.get("env")}  # the pilots of a plan
    if not sources:
        return config

    def shared(setting: str, value_of: Callable[[Tree], Any], remedy: str) -> Any:
        values = {name: value_of(tree) for name, tree in sources.items()}
        first = next(iter(values.values()))
        if second := next((name for name, value in values.items() if value != first), None):
            raise UsageError(
                "arms.runs-differ",
                key=setting,
                first=next(iter(values)),
                value_first=first,
                second=second,
                value_second=values[second],
                remedy=remedy,
            )
        return first

    inherited: dict[str, Any] = {}
    fields, env = config.env.model_fields_set, next(iter(sources.values()))["env"]
    remedy = Sentence("arms.environment-and-options")
    if not {"name", "options"} & fields:
        shared("environment", lambda tree: env_in_words(tree["env"]["name"], tree["env"]["options"]), remedy)
        inherited["env"] = config.env.model_copy(update={"name": env["name"], "options": env["options"]})
    elif "name" not in fields:
        shared("environment", lambda tree: tree["env"]["name"], remedy)
        inherited["env"] = config.env.model_copy(update={"name": env["name"]})
    if trainings and "max_steps" not in config.model_fields_set:
        inherited["max_steps"] = shared("max_steps", lambda tree: tree["max_steps"], Sentence("arms.number-of-steps"))
    arms = {tree["arm"] for tree in trainings.values()}
    alone = len(arms) == 1 and all(stage == "train" for stage, _ in reads) and not config.policies
    if config.with_start and alone:
        natural = {"baseline": START, "treatment": arms.pop(), "control": None}
        inherited |= {key: value for key, value in natural.items() if key not in config.model_fields_set}
    return config.model_copy(update=inherited)


def env_in_words(name: str, options: Mapping[str, Any]) -> str:
    """Return an environment with its options as a plan and a refusal show it: "skills (shots=3)"."""
    return name + (f" ({', '.join(f'{key}={value}' for key, value in options.items())})" if options else "")


def check_reads(config: Config, reads: Sequence[tuple[str, StageConfig]]) -> None:
    """Raise `UsageError` where baseline or treatment is none of the arms that a chain trains."""
    trained = {str(getattr(read, "arm", "")) for stage, read in reads if stage == "train"}
    if trained:
        start = [START] if config.with_start else []
        _require_compared([*start, *sorted(trained), *config.policies], config, Sentence("arms.add-to-preset"))


def plan(inputs: Inputs, config: Config) -> Plan:
    """Return the number of rollouts to play."""
    reporting.check(config.report_to)
    for policy in config.policies.values():
        scripted.check(policy, config.env.name)
    played_arms = arms(inputs, config)
    units = config.tasks * rollouts_of_task(played_arms, config.samples)
    control = f", control {config.control}" if config.control else ""
    compared = [f"{config.treatment} against {config.baseline}{control}"]
    of_trainings = [env for run in inputs.many("arms") if (env := run.manifest.config.get("env"))]
    if trained := {env_in_words(env["name"], env["options"]) for env in of_trainings}:
        environment = env_in_words(config.env.name, config.env.options)
        also = "as trained" if trained == {environment} else f"trained in {' and '.join(sorted(trained))}"
        compared.append(f"environment {environment}, {also}")
    looks = [Sentence("arms.planned-looks", looks=config.looks)] if config.looks > 1 else []
    same = [SENTENCES.text("one_model", config.baseline, config.treatment)] if is_one_model(played_arms, config) else []
    notes = (*compared, *same, *config.limits.notes(config.most_steps()), *looks)
    return Plan(units=units, what="rollouts", notes=notes, up_to=config.counts_by_default())


def planned(runs: Sequence[Run], config: Config) -> planner.PlannedEvaluation:
    """Return the evaluation of these trainings, or as these pilots suggest, that has the settings.

    Settings that nobody gave are those of the runs. Raises `BadInput` for pilots without a known outcome, and
    `UsageError` for one that was played in another environment.
    """
    trainings = [run for run in runs if run.holds(CHECKPOINT)]
    reads = [(run.manifest.stage if trainings else run_name(run.path), run) for run in trainings or runs]
    config = inherit(config, [(name, run.manifest.config) for name, run in reads])
    items, evaluated = list[Row](), dict[tuple[str, int], None]()
    for pilot in find_pilots(runs):
        played_in = (collected_with(pilot).get("env") or {}).get("name")  # None for imported rollouts
        if played_in is not None and not envs.is_same_environment(played_in, config.env.name):
            raise UsageError(
                "arms.pilot-of-other-environment", path=pilot.path, played=played_in, planned=config.env.name
            )
        if not pilot.holds(EVAL_ITEM):
            items += rollout_items(pilot)
            continue
        items += (pilot_items := pilot.rows(EVAL_ITEM))
        config = as_evaluated(config, pilot.manifest.config, pilot_items)
        evaluated |= dict.fromkeys(
            (item["arm"], item["train_seed"]) for item in pilot_items if not item["arm"].endswith(AT_ZERO)
        )
    if (items or len(trainings) < len(runs)) and not known_items(items, config.baseline)[0]:
        failed = next(((item["error_type"], item["error"]) for item in items if item["error_type"]), None)
        raise BadInput("arms.pilot-without-outcomes", rollouts=len(items), failed=failed)
    names = [*([START] if config.with_start else []), config.baseline, config.treatment, config.control]
    to_train = list(evaluated) or [(name, 0) for name in names if name]
    played_arms = arms(Inputs({"arms": trainings} if trainings else {}), config, to_train)
    compared = [arm.name for arm in played_arms if arm.trained and arm.name in (config.baseline, config.treatment)]
    seeds = num_seeds = max(Counter(compared).values(), default=1)
    if compared and "seeds" in config.planning.model_fields_set:
        num_seeds = config.planning.seeds

    def rollouts(design: Design) -> int:
        """Return how many rollouts the arms play on a design, which may have other training seeds."""
        named = {arm.name: arm for arm in played_arms}.values()
        arms = [arm for arm in named for _ in range(design.seeds if arm.trained else 1)]
        return design.num_tasks * rollouts_of_task(played_arms if design.seeds == seeds else arms, design.samples)

    sampling, make, most = config.sampling(), config.opener(), config.tasks
    drawn = config.draw(make, most)
    if envs.lists_tasks(config.env.name):
        most = max(2 * most, planner.DRAWN_TASKS)
        drawn = config.draw(make, most, at_most=True)
    units = [sampling.of(task.task_id, task.family) for task in drawn]
    supply = Supply.of(units, complete=len(units) < most, fixed=sampling.fixed)
    design = Design(supply.sizes(config.tasks), config.samples, num_seeds, sampling.fixed)
    design = replace(design, one_baseline=len(set(compared)) == 1, untrained=not compared)
    return planner.PlannedEvaluation(config, items, supply, design, rollouts)


def find_pilots(runs: Sequence[Run]) -> list[Run]:
    """Return the runs that give rates: those that are no trainings, or else the rollouts of trainings."""
    pilots = [run for run in runs if not run.holds(CHECKPOINT)]
    return pilots or [run for run in runs if run.holds(ROLLOUT)]


def study(runs: Sequence[Run], config: Config, tell: Callable[[str, int, int], None]) -> tuple[Row, str]:
    """Return what the evaluation would find and cost, as JSON and as text; raises what `planned` does.

    runs: trainings, which are arms as in the evaluation itself, and pilots. `tell` is called with what is counted, how
    many designs are simulated, and how many there are.
    """
    result = planner.study(planned(runs, config), tell)
    result = replace(result, pilots=tuple(run_name(run.path) for run in find_pilots(runs)))
    return asdict(result), study_text(result)


def as_evaluated(config: Config, tree: Tree, items: Iterable[Row]) -> Config:
    """Return the settings, where nobody gave any those of an earlier evaluation: its settings and its items' tasks."""
    names = ("samples", "baseline", "treatment", "control", "greedy", "policies", "looks", "units")
    settings = build("evaluate", Config, [{name: tree[name] for name in names if name in tree}])
    inherited = {name: getattr(settings, name) for name in settings.model_fields_set - config.model_fields_set}
    inherited["policies"] = {**settings.policies, **config.policies}
    if "tasks" not in config.model_fields_set:
        inherited["tasks"] = len({item["task_id"] for item in items})
    return config.model_copy(update=inherited)


def run(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Play every arm on every task, look by look, until all is decided or played."""
    played_arms, make = arms(inputs, config), cache(config.opener)
    sampling, tasks = config.sampling(), config.draw(make(), config.tasks, out)
    config.tell_of_fewer(tasks, len(tasks) * rollouts_of_task(played_arms, config.samples), out)
    trained = inputs.many("arms")
    infos = [CheckpointInfo.of(run) for run in trained]
    by_training = [(info.arm, info.train_seed, run) for info, run in zip(infos, trained, strict=True)]
    differing = (*trained_differences(by_training), *policy_differences(config.policies))
    refuse_trained([*infos, *trainings_of(config.policies)], config.env.name, [task.task_id for task in tasks])
    looks = parts(len(tasks), config.looks)
    looks_taken: list[Look] = []
    damaged: dict[tuple[str, int], str] = {}
    question = EvalQuestion(
        *(config.baseline, config.treatment, config.control, sampling),
        untrained=frozenset(name + end for name in (START, *config.policies) for end in ("", AT_ZERO)),
        collapsed={(info.arm, info.train_seed): info.collapsed for info in infos if info.collapsed},
    )
    for arm in played_arms:
        if kind_of(arm.policy) == "local":
            available.check(arm.policy)  # before another arm has played for hours
    following = reporting.log_units(config.report_to, out, out.manifest.label)
    with following, Serving(out, [arm.policy for arm in played_arms], rollout_usd=config.limits.cost_usd) as serving:
        # Each look has its share of alpha, so that looking several times does not raise the rate of false verdicts.
        for part, level in zip(looks, levels(len(looks)), strict=True):
            part_tasks = [tasks[index] for index in part]
            out.spread(
                worker_blocks((arm, _rollouts(arm, part_tasks, config)) for arm in played_arms), "rollouts of all arms"
            )
            for arm in played_arms:
                if why := _play(arm, make(), part_tasks, serving, config, out):
                    damaged[arm.name, arm.seed] = why
            sound = [arm for arm in played_arms if (arm.name, arm.seed) not in damaged]
            names = [item_id(arm, rollout) for arm in sound for rollout in _rollouts(arm, tasks[: part.stop], config)]
            # Transcripts, patches and logs stay on disk: the other columns of an item are small.
            items = [record["item"] | dict.fromkeys(LONG) for record in out.journal.read(names)]
            verdict = decide(items_table(items), replace(question, alpha=level, damaged=damaged), differing)
            looks_taken.append(Look(part.stop, level, verdict.decision, verdict.gain))
            if verdict.settled or damaged:
                break
    if len(looks) > 1:
        verdict = replace(verdict, looks=tuple(looks_taken), planned_looks=len(looks), planned_tasks=len(tasks))
    _finish(replace(verdict, one_model=is_one_model(played_arms, config)), items, out)


def work(inputs: Inputs, config: Config, out: RunWriter) -> None:
    """Play every arm on every task, without deciding anything."""
    make = config.opener()
    tasks = config.draw(make, config.tasks)
    played_arms = arms(inputs, config)
    with Serving(out, [arm.policy for arm in played_arms], rollout_usd=config.limits.cost_usd) as serving:
        for part in parts(len(tasks), config.looks):
            for arm in played_arms:
                part_tasks = [tasks[index] for index in part]
                if not all(out.finished(item_id(arm, rollout)) for rollout in _rollouts(arm, part_tasks, config)):
                    _play(arm, make, part_tasks, serving, config, out)


def item_id(arm: Arm, rollout: LiveRollout) -> str:
    """Return the name of an arm's rollout."""
    return f"{arm.name}/{arm.seed}/{rollout.rollout_id}"


def worker_blocks(rollouts_of: Iterable[tuple[Arm, Sequence[LiveRollout]]]) -> list[Sequence[str]]:
    """Return the smallest shares of one worker: one rollout of a server, a batch of a model in its process."""
    shares = list[Sequence[str]]()
    for arm, rollouts in rollouts_of:
        # A server batches the rollouts of all workers itself; a model in a process plays its batch together.
        served = arm.policy.served or arm.policy.base_url is not None
        shares += blocks([item_id(arm, rollout) for rollout in rollouts], 1 if served else arm.policy.lockstep)
    return shares


def passed_by(reward: float | None, hidden_pass: bool | None) -> bool | None:
    """Return whether a rollout passed: its reward is full; on a scale above 1, by the hidden tests, None without.

    `evaluate` counts what training pays for. `Grade.passed`, by which pairs and `curriculum` go, asks the hidden tests
    first: a full reward by a loophole is a pass here and none there.
    """
    if reward is None or reward > FULL_REWARD:
        return None if reward is None else hidden_pass
    return reward >= 1


def played_item(arm: Arm, rollout: LiveRollout, sampling: SamplingUnit) -> Row:
    """Return one `eval_item` row; `passed` is null when the machinery failed."""
    error_type, error = rollout.error or (None, rollout.grade.error)
    passed = None if rollout.error else passed_by(rollout.grade.reward, rollout.grade.hidden_pass)
    if passed is None and error_type is None and rollout.grade.reward is not None:
        error_type, error = "WrongValue", Sentence("arms.reward-above-one", reward=rollout.grade.reward)
    return {
        "item_id": item_id(arm, rollout),
        "arm": arm.name,
        "train_seed": arm.seed,
        "pair_set": arm.pair_set,
        "task_id": rollout.task.task_id,
        "family": rollout.task.family,
        "sample_idx": rollout.sample_idx,
        "terminated_by": rollout.terminated_by,
        "wall_s": rollout.wall_s,
        "unit": sampling.of(rollout.task.task_id, rollout.task.family),
        "passed": passed,
        **verdict_columns(rollout.grade),
        "num_steps": len(rollout.steps),
        **action_facts(rollout),
        **work_columns(rollout.grade.work),
        "error_type": error_type,
        "error": error,
        "cost_usd": sum(step.sample.cost_usd for step in rollout.steps),
        "sampled_tokens": sum(step.sample.completion_tokens for step in rollout.steps),
    }


def rollout_items(pilot: Run) -> Iterator[Row]:
    """Yield the rollouts of a pilot as `eval_item` rows of the arm `START`. Columns that a rollout lacks are null."""
    table = require_unmixed(pilot).scan(ROLLOUT)
    needed = {*EVAL_ITEM.columns, "rollout_id", "env", "reward", "completion_tokens"} - LONG
    rows = list(table.rows([name for name in table.columns if name in needed]))
    for row in rows:
        yield {column: row.get(column) for column in EVAL_ITEM.columns} | {
            "item_id": f"{START}/{row['rollout_id']}",
            "arm": START,
            "train_seed": 0,
            "unit": sampling_unit_of(row["env"]).of(row["task_id"], row.get("family")),
            "passed": passed_by(row["reward"], row.get("hidden_pass")),
            # A rollout without a cost of its own gets an equal share of the run's.
            "cost_usd": pilot.manifest.cost_usd / len(rows) if row["cost_usd"] is None else row["cost_usd"],
            "sampled_tokens": row["completion_tokens"],
        }


def _rollouts(arm: Arm, tasks: list[Task], config: Config) -> list[LiveRollout]:
    """Return the same tasks, samples and sampling seeds for every arm: only the model differs."""
    samples = rollouts_of_task([arm], config.samples)
    return [LiveRollout(task, index, config.seed) for task in tasks for index in range(samples)]


def rollouts_of_task(played_arms: Iterable[Arm], samples: int) -> int:
    """Return how many rollouts of one task these arms play."""
    return sum(1 if arm.once else samples for arm in played_arms)


def _play(
    arm: Arm, make: Callable[[], Environment], tasks: list[Task], serving: Serving, config: Config, out: RunWriter
) -> str | None:
    """Play an arm's rollouts of these tasks; return why that is impossible, where its weights are no numbers."""
    sampling = config.sampling()
    try:
        policy = serving.open(arm.policy)
        facts = policy.facts()
        if arm.revision and (now := facts.get("revision", arm.revision)) != arm.revision:
            raise BadInput("arms.start-changed", model=arm.policy.model, revision=arm.revision, now=now)
        out.model(f"{arm.name}/{arm.seed}", **facts)
        play_missing(
            make,
            policy,
            _rollouts(arm, tasks, config),
            key=lambda rollout: item_id(arm, rollout),
            payload=lambda rollout: {"item": played_item(arm, rollout, sampling)},
            config=config,
            out=out,
            noun=f"rollouts of arm {arm.name}",
        )
        out.model(f"{arm.name}/{arm.seed}", **policy.facts())  # what was found while asking
    except NotFinite as error:
        return str(error)
    return None


def _answer_notes(items: list[Row], out: RunWriter) -> list[str]:
    """Return notes on who answered in each arm, and on reused answers."""
    served = defaultdict[str, Counter[tuple[str | None, ...]]](Counter)
    for record in out.journal.read([item["item_id"] for item in items]):
        item = record["item"]
        counts = served[f"{item['arm']}/{item['train_seed']}"]
        for fact in orjson.loads(item["steps_json"] or "[]"):
            if any(named := tuple(fact.get(name) for name in SERVED)):
                counts[named] += 1
    models = out.manifest.models
    return [
        line
        for arm, counts in served.items()
        for line in (*answered_by(counts, str(models[arm]["model"]), arm), *policy_notes(models[arm]))
    ]


def _finish(verdict: EvalVerdict, items: list[Row], out: RunWriter) -> None:
    """Write the items, the verdict, the chart and the report; raise `Incomplete` where rollouts failed."""
    names = [item["item_id"] for item in items]
    out.table(EVAL_ITEM, (record["item"] for record in out.journal.read(names)))
    failed = sum(item["error_type"] is not None for item in items)
    out.count(planned=len(items), done=len(items) - failed, failed=failed)
    words = describe_verdict(verdict)
    out.set_summary(
        ok=verdict.decision is not Verdict.INVALID_RUN,
        exit_code=verdict.exit_code,
        verdict=verdict.decision.value,
        claim=words.claim,
        why=words.why,
    )
    out.document("verdict", verdict_document(verdict, words))
    if find_spec("matplotlib"):  # which the extra `charts` brings
        out.write_file("chart.svg", arms_chart(verdict))
    out.write_file("report.txt", "\n".join([text_table(verdict, words), *_answer_notes(items, out), ""]))
    if failed:
        first = next(item for item in items if item["error_type"])
        raise Incomplete(
            "arms.rollouts-failed", failed=failed, rollouts=len(items), kind=first["error_type"], error=first["error"]
        )
