"""Tasks of the user's own, a row each: a prompt, files to work on, and a test that decides.

rows.py - read and check rows of JSON lines, Parquet or a data set of the hub; split them by family
tables.py - rows of Parquet and of the hub as their author wrote them
values.py - tests that are decided by values: calls of functions, and scripts, what they print and write; programs.toml
shown.py - what shows a result that a row expects of its calls and scripts
env.py  - the environment: a shell on the files, graded by the test with hidden files added and originals restored
"""
