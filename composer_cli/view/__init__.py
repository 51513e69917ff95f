"""`composer view`: a local web page over all runs, in one process, on loopback, offline, and read-only.

app.py        - who may ask (the token in the address, the host), the pages with lists and curves, the server
transcript.py - a rollout step by step, with tokens, teachers' actions, pairs, failed tests

Templates are in `pages`, one style sheet and one script in `static`.
"""
