"""Upstream's own functions, run from a clone on the recorded inputs: whether a project has moved since.

A case drifts where a number is another one, where the function is gone, and where it cannot be called as before.
"""

import __future__

import ast
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from composer_stages.errors import UsageError
from parity.golden_case import GOLDEN, Case, Outcome, differences, recorded_cases

Found = Mapping[str, Any]
"""Upstream's functions by name."""
Call = Callable[[Found, Case], Any]
LAZY = __future__.annotations.compiler_flag
"""Annotations stay text: the types that they name are not needed."""
RECORD = "LossInputs"
"""PRIME-RL's record of what a loss is given."""


def functions(source: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file defines; "Class.method" gives a static method. Executes upstream's code.

    given: what stands for names that the file imports. A statement that fails, such as an import of an absent package,
    is left out, a class whose bases are absent has none, and a function that uses what is left out raises NameError.
    """
    space: dict[str, Any] = {"__name__": __name__, **given}
    methods: dict[str, Any] = {}
    for node in ast.parse(source).body:
        is_class = isinstance(node, ast.ClassDef)
        for bases in (None, []) if is_class else (None,):
            if is_class and bases is not None:
                node.bases, node.keywords = [], []
            with suppress(Exception):
                exec(compile(ast.Module([node], []), "upstream", "exec", LAZY, dont_inherit=True), space)
                break
        space.update(given)
        if is_class and node.name in space:
            static = {name: one for name, one in vars(space[node.name]).items() if isinstance(one, staticmethod)}
            methods |= {f"{node.name}.{name}": one.__func__ for name, one in static.items()}
    return space | methods


@dataclass(frozen=True)
class Clone:
    """A repository at a commit; commit None: the files of a folder as they lie."""

    folder: Path
    commit: str | None

    def read(self, path: str) -> str | None:
        """A file's text, or None where there is none; `UsageError` for a commit that the clone does not have."""
        if self.commit is None:
            file = self.folder / path
            return file.read_text(encoding="utf-8") if file.is_file() else None
        if _git(self.folder, "cat-file", "-e", f"{self.commit}^{{commit}}") is None:
            raise UsageError(f"{self.folder} has no commit {self.commit}. Fetch it, or name another one.")
        return _git(self.folder, "show", f"{self.commit}:{path}")


@dataclass(frozen=True)
class Upstream:
    """Where a project's functions lie, and how a recorded case calls them: golden function -> (its name, call)."""

    repo: str
    file: str
    calls: Mapping[str, tuple[str, Call]]
    beside: Mapping[str, str] = field(default_factory=dict)
    """Name of an import -> the file that stands for it."""

    def functions(self, clone: Clone) -> Found | None:
        """All that the clone's file defines; None where none of the functions is there: another project's clone."""
        source = clone.read(self.file)
        given = {name: SimpleNamespace(**functions(clone.read(file) or "", {})) for name, file in self.beside.items()}
        found = functions(source or "", given)
        return found if found.keys() & {name for name, _ in self.calls.values()} else None


def _one_sequence(name: str) -> Call:
    def call(found: Found, case: Case) -> Any:
        columns = found[RECORD].__dataclass_fields__
        reference = "ref_logprobs" if "ref_logprobs" in columns else "teacher_logprobs"
        inputs = {reference: None, **case.inputs}
        config = (SimpleNamespace(**case.args),) if name in ("default_loss_fn", "ipo_loss_fn") else ()
        return found[name](found[RECORD](**inputs), *config)

    return call


def _prime_rl_step(found: Found, case: Case) -> Any:
    scales = {key: value for key, value in case.args.items() if key.endswith("scale")}
    kind = "ipo_loss_fn" if "ipo_threshold" in case.args else "default_loss_fn"
    config = SimpleNamespace(**case.args)

    def rl_loss(inputs: Any) -> Any:
        return found[kind](inputs, config)

    columns = {name: None if value is None else list(value) for name, value in case.inputs.items()}
    if "rl_scale" in scales:
        return found["compute_loss"](**columns, rl_loss_fn=rl_loss, **scales)
    losses = {"rl": rl_loss, "opd": found["opd_loss_fn"], "sft": found["sft_loss_fn"]}
    return found["compute_loss"](
        **columns, loss_fns=losses, loss_scale=case.args["loss_scale"], training_mode=case.args["training_mode"]
    )


def _self_distillation(found: Found, case: Case) -> Any:
    config = SimpleNamespace(**case.args)
    absent = {"student_log_probs": None, "teacher_log_probs": None}
    return found["compute_self_distillation_loss"](
        **{**absent, **case.inputs}, self_distillation_config=config, loss_agg_mode=case.args["loss_agg_mode"]
    )


def _by_name(name: str) -> Call:
    return lambda found, case: found[name](**case.inputs, **case.args)


PRIME_RL = ("default_loss_fn", "ipo_loss_fn", "opd_loss_fn", "sft_loss_fn", "ce_loss_fn", "ref_kl_loss_fn")
JSD = "OPSDTrainer.generalized_jsd_loss"
UPSTREAMS = (
    Upstream(
        "PrimeIntellect-ai/prime-rl",
        "src/prime_rl/trainer/rl/loss.py",
        {name: (name, _one_sequence(name)) for name in PRIME_RL} | {"compute_loss": ("compute_loss", _prime_rl_step)},
    ),
    Upstream(
        "siyan-zhao/OPSD",
        "opsd_trainer.py",
        {fn: (JSD, _by_name(JSD)) for fn in ("generalized_jsd_loss", "generalized_jsd_loss[token_clip version]")},
    ),
    Upstream(
        "lasgroup/SDPO",
        "verl/trainer/ppo/core_algos.py",
        {"compute_self_distillation_loss": ("compute_self_distillation_loss", _self_distillation)},
        {"verl_F": "verl/utils/torch_functional.py"},
    ),
    Upstream(
        "verl-project/verl", "verl/trainer/ppo/core_algos.py", {"kl_penalty": ("kl_penalty", _by_name("kl_penalty"))}
    ),
)
"""Projects whose functions can be called without their trainers; SDPO is a fork of verl and stands before it."""


@dataclass(frozen=True)
class Version:
    """The cases that were recorded from a project at one commit; drifted: name -> first difference."""

    file: str
    commit: str
    num_cases: int
    drifted: Mapping[str, str]


@dataclass(frozen=True)
class Drift:
    """A project at a commit, compared with each of its versions that numbers were recorded from."""

    repo: str
    commit: str
    versions: list[Version]

    @property
    def same(self) -> bool:
        """Whether it is as one of the recorded versions."""
        return any(not version.drifted for version in self.versions)

    def __str__(self) -> str:
        lines = [f"{self.repo} at {self.commit}"]
        for version in self.versions:
            same = version.num_cases - len(version.drifted)
            lines.append(
                f"  {version.file}, recorded at {version.commit[:9]}: {same} of {version.num_cases} as recorded"
            )
            lines += [f"    {name}: {difference}" for name, difference in version.drifted.items()]
        return "\n".join(lines)


def compare(against: str, golden: Path = GOLDEN) -> Drift:
    """Run upstream's functions on what is recorded of them.

    against: FOLDER, FOLDER@COMMIT, or OWNER/NAME@COMMIT, which git then clones from GitHub. `UsageError` for what is no
    clone of a project with recorded numbers.
    """
    words, _, commit = against.partition("@")
    if Path(words).exists():
        return _compared(Clone(Path(words), commit or None), words, golden)
    if words.count("/") != 1:
        raise UsageError(f"{words} is neither a folder nor OWNER/NAME. Known are {_known()}.")
    with TemporaryDirectory() as folder:
        url = f"https://github.com/{words}"
        if _git(None, "clone", "--quiet", "--bare", "--filter=blob:none", url, folder) is None:
            raise UsageError(f"git could not clone {url}. Clone it yourself and give the folder.")
        return _compared(Clone(Path(folder), commit or "HEAD"), words, golden)


def _compared(clone: Clone, name: str, golden: Path) -> Drift:
    for upstream in UPSTREAMS:
        found = upstream.functions(clone)
        if found:
            versions = [
                Version(*version, len(cases), dict(_drifted(upstream, found, cases)))
                for version, cases in _cases(upstream, golden).items()
            ]
            return Drift(upstream.repo, clone.commit or "as it lies", versions)
    raise UsageError(f"{name} holds none of the functions whose numbers are recorded. Known are {_known()}.")


def _known() -> str:
    return ", ".join(upstream.repo for upstream in UPSTREAMS)


def _cases(upstream: Upstream, golden: Path) -> dict[tuple[str, str], list[Any]]:
    """The cases by golden file and commit; `UsageError` where no numbers are at hand."""
    found: dict[tuple[str, str], list[Any]] = {}
    for file, case in recorded_cases(golden):
        if case["upstream"]["repo"] == upstream.repo and case["fn"] in upstream.calls:
            found.setdefault((file, case["upstream"]["commit"]), []).append(case)
    if not found:
        raise UsageError(f"There are no recorded numbers of {upstream.repo} in {golden}.")
    return found


def _drifted(upstream: Upstream, found: Found, cases: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Name and first difference of each case that is not as recorded."""
    for recorded in cases:
        name, call = upstream.calls[recorded["fn"]]
        if name not in found:
            yield recorded["name"], f"{name} is gone"
            continue

        def run(case: Case, call: Call = call) -> Outcome:
            output = call(found, case)
            loss, metrics = output if isinstance(output, tuple) else (getattr(output, "loss", output), None)
            return Outcome(loss, metrics or getattr(output, "metrics", {}))

        try:
            difference = next(differences(recorded, run), None)
        except Exception as error:
            difference = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if difference:
            yield recorded["name"], difference


def _git(folder: Path | None, *words: str) -> str | None:
    """What git prints; None where it fails."""
    where = [] if folder is None else ["-C", str(folder)]
    done = subprocess.run(["git", *where, *words], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None
