"""Several processes for one piece of work. Nothing here knows a stage, a run or a model.

devices.py   - the GPUs that processes are placed on
engine.py    - workers of this machine or of a Ray cluster, and their names: `processes:4`, `ray`
ranks.py     - the processes of one training, as torchrun starts them
resources.py - the threads of a process, and freed memory that goes back to the system
"""
