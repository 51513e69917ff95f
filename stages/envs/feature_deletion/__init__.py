"""Tasks made from any tested Python package by deleting a feature of it; the package's own tests are the reward.

package.py - a folder or sdist, unpacked without running any of it
requirement_hints.py - which distributions bring what tests could not import, by packaging metadata
tools.py - the test runner that the sandbox sees, and nothing else that is installed here
worker.py - many test runs in one sandbox
baseline.py - which tests pass, and which lines each of them executes
definitions.py - functions and classes of a source file, and what is left of one when it is removed
selection.py - what to remove: functions, classes, clusters of the call graph, at a difficulty
proposals.py - what to remove as a model proposes it: what it is shown, and what of its answer can be tried
leaks.py - copies of the removed code that an agent could find
twins.py - contradictory tests: the impossible variant of a task
contradicting.py - the search for tests of one candidate that can be contradicted
candidate.py - one removal on its way to a task
task_generator.py - candidates to accepted tasks
patience.py - how long tests may take when an answer is graded
rows.py - a task as a row in SWE-bench's shape, and back
task_source.py - where tasks and packages come from: made on demand, or read from a run
env.py - the environment
guest/ - what runs in the sandbox
"""
