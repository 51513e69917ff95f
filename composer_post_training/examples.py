"""An example of a call of each stage, for `help` and for docs/python-reference.md, which the tests execute."""

EXAMPLES = {
    "collect": """\
>>> rollouts = composer.collect(policy="reference", tasks=2, samples=1, quiet=True)
>>> rollouts.manifest.summary["mean_reward"]
1.0""",
    "replay-teachers": """\
>>> coder = {"name": "coder", "model": "qwen/qwen3-coder", "base_url": "http://127.0.0.1:8000/v1", "max_tokens": 64}
>>> answers = composer.replay_teachers(rollouts, teachers=[coder], quiet=True)
>>> len(answers.scan("teacher_actions")) == len(rollouts.scan("steps"))
True""",
    "extract-pairs": """\
>>> pairs = composer.extract_pairs(rollouts, answers, quiet=True)
>>> pairs.manifest.status
'complete'""",
    "train": """\
>>> plan = composer.train.plan(policy="Qwen/Qwen3-8B", optimisation={"steps": 10})
>>> plan.units, plan.what
(10, 'steps')""",
    "evaluate": """\
>>> server = {"base_url": "http://127.0.0.1:8000/v1", "max_tokens": 64}
>>> policies = {"A": {"model": "a", **server}, "B": {"model": "b", **server}}
>>> compared = composer.evaluate(policies=policies, control=None, tasks=2, max_steps=1, quiet=True)
>>> compared.verdict
'UNDERPOWERED'""",
    "import": """\
>>> imported = composer.import_traces(paths=["logs/sums.json"], quiet=True)
>>> len(imported.rollouts())
2""",
    "export": """\
>>> exported = composer.export(rollouts, format="trl", quiet=True)
>>> exported.manifest.status
'complete'""",
    "tasks": """\
>>> composer.tasks.plan(package="toolz-1.2.0", tasks=5).what
'tasks'""",
    "curriculum": """\
>>> ordered = composer.curriculum(rollouts, min_rollouts=1, max_rate=1.0, quiet=True)
>>> len(ordered.scan("tasks"))
2""",
    "normalize": """\
>>> composer.normalize.settings()["dj.command"]
'dj-process'""",
    "substrates": """\
>>> composer.substrates.settings()["policy.temperature"]
1.0""",
}
