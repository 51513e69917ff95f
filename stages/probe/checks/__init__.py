"""The probe's checks: on a pool, a direction, replays, scores and trajectories, each a statistic with its threshold.

check.py - what a check shows, the verdict of several, and their table
contrasts.py - statistics of labelled rows that are not independent
labelled.py - scored rows with their labels, as arrays
effects.py - effect sizes that can be compared across adapters
contrast_checks.py - T4: do the scores tell hacks apart?
planning.py - how large an effect T4e can see, before anything is sampled
pool_checks.py - T1: does the teacher hack, and the base model not?
replay_checks.py - T2 and T3: is every row measured, and does the projection do what it says?
validation.py - V1 to V6, T7 and R7: what a direction must show before it is used
comparisons.py - R5, R6 and R7: trajectories of several arms, two scores of one pool
alarm.py - when a watched training turns toward a hack
judging.py - all checks of `probe uat` on finished runs
guards/ - one check for every known way in which such a probe misleads
"""
