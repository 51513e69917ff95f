"""Requests for one model in this process: they wait in a queue and are sampled in batches, in the model's own thread.

The server of `composer serve` (completions.py) asks from a thread of its own; the model's thread calls `sample_next`.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

import torch

from composer_stages.errors import InfrastructureError
from composer_stages.policy.base import Sample, Turn
from composer_stages.policy.local import LocalPolicy
from composer_stages.stopping import Interrupted

ENDING = "The server is ending. Ask again once it runs."
SCORED_AT_ONCE = 256
"""Tokens whose distributions over the vocabulary are held at once."""
LEAST = -9999.0
"""Log-prob of a token that the model excludes, as OpenAI and vLLM write it: JSON has no infinity."""
Likeliest = dict[int, tuple[float, int]]
"""At one place: token id -> natural log-prob after temperature and rank, of the likeliest tokens and the own one."""


@dataclass(frozen=True)
class SamplingQuestion:
    """What is sampled. prompt: a conversation, or token ids as they stand, with a seed for this answer alone.

    likeliest, prompt_likeliest: how many of the likeliest tokens are told at each place of answer and prompt, besides
    its own; None for nothing.
    """

    prompt: Turn | list[int]
    seed: int
    temperature: float
    max_tokens: int | None
    likeliest: int | None = None
    prompt_likeliest: int | None = None


@dataclass(frozen=True)
class ScoredAnswer:
    """A sampled answer, and the likeliest tokens at each place of it and of its prompt, where they were asked for."""

    sample: Sample
    likeliest: list[Likeliest] = field(default_factory=list)
    prompt_likeliest: list[Likeliest] = field(default_factory=list)


@dataclass(frozen=True)
class Waiting:
    """A question with its prompt as token ids, and its limit where the context has room for that."""

    question: SamplingQuestion
    prompt: list[int]
    limit: int | None
    answer: Future[ScoredAnswer]


class Sampler:
    """A queue of questions for one model, sampled in one thread; those with equal settings form a batch.

    An answer depends on its own question alone, up to rounding.
    """

    def __init__(self, policy: LocalPolicy) -> None:
        self.policy = policy
        self._arrived = SimpleQueue[tuple[SamplingQuestion, Future[ScoredAnswer]]]()
        self._waiting, self._running = list[Waiting](), list[Waiting]()
        self._closing, self._closed = threading.Lock(), False

    def ask(self, question: SamplingQuestion) -> Future[ScoredAnswer]:
        """Return a future of the answer, from any thread; cancelling it before it is sampled withdraws the question."""
        answer = Future[ScoredAnswer]()
        with self._closing:  # none may be put after `close` has answered all: the server would wait for it for ever
            if self._closed:
                answer.set_exception(InfrastructureError(ENDING))
            else:
                self._arrived.put((question, answer))
        return answer

    def sample_next(self, wait_s: float) -> None:
        """Sample the answer to the question that has waited longest, and with it all with its settings.

        Returns after `wait_s` where none has come. An error of the model is the answer to these questions.
        """
        with suppress(Empty):
            if not self._waiting:
                self._admit(*self._arrived.get(timeout=wait_s))
            while True:
                self._admit(*self._arrived.get_nowait())
        if not self._waiting:
            return
        settings = _settings(self._waiting[0])
        batch = [waiting for waiting in self._waiting if _settings(waiting) == settings]
        self._waiting = [waiting for waiting in self._waiting if _settings(waiting) != settings]
        self._running = [waiting for waiting in batch if waiting.answer.set_running_or_notify_cancel()]
        try:
            samples = self._sample(self._running) if self._running else []
            for waiting, sample in zip(self._running, samples, strict=True):
                # Without a limit all of a batch end where its longest prompt leaves no room: the others have more.
                if settings[1] is None and len(samples) > 1 and sample.finish_reason == "length":
                    [sample] = self._sample([waiting])
                waiting.answer.set_result(self._scored(waiting.question, sample))
        except Interrupted:
            raise
        except Exception as error:
            for waiting in self._running:
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)
        self._running = []

    def close(self) -> None:
        """Answer all that wait, are being sampled or come later with the error that the server ends."""
        with self._closing:
            self._closed = True
        unanswered = [waiting.answer for waiting in (*self._running, *self._waiting)]
        with suppress(Empty):
            while True:
                unanswered.append(self._arrived.get_nowait()[1])
        for answer in unanswered:
            if not answer.done():
                answer.set_exception(InfrastructureError(ENDING))

    def _admit(self, question: SamplingQuestion, answer: Future[ScoredAnswer]) -> None:
        """Add a question to those that wait, unless its conversation cannot be rendered or is too long."""
        try:
            prompt = self.policy.model_facts.render(question.prompt)
        except Exception as error:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
            return
        if isinstance(prompt, list):
            fits = question.max_tokens is not None and question.max_tokens <= self.policy.context - len(prompt)
            self._waiting.append(Waiting(question, prompt, question.max_tokens if fits else None, answer))
        elif answer.set_running_or_notify_cancel():
            answer.set_result(ScoredAnswer(prompt))

    def _sample(self, batch: Sequence[Waiting]) -> list[Sample]:
        policy = self.policy.sampling_at(*_settings(batch[0]))
        return policy.sample_ids([waiting.prompt for waiting in batch], [waiting.question.seed for waiting in batch])

    def _scored(self, question: SamplingQuestion, sample: Sample) -> ScoredAnswer:
        """Return an answer with the likeliest tokens that its question asks for, in another pass of the model."""
        prompt, ids = sample.prompt_ids or [], sample.completion_ids or []
        answer, temperature = ScoredAnswer(sample), question.temperature
        if question.likeliest is not None and ids:
            table = likeliest(self.policy.model, prompt + ids, len(prompt), question.likeliest, temperature)
            answer = replace(answer, likeliest=table)
        if question.prompt_likeliest is not None and prompt:
            table = likeliest(self.policy.model, prompt, 1, question.prompt_likeliest, temperature)
            answer = replace(answer, prompt_likeliest=table)
        return answer


def _settings(waiting: Waiting) -> tuple[float, int | None]:
    return waiting.question.temperature, waiting.limit


@torch.inference_mode()
def likeliest(model: Any, ids: Sequence[int], start: int, num: int, temperature: float) -> list[Likeliest]:
    """Return the `num` likeliest tokens at each place of token ids from `start` on (at least 1), and its own token.

    Temperature 0 stands for the untempered distribution, as in sampling.
    """
    cache, rows, device = None, list[Likeliest](), next(model.parameters()).device
    for begin in range(0, len(ids) - 1, SCORED_AT_ONCE):
        part, following = ids[begin : begin + SCORED_AT_ONCE], ids[begin + 1 : begin + SCORED_AT_ONCE + 1]
        out = model(
            input_ids=torch.tensor([part[: len(following)]], device=device), past_key_values=cache, use_cache=True
        )
        cache, skipped = out.past_key_values, max(start - 1 - begin, 0)
        if skipped >= len(following):
            continue
        logps = torch.log_softmax(out.logits[0, skipped:].float() / (temperature or 1.0), dim=-1).clamp(min=LEAST)
        chosen_logps = logps.gather(-1, torch.tensor(following[skipped:], device=device)[:, None])
        ranks = (logps > chosen_logps).sum(-1) + 1
        best, tokens = (table.tolist() for table in logps.topk(min(num, logps.shape[-1]), dim=-1))
        for row, token in enumerate(following[skipped:]):
            rows.append({candidate: (best[row][i], i + 1) for i, candidate in enumerate(tokens[row])})
            rows[-1].setdefault(token, (chosen_logps[row].item(), int(ranks[row])))
    return rows
