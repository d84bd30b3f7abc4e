"""The serve command as a process, on one rank and on several: what it says, how it ends, the same answers."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from fake_scheduler import until  # noqa: E402

import dsv4  # noqa: E402
from dsv4.generate import complete  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
needs_mpi = [pytest.mark.mpi, pytest.mark.skipif(MPIRUN is None, reason="no mpirun")]
# Greedy, nano tells this story in circles, without an end.
LONG = {"model": "nano", "prompt": "Once upon a time", "max_tokens": 8000, "temperature": 0, "stream": True}


def clean(**extra):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "DSV4_", "PRTE_"))}
    return kept | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
                   "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"} | extra  # fmt: skip


@contextmanager
def started(*arguments, ranks=0, launcher=(), **environment):
    """(process, address) of a server on a free port, once it answers; on ranks of mpirun, or by another launcher."""
    line = [*(launcher or [sys.executable, "-m", "dsv4", "serve"]), "--port", "0", *map(str, arguments)]
    if ranks:
        line = [MPIRUN, "-n", str(ranks), *line]
    process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=clean(**environment), cwd=ROOT / "tests", start_new_session=bool(launcher))  # fmt: skip
    try:
        said = process.stdout.readline()
        assert said.startswith("dsv4: ") and "http://127.0.0.1:" in said, said + process.stderr.read()
        yield process, said.split()[3]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ended(process):
    """(status, stdout, stderr) once the process is over."""
    out, err = process.communicate(timeout=40)
    return process.returncode, out, err


def first_line(response):
    lines = response.iter_lines()
    return next(lines), lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], ids=lambda n: n.name)
def test_it_ends_when_told_to(number):
    with started() as (process, address):
        assert httpx.get(address + "/health").json() == {"status": "ok"}
        process.send_signal(number)
        assert ended(process) == (0, "", "")


def test_running_answers_come_to_their_end_and_new_ones_are_refused():
    with started("--drain", 200) as (process, address):
        with httpx.stream("POST", address + "/v1/completions", json={**LONG, "max_tokens": 1200}, timeout=60) as response:
            line, lines = first_line(response)
            process.terminate()
            until(lambda: httpx.get(address + "/health").status_code == 503)
            assert httpx.post(address + "/v1/completions", json=LONG).status_code == 503
            *_, last, empty, done, _ = [line, *lines]
        assert done == "data: [DONE]" and json.loads(last[6:])["choices"][0]["finish_reason"] == "length"
        assert ended(process) == (0, "", "")


def test_a_second_signal_cuts_them_off():
    with started() as (process, address):
        with httpx.stream("POST", address + "/v1/completions", json=LONG, timeout=60) as response:
            line, lines = first_line(response)
            process.send_signal(signal.SIGINT)
            until(lambda: httpx.get(address + "/health").status_code == 503)
            process.send_signal(signal.SIGINT)
            *_, last, empty, done, _ = [line, *lines]
        assert done == "data: [DONE]" and json.loads(last[6:])["error"]["code"] == "closing"
        assert ended(process) == (0, "", "")


def test_a_key_from_the_environment():
    with started(DSV4_API_KEY="sesame") as (process, address):
        assert httpx.get(address + "/v1/models").status_code == 401
        client = openai.OpenAI(base_url=address + "/v1", api_key="sesame", max_retries=0)
        assert [model.id for model in client.models.list()] == ["nano"]


def test_states_of_prompts_outlive_the_process(tmp_path):
    body = {"model": "nano", "prompt": "One morning, Tobin lived near the mill. " * 8, "temperature": 0}
    answers = []
    for _ in range(2):
        with started("--prefix-dir", tmp_path) as (process, address):
            answers.append(httpx.post(address + "/v1/completions", json=body, timeout=60).json())
            process.terminate()
            assert ended(process) == (0, "", "")
    assert answers[0]["choices"] == answers[1]["choices"]
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 50 for answer in answers] == [False, True]


def refused(*arguments, **environment):
    line = [sys.executable, "-m", "dsv4", "serve", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=40, env=clean(**environment), check=False)
    assert done.returncode == 2 and done.stdout == "", done.stdout + done.stderr
    return done.stderr


def test_refused_at_the_start():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused("--port", port)
    assert said == f"dsv4: error: port {port} of 127.0.0.1 is in use; choose another with --port\n"
    assert "dsv4: error: 192.0.2.1:80: expected an address to listen on; " in refused("--host", "192.0.2.1", "--port", 80)
    assert "API key: expected printable ASCII without spaces" in refused("--api-key", "open sesame")
    assert "API key: expected printable ASCII" in refused(DSV4_API_KEY="")
    assert "DSV4_API_KEYS: unknown variable" in refused("--port", 0, DSV4_API_KEYS="x")
    assert "--port" in refused("--port", 70000) and "--max-queue" in refused("--max-queue", 0)
    assert "--prefix-dir needs" in refused("--prefix-dir", "/tmp", "--prefix-cache", 0, "--model", "/nowhere")


def test_what_is_not_installed_is_named(monkeypatch, capsys):
    from dsv4 import cli, cli_serve

    monkeypatch.setattr(cli_serve, "find_spec", lambda name: None if name == "uvicorn" else name)
    assert cli.main(["serve"]) == 2
    assert capsys.readouterr().err == (
        "dsv4: error: serve: expected starlette, uvicorn, prometheus_client; found no uvicorn; "
        "`pip install -e '.[serve]'` in a checkout installs what is needed\n"
    )


# ------------------------------------------------------------------------------------------------ ranks
@pytest.fixture(scope="module")
def tiny_with_text(tiny_root, nano_dir, tmp_path_factory):
    """tiny-tp, which divides over 4 ranks, with as much of nano's tokenizer as its vocabulary has room for."""
    path = shutil.copytree(tiny_root / "tiny-tp", tmp_path_factory.mktemp("served") / "tiny-tp")
    size = json.loads((path / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads((nano_dir / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["vocab"] = {text: number for text, number in model["vocab"].items() if number < size}
    pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    model["merges"] = [pair for pair in pairs if {*pair, "".join(pair)} <= set(model["vocab"])]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(nano_dir / "tokenizer_config.json", path)
    return path


def asked(client, model, prompts):
    """What every prompt gives, whole and streamed, and a chat answer."""
    how = {"model": model, "max_tokens": 12, "temperature": 1, "seed": 3}
    answers = [client.completions.create(prompt=prompt, **how).choices[0].text for prompt in prompts]
    for prompt, answer in zip(prompts, answers):
        stream = client.completions.create(prompt=prompt, stream=True, **how)
        assert "".join(chunk.choices[0].text for chunk in stream) == answer
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "Hello"}], **how)
    return answers, chat.choices[0].message.content


@pytest.mark.parametrize("ranks, model", [pytest.param(1, "nano", marks=needs_mpi), pytest.param(2, "nano", marks=needs_mpi),
                                          pytest.param(4, "tiny", marks=needs_mpi)])  # fmt: skip
def test_ranks_give_the_answers_of_one(ranks, model, tiny_with_text, nano_dir):
    """And leave in order when mpirun is sent SIGUSR1, as launch/serve.sh does; a follower left to itself stays."""
    directory = nano_dir if model == "nano" else tiny_with_text
    prompts = ["Once upon a time", [5, 6, 7, 8]]
    with dsv4.Engine.load(directory, threads=1) as engine:
        params = dsv4.SamplingParams(max_tokens=12, seed=3)
        expected = [complete(engine, prompt, params).text for prompt in prompts]
    with started("--model", directory, ranks=ranks) as (process, address):
        client = openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0, timeout=60)
        answers, _ = asked(client, directory.name, prompts)
        assert answers == expected
        with client.completions.create(**{**LONG, "model": directory.name, "max_tokens": 1000}) as stream:
            next(iter(stream))  # a client that leaves, also of several ranks
        process.send_signal(signal.SIGUSR1)
        status, _, err = ended(process)
        assert status == 0 and err == "", err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_mpi)])
def test_the_script_ends_its_job_in_order(ranks, number, tmp_path):
    """launch/serve.sh with an environment that is there already. A terminal sends Ctrl-C to the whole process group."""
    shutil.copy(ROOT / "launch" / "serve.sh", tmp_path)
    setup = (ROOT / "launch" / "setup.sh").read_text()
    (tmp_path / "setup.sh").write_text(f"{setup}\nsetup() {{ python={sys.executable}; }}\nvenv=/none\n")
    script = ["bash", tmp_path / "serve.sh", str(ranks)]
    with started(launcher=script, MPIRUN=str(MPIRUN)) as (process, address):
        with httpx.stream("POST", address + "/v1/completions", json={**LONG, "max_tokens": 300}, timeout=60) as response:
            line, lines = first_line(response)
            if number == signal.SIGINT:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            *_, last, empty, done, _ = [line, *lines]
        assert done == "data: [DONE]" and json.loads(last[6:])["choices"][0]["finish_reason"] == "length"
        assert ended(process) == (0, "", "")


@pytest.mark.mpi
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun")
def test_an_mpirun_that_is_interrupted_ends_all(nano_dir):
    with started("--model", nano_dir, ranks=2) as (process, address):
        process.send_signal(signal.SIGINT)
        status, _, _ = ended(process)
        assert status != 0  # mpirun's own
        with pytest.raises(httpx.ConnectError):
            httpx.get(address + "/health")


@pytest.mark.mpi
@pytest.mark.skipif(MPIRUN is None, reason="no mpirun")
def test_a_rank_that_is_killed_ends_the_server(nano_dir):
    import psutil

    with started("--model", nano_dir, ranks=2) as (process, address):
        ranks = [child for child in psutil.Process(process.pid).children(recursive=True) if "serve" in child.cmdline()]
        listening = {child.pid for child in ranks if child.net_connections()}
        victims = [child for child in ranks if child.environ().get("OMPI_COMM_WORLD_RANK") == "1"]
        assert len(victims) == 1 and listening
        victims[0].kill()
        status, _, _ = ended(process)
        assert status != 0
