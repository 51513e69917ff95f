"""The probe's checks: on a pool, a direction, replays, scores and trajectories, each a statistic with its threshold.

check.py - what a check shows, the verdict of several, and their table
contrasts.py - statistics of labelled rows that are not independent, and effect sizes comparable across adapters
contrast_checks.py - T1: does the teacher hack, and the base model not? T4: do the scores tell hacks apart?
validation.py - V1 to V6, T7 and R7: what a direction must show before it is used
comparisons.py - R5, R6 and R7: trajectories of several arms, two scores of one pool
alarm.py - when a watched training turns toward a hack
judging.py - all checks of `probe uat` on finished runs, T2 and T3 among them
prompts.py - the prompts of a pool against the contract they were made under
guards.py - one check for every known way in which such a probe misleads
"""
