"""What carries work to several processes. Nothing here knows a stage, a run or a model.

ranks.py - the processes of one training, as torchrun starts them
"""
