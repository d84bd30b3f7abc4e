"""Ranks as processes under mpirun: the same tokens, refusals at the start, and the end of a job when a rank fails."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install -e '.[mpi]', or an MPI of the system with mpi4py"),
]
TOKENS = ["--tokens", "5,6,7,8,9,10", "--temperature", "0", "--max-tokens", "16", "--ignore-eos"]


def environment(**extra):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "DSV4_", "PRTE_"))}
    return clean | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
                    "OMP_NUM_THREADS": "1"} | extra  # fmt: skip


def mpirun(*jobs, limit=40, **extra):
    """jobs: (processes, *arguments of Python) each → the finished mpirun."""
    line = [MPIRUN]
    for number, (size, *arguments) in enumerate(jobs):
        line += [":"] * (number > 0) + ["-n", str(size), sys.executable, *map(str, arguments)]
    return subprocess.run(line, env=environment(**extra), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=limit, check=False, cwd=TESTS)  # fmt: skip


def generate(directory, *options):
    return ("-m", "dsv4", "generate", "--model", directory, *TOKENS, *options)


# ---------------------------------------------------------------------- the same
def test_the_command_line_gives_the_same_tokens(checkpoint_dir):
    for name, sizes in (("tiny-tp", (1, 2, 4, 8)), ("nano", (1, 2))):
        runs = [mpirun((size, *generate(checkpoint_dir(name), "--json"))) for size in sizes]
        assert all(run.returncode == 0 for run in runs), [run.stderr for run in runs]
        records = [json.loads(run.stdout) for run in runs]  # one record: only rank 0 speaks
        assert len(records[0]["tokens"]) == 16
        assert all(record["tokens"] == records[0]["tokens"] for record in records), name
        assert all(record["speculation"]["drafted"] > 0 for record in records)


def test_a_table_has_no_colours(checkpoint_dir):
    """mpirun gives a rank's standard output a terminal of its own, though what it writes goes into a pipe here."""
    run = mpirun((2, "-m", "dsv4", "bench", "--model", checkpoint_dir("tiny-tp"), "--contexts", "16", "--repeats", "1", "--steps", "2"),
                 TERM="xterm")  # fmt: skip
    assert run.returncode == 0 and "decode tok/s" in run.stdout and "2 ranks; rank 0 holds" in run.stdout
    assert "\x1b" not in run.stdout + run.stderr


def test_logits_have_the_same_bits(checkpoint_dir, tmp_path):
    for size in (1, 4):
        run = mpirun((size, "-m", "dsv4", "logits", "--model", checkpoint_dir("tiny-tp"), "--tokens", "5,6,7,8,9,10",
                      "--threads", "1", "--out", tmp_path / f"{size}.safetensors"))  # fmt: skip
        assert run.returncode == 0, run.stderr
    assert (tmp_path / "1.safetensors").read_bytes() == (tmp_path / "4.safetensors").read_bytes()


@pytest.mark.parametrize("size", [2, 4])
def test_the_body_of_all_communicators(size):
    run = mpirun((size, "comm_body.py"))
    assert run.returncode == 0 and run.stdout.count("done") == size, run.stdout + run.stderr


def test_the_body_over_nccl():
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two CUDA devices")
    run = mpirun((2, "comm_body.py", "nccl"))
    assert run.returncode == 0 and run.stdout.count("done") == 2, run.stdout + run.stderr


def test_a_program_of_ones_own(checkpoint_dir):
    """Engine.load on rank 0, ranks.serve() elsewhere: it learns from rank 0 what to load."""
    lead = (
        "import dsv4, sys; engine = dsv4.Engine.load(sys.argv[1], threads=1, chunk=7);"
        "print([s.token for s in engine.generate(range(30), dsv4.SamplingParams(temperature=0, max_tokens=3))]);"
        "print(len(engine.traffic()), engine.traffic()[1].messages > 0)"
    )
    one = mpirun((1, "-c", lead.replace("engine.traffic()[1].messages > 0", "1"), checkpoint_dir("tiny-tp")))
    two = mpirun((1, "-c", lead, checkpoint_dir("tiny-tp")), (1, "-c", "import dsv4.ranks; dsv4.ranks.serve()"))
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    assert one.stdout.splitlines()[0] == two.stdout.splitlines()[0] and two.stdout.splitlines()[1] == "2 True"


def test_other_commands_speak_once():
    run = mpirun((2, "-m", "dsv4", "inspect", "nano", "--json"))
    assert run.returncode == 0 and json.loads(run.stdout)["tensors"]
    run = mpirun((2, "-m", "dsv4", "generate", "--no-such-option"))
    assert run.returncode == 2 and run.stderr.count("No such option") == 1


# ---------------------------------------------------------------------- refused at the start
def refused(run, pattern):
    said = [line for line in run.stderr.splitlines() if "dsv4: error:" in line]
    assert run.returncode == 2 and len(said) == 1 and re.search(pattern, said[0]), (run.returncode, run.stderr)
    assert run.stdout == ""


@pytest.mark.parametrize("name, size, pattern", [
    ("tiny-tp", 3, r"ranks: expected one of 1, 2, 4, 8; found 3"),
    ("nano", 4, r"ranks: expected one of 1, 2; found 4"),
    ("tiny-m", 2, r"ranks: expected one of 1; found 2"),
])  # fmt: skip
def test_counts_over_which_nothing_divides(checkpoint_dir, name, size, pattern):
    refused(mpirun((size, *generate(checkpoint_dir(name)))), pattern)


def test_ranks_that_disagree(checkpoint_dir, tmp_path):
    path = checkpoint_dir("tiny-tp")
    other = shutil.copytree(path, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"swiglu_limit": 9.0}))
    refused(mpirun((1, *generate(path)), (1, *generate(other))), "expected the same checkpoint on all, found .* rank 1")
    refused(mpirun((1, *generate(path)), (1, *generate(path, "--chunk", "64"))),
            "expected the same chunk on all, found 512 on rank 0 and 64 on rank 1")  # fmt: skip
    older = "import sys, dsv4.loading; dsv4.loading.__version__ = '0.0.1'; from dsv4.cli import main; sys.exit(main())"
    refused(mpirun((1, *generate(path)), (1, "-c", older, *generate(path)[2:])), "expected the same version on all")


def test_a_mistake_of_all_ranks_is_told_once(checkpoint_dir):
    refused(mpirun((2, *generate("/no/such/model"))), "/no/such/model: not found")
    refused(mpirun((2, "-m", "dsv4", "generate", "--model", checkpoint_dir("tiny-tp"), "--tokens", "99999")),
            "expected ids within 0..511, found 99999")  # fmt: skip
    for name in ("DSV4_INIT_TIMEOUT", "DSV4_THREADS"):
        refused(mpirun((2, *generate(checkpoint_dir("tiny-tp"))), **{name: "soon"}), f"{name}: expected an integer")


def test_a_mistake_of_one_rank_is_told(checkpoint_dir):
    run = mpirun((1, *generate(checkpoint_dir("tiny-tp"))), (1, *generate("/no/such/model")))
    refused(run, "rank 1: /no/such/model: not found")


def test_a_follower_tells_what_rank_0_did_not_find(checkpoint_dir):
    run = mpirun((1, *generate(checkpoint_dir("tiny-tp"))), (1, *generate(checkpoint_dir("tiny-tp"), "--no-such-option")))
    assert run.returncode == 2 and run.stdout == "", run.stderr
    assert run.stderr.count("No such option") == 1 and run.stderr.count("rank 1: Usage") == 1


def test_a_mistake_before_the_ranks_met_waits_for_them(tmp_path):
    """A launcher may hang when it ends a process that is just starting MPI."""
    late = "import time, dsv4.comm as c; time.sleep(1); c.open_communicator(c.World.from_env()); print('met', flush=True);"
    late += "time.sleep(30)"
    run = mpirun((1, *generate("nano")[:5], "--prompt-file", tmp_path / "absent"), (1, "-c", late))
    assert run.returncode == 2 and run.stdout == "met\n" and run.stderr.count("absent: expected a readable file") == 1, run
    serve = "import dsv4.ranks; dsv4.ranks.serve()"
    run = mpirun((1, "-c", serve), (1, "-c", late))
    assert run.returncode == 2 and run.stdout == "met\n" and run.stderr.count("serve: expected a rank other than 0") == 1, run


def test_one_engine_in_a_job(checkpoint_dir):
    lead = "import dsv4, sys; load = lambda: dsv4.Engine.load(sys.argv[1], threads=1, max_context=64); one = load();"
    for close in ("one.close(); ", ""):
        run = mpirun((2, "-c", lead + close + "load()", checkpoint_dir("tiny-tp")))
        assert run.returncode == 1 and run.stderr.count("ConfigError: ranks: expected one engine in a job") == 1, run.stderr


def test_settings_of_serve_without_a_path(checkpoint_dir):
    """They go before rank 0's; they were once ignored."""
    lead = "import dsv4, sys; dsv4.Engine.load(sys.argv[1], threads=1, chunk=7).close()"
    serve = "import dsv4.ranks; dsv4.ranks.serve({})"
    refused(mpirun((1, "-c", lead, checkpoint_dir("tiny-tp")), (1, "-c", serve.format("chunk=8"))), "the same chunk on all")
    assert mpirun((1, "-c", lead, checkpoint_dir("tiny-tp")), (1, "-c", serve.format("threads=2"))).returncode == 0


def test_a_launcher_of_another_mpi(checkpoint_dir):
    """Two processes are announced, but MPI knows of one."""
    run = subprocess.run([sys.executable, "-m", "dsv4", "generate", "--model", str(checkpoint_dir("tiny-tp")), *TOKENS],
                         env=environment(PMI_SIZE="2", PMI_RANK="0"), capture_output=True, text=True, timeout=30,
                         check=False)  # fmt: skip
    assert run.returncode == 2 and "the launcher started 2 processes, but mpi4py sees 1" in run.stderr, run.stderr


def test_without_mpi4py(checkpoint_dir, tmp_path):
    """One process needs none; two say what to install."""
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not here')")
    line = [sys.executable, "-m", "dsv4", *map(str, generate(checkpoint_dir("tiny-tp"))[2:])]
    for extra, status in (({}, 0), ({"PMI_SIZE": "2", "PMI_RANK": "0"}, 2)):
        run = subprocess.run(line, env=environment(PYTHONPATH=str(tmp_path), **extra), capture_output=True, text=True,
                             timeout=30, check=False)  # fmt: skip
        assert run.returncode == status, run.stderr
    assert "2 processes were started, but mpi4py cannot be loaded (not here); `pip install -e '.[mpi]'`" in run.stderr


# ---------------------------------------------------------------------- a rank fails
MESSAGES = {
    "kill": r"rank {rank} with PID|=   EXIT CODE: 9$",  # mpirun's own words: the process can say nothing
    "raise": r"dsv4: error: {who}ValueError: struck$",
    "stop": r"dsv4: error: rank {rank} stopped answering",
    "hang": r"dsv4: error: rank {rank} stopped answering",
    "interrupt": r"dsv4: {who}interrupted$",
}
PHASES = ("load", "forward", "draft", "verify", "idle")
# Each fault and each phase on both ranks; the rest of the 46 are slow.
QUICK = [("kill", "load"), ("raise", "forward"), ("stop", "draft"), ("interrupt", "verify"), ("kill", "idle"),
         ("hang", "load"), ("interrupt", "idle"), ("stop", "idle"), ("raise", "verify")]  # fmt: skip
POSSIBLE = [(fault, phase) for fault in MESSAGES for phase in PHASES
            if phase != "idle" or fault in ("kill", "stop", "interrupt")]  # fmt: skip


def struck(path, rank, fault, phase):
    """What is wrong with how the job ended, as text; nothing if all is well."""
    run = mpirun((2, "mpi_job.py", path, rank, phase, fault))
    end, what = time.time(), f"{fault} in rank {rank} at {phase}"
    times = re.findall(r"struck ([\d.]+)", run.stdout)
    if len(times) != 1 or run.returncode == 0 or end - float(times[0]) > 10:
        return f"{what}: status {run.returncode}, struck {times}, ended {end}: {run.stderr}"
    pattern = MESSAGES[fault].format(rank=rank, who="rank 1: " if rank else "")
    if (rank, fault, phase) == (0, "interrupt", "idle"):
        pattern = "^KeyboardInterrupt$"  # in the program's own code
    said = re.findall(pattern, run.stderr + run.stdout, re.MULTILINE)
    return "" if len(said) == 1 else f"{what}: said {said}: {run.stderr}"


def strike_all(path, cases):
    with ThreadPoolExecutor(2) as pool:  # the jobs mostly wait; more of them would make each other late
        found = list(pool.map(lambda case: struck(path, *case), cases))
    assert not any(found), "\n".join(filter(None, found))


def test_a_failing_rank_ends_the_job(checkpoint_dir):
    strike_all(checkpoint_dir("tiny-tp"), [(rank, *case) for case in QUICK for rank in (0, 1)])


@pytest.mark.slow
def test_a_failing_rank_ends_the_job_whatever_and_whenever(checkpoint_dir):
    cases = [(rank, *case) for case in POSSIBLE if case not in QUICK for rank in (0, 1)]
    strike_all(checkpoint_dir("tiny-tp"), cases)


def test_a_slow_load_is_no_failure(checkpoint_dir):
    run = mpirun((2, "mpi_job.py", checkpoint_dir("tiny-tp"), 1, "load", "slow"))
    assert run.returncode == 0 and len(run.stdout.splitlines()[-1].split()) == 12, run.stderr


def test_a_load_beyond_the_limit(checkpoint_dir):
    run = mpirun((2, "mpi_job.py", checkpoint_dir("tiny-tp"), 1, "load", "slow"), DSV4_INIT_TIMEOUT="2")
    assert run.returncode == 1 and run.stderr.count("rank 1 ") == 1, run.stderr
    assert re.search(r"rank 1 (did not answer within 2 s \(DSV4_INIT_TIMEOUT\)|stopped answering)", run.stderr)


def test_a_process_that_never_joins(checkpoint_dir):
    job = generate(checkpoint_dir("tiny-tp"))
    run = mpirun((1, *job), (1, "-c", "import time; time.sleep(30)"), DSV4_INIT_TIMEOUT="2")
    assert run.returncode == 1 and re.search(r"Timeout \(0:00:02\)!(.*\n)+.* in _import_mpi", run.stderr), run.stderr


def test_ctrl_c_of_mpirun(checkpoint_dir):
    line = [MPIRUN, "-n", "2", sys.executable, "mpi_job.py", str(checkpoint_dir("tiny-tp")), "0", "idle", "slow"]
    with subprocess.Popen(line, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, cwd=TESTS) as job:  # fmt: skip
        job.stdout.readline()
        started = time.monotonic()
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=10)
    assert job.returncode != 0 and time.monotonic() - started < 10
