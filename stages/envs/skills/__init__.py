"""Short tasks with exact answers, for small language models.

drawing.py - distinct questions, dealt by a digest to worked examples, training and evaluation
families.py - functions that draw questions; families.toml - words, and the families: templates with parameters
env.py - the environment `skills`: families and questions by split, worked examples, scores, pairs for the probe
reasoning_gym.py - the environment `reasoning-gym`: tasks of that package, with its scorers; reasoning_gym.toml
"""
