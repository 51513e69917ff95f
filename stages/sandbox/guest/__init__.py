"""What runs inside a sandbox, as process 1 of its namespace; needs nothing but the standard library.

__main__.py - starts the supervisor
supervisor.py - process 1: runs one job at a time and reports; what a job leaves that a later one could notice
processes.py - starts a job as a process of its own, and ends everything that it started
candidate.py - runs a candidate's function and writes what it returned
watchdog.py - what all processes use together, and the size of the work folder, beside their limits
capture.py - what is kept of a stream
protocol.py - frames between host and supervisor, imported by both
values.py - the encoding of values, read by both

Inside, this folder is no package: its files lie on the path of modules, and import each other by their bare names.
Names for annotations are imported behind `TYPE_CHECKING = False`: `typing` would cost a third of the start-up, and
`signal`, `ctypes` and `contextlib` half of it.
"""
