"""Loss kernels held to numbers that upstream's own code produced: `./dev parity`.

golden/ - recorded cases: inputs, options, losses, gradients, metrics
golden_case.py - one case: its tensors, tolerances, and how numbers are compared
runners.py - what runs each upstream function's cases here, and why some are not run
trl_grpo.py - GRPO: TRL's own method, on a plain holder of the attributes that it reads
test_golden.py - every case
drift.py - upstream's functions, run from a clone on the recorded inputs: `./dev parity --against CLONE`
test_drift.py - such a clone, and made ones that drifted
conftest.py - the option --against
"""
