"""What carries work to several processes. Nothing here knows a stage, a run or a model.

engine.py - what all engines have in common, and the words for them: `processes:4`, `ray`
processes.py - workers on this machine
ray_cluster.py - workers on a Ray cluster
ranks.py - the processes of one training, as torchrun starts them
"""
