"""The sandbox in which every command of an agent and every grading run is executed.

contract.py - limits, what is visible, results, the protocol of a sandbox
supervised.py - open a sandbox, probe whether one works here, run commands in it
bubblewrap.py - the bwrap command line: visible files, the seccomp filter (syscalls.toml), the interpreter
containers.py - container engines, and commands run in a container
memory_group.py - the kernel's limit of a sandbox's memory, where the kernel allows one
session.py - the host's end of the channel to a supervisor
guest/ - the supervisor, process 1 of the sandbox, and the encoding of values (values.py)
judge.py - what candidates' functions return, compared outside of their sandbox
equality.py - which values, exceptions and texts count as the expected ones
"""

from composer_stages.sandbox.contract import (
    CommandResult as CommandResult,
    Limits as Limits,
    Sandbox as Sandbox,
    View as View,
)
from composer_stages.sandbox.judge import (
    Answer as Answer,
    Answers as Answers,
    Call as Call,
    judge as judge,
    match as match,
)
from composer_stages.sandbox.supervised import KINDS as KINDS, open_sandbox as open_sandbox, probe as probe
