"""Write one function: MBPP, HumanEval, EvalPlus, or rows of the user's own; their tests decide, apart from the answer.

testing.py - which tests can be asked, and how they are played with what a program returned; programs.toml
guest/ - a program that runs inside the sandbox: plays a test, without the program that is tested
rows.py - problems from files or the hub, their formats and splits, and what is left out
env.py - what an agent is told, the environment
"""
