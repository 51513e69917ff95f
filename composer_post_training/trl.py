"""What a script that trains with TRL can add: channels, the probe's alarm, pairs for `DPOTrainer`, environments.

    from composer_post_training.trl import ProbeCallback, preference_dataset, with_channels

    pairs = preference_dataset(composer.find("extract-pairs"))
    trainer = with_channels(GRPOTrainer)(..., weights={"dpo": 0.1}, pairs=pairs)
    trainer.add_callback(ProbeCallback(trainer, composer.find("probe-extract-vhack")))
    trainer.train()

The trainer stays TRL's, with all of its arguments. Contracts read from huggingface/trl 1.16.0,
`trl/trainer/grpo_trainer.py` (`_prepare_inputs`, `_generate_and_score_completions`, `_calculate_rewards`).
"""

import json
import warnings
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from datasets import Dataset
from jaxtyping import Float
from transformers import ProcessorMixin, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.data_utils import _tokenize, common_prefix_length, extract_prompt, prepare_multimodal_messages
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from composer_post_training.stage_functions import folders_of_runs
from composer_post_training.words import errors_in_python
from composer_stages.backends.ranks import join
from composer_stages.errors import BadInput, UsageError
from composer_stages.gradients.per_row import MAX_TOKENS
from composer_stages.integrations.trl import (
    RolloutFunction as RolloutFunction,
    environment_reward as environment_reward,
    tool_environments as tool_environments,
)
from composer_stages.messages import Message, parsed_calls, thoughts_apart
from composer_stages.policy import background
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.tool_calls import declare_tools
from composer_stages.probe.checks.alarm import CheckpointRollouts, alarm
from composer_stages.probe.statistics import codes
from composer_stages.probe.watching import Watcher
from composer_stages.rollouts.agent_loop import LiveRollout
from composer_stages.rollouts.trace import pairs_with_states
from composer_stages.runs import catalog
from composer_stages.runs.kinds import Row
from composer_stages.runs.run import Run
from composer_stages.runs.settings import build
from composer_stages.thoughts import split_thoughts
from composer_stages.training.channels import CHANNELS
from composer_stages.training.channels.hints import HintedTurn, HintSource, SelfTeacher, spread, with_hint
from composer_stages.training.channels.pairs import PairSource, TokenPair, fitted
from composer_stages.training.channels.rollouts import OwnRollout
from composer_stages.training.checkpoints import SourcesFollow
from composer_stages.training.config import Config, Hints
from composer_stages.training.refusals import of_a_pass
from composer_stages.training.scoring import Tree
from composer_stages.training.step import Channels, ComposedStep
from composer_stages.words import Sentence

KWARGS = "chat_template_kwargs"
"""Settings of the chat template for one row, in TRL's datasets."""
SIDES = ("chosen", "rejected")
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Where messages of one program or another have the thoughts of an answer."""


def preference_dataset(run: Run) -> Dataset:
    """Return a run's preference pairs as `DPOTrainer` takes them: conversations `prompt`, `chosen` and `rejected`.

    run: such as `find("extract-pairs")`. Thoughts stand apart from the content, and where tools could be called, calls,
    too; the column `tools` has the tools as JSON.

    Raises `UsageError` for what is no run, `BadInput` for a run without pairs.
    """
    with errors_in_python():
        folders_of_runs([run])
        _warn_of_verdict(run)
        pairs = list(pairs_with_states(run))
    rows, with_tools = list[Row](), any(pair["tools_json"] for pair in pairs)
    for pair in pairs:
        prompt, tools = orjson.loads(pair["messages_json"]), declare_tools(orjson.loads(pair["tools_json"] or "[]"))
        form: Callable[[list[Message]], list[Any]] = parsed_calls if tools else thoughts_apart
        row: Row = {"prompt": form(prompt)}
        for side in SIDES:
            row[side] = form([*prompt, {"role": "assistant", "content": pair[side]}])[-1:]
        rows.append(row | ({"tools": json.dumps(tools) if tools else None} if with_tools else {}))
    # Without JSON a message that lacks a key of others has it as None, which templates may write.
    mixed = with_tools or any(len(message) > 2 for row in rows for part in ("prompt", *SIDES) for message in row[part])
    return Dataset.from_list(rows, on_mixed_types="use_json" if mixed else None)


def _warn_of_verdict(run: Run) -> None:
    """Warn of a run that did not pass its own checks, or left open whether it does."""
    outcome = run.manifest.outcome
    if outcome.exit_code:
        verdict, line = outcome.summary.get("verdict"), outcome.summary.get("judgement")
        warnings.warn(Sentence("python.own-verdict", run=run.path, verdict=verdict, line=line), stacklevel=3)


# Channels


def with_channels(trainer: type[GRPOTrainer] = GRPOTrainer) -> type[Any]:
    """Return a subclass of a trainer that adds the losses of channels to its own; with all weights 0 it is the same.

    Its constructor takes the trainer's arguments, and:

    weights: of `dpo`, `simpo` and `sft` on pairs, of `sdpo` on hints, and of `grpo`, the trainer's own loss (1).
    pairs: rows with `prompt`, `chosen` and `rejected`, perhaps `tools` and `chat_template_kwargs`, as `DPOTrainer`
    takes and tokenises them.
    hints: a function with the arguments of a reward function, asynchronous or not, that returns a hint for each
    completion, or None. Where there is one, the model learns what it predicts for the same completion behind the prompt
    with the hint.
    settings: the groups `pairs` and `hints` of `composer train`, such as `{"pairs": {"per_step": 8, "beta": 0.2}}`.
    max_tokens: of one forward pass, where a micro-batch with its share of the pairs does not fit into memory.

    Each process trains on one GPU, which holds the entire model. The constructor raises `UsageError` for FSDP and
    DeepSpeed, and for weights without their rows; `BadInput` for pairs of
    another form.
    """
    return type(f"Composed{trainer.__name__}", (_ChannelStep, trainer), {})


class _GivenHints(HintSource):
    """Gives the completions of the newest generation that the user's function has hinted, as many as a step takes."""

    def __init__(self, settings: Hints) -> None:
        self.follower, self.turns, self._settings = SelfTeacher(settings), list[HintedTurn](), settings

    def rows(self, rollouts: Sequence[LiveRollout], step: int) -> list[HintedTurn]:
        return spread(self.turns, self._settings.per_step)


class _ChannelStep(ComposedStep):
    """A training step with channels whose rows the user gives."""

    def __init__(
        self,
        *args: Any,
        weights: Mapping[str, float] | None = None,
        pairs: Iterable[Row] = (),
        hints: Callable[..., Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        **trl: Any,
    ) -> None:
        rows, self._shown = list(pairs), list[list[int] | None]()
        if others := [row for row in rows if not isinstance(row, Mapping)]:  # of a table its columns, of a text letters
            raise BadInput("python.pairs-no-rows", kind=type(pairs).__name__, value=others[0])
        missing = {"pairs": not rows and "Give pairs", "hinted": hints is None and "Give hints"}
        from_rollouts = "Its rows are made of rollouts of `composer train`, where it can be used"
        sources = {name: channel.load().source.name for name, channel in CHANNELS.items()}
        usable = ["grpo", *(name for name, source in sources.items() if source in missing)]
        for name, weight in (weights or {}).items():
            if name not in (*usable, *sources):
                raise UsageError("python.no-channel", name=name, usable=usable)
            if weight and name in sources and (remedy := missing.get(sources[name], from_rollouts)):
                raise UsageError("python.channel-without-rows", name=name, remedy=remedy)
        grpo_config = next((argument for argument in (*args, *trl.values()) if isinstance(argument, GRPOConfig)), None)
        sampling = (
            {}
            if grpo_config is None
            else {"policy": {"temperature": grpo_config.temperature}, "seed": grpo_config.seed}
        )
        if unread := (settings or {}).keys() - {"pairs", "hints"}:
            raise UsageError("python.channel-setting-unread", name=min(unread))
        with errors_in_python():
            config = build("train", Config, [{**(settings or {}), "weights": dict(weights or {}), **sampling}])
        self._pairs, self._hints = PairSource([], config.pairs.per_step, config.seed), _GivenHints(config.hints)
        channels = Channels(config, [self._pairs, self._hints])
        self._hint = hints if self._hints.name in channels.sources else None
        super().__init__(*args, channels=channels, rows=lambda batches, step: channels.rows([], step), **trl)
        if channels.weights:
            if any(getattr(argument, "lora_dropout", 0) for argument in trl.values()):
                warnings.warn(Sentence("python.dropout-off"), stacklevel=2)
            self._check()
            self._ranks.broadcast_weights(self.model.parameters())
            self.add_callback(SourcesFollow(channels))
            was_training = self.model.training
            self.model.eval()
            if rows:
                self._take(rows, config)
            self.model.train(was_training)

    def _check(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise UsageError("python.sharded-channels")
        generation, step = self.args.steps_per_generation or 1, self.args.gradient_accumulation_steps
        if generation % step:
            raise UsageError("python.uneven-generation", generation=generation, step=step)
        if self.args.cast_lm_head_to_fp32:
            raise UsageError("training.head-of-trl", channels=True)
        if self._max_tokens is not None and (field := of_a_pass(vars(self.args))):
            raise UsageError("training.mean-per-part", field=field, cut="max_tokens")

    def _take(self, rows: list[Row], config: Config) -> None:
        """Tokenise pairs as `DPOTrainer` does, and score them by the model as it is."""
        rows = [_with_prompt(number, row) for number, row in enumerate(rows)]
        # Where a row has no tools, the prompts of the trainer have its own.
        own_tools = self.tools if self.environment_factories is None else self._env_tools.get(None)
        settings: Any = self.chat_template_kwargs
        token_pairs = [
            _token_pair(
                self.processing_class,
                number,
                row,
                tools=_parsed(number, row, "tools") or own_tools or None,
                chat_template=self.chat_template,
                **(settings | (_parsed(number, row, KWARGS) or {})),
            )
            for number, row in enumerate(rows)
        ]
        most = config.pairs.max_tokens
        self._pairs.pairs, lost = fitted(token_pairs, most)
        if lost:
            warnings.warn(Sentence("python.pairs-not-whole", lost=lost, total=len(rows), most=most), stacklevel=3)
        if not self._pairs.pairs:
            raise UsageError("python.no-pairs-left", total=len(rows), most=most)
        if any("reference" in CHANNELS[name].needs for name in self.channels.weights):
            with self.accelerator.autocast():
                self._pairs.cache_reference(self.model, ranks=self._ranks)

    def _calculate_rewards(
        self, inputs: list[Row], prompts: list[Any], completions: list[Any], completion_ids_list: list[list[int]]
    ) -> Any:
        """Ask for hints where TRL asks for rewards, with the same arguments."""
        if self._hint is not None and self.model.training:
            reserved = {"prompt", "completion", "completion_ids"}
            columns: dict[str, Any] = {name: [row[name] for row in inputs] for name in inputs[0].keys() - reserved}
            environments: Any = self.environments
            columns |= {"trainer_state": self.state} | ({"environments": environments} if environments else {})
            columns |= {"log_extra": self._log_completion_extra, "log_metric": self._log_metric}
            hints = self._hint(prompts=prompts, completions=completions, completion_ids=completion_ids_list, **columns)
            hints = background.run(hints) if isinstance(hints, Coroutine) else hints
            if odd := [hint for hint in hints if not isinstance(hint, str | None)]:  # such as False, or pandas' NaN
                raise BadInput("python.hint-no-text", value=odd[0])
            if len(hints) != len(prompts):
                raise BadInput("python.hints-of-other-length", hints=len(hints), completions=len(prompts))
            hinted_prompts = [
                prompt if hint is None else _hinted(prompt, hint) for prompt, hint in zip(prompts, hints, strict=True)
            ]
            ids = self._tokenize_prompts(hinted_prompts)[0]
            self._shown = [
                None if hint is None else list(token_ids) for hint, token_ids in zip(hints, ids, strict=True)
            ]
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _generate_and_score_completions(self, inputs: list[Row]) -> dict[str, Any]:
        """Make rows of the completions that were hinted, those of all processes."""
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if self._hint is not None and self.model.training:
            turns = [
                HintedTurn(row.tree, Tree(prompt, row.tree.branches), row.mask, row.logprobs or None)
                for row, prompt in zip(_rollouts(batch), self._shown, strict=True)
                if prompt is not None and any(row.mask)
            ]
            self._hints.turns = [turn for turns in self._ranks.gather_to_rank0(turns) for turn in turns]
        return batch

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        for follower in self.channels.followers:
            follower.load(Path(resume_from_checkpoint))


def _parsed(number: int, row: Row, key: str) -> Any:
    """Return the tools or the template's settings of a row, which tables may hold as JSON; `BadInput` for others."""
    value = row.get(key)
    with suppress(ValueError):
        parsed = json.loads(value or "null") if isinstance(value, str) else value
        fits = isinstance(parsed, Mapping) if key == KWARGS else isinstance(parsed, list) and all(map(_is_tool, parsed))
        if parsed is None or fits:
            return parsed
    raise BadInput("python.pair-with-malformed-key", number=number, key=key, value=value)


def _is_tool(tool: Any) -> bool:
    return callable(tool) or _has_name(tool)


def _with_prompt(number: int, row: Row) -> Row:
    """Return a row whose prompt is apart, taken out of its sides where it has none, as `DPOTrainer` does.

    `BadInput` names what is neither text nor messages, and pictures, which no model here sees.
    """
    row = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}  # pandas'
    if lacking := [name for name in SIDES if row.get(name) is None]:
        raise BadInput("python.pair-lacks-key", number=number, key=lacking[0])
    if pictures := [name for name in ("images", "image") if row.get(name)]:
        raise BadInput("python.pair-with-pictures", number=number, key=pictures[0])
    row = row if row.get("prompt") is not None else {**row, **extract_prompt(dict(row))}
    is_text = isinstance(row["prompt"], str)
    for name in ("prompt", *SIDES):
        value = row[name]
        messages = isinstance(value, list) and value and all(map(_is_message, value))
        if not (isinstance(value, str) if is_text else messages or (name in SIDES and isinstance(value, str))):
            raise BadInput("python.pair-of-another-form", number=number, key=name, value=value, is_text=is_text)
    return row


def _token_pair(processing_class: Any, number: int, row: Row, **rendering: Any) -> TokenPair:
    """Return a row's token ids as `DPOTrainer` makes them: both conversations whole, cut where they leave the prompt.

    `BadInput` names the row and what of it the chat template does not write.
    """
    sides = {side: row[side] for side in SIDES}
    if isinstance(row["prompt"], str):
        end = getattr(processing_class, "tokenizer", processing_class).eos_token
        if not end:
            raise BadInput("python.text-without-end", number=number)
        texts = [row["prompt"], *(row["prompt"] + side.removesuffix(end) + end for side in sides.values())]
        prompt, *sequences = (_tokenize(processing_class, text)["input_ids"] for text in texts)
    else:
        conversations = []
        for side, answer in sides.items():
            said = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
            if len(said) != 1 or said[0]["role"] != "assistant":
                raise BadInput("python.pair-not-one-message", number=number, messages=len(said), side=side)
            conversations.append([*row["prompt"], *said])
            if lost := _unwritten(processing_class, conversations[-1], **rendering):
                raise BadInput("python.pair-not-written", number=number, side=side, lost=lost)
        prompt = _tokenize(processing_class, row["prompt"], add_generation_prompt=True, **rendering)["input_ids"]
        sequences = [_tokenize(processing_class, messages, **rendering)["input_ids"] for messages in conversations]
    length = min(common_prefix_length(prompt, ids) for ids in sequences)
    return TokenPair(str(number), Tree(prompt[:length], (sequences[0][length:], sequences[1][length:])))


def _unwritten(processing_class: Any, messages: list[Row], **rendering: Any) -> str:
    """Return what of a conversation the chat template leaves out, or writes as a value of Python; "" for nothing.

    Thoughts are looked for in the answer alone: of earlier ones many templates leave them out by design.
    """
    in_parts = isinstance(processing_class, ProcessorMixin)  # as `_tokenize` gives them
    try:
        shown = prepare_multimodal_messages(messages) if in_parts else messages
        text = processing_class.apply_chat_template(shown, tokenize=False, **rendering)
    except Exception as error:  # the template's author chooses what is raised
        return f"it fails ({type(error).__name__}: {error})"
    for tool in rendering["tools"] or ():
        name = tool.get("function", tool).get("name") if isinstance(tool, Mapping) else tool.__name__
        if name not in text:
            return f"the tool {name}"
    for message in messages:
        role, content = message["role"], message.get("content")
        parts = [] if isinstance(content, str) or content is None else content
        if any(part.get("type") != "text" or part["text"].strip() not in text for part in parts) or (
            parts and str(parts) in text
        ):
            return "content in parts"
        said, thoughts = split_thoughts(content) if isinstance(content, str) and role == "assistant" else (content, [])
        if isinstance(said, str) and not _is_in(said, text):
            return f"what the {role} says"
        if message is messages[-1] and not all(_is_in(thought, text) for thought in thoughts):
            return "thoughts"
        calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
        for call in [*calls, *filter(None, [message.get("function_call")])]:
            if call["name"] not in text:
                return f"the call of {call['name']}"
            # Of a text a template may write the JSON, with quotes in quotes, and an object as Python shows it.
            arguments, is_text = call.get("arguments"), isinstance(call.get("arguments"), str)
            if arguments and (json.dumps(arguments, ensure_ascii=False) if is_text else str(arguments)) in text:
                return f"the arguments of {call['name']}, as {'a text' if is_text else 'an object'}"
    for name in (*THOUGHT_KEYS, "refusal"):
        said = messages[-1].get(name)
        if isinstance(said, str) and not _is_in(said, text):
            return name
    return ""


def _is_in(part: str, text: str) -> bool:
    """Return whether a rendered text has this part, as it is or as JSON, in which some templates write results."""
    return part.strip() in text or json.dumps(part.strip(), ensure_ascii=False)[1:-1] in text


def _is_message(message: Any) -> bool:
    """Return whether this is a message: it has a role, its content is text, parts or nothing, and calls have names."""
    if not isinstance(message, Mapping) or "role" not in message:
        return False
    content, calls = message.get("content"), message.get("tool_calls") or []
    parts = [] if isinstance(content, str | None) else content
    return (
        isinstance(parts, list)
        and all(isinstance(part, Mapping) for part in parts)
        and all(isinstance(part.get("text"), str) for part in parts if part.get("type") == "text")
        and isinstance(calls, list)
        and all(map(_has_name, [*calls, *filter(None, [message.get("function_call")])]))
    )


def _has_name(function: Any) -> bool:
    """Return whether a tool or a call has a name, by itself or in its `function`."""
    inner = function.get("function", function) if isinstance(function, Mapping) else None
    return isinstance(inner, Mapping) and isinstance(inner.get("name"), str)


def _hinted(prompt: Any, hint: str) -> Any:
    if isinstance(prompt, str):
        return f"{prompt}\n{hint}"
    *before, last = prompt
    if isinstance(last["content"], list):
        return [*before, {**last, "content": [*last["content"], {"type": "text", "text": f"\n{hint}"}]}]
    return with_hint(prompt, hint)


def _rollouts(batch: Mapping[str, Any]) -> list[OwnRollout]:
    """Return the rows of TRL's batch in token ids without padding; without log-probs where TRL has none."""
    mask, logps = batch["completion_mask"] * batch.get("tool_mask", 1), batch.get("sampling_per_token_logps")
    rollouts = []
    for i, inside in enumerate(batch["completion_mask"].bool()):
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
        tree = Tree(prompt, (batch["completion_ids"][i][inside].tolist(),))
        rollouts.append(OwnRollout(tree, mask[i][inside].tolist(), [] if logps is None else logps[i][inside].tolist()))
    return rollouts


# The probe


ROUNDING = 3e-3
"""Of a model's weights in bfloat16, as a share of their norm."""


class ProbeCallback(TrainerCallback):
    """Measures whether completions that look like a hack earn more than others: push and alarm of `probe watch`.

    trainer: a `GRPOTrainer`. direction: a run of `composer probe extract-vhack` on the model that training starts from,
    which is loaded a second time, into the first process. every: steps between measurements, of the newest completions.
    placebos, permutations: as of `composer probe watch`.

    Logs `probe/push` (advantages of hack-like completions, summed since the start), `probe/hack_like` (their share),
    `probe/cosine` (the mean with the direction), `probe/p`, and `probe/alarm`, 1 where the push has been larger than
    chance explains. At most 5 % of honest trainings end with an alarm; more have one on the way. A resumed training
    counts anew. Raises `UsageError` for what is no run, `BadInput` where the direction is of another model, or does not
    tell its own pairs apart.
    """

    def __init__(
        self, trainer: Any, direction: Run, *, every: int = 10, placebos: int = 334, permutations: int = 2000
    ) -> None:
        folders_of_runs([direction])
        _warn_of_verdict(direction)
        self._trainer, self._every, self._permutations = trainer, every, permutations
        self._looks, self._pushes, self._ranks = list[CheckpointRollouts](), list[Float[np.ndarray, " D"]](), join()
        if not self._ranks.first:
            return
        artifacts, made_of = direction.path.parents[1], catalog.references(direction.manifest)
        svd = [Run(catalog.find_input(artifacts, Path(ref.path))) for ref in made_of if ref.stage == "probe-svd"]
        start = PolicyConfig.model_validate(direction.manifest.config["student"])
        self._watcher = watcher = Watcher(
            start,
            direction,
            svd[0] if svd else None,
            placebos,
            trainer.args.seed,
            MAX_TOKENS,
            lambda activity, done, total: None,
        )
        if watcher.scale.hack <= watcher.scale.clean:
            raise BadInput("python.direction-tells-nothing", direction=direction.path)
        models: list[Any] = [trainer.model, watcher.student.model]
        trained, its = (model.get_input_embeddings().weight.detach().float().cpu() for model in models)
        if trained.shape != its.shape or (trained - its).norm() > ROUNDING * trained.norm():
            raise BadInput("python.direction-of-other-model", direction=direction.path, model=start.model)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure the completions that the step was trained on, those of all processes."""
        if state.global_step % self._every:
            return
        rows_here = [
            {
                "problem_id": str(row.tree.prompt),
                "prompt_ids": row.tree.prompt,
                "completion_ids": row.tree.branches[0],
                "own": list(map(bool, row.mask)),
                "reward": advantage,
            }
            for batch in self._trainer._buffered_inputs
            for row, advantage in zip(_rollouts(batch), batch["advantages"].tolist(), strict=True)
            if any(row.mask)
        ]
        rows = [row for rows in self._ranks.gather_to_rank0(rows_here) for row in rows]
        if not self._ranks.first or not rows:
            return
        measured, push = self._watcher.played(rows)
        cosines = measured.cosines[:, 0].double().numpy()
        hack_like, groups = self._watcher.scale.hack_like(cosines), codes([row["problem_id"] for row in rows])
        self._looks.append(CheckpointRollouts(hack_like, measured.advantages.numpy(), groups))
        self._pushes.append(push[1:])
        result = alarm(self._looks, np.stack(self._pushes), self._watcher.families, self._permutations, args.seed)
        logged = {"push": result.push[-1], "hack_like": hack_like.mean(), "cosine": np.nanmean(cosines)}
        if result.untested is None:
            logged |= {"p": result.p, "alarm": result.first is not None}
        for name, value in logged.items():
            self._trainer._metrics["train"][f"probe/{name}"].append(float(value))
