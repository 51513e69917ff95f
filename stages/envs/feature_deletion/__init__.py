"""Tasks made from any tested Python package by deleting a feature of it; the package's own tests are the reward.

env.py - the environment
package.py - a folder or sdist, unpacked without running any of it, and its metadata
worker.py - many test runs in one sandbox; which tests pass, and which lines each of them executes
definitions.py - functions and classes of a source file, and the edits that remove their code
selection.py - what to remove: functions, classes, clusters of the call graph, or what a model proposes
twins.py - a test with one expected value changed, which makes the impossible variant of a task
rows.py - a task as a row in SWE-bench's shape, and back
task_generator.py - from removals to accepted tasks, copies of the removed code, and where an environment gets both from
prompts.toml - the problem statement, and the questions to a model
guest/ - programs that run inside the sandbox: the test worker
"""
