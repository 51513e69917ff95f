"""`composer view`: a local web page over all runs, in one process, on loopback, offline, and read-only.

app.py       - addresses and what answers them
catalog.py   - the runs there are, and which were made from which
curves.py    - training metrics as drawings
guard.py     - who may ask: the token in the address, the host, and what a page may do
page_parts.py - filters and small words of the templates
pieces.py    - tokens of an answer with their log-probs
server.py    - opens the port and serves
transcript.py - a rollout step by step, with teachers' actions, pairs, failed tests

Templates lie in `pages`, one style sheet and one script in `static`.
"""
