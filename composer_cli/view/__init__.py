"""`composer view`: a local web page over all runs, in one process, on loopback, offline; it writes notes alone.

app.py    - access control, one method a page, the server
page.py   - pages as HTML: curves, texts with marks, templates; `composer report`: a chain as one saved file
notes.py  - notes and tags of rollouts, in files beside the runs

Templates are in `pages`, one style sheet and one script in `static`.
"""
