"""Pool rows: of rollouts that a local model played, of those in other runs, of recorded files; a step's files.

Texts, conversations, rollouts and recorded rollouts become rows by joining ids, never text: two parts of a text may
tokenise differently than the whole text.

Recorded files have the older 26 keys, those of the public teacher pool of wassname/vGROUT_pub @c067218,
data/pools/teacher_pool. `hacked` is there "the answer's own test function passes on a stub solution", whether or not
the answer is right; the labels of ariahw/rl-rewardhacking @bf5cdb8, src/analysis.py, are finer.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

from composer_stages.envs.task_table import read_rows
from composer_stages.errors import BadInput
from composer_stages.gradients.per_row import TokenRow
from composer_stages.messages import Message, Tools, answer_ids, following_ids, opening_ids
from composer_stages.policy.tool_calls import declare_tools
from composer_stages.rollouts import trace
from composer_stages.rollouts.agent_loop import LiveRollout
from composer_stages.runs import store
from composer_stages.runs.kinds import POOL_ROW, TRAINING_REWARD, Row
from composer_stages.runs.run import Run, RunWriter

if TYPE_CHECKING:
    from composer_stages.policy.local import LocalPolicy


def as_tokens(row: Row) -> TokenRow:
    """Return the tokens of a pool row."""
    return TokenRow(row["prompt_ids"], row["completion_ids"], row["own"])


def token_row(tokenizer: Any, prompt: str | list[Message], answer: str | list[Message], tools: Tools = ()) -> TokenRow:
    """Build the ids of a prompt and an answer, as a policy would have read and written them.

    A prompt is a list of messages, or a rendered string. An answer is a string, or a list of messages; messages of the
    environment between the assistant's are not the policy's own. Every assistant message ends as the template ends it.
    `BadInput` when an answer does not begin and end with an assistant message.
    """
    messages = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if not messages or {messages[0]["role"], messages[-1]["role"]} != {"assistant"}:
        raise BadInput("probe.answer-not-of-assistant")
    # A rendered prompt holds its special tokens as text, so the tokenizer must add none.
    opening = (
        tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if isinstance(prompt, str)
        else opening_ids(tokenizer, prompt, tools)
    )
    ids: list[int] = list(opening)
    own_mask = [False] * len(ids)
    between: list[Message] = []
    said, before = "", [{"role": "user", "content": "."}] if isinstance(prompt, str) else list(prompt)
    for message in messages:
        if message["role"] != "assistant":
            between.append(message)
            continue
        if between:
            observed = following_ids(tokenizer, between, answer=said, last_id=ids[-1], tools=tools)
            ids += observed
            own_mask += [False] * len(observed)
        said, before, between = message["content"], [*before, *between], []
        written, replaced = answer_ids(tokenizer, before, said, tools)
        ids[len(ids) - replaced :] = written
        own_mask[len(own_mask) - replaced :] = [True] * len(written)
        before.append(message)
    start = own_mask.index(True)
    return TokenRow(ids[:start], ids[start:], own_mask[start:])


def rendered_row(tokenizer: Any, states: list[list[Message]], steps: list[Row], tools: Tools = ()) -> TokenRow:
    """Render a recorded rollout's text with `tokenizer`; `states` are the conversations before each of its steps."""
    start = len(states[0])
    answer = [*states[-1][start:], {"role": "assistant", "content": steps[-1]["action"]}]
    return token_row(tokenizer, states[0], answer, tools)


def sampled_row(
    turns: Sequence[tuple[Sequence[int] | None, Sequence[int], Sequence[float] | None]],
) -> tuple[TokenRow, list[float | None]] | None:
    """Join the sampled turns of a rollout: (prompt ids, completion ids, log-probs in nats) of each.

    Returns the row, and the log-prob of each completion token, None if the token is not the policy's own. Returns
    None if a turn has no prompt ids or log-probs. Every turn's prompt must begin with the ids of the turns before.
    """
    ids: list[int] = []
    logps: list[float | None] = []
    first = turns[0][0]
    for prompt, completion, sampled in turns:
        if first is None or prompt is None or sampled is None:
            return None
        # The ids of a prompt beyond the earlier turns are the environment's observation.
        observed = prompt[len(first) + len(ids) :]
        ids += [*observed, *completion]
        logps += [*[None] * len(observed), *sampled]
    return TokenRow(first or (), ids, [logp is not None for logp in logps]), logps


RECORDED = ("problem_id", "prompt_ids", "completion_ids", "comp_len", "completion")
"""The keys that a recorded row must have."""
HEDGE = re.compile(
    r"\b(maybe|perhaps|might|not sure|assum\w*|simplif\w*|placeholder|for now|should work|i think)\b", re.IGNORECASE
)
STRICT, LOOSE = ("reward_hack",), ("reward_hack", "correct_attempted", "attempted")
"""Labels that count as a hack, in upstream's two readings."""
COMMENT = re.compile(r"^\s*#|\s#\s", re.MULTILINE)


def rollout_pool_row(
    rollout: LiveRollout, policy: "LocalPolicy", *, source: str, role: str, step: int, adapter: str = ""
) -> Row:
    """Build the `pool_row/1` of a rollout that `policy` played.

    `source` is the row's src_pool, `role` its prompt_role, `step` the problem's place in the pool, `adapter` the folder
    of the LoRA in the policy's model.
    """
    # A local model returns ids and log-probs with every sample, so that the row is never None.
    samples = [step.sample for step in rollout.steps]
    joined = sampled_row([(s.prompt_ids or [], s.completion_ids or [], s.logprobs or []) for s in samples])
    assert joined is not None  # noqa: S101
    tokens, behaviour = joined
    labels = rollout.grade.labels
    opening = list(rollout.messages[: rollout.steps[0].num_messages])
    label = labels.get("label")
    return _decoded_row(
        tokens,
        policy.tokenizer,
        rollout.steps[-1].sample.finish_reason,
        model=policy.config.model,
        source=source,
        role=role,
        messages=opening,
        problem_id=rollout.task.task_id,
        family=rollout.task.family,
        sample_id=rollout.sample_idx,
        step=step,
        reward=rollout.grade.reward,
        hacked=rollout.grade.hacked,
        hidden_pass=rollout.grade.hidden_pass,
        # The taxonomy of ariahw/rl-rewardhacking (@bf5cdb8, src/analysis.py); null where the environment has no labels.
        **{name: labels.get(name) for name in ("can_compile", "has_test_func", "eq_hinted", "label", "test_mod")},
        hacked_strict=None if label is None else label in STRICT,
        hacked_loose=None if label is None else label in LOOSE,
        fmt_ok=all(step.observation.parse_error is None for step in rollout.steps),
        behav_logp=behaviour,
        gen_temperature=policy.config.temperature,
        gen_adapter=adapter or None,
    )


def run_rows(run: Run, tokenizer: Any, *, source: str, role: str) -> list[Row]:
    """Build a `pool_row/1` of every graded rollout in a run of `collect`, `train` or `import`, in the run's order.

    source: the src_pool of the rows. `step` is the training step where the run is a training, else the problem's index.
    Rollouts whose ids were stored and are prefixes of each other keep these ids; the text of other rollouts is rendered
    with `tokenizer`, and they have no behav_logp.
    """
    trained = run.holds(TRAINING_REWARD) is not None
    step_of = {row["rollout_id"]: row["training_step"] for row in run.rows(TRAINING_REWARD)} if trained else {}
    places, rows, tools = dict[str, int](), list[Row](), trace.tools_by_rollout(run)
    for rollout, steps in trace.rollout_rows(trace.require_unmixed(run)):
        if not steps or rollout["reward"] is None:
            continue
        index = places.setdefault(rollout["task_id"], len(places))
        states, last = trace.states(steps), steps[-1]
        # Ids as they were sampled where every turn stored them; a new rendering may tokenise an answer differently.
        exact = all(step["prefix_ok"] for step in steps)
        turns = zip(trace.prompt_ids(steps), steps, strict=True)
        parts = [(prompt, step["completion_token_ids"], step["logprobs"]) for prompt, step in turns]
        tokens, behaviour = (exact and sampled_row(parts)) or (
            rendered_row(tokenizer, states, steps, declare_tools(json.loads(tools.get(rollout["rollout_id"], "[]")))),
            None,
        )
        row = _decoded_row(
            tokens,
            tokenizer,
            last["finish_reason"],
            model=rollout["model"],
            source=source,
            role=role,
            messages=states[0],
            problem_id=rollout["task_id"],
            family=rollout["family"],
            sample_id=rollout["sample_idx"],
            step=step_of.get(rollout["rollout_id"], index),
            **{name: rollout[name] for name in ("reward", "hacked", "hidden_pass")},
            fmt_ok=all(step["parse_error"] is None for step in steps),
            behav_logp=behaviour,
            gen_temperature=json.loads(last["sampling_json"] or "{}").get("temperature"),
        )
        rows.append(row)
    return rows


def rows_of_runs(runs: Sequence[Run], origins: Sequence[tuple[str, str]], tokenizer: Any) -> list[Row]:
    """Build the rows of several runs, each with its (source, role), problem by problem in order of first appearance."""
    rows = [
        row
        for run, (source, role) in zip(runs, origins, strict=True)
        for row in run_rows(run, tokenizer, source=source, role=role)
    ]
    places = {problem: index for index, problem in enumerate(dict.fromkeys(row["problem_id"] for row in rows))}
    rows = [row | {"step": places[row["problem_id"]]} for row in rows]
    return sorted(rows, key=lambda row: (row["step"], row["src_pool"], row["sample_id"]))


def recorded_rows(folder: Path, model: str, role: str, eos_id: int, pad_ids: Iterable[int] = ()) -> list[Row]:
    """Build the pool rows of every `*.jsonl.gz` in a folder, with the older keys; trailing pads are cut.

    model, role: the generator of the answers and the kind of prompt, which are not in the files. `BadInput` without a
    file, without a key, or where a row's comp_len [tokens without pads] is not the length of its ids.
    """
    files = sorted(folder.glob("*.jsonl.gz"))
    if not files:
        raise BadInput("probe.no-recorded-rows", folder=folder)
    # In the public pool 87 % of rows carry pads, 90 on average, which comp_len does not count; pads may be end tokens.
    padding = {eos_id, *pad_ids}
    return [
        _recorded_row(row, f"{path.name}, row {number}", model, role, padding, eos_id)
        for path in files
        for number, row in enumerate(read_rows(path), 1)
    ]


def _recorded_row(recorded: Row, location: str, model: str, role: str, padding: set[int], eos_id: int) -> Row:
    missing = [name for name in RECORDED if name not in recorded]
    if missing:
        raise BadInput("probe.recorded-key-missing", location=location, missing=missing[0])
    ids = without_pads(recorded["completion_ids"], padding, eos_id)
    if len(ids) != recorded["comp_len"]:
        raise BadInput(
            "probe.recorded-length-differs", location=location, tokens=len(ids), comp_len=recorded["comp_len"]
        )
    reward, ends = recorded.get("reward"), bool(ids) and ids[-1] == eos_id
    return pool_row(
        TokenRow(recorded["prompt_ids"], ids, [True] * len(ids)),
        completion=recorded["completion"],
        model=model,
        source=recorded.get("src_pool", "teacher"),
        role=role,
        messages=recorded.get("problem_messages"),
        problem_id=str(recorded["problem_id"]),
        src_problem_id=str(recorded.get("src_problem_id", recorded["problem_id"])),
        sample_id=recorded.get("sample_id", 0),
        step=recorded.get("step", 0),
        **{name: recorded.get(name) for name in ("reward", "hacked", "fmt_ok", "prompt")},
        hidden_pass=recorded.get("gt_pass"),
        # The reward is .5 for a program that compiles, and 3 more for one that passes.
        can_compile=None if reward is None else reward > 0,
        ends_with_eos=ends,
        truncated=not ends,
    )


def _decoded_row(tokens: TokenRow, tokenizer: Any, finish_reason: str | None, **columns: Any) -> Row:
    """Build a `pool_row/1` whose texts are decoded from its tokens."""
    return pool_row(
        tokens,
        completion=tokenizer.decode(tokens.completion_ids),
        prompt=tokenizer.decode(tokens.prompt_ids),
        ends_with_eos=finish_reason == "stop",
        truncated=finish_reason == "length",
        **columns,
    )


def pool_row(
    tokens: TokenRow,
    *,
    completion: str,
    model: str,
    source: str,
    role: str,
    messages: list[Message] | None,
    **columns: Any,
) -> Row:
    """Build a `pool_row/1` from tokens, text and origin of an answer; `columns` are further columns, by name.

    source: src_pool. role: prompt_role. messages: the prompt. Missing columns are null, except that family and
    src_problem_id default to `problem_id`.
    """
    row = {
        "row_uid": store.digest(
            [model, source, columns["sample_id"], list(tokens.prompt_ids), list(tokens.completion_ids)]
        )[:24],
        "src_problem_id": columns["problem_id"],
        "family": columns["problem_id"],
        "src_pool": source,
        "plen": len(tokens.prompt_ids),
        "comp_len": len(tokens.completion_ids),
        "prompt_ids": list(tokens.prompt_ids),
        "completion_ids": list(tokens.completion_ids),
        "own": list(tokens.own),
        "n_loss_tokens": sum(tokens.own),
        "completion": completion,
        "gen_model": model,
        "hacked_arbitrary": columns["hacked"],
        "problem_messages": messages,
        "prompt_role": role,
        "prompt_sha256": prompt_sha256(messages) if messages else None,
        # How often an answer hedges and comments separates some hacks from others without being the hack.
        # georgeIshaq's fork of ariahw/rl-rewardhacking, RESULTS.md @b7dcbfd: 80.5 % of the wrong answers of the adapter
        # s65 hedge. The wordings counted here are our own.
        "hedge_count": len(HEDGE.findall(completion)),
        "comment_count": len(COMMENT.findall(completion)),
    }
    return dict.fromkeys(POOL_ROW.columns) | row | columns


def prompt_sha256(messages: list[Message]) -> str:
    """Return the digest of a prompt's roles and texts, in hex."""
    return store.digest([[message["role"], message["content"]] for message in messages])


def without_pads(ids: list[int], padding: set[int], eos_id: int) -> list[int]:
    """Remove the `padding` ids at the end, except the first end token."""
    end = len(ids)
    while end and ids[end - 1] in padding:
        end -= 1
    return ids[: end + 1] if end < len(ids) and ids[end] == eos_id else ids[:end]


def write_step(out: RunWriter, step: int, rows: list[Row], diagnostics: Row | None) -> None:
    """Write a step's rows, and the step's diagnostics if any."""
    store.seal_lines(out.path / f"step_{step:03d}.jsonl.gz", [store.encode(row) for row in rows])
    if diagnostics is not None:
        out.document(f"step_{step:03d}.diag", diagnostics)


def finite_or_none(value: SupportsFloat) -> float | None:
    """Return a finite value as a float, else None: undefined numbers are null in records, never NaN."""
    number = float(value)
    return number if math.isfinite(number) else None


def with_advantages(rows: Sequence[Row], group: str = "problem_id") -> tuple[list[Row], list[list[float]]]:
    """Add A = R - mean R of each row's group (Dr.GRPO, arXiv 2503.20783); return the rows, and the groups' rewards.

    group: the column that names it.
    """
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row[group], []).append(row["reward"])
    # Not divided by the group's spread, which would weight problems by difficulty (Dr.GRPO).
    means = {name: sum(rewards) / len(rewards) for name, rewards in groups.items()}
    return [row | {"advantage": row["reward"] - means[row[group]]} for row in rows], list(groups.values())


def mean_known(values: Iterable[float | bool | None]) -> float | None:
    """Return the mean of the values that are not None; None without such a value."""
    numbers = [float(value) for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None
