"""Made-up outcomes of experiments, to be judged."""


def row(arm, task, family, passed, train_seed=0, hacked=False, protocol_ok=True):
    """One rollout of an arm on a task."""
    return {
        "arm": arm,
        "train_seed": train_seed,
        "task_id": f"t{task}",
        "family": f"f{family}",
        "sample_idx": 0,
        "passed": bool(passed),
        "hacked": bool(hacked),
        "protocol_ok": bool(protocol_ok),
        "error_type": None,
    }


def experiment(passes, num_tasks=400, seeds=(0, 1, 2), **rates):
    """Arms in which the first `passes[arm]` of the tasks pass; four tasks a family, spread over the whole range."""
    items = []
    for arm, num_passed in passes.items():
        limits = {field: counts.get(arm, default) for field, (counts, default) in rates.items()}
        for seed in seeds:
            for task in range(num_tasks):
                fields = {field: task < limit for field, limit in limits.items()}
                items.append(row(arm, task, task % (num_tasks // 4), task < num_passed, train_seed=seed, **fields))
    return items
