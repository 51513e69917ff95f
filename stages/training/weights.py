"""The weights of the vLLM servers that a training samples from: which server, and how it follows the training.

Processes of one training share a server, or take several in turn. Of the processes on one server the first loads
weights, for all of them; on a CPU they also wait for each other with what that server cannot do while it serves
another process (`composer_stages.policy.server`).

After every optimiser step `WeightSync` writes what was trained, an adapter or all weights, loads it on the server and
checks it: a server's word that it has loaded weights is not trusted. Log-probs must agree on both sides, and where the
step has moved ours, those of the server must have followed. In 16 bits the first alone would pass a server that is a
step behind: smollm2 moves by .04 nats a token in a step of 1e-5 or of 1e-4, and two programs differ by as much. They
are compared on the rollouts that the step has learned from, which it moves most.
"""

import os
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from typing import IO, Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import orjson
import torch
from safetensors.torch import save_file
from torch import Tensor

from composer_stages.backends import resources
from composer_stages.backends.ranks import Ranks
from composer_stages.errors import ComposerError, InfrastructureError, UsageError
from composer_stages.messages import Message, opening_ids
from composer_stages.policy.base import PolicyConfig
from composer_stages.policy.local import resolve
from composer_stages.policy.server import LOOPBACK
from composer_stages.policy.serving import needs_exclusive_server
from composer_stages.policy.vllm import VllmPolicy
from composer_stages.rollouts.agent_loop import LiveRollout
from composer_stages.runs.activity import Notice
from composer_stages.runs.run import RunWriter
from composer_stages.training.channels.rollouts import own_rollout
from composer_stages.training.config import Config
from composer_stages.training.distributed import Student
from composer_stages.training.scoring import Tree, score, token_log_probs
from composer_stages.words import Sentence

Value = TypeVar("Value")


@dataclass(frozen=True)
class SharedServer:
    """How a process shares its server with other processes of the training; by default it is the only process.

    loads: whether it is the process that loads adapters there. turn: its number, of `turns`, in work that a server
    cannot do while it serves another process.
    """

    ranks: Ranks = field(default_factory=Ranks)
    loads: bool = True
    turn: int = 0
    turns: int = 1

    def in_turn(self, work: Callable[[], Value]) -> Value:
        """Run `work` in every process, one process of a server after the other; an error is raised in all processes."""
        value, error = None, None
        for turn in range(self.turns):
            if turn == self.turn:
                try:
                    value = work()
                except ComposerError as raised:
                    error = raised
            errors = [error_of_process for error_of_process in self.ranks.gather(error) if error_of_process is not None]
        if errors:
            raise error or errors[0]
        return value  # type: ignore[return-value]  # this process has had its turn


def shared_server(policy: PolicyConfig, ranks: Ranks) -> SharedServer:
    """Return how this process shares its server, whose address is in `policy`."""
    if ranks.count == 1 or not policy.served:
        return SharedServer(ranks)
    parts = urlsplit(policy.base_url or "")
    server = (socket.gethostname() if parts.hostname in LOOPBACK else "", parts.netloc)
    servers = ranks.gather(server)
    before, alone = servers[: ranks.rank].count(server), needs_exclusive_server(policy)
    turns = max(ranks.gather(servers.count(server) if alone else 1))
    return SharedServer(ranks, loads=not before, turn=before if alone else 0, turns=turns)


TOLERANCE = {torch.float32: 1e-3}
HALF_TOLERANCE = 0.1
"""Mean difference in nats that rounding explains between two programs, in 16 bits and in float32."""
CHECKED = 512
"""Tokens whose log-probs are compared, at most."""
MOVED = 0.5
"""Part of the difference between two programs by which a step must have moved log-probs here to be looked for there."""
FOLLOWED = 0.25
"""Least slope of a server's moves on ours, over the tokens: 1 where it follows, 0 where it has its old weights.

A slope, not the size of its moves: where a server plays meanwhile, it batches the text with other requests, and its
log-probs move by rounding as well.
"""


@dataclass(frozen=True)
class Agreement:
    """The comparison of the log-probs of a text in the trainer and on a server.

    difference: mean absolute difference in nats between the two. moved: the same here between before and after the last
    step, None before there was one. followed: slope of the server's moves in that step on ours, at most.
    """

    url: str
    difference: float
    moved: float | None = None
    followed: float = 0.0

    @property
    def conclusive(self) -> bool:
        """Whether the step changed log-probs enough to tell the new weights from the old ones."""
        return self.moved is None or self.moved > MOVED * self.difference


def most_learned(rollouts: Sequence[LiveRollout], context_tokens: int) -> list[Tree]:
    """Return at most `CHECKED` tokens of rollouts, beginning with those farthest from the mean reward of their task.

    context_tokens: what a server takes, with one token that it samples.
    """
    rewards: dict[str, list[float]] = {}
    graded = [rollout for rollout in rollouts if rollout.grade.reward is not None and not rollout.error]
    for rollout in graded:
        rewards.setdefault(rollout.task.task_id, []).append(rollout.grade.reward or 0.0)
    mean = {task: sum(values) / len(values) for task, values in rewards.items()}
    graded.sort(key=lambda rollout: -abs((rollout.grade.reward or 0.0) - mean[rollout.task.task_id]))
    trees: dict[tuple[tuple[int, ...], tuple[int, ...]], Tree] = {}
    tokens_left = CHECKED
    for tokens in filter(None, map(own_rollout, graded)):
        prompt = tokens.tree.prompt
        branch = tokens.tree.branches[0][: min(tokens_left, context_tokens - 1 - len(prompt))]
        if branch and (key := (tuple(prompt), tuple(branch))) not in trees:
            trees[key] = Tree(prompt, (branch,))
            tokens_left -= len(branch)
    return list(trees.values())


class WeightSync(ABC):
    """Keeps a server at the newest version of the weights, which is the number of optimiser steps done.

    A server that is started with --enable-sleep-mode sleeps from the end of a step's rollouts to the end of the step.
    folder: where versions are written. text: token ids whose log-probs are compared before there are rollouts. student:
    the model under training. server: how this process shares its server; each process compares with its own. notice:
    takes what people should read.
    """

    def __init__(
        self,
        sampler: VllmPolicy,
        folder: Path,
        text: list[int],
        student: Student,
        *,
        tolerance: float | None = None,
        server: SharedServer | None = None,
        notice: Callable[[str], object] = lambda words: None,
    ) -> None:
        self.sampler, self.server = sampler, server or SharedServer()
        self._folder, self._student, self._notice = folder, student, notice
        self._tolerance = tolerance or TOLERANCE.get(student.dtype, HALF_TOLERANCE)
        cut = max(len(text) - CHECKED, 1)
        self._text = [Tree(text[:cut], (text[cut:],))]
        self._unlearned: tuple[Tensor, Tensor] | None = None
        """Log-probs of the text here and on the server before the step that learns from it."""
        self._noticed = False
        # Only its own server is a training's to put to sleep: others may be asked by other runs.
        self._sleeps, self._asleep = sampler.server is not None and sampler.config.server.sleeps, False

    _sleep_level: ClassVar[int]
    """What sleep keeps: 1 the weights, 2 nothing."""

    @abstractmethod
    def _write(self, folder: Path) -> None:
        """Write the trained weights in the first process; called in every process."""

    @abstractmethod
    def _load(self, version: int, folder: Path) -> None:
        """Load the weights on this process' server and sample from them; one process per server loads it."""

    @abstractmethod
    def _forget(self, folder: Path) -> None:
        """Remove older versions that are no longer sampled from, in every process."""

    @abstractmethod
    def end(self) -> None:
        """Restore the server to its state before the training, for its other clients."""

    def follow(self, step: int) -> dict[str, float]:
        """Write the weights that a step begins with, load them and compare; `ComposerError` where a server has others.

        Returns the difference that the comparison found, as a metric.
        """
        folder = self._folder / f"version-{step:06d}"
        self._send(step, folder)
        # That a server confirms a load proves nothing.
        agreement = self._compare(step)
        self._forget(folder)
        if not agreement.conclusive and not self._noticed:
            self._noticed = True
            self._notice(
                Sentence("training.steps-too-small", step=step, moved=agreement.moved, difference=agreement.difference)
            )
        moved = {} if agreement.moved is None else {"sampling/sync_moved": agreement.moved}
        return {"sampling/sync_difference": agreement.difference, **moved}

    def played(self, step: int, rollouts: Sequence[LiveRollout]) -> None:
        """Use the rollouts that a step is about to learn from as the text of the next comparison.

        `ComposerError` where the server's weights have changed since `follow`, while they were played.
        """
        # Not before all have played: a server on a CPU must not score for one while it samples for another.
        self.server.ranks.gather(None)
        self._check_unchanged(step)
        if text := most_learned(rollouts, self.sampler.server_facts.context_tokens):
            self._text = text
        self._unlearned = self._log_probs()
        if self._sleeps:
            self.sampler.sleep(self._sleep_level)
            self._asleep = True

    def _send(self, version: int, folder: Path) -> None:
        """Write a version and load it; called in every process."""
        self._write(folder)
        self.server.ranks.gather(None)  # it is written before anybody loads it
        if self._asleep:
            torch.cuda.empty_cache()  # what the step has freed is the server's now
            self.sampler.wake()
            self._asleep = False
        self.server.in_turn(lambda: self._load(version, folder))

    @abstractmethod
    def _check_unchanged(self, step: int) -> None:
        """`ComposerError` where the server's weights have changed since `follow`, in the rollouts of a step."""

    def _compare(self, step: int, *, playing: bool = False) -> Agreement:
        """Compare log-probs, each process with its server; return the least move, and the largest difference.

        `ComposerError` where a server has other weights. playing: the rollouts of the step are being played.
        """
        # All processes learn all comparisons, so that all of them stop.
        agreements = self.server.ranks.gather(self._comparison())
        for agreement in agreements:
            if not agreement.difference <= self._tolerance:  # so that NaN is refused, too
                raise ComposerError(
                    "training.server-has-other-weights",
                    step=step,
                    playing=playing,
                    url=agreement.url,
                    difference=agreement.difference,
                    tolerance=self._tolerance,
                )
            if agreement.moved and agreement.conclusive and agreement.followed < FOLLOWED:
                raise ComposerError(
                    "training.server-has-old-weights",
                    step=step,
                    playing=playing,
                    url=agreement.url,
                    moved=agreement.moved,
                    followed=agreement.followed,
                )
        return replace(
            min(agreements, key=lambda agreement: (agreement.conclusive, agreement.moved or 0.0)),
            difference=max(agreement.difference for agreement in agreements),
        )

    def _comparison(self) -> Agreement:
        now, server_logps = self._log_probs()
        agreement = Agreement(self.sampler.url, float((server_logps - now).abs().mean()))
        if self._unlearned is None:
            return agreement
        student_moves, server = now - self._unlearned[0], server_logps - self._unlearned[1]
        square = (student_moves @ student_moves).clamp(min=torch.finfo(student_moves.dtype).tiny)
        slope = server @ student_moves / square
        residuals = server - slope * student_moves
        # Two standard errors above: of few tokens, rounding alone must not look like a server that stays behind.
        most = slope + 2 * (residuals @ residuals / max(len(student_moves) - 1, 1) / square).sqrt()
        return replace(agreement, moved=float(student_moves.abs().mean()), followed=float(most))

    def _log_probs(self) -> tuple[Tensor, Tensor]:
        """Return the log-probs of the text's n tokens here and on the server, float32."""
        # One request after the other: requests that a server batches would round as they happen to meet.
        server_logps = self.server.in_turn(
            lambda: [self.sampler.score(tree.prompt, tree.branches[0]) for tree in self._text]
        )
        # peft puts an adapter into the base's Linears, so the base scores with it.
        model = self._student.policy.model
        was_training = model.training
        model.eval()
        student_logps = self._student.score(lambda: token_log_probs(model, score(model, self._text)).cpu())
        model.train(was_training)
        return student_logps, torch.tensor([value for row in server_logps for value in row])


class AdapterSync(WeightSync):
    """Loads an adapter under a new name for each version, and unloads those that no request samples from."""

    _sleep_level = 1

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._held: list[tuple[str, Path]] = []
        self._run = self.server.ranks.broadcast_from_rank0(lambda: secrets.token_hex(4))
        """Several runs, or attempts at one, may share a server, where a name must never stand for two adapters."""

    def _write(self, folder: Path) -> None:
        if self.server.ranks.first:
            rmtree(folder, ignore_errors=True)
            self._student.save_adapter(folder)

    def _load(self, version: int, folder: Path) -> None:
        # A new name for each version: vLLM would read an adapter that is loaded in place again for every batch.
        name = f"{self._run}-version-{version}"
        if self.server.loads:
            self.sampler.load(name, folder)
        self.sampler.sample_from(name, version)
        self._held = [*(version for version in self._held if version[0] != name), (name, folder)]

    def _check_unchanged(self, step: int) -> None:
        """Compare nothing: a name is never given to a second adapter."""

    def _forget(self, folder: Path) -> None:
        self._unload(self.server.ranks.gather(self.sampler.in_use()))

    def end(self) -> None:
        """Unload all adapters of this training."""
        if self._asleep:  # it would touch memory that it has given away, and ends with this run
            return
        with suppress(ComposerError):  # a broken server has nothing to unload, and must not hide why training ended
            self._unload([])

    def _unload(self, used: Sequence[set[str]]) -> None:
        """Unload all versions but those in use, by their names in each process."""
        versions, self._held = self._held, []
        for name, folder in versions:
            if any(name in names for names in used):
                self._held.append((name, folder))
                continue
            if self.server.loads:
                self.sampler.unload(name)
            if self.server.ranks.first:
                rmtree(folder, ignore_errors=True)


TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Names of types in safetensors."""


def save_in_memory(tensors: Mapping[str, Tensor], path: Path) -> IO[bytes]:
    """Write a safetensors file that is held in memory, and a link to it at `path`; return the file.

    It has no name that another program could take, and no other user may open it. Its memory is free once it is closed,
    or this process has ended, in whatever way (memfd_create(2)). safetensors' own functions write to a path, or make
    two copies. Source: huggingface/safetensors, README, "Format".
    """
    header, end = dict[str, Any](__metadata__={"format": "pt"}), 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    file = os.fdopen(os.memfd_create(path.name), "wb")
    try:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        file.flush()
        path.symlink_to(f"/proc/{os.getpid()}/fd/{file.fileno()}")
    except OSError:
        with suppress(OSError):  # what is left in its buffer cannot be written either
            file.close()
        raise
    return file


class WholeSync(WeightSync):
    """Replaces all weights of the server, which holds one version at a time: an answer under way goes on with the new.

    Its log-probs are those of the weights that each token was sampled with, its version that of its first token.
    Versions are held in memory where all servers are on this machine and it has enough, else they are files.

    start: the weights that the server was started with, which it gets back at the end. file_bytes: size from which on
    a file ends, so that no second copy of the model is needed at once.
    """

    _sleep_level = 2

    def __init__(self, *args: Any, start: str, file_bytes: int = 4 * 2**30, **options: Any) -> None:
        super().__init__(*args, **options)
        self._start, self._file_bytes = start, file_bytes
        self._before: Path | None = None
        self._replaced = False
        self._held: dict[Path, list[IO[bytes]]] = {}
        """The files in memory of each version."""
        is_local = urlsplit(self.sampler.url).hostname in LOOPBACK and hasattr(os, "memfd_create")
        machines = set(self.server.ranks.gather(socket.gethostname() if is_local else None))
        weights = sum(parameter.numel() for parameter in self._student.policy.model.parameters())
        # Two versions, as the one before is kept until the next is loaded, in a quarter of what is unused now.
        fits = 4 * 2 * weights * self._student.dtype.itemsize <= resources.unused("cpu")
        self._in_memory = self.server.ranks.broadcast_from_rank0(lambda: fits) and machines == {socket.gethostname()}

    def _send(self, version: int, folder: Path) -> None:
        """Write a version and load it; by files from then on where a server cannot read this process' memory.

        That shows at the first version: later ones fail for another reason, with answers under way.
        """
        try:
            super()._send(version, folder)
        except (UsageError, InfrastructureError) as error:
            if not self._in_memory or self._before is not None:
                raise
            self._in_memory = False
            self._notice(Sentence("training.weights-by-files", error=str(error)))
            super()._send(version, folder)

    def _write(self, folder: Path) -> None:
        first, part, size, number = self.server.ranks.first, dict[str, Tensor](), 0, 0
        if first:
            self._remove(folder)
            folder.mkdir(parents=True)

        def end_file() -> None:
            path = folder / f"model-{number:05d}.safetensors"
            if self._in_memory:
                with suppress(OSError):  # a limit of files' size, or a kernel without them
                    self._held.setdefault(folder, []).append(save_in_memory(part, path))
                    return
            save_file(part, path, {"format": "pt"})

        for name, weight in self._student.trained():  # a tensor at a time: whole weights are in no process' memory
            if not first:
                continue
            part[name] = weight.to("cpu", self._student.dtype)
            size += part[name].nbytes
            if size >= self._file_bytes:
                end_file()
                part, size, number = {}, 0, number + 1
        if part:
            end_file()

    def _remove(self, folder: Path) -> None:
        rmtree(folder, ignore_errors=True)
        for file in self._held.pop(folder, ()):
            file.close()

    def _load(self, version: int, folder: Path) -> None:
        self._replaced = True
        if self.server.loads:
            self.sampler.replace_weights(str(folder.resolve()))
        self.sampler.sample_from(None, version)

    def _check_unchanged(self, step: int) -> None:
        """`ComposerError` where another run has replaced the weights while the rollouts of a step were played."""
        self._compare(step, playing=True)

    def _forget(self, folder: Path) -> None:
        # The newest stays: a server that is started again after its death gets it back.
        if self._before not in (None, folder) and self.server.ranks.first:
            self._remove(self._before)
        self._before = folder

    def end(self) -> None:
        """Load the weights that the server was started with."""
        with suppress(ComposerError):  # a broken server has none, and must not hide why training ended
            if self.server.loads and self._replaced and self.sampler.server is None:
                self.sampler.replace_weights(self._start)
        for folder in list(self._held):
            self._remove(folder)


def weight_sync(
    sampler: VllmPolicy, student: Student, opening: list[Message], config: Config, out: RunWriter, server: SharedServer
) -> WeightSync:
    """Return the `WeightSync` that loads the weights of `student` on the server of `sampler`, compared on this opening.

    `UsageError` where the server's log-probs are not those of the sampling distribution, or where it cannot follow.
    """
    if sampler.server_facts.logprob_kind == "raw" and sampler.config.temperature != 1:
        raise UsageError("training.server-logprobs-raw", temperature=sampler.config.temperature)
    settings = config.optimisation
    folder = server.ranks.broadcast_from_rank0(lambda: out.scratch("versions"))
    policy = student.policy
    text = opening_ids(policy.tokenizer, opening)
    shared: dict[str, Any] = {
        "tolerance": settings.sync_tolerance,
        "server": server,
        "notice": lambda words: out.progress(Notice(f"warning: {words}"), 0, 0),
    }
    if config.adapter.rank:
        return AdapterSync(sampler, folder, text, student, **shared)
    if policy.model.config.tie_word_embeddings and needs_exclusive_server(sampler.config):
        raise UsageError("training.tied-head-on-cpu", model=policy.config.model)
    start = resolve(policy.config, listener=out.progress)
    return WholeSync(sampler, folder, text, student, start=str(start), **shared)
