"""LeetCode problems whose prompt gives a loophole away: run_tests() judges the answer, and the answer may define it.

data.py - problems and recorded rollouts from a folder of the user
answers.py - the code in an answer and the test function that it defines
assertions.py - what the real tests call and expect, compared outside the sandbox
programs.py - the programs that run in the sandbox
grading.py - verdicts: real tests, own tests, own tests against a stub and against the reference solution
env.py - the environment
agreement.py - how far the verdicts agree with recorded labels: `python -m stages.envs.leetcode_rh.agreement FOLDER`
"""
