"""What benchmarks/forgeries.py tries: forged passes and honest solutions, and each environment's grades of them.

mechanisms.py - forgeries generated from mechanisms and disguises, for every way of grading
by_hand.py - attacks on grading by pytest that were written by hand, those of the tests included
honest.py - honest solutions of many kinds, none of which may be called forged
tables.py - the table of an environment: what its own grading makes of them in the real sandbox
harbor.py - the same for a Harbor task, by how it is graded and where it runs
"""
