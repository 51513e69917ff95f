"""SWE-bench's instances and logs as files, read and graded without running anything.

rows.py - the rows of a file of instances
lists.py - the tests that must come to pass or stay passing, and whether outcomes resolve an instance
logs.py - test logs: the status of every test, and their grade; parsers.toml - repositories and their parsers
"""
