"""Upstream's functions from a clone: a given one, and a small one of prime-rl's layout that agrees and differs."""

import json
import subprocess
from pathlib import Path

import pytest

from composer_stages.errors import UsageError
from parity.drift import Drift, compare, functions
from parity.golden_case import GOLDEN

FILE = "src/prime_rl/trainer/rl/loss.py"
SOURCE = """
from dataclasses import dataclass
from prime_rl.configs.trainer import DefaultLossConfig
from torch import Tensor
from jaxtyping import Float
from composer_stages.losses.prime_rl import DefaultOptions, PackedTokens, default_loss
import not_installed_anywhere

raise_when_executed = not_installed_anywhere.thing

@dataclass
class LossInputs:
    trainer_logprobs: Float[Tensor, " seq"]
    inference_logprobs: Float[Tensor, " seq"]
    ref_logprobs: Float[Tensor, " seq"] | None
    advantages: Float[Tensor, " seq"]
    loss_mask: Unknown[Tensor, " seq"]
    loss_weights: Float[Tensor, " seq"] | None = None

FACTOR = 1.0

def _tokens(inputs):
    return PackedTokens(inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages, inputs.loss_mask,
                        None, inputs.loss_weights)

def default_loss_fn(inputs: LossInputs, loss_config: DefaultLossConfig) -> "LossOutputs":
    options = DefaultOptions(loss_config.dppo_mask_low, loss_config.dppo_mask_high, loss_config.adv_tau,
                             FACTOR * loss_config.kl_tau)
    return default_loss(_tokens(inputs), options)
"""


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, source: str) -> str:
    (folder / FILE).parent.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(source)
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "change")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    folder.mkdir()
    git(folder, "init", "-q")
    return folder


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """The recorded cases of the default loss at prime-rl's newest version."""
    folder = tmp_path / "golden"
    folder.mkdir()
    cases = json.loads((GOLDEN / "prime_rl_head.json").read_text())["cases"]
    kept = [case for case in cases if case["fn"] == "default_loss_fn"]
    (folder / "head.json").write_text(json.dumps({"cases": kept}))
    return folder


def reasons(found: Drift) -> list[str]:
    (version,) = found.versions
    assert version.num_cases == 4
    return list(version.drifted.values())


def test_a_commit_that_computes_the_same_has_not_drifted(clone: Path, golden: Path) -> None:
    first = commit(clone, SOURCE)
    commit(clone, SOURCE.replace("FACTOR = 1.0", "FACTOR = 2.0"))
    found = compare(f"{clone}@{first}", golden)
    assert (found.repo, found.same, reasons(found)) == ("PrimeIntellect-ai/prime-rl", True, [])


def test_another_number_a_lost_function_and_other_arguments_are_drift(clone: Path, golden: Path) -> None:
    commit(clone, SOURCE.replace("FACTOR = 1.0", "FACTOR = 2.0"))
    assert all("loss is" in reason or "grad_wrt" in reason for reason in reasons(compare(f"{clone}@HEAD", golden)))
    assert len(reasons(compare(str(clone), golden))) >= 3, "a folder is read as it lies"
    commit(clone, SOURCE.replace("inputs: LossInputs, loss", "inputs, more, loss"))
    assert all(reason.startswith("TypeError") for reason in reasons(compare(f"{clone}@HEAD", golden)))
    commit(clone, SOURCE.replace("def default_loss_fn", "def ipo_loss_fn"))
    assert reasons(compare(f"{clone}@HEAD", golden)) == ["default_loss_fn is gone"] * 4


def test_unknown_clones_are_refused(clone: Path, golden: Path, tmp_path: Path) -> None:
    first = commit(clone, SOURCE)
    with pytest.raises(UsageError, match="has no commit 0123abc"):
        compare(f"{clone}@0123abc", golden)
    with pytest.raises(UsageError, match="neither a folder nor OWNER/NAME"):
        compare("nowhere", golden)
    with pytest.raises(UsageError, match="no recorded numbers of PrimeIntellect-ai/prime-rl"):
        compare(f"{clone}@{first}", tmp_path / "empty")
    (clone / FILE).unlink()
    with pytest.raises(UsageError, match="holds none of the functions"):
        compare(str(clone), golden)


TORN = """import not_installed_anywhere
from math import e as wanted
BROKEN = not_installed_anywhere.thing
BASE = 2
class A(not_installed_anywhere.Base):
    @staticmethod
    def f(x: Nothing = BASE): return x + g()
def g(): return BASE
def uses(): return BROKEN
def asks(): return wanted
"""


def test_statements_that_fail_are_left_out() -> None:
    found = functions(TORN, {"wanted": 7})
    assert found["A.f"](3) == 5 and found["g"]() == 2 and found["asks"]() == 7
    with pytest.raises(NameError):
        found["uses"]()


def test_the_text_names_each_version_and_each_case_that_drifted(clone: Path) -> None:
    commit(clone, SOURCE)
    found = compare(str(clone))
    assert not found.same and "ipo_loss_fn is gone" in str(found)
    head = next(version for version in found.versions if version.file == "prime_rl_head.json")
    assert not any(name.startswith("default/") for name in head.drifted)


def test_upstream_is_as_recorded(pytestconfig: pytest.Config) -> None:
    clone = pytestconfig.getoption("--against", default=None)
    if clone is None:
        pytest.skip("no clone is given: ./dev parity --against CLONE")
    found = compare(clone)
    assert found.same, str(found)
    print(found)
