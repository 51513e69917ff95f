"""Teachers: frozen policies that are asked what they would have done in recorded states.

stage.py - what `replay-teachers` does
config.py - its settings
spending.py - calls, tokens, cost and latency of teachers, and whether they are affordable
questions.py - the teacher table, the messages of each distinct state, and one question per state, teacher and sample
asking.py - all questions asked: servers concurrently on the event loop, local models batch by batch
selection.py - expensive teachers asked only where their answers can change a pair
mixing.py - rollouts whose turns the policy and teachers share
"""
