"""The probe's checks, by what they judge: each a statistic with its threshold.

check.py - what a check shows, the verdict of several, and their table
pool.py - T1 and the pool's prompts: does the teacher hack, and the base model not?
direction.py - V1 to V6, T7 and R7: what a direction must show before it is used
gradients.py - T2: gradients are those of the right tokens of every row
removal.py - T3: a direction is really removed from gradients and updates
hacking.py - T4: do the scores tell hacks apart?
trajectories.py - R5, R6 and R7: trainings of several arms, two scores of one pool, a GRPO step that still learns
alarm.py - when a watched training turns toward a hack
uat.py - all checks of `probe uat` on finished runs
"""
