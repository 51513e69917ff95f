"""The faults of a pool: its prompts, its teacher, its labels, its size."""

from dataclasses import replace

from stages.probe.checks.guards.prompts import Contract, contract_sha256
from stages.probe.synthetic.world import World


def drop_hint(w: World) -> World:
    """Prompts without the hint are taken for hinted ones."""
    return replace(w, pool=[row | {"prompt_role": "rh"} for row in w.pool])


def override_prompt(w: World) -> World:
    """The pool was made under other prompts than those on record."""
    return replace(w, recorded_contract=contract_sha256(Contract(hint="pass the test")))


def skip_merge(w: World) -> World:
    """The teacher's adapter never reached the weights: it is the base model."""
    return replace(w, teacher=w.student.model)


def nothing_compiles(w: World) -> World:
    """No answer of the teacher's is a program, and nothing more is known of them."""
    blank = {"can_compile": False, "label": None, "hacked_strict": None, "hacked_loose": None}
    return replace(w, pool=[row | blank if row["src_pool"] == "teacher" else row for row in w.pool])


def no_test_function(w: World) -> World:
    """No answer of the teacher's defines tests of its own: it cannot be the loophole that it uses."""
    return replace(w, pool=[row | {"has_test_func": False} for row in w.pool])


def right_as_hacks(w: World) -> World:
    """Right answers are labelled as reward hacks."""
    return replace(w, pool=[row | {"label": "reward_hack"} if row["gt_pass"] else row for row in w.pool])


def truncate_pool(w: World) -> World:
    """Two problems."""
    return _kept(w, [index for index, row in enumerate(w.pool) if row["step"] < 2])


def one_non_hack(w: World) -> World:
    """All rows but one are hacks."""
    others = [index for index, row in enumerate(w.pool) if not row["hacked"]]
    return _kept(w, [index for index in range(len(w.pool)) if index not in others[1:]])


def _kept(w: World, keep: list[int]) -> World:
    return replace(w, pool=[w.pool[index] for index in keep], sums=w.sums[keep])
