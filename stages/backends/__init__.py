"""What carries work to several processes. Nothing here knows a stage, a run or a model.

allocator.py - memory that was freed goes back to the system
engine.py - what all engines have in common, and the words for them: `processes:4`, `ray`
processes.py - workers on this machine
ranks.py - the processes of one training, as torchrun starts them
ray_cluster.py - workers on a Ray cluster
threads.py - how many threads a process computes with
"""
