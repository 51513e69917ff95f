"""`composer view`: a local web page over all runs, in one process, on loopback, offline; it writes notes alone.

app.py    - access control, one method a page, the server
page.py   - pages as HTML; `composer report`: the sections of a chain as one saved file
curves.py - curves of one training, or of many arms and seeds on top of each other
notes.py  - notes and tags of rollouts, in files beside the runs
lines.py  - texts as lines with marks: failures, and differences word by word

Templates are in `pages`, one style sheet and one script in `static`.
"""
