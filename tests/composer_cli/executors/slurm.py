"""A real Slurm of one node: slurmctld and slurmd of the user's own, in a folder, without munge or root's settings."""

import getpass
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.command_line import until

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait=20
SchedulerParameters=bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1
PartitionName=high Nodes=ALL State=UP PriorityTier=10
"""


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """A running Slurm; yields the variables by which its commands find it. A job in `high` preempts those in `low`."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    conf = folder / "slurm.conf"
    conf.write_text(
        CONF.format(host=socket.gethostname(), user=getpass.getuser(), ports=[_port(), _port()], folder=folder)
    )
    variables = {"SLURM_CONF": str(conf)}
    with ExitStack() as stack:
        for program in ("slurmctld", "slurmd"):
            stack.enter_context(_daemon(program, folder, variables))
        until(lambda: "idle" in said(variables, "sinfo", "-h"), seconds=200)
        try:
            yield variables
        finally:  # a daemon that ends leaves the processes of jobs behind
            said(variables, "scancel", "-u", getpass.getuser())
            until(lambda: not said(variables, "squeue", "-h", "-t", "R,CG"), seconds=200)


def said(variables: dict[str, str], *words: str) -> str:
    """What one of its commands prints."""
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, **variables}, timeout=60).stdout


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def _daemon(program: str, folder: Path, variables: dict[str, str]) -> Iterator[None]:
    with (folder / f"{program}.out").open("w") as out:
        process = subprocess.Popen(
            [program, "-D"], stdout=out, stderr=out, env={**os.environ, **variables}, start_new_session=True
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
