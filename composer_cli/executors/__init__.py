"""`composer run --on EXECUTOR`: the same chain of stages, submitted elsewhere, and watched from here.

base.py          - what an executor is, the names behind --on, a chain as a shell script
hf_jobs.py       - Hugging Face Jobs, over their REST API; artifacts in a bucket
jobs.py          - the jobs that were submitted from here: from the words of `composer run` to state, log and end
modal_sandbox.py - Modal sandboxes, through Modal's SDK; artifacts in a volume
slurm.py         - Slurm, through sbatch; artifacts on the file system that the cluster shares
"""
