"""Workers on this machine: every job is done, whoever dies of it."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import until
from support.jobs import Nap, nap, place

from composer_stages.backends.devices import Pool
from composer_stages.backends.engine import TRIES, ProcessEngine, find_engine
from composer_stages.errors import InfrastructureError, UsageError


def test_every_job_is_done_by_several_workers(tmp_path: Path) -> None:
    jobs = [Nap(number, tmp_path, 0.2) for number in range(6)]
    done = dict(ProcessEngine(2).map(nap, jobs))
    assert {job: number for job, (number, _) in done.items()} == {job: job.number for job in jobs}
    workers = {worker for _, worker in done.values()}
    assert len(workers) == 2
    assert os.getpid() not in workers


def test_a_job_is_drawn_when_a_worker_is_free_for_it(tmp_path: Path) -> None:
    drawn = []

    def jobs():
        for number in range(5):
            drawn.append(number)
            yield Nap(number, tmp_path)

    for count, _ in enumerate(ProcessEngine(2).map(nap, jobs()), 1):
        assert len(drawn) <= count + 1


def test_a_job_whose_worker_dies_is_done_by_the_next(tmp_path: Path) -> None:
    jobs = [Nap(number, tmp_path, deaths=2 if number == 1 else 0) for number in range(4)]
    assert sorted(number for _, (number, _) in ProcessEngine(2).map(nap, jobs)) == [0, 1, 2, 3]
    assert (tmp_path / "1").read_text() == "xxx"


def test_a_job_that_kills_every_worker_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match=f"^{TRIES} workers died while they ran the same job.* exit code -9"):
        list(ProcessEngine(1).map(nap, [Nap(0, tmp_path, deaths=99)]))
    assert (tmp_path / "0").read_text() == "x" * TRIES


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from support.jobs import Nap, nap\n"
        "from composer_stages.backends.engine import ProcessEngine\n"
        f"if __name__ == '__main__': list(ProcessEngine(1).map(nap, [Nap(0, Path({str(tmp_path)!r}), 60)]))"
    )
    script = tmp_path / "program.py"
    script.write_text(program)
    paths = os.pathsep.join(sys.path)
    process = subprocess.Popen([sys.executable, script], env={**os.environ, "PYTHONPATH": paths})
    until(lambda: (tmp_path / "0").exists())
    (worker,) = children(process.pid)
    process.kill()
    process.wait()
    until(lambda: not Path(f"/proc/{worker}").exists())


def children(parent: int) -> list[int]:
    """The processes that a process started, but not multiprocessing's tracker of resources."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat, words = (path / "stat").read_text().rpartition(")")[2].split(), (path / "cmdline").read_text()
        except OSError:
            continue
        if int(stat[1]) == parent and "resource_tracker" not in words:
            found.append(int(path.name))
    return found


def test_workers_have_a_gpu_each_and_no_more_run_than_there_are(tmp_path: Path) -> None:
    engine = ProcessEngine(3, 1, Pool(["4", "MIG-5d3e"]))
    assert engine.workers == 2 and engine.device == "GPU 4, MIG-5d3e"
    jobs = [Nap(number, tmp_path, 0.3, deaths=int(number == 2)) for number in range(6)]
    done = [where for _, where in engine.map(place, jobs)]
    engine.close()
    assert {gpu for gpu, _, _ in done} == {"4", "MIG-5d3e"}
    for gpu in ("4", "MIG-5d3e"):
        times = sorted((began, ended) for where, began, ended in done if where == gpu)
        assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(times))


def test_several_gpus_a_worker(tmp_path: Path) -> None:
    engine = ProcessEngine(8, 2, Pool(["0", "1", "2", "3", "4"]))
    assert engine.workers == 2
    assert {where for _, (where, _, _) in engine.map(place, [Nap(n, tmp_path, 0.3) for n in range(4)])} <= {
        "0,1",
        "2,3",
    }
    engine.close()
    with pytest.raises(UsageError, match="2 GPUs, and this machine lets it use 1"):
        ProcessEngine(8, 2, Pool(["0"]))


@pytest.mark.parametrize(("gpus", "names"), [(1, []), (0, ["0"])])
def test_without_gpus_a_worker_sees_what_this_process_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, names: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    engine = ProcessEngine(2, gpus, Pool(names))
    assert engine.workers == 2 and engine.device == "cpu"
    assert [where for _, (where, _, _) in engine.map(place, [Nap(0, tmp_path)])] == ["7"]
    engine.close()


@pytest.mark.parametrize("word", ["", "processes", "processes:0", "processes:-1", "processes:two", "ray:", "slurms"])
def test_unknown_engines_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match=r"^There is no engine .*processes:N, ray, ray://HOST:PORT"):
        find_engine(word)
