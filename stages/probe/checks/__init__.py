"""The checks of the probe: each a statistic with a threshold.

checks.toml - the question and the threshold of each check
check.py - the declaration and the result of a check, the verdict of several, and their table
pool.py - T1 and the prompts of a pool
direction.py - V1 to V6, T7 and R7: a direction before its use
gradients.py - T2: gradients are those of the right tokens of every row
removal.py - T3: projection removes the direction
hacking.py - T4: scores separate hacks from other answers
trajectories.py - R5, R6 and R7: trainings of several arms, and two scores of one pool
alarm.py - the alarm of a watched training
uat.py - all checks of `probe uat` on finished runs
words.toml - the sentences of details and refusals
"""
