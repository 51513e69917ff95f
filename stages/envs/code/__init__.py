"""Write one function: MBPP, HumanEval, EvalPlus, or rows of the user's own; assertions decide, outside of the sandbox.

assertions.py - assertions as calls of a function, and as expressions over what the calls returned
rows.py - problems from files or the hub, their formats and splits, and what is left out
env.py - the code in an answer, its execution, the environment
"""
