"""Short tasks with exact answers, for small language models.

families.py - the families of questions: templates with parameters
env.py - the environment: families and questions by split, worked examples, scores
"""
