"""Software-engineering tasks in SWE-bench's shape: a repository, an issue, tests to fix and tests to keep passing.

env.py - the environment `swe-lite`, and what a machine needs for it
mini.py - the environment `swe-mini`: a dozen instances of our own, in mini.jsonl, and what they need, fetched once
instances.py - instance rows from files and from the hub, in both shapes; git mirrors, checkouts and patches
specs.py - the environment specification of a repository version, and how the tests of an instance are run
venvs.py - virtual environments of repository versions
engine.py - containers of SWE-bench's images
instance_tasks.py - an instance as a `RepoTask`, on a checkout of this machine or in a container

The parsers of test logs and their grades are in stages/swebench.
"""
