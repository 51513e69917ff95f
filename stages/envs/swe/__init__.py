"""Software-engineering tasks in SWE-bench's shape: a repository, an issue, tests to fix and tests to keep passing.

env.py - the environment
mini.py - the environment with a dozen instances of our own, in mini.jsonl
mini_sources.py - what those need, made once: source distributions, mirrors, an environment for tests
instances.py - instances from files and from the hub, in both shapes
instance_runtime.py - an instance on this machine or in a container: tree, tests, sandboxes on copies of the tree
shared_trees.py - delivered trees that several episodes read, and when they are deleted
commands.py - how the environment of an instance is made and how its tests are run
mirrors.py - the user's git mirrors, and what a patch makes of a checkout
venvs.py - virtual environments of repository versions
host_copies.py - copies of a repository that other programs of this machine bring along
engine.py - containers: which engine there is, and a sandbox in one
requirements.py - what both ways of running need of a machine, and containers
clone_requirements.py - what clones need, and how long building environments takes
logs.py - test logs of SWE-bench's repositories, test by test
report.py - a saved log to a report as SWE-bench's harness writes it
swebench_grader.py - swebench's own grader where it is installed
eval_logs.py - saved logs and what lies beside them
instance_index.py - instance rows for saved logs
regrading.py - saved logs graded again, beside their harness's verdicts
"""
