#!/usr/bin/env python3
"""Load on a server: many clients with mixed requests, some of which leave; every answer is compared with one had alone.

    python tests/tools/load_http.py --seconds 600                      starts a server of the embedded model
    python tests/tools/load_http.py --seconds 60 --serve "--model DIR --threads 2"
    python tests/tools/load_http.py --url http://127.0.0.1:8000 --model NAME      a server that runs already

Prints one JSON object: requests by kind, failures (what differed or broke; there should be none), tokens per second of
one client and of all, seconds to the first chunk, the server's memory from start to end, its own counts. Exits with 1
if anything failed, if something was left running, or if memory grew by more than --growth MiB after the first tenth.
"""

import argparse
import http.client
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

PROMPTS = ["Once upon a time", "def add(a, b):\n", "1, 2, 3, 4, ", "Oren has 6 bags of 12 eggs. ", "red, blue, red, "]
LENGTHS = [1, 3, 8, 20, 45, 90, 180, 300]
LEAVES = {"whole": 0.35, "stream": 0.35, "leave": 0.2, "vanish": 0.1}  # how requests end, and their shares


def cases(model: str) -> list[tuple[str, dict]]:
    """(path, body) of every request there is: prompts × lengths, greedy and sampled, completions and chat."""
    found = []
    for i, length in enumerate(LENGTHS):
        for j, prompt in enumerate(PROMPTS):
            how = {"model": model, "max_tokens": length, "temperature": (i + j) % 2, "seed": 10 * i + j}
            if (i + j) % 3:
                found.append(("/v1/completions", {**how, "prompt": prompt}))
            else:
                effort = "low" if j % 2 else "none"
                messages = [{"role": "user", "content": prompt}]
                found.append(("/v1/chat/completions", {**how, "messages": messages, "reasoning_effort": effort}))
    return found


def text_of(choice: dict) -> str:
    part = choice.get("message") or choice.get("delta") or {}
    return choice.get("text") or (part.get("reasoning_content") or "") + (part.get("content") or "")


class Client:
    """One connection at a time to the server."""

    def __init__(self, address: str, key: str | None = None):
        self.host, self.port = urlsplit(address).hostname, urlsplit(address).port
        self.headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}

    def post(self, path: str, body: dict) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=300)
        connection.request("POST", path, json.dumps(body), self.headers)
        return connection, connection.getresponse()

    def get(self, path: str) -> str:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request("GET", path, headers=self.headers)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def whole(self, path: str, body: dict) -> tuple[str, int]:
        """(text, tokens)"""
        connection, response = self.post(path, body)
        try:
            found = json.loads(response.read())
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {found['error']['message']}")
        return text_of(found["choices"][0]), found["usage"]["completion_tokens"]

    def stream(self, path: str, body: dict, chunks: int | None = None) -> tuple[str, int, float]:
        """(text, tokens, seconds to the first text); leaves after `chunks` chunks, without knowing the tokens."""
        start, first, text, tokens = time.monotonic(), 0.0, "", 0
        connection, response = self.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
        try:
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {response.read()!r}")
            while chunks is None or chunks > 0:
                line = response.readline()
                if not line:
                    raise RuntimeError("the stream broke off")
                if line == b"data: [DONE]\n":
                    break
                if not line.strip():
                    continue
                found = json.loads(line[6:])
                if "error" in found:
                    raise RuntimeError(found["error"]["message"])
                more = "".join(text_of(choice) for choice in found["choices"])
                if more:
                    first = first or time.monotonic() - start
                    text += more
                    chunks = None if chunks is None else chunks - 1
                tokens = (found.get("usage") or {}).get("completion_tokens", tokens)
        finally:
            connection.close()
        return text, tokens, first

    def vanish(self, path: str, body: dict, after: float) -> None:
        """Ask, and be gone before anything is read."""
        data = json.dumps(body).encode()
        head = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        with socket.create_connection((self.host, self.port), timeout=60) as sock:
            head = f"POST {path} HTTP/1.1\r\nhost: {self.host}\r\n{head}content-length: {len(data)}\r\n\r\n"
            sock.sendall(head.encode() + data)
            time.sleep(after)


class Crowd:
    """Clients that ask until the time is over, and what became of it."""

    def __init__(self, client: Client, todo: list[tuple[str, dict]], alone: list[tuple[str, int]], seed: int):
        self.client, self.todo, self.alone, self.seed = client, todo, alone, seed
        self.lock = threading.Lock()
        self.kinds: Counter[str] = Counter()
        self.tokens = 0
        self.first: list[float] = []
        self.failures: list[str] = []

    def run(self, clients: int, seconds: float) -> float:
        start = time.monotonic()
        threads = [threading.Thread(target=self._ask, args=(i, start + seconds)) for i in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - start

    def _ask(self, number: int, end: float) -> None:
        dice = random.Random(f"{self.seed}-{number}")
        while time.monotonic() < end:
            which = dice.randrange(len(self.todo))
            kind = dice.choices(list(LEAVES), LEAVES.values())[0]
            try:
                wrong = self._one(kind, which, dice)
            except (OSError, RuntimeError, ValueError, KeyError, http.client.HTTPException) as error:
                wrong = f"{type(error).__name__}: {error}"
            with self.lock:
                self.kinds[kind] += 1
                if wrong:
                    self.failures.append(f"{kind} {self.todo[which]}: {wrong}")

    def _one(self, kind: str, which: int, dice: random.Random) -> str | None:
        (path, body), (expected, count) = self.todo[which], self.alone[which]
        tokens, first = 0, None
        if kind == "vanish":
            self.client.vanish(path, {**body, "stream": dice.random() < 0.5}, dice.random() * 0.3)
            return None
        if kind == "whole":
            text, tokens = self.client.whole(path, body)
        elif kind == "stream":
            text, tokens, first = self.client.stream(path, body)
        else:
            text, _, _ = self.client.stream(path, body, dice.randrange(1, 30))
        with self.lock:
            self.tokens += tokens
            self.first += [first] if first else []
        if kind == "leave":
            return None if expected.startswith(text) else f"expected a beginning of {expected!r}; found {text!r}"
        return None if (text, tokens) == (expected, count) else f"expected {count} tokens {expected!r}; found {tokens}, {text!r}"


class Memory(threading.Thread):
    """Resident memory of a process in MiB, once a second."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.status, self.samples, self.over = Path(f"/proc/{pid}/status"), [], threading.Event()

    def now(self) -> float:
        return int(re.search(r"VmRSS:\s+(\d+)", self.status.read_text())[1]) / 1024

    def run(self) -> None:
        while not self.over.wait(1):
            self.samples.append(self.now())

    def report(self, start: float) -> dict:
        """After the first tenth, in which caches fill, memory should not grow: the medians of the parts that follow."""
        self.over.set()
        rest = self.samples[len(self.samples) // 10 :] or [self.now()]
        part = max(1, len(rest) // 4)
        settled, last = statistics.median(rest[:part]), statistics.median(rest[-part:])
        return {"start_mib": start, "peak_mib": max(rest), "end_mib": self.now(), "settled_mib": settled,
                "last_quarter_mib": last, "growth_mib": last - settled}  # fmt: skip


def server_stats(client: Client) -> dict[str, float]:
    """The numbers of /metrics without labels."""
    lines = [line.split() for line in client.get("/metrics").splitlines() if line.startswith("dsv4_") and "{" not in line]
    return {name: float(value) for name, value in lines if not name.endswith("_created")}


def settle(client: Client) -> dict[str, float]:
    """Those numbers once nothing runs any more, or after half a minute."""
    end = time.monotonic() + 30
    while True:
        stats = server_stats(client)
        if stats["dsv4_running"] == stats["dsv4_waiting"] == 0 or time.monotonic() > end:
            return stats
        time.sleep(0.1)


def load(client: Client, model: str, args: argparse.Namespace, pid: int | None) -> dict:
    todo = cases(model)
    start = time.monotonic()
    alone = [client.whole(path, body) for path, body in todo]
    single = sum(tokens for _, tokens in alone) / (time.monotonic() - start)
    memory = Memory(pid) if pid else None
    begin = memory.now() if memory else None
    if memory:
        memory.start()
    crowd = Crowd(client, todo, alone, args.seed)
    seconds = crowd.run(args.clients, args.seconds)
    stats = settle(client)
    return {
        "clients": args.clients, "seconds": seconds, "requests": sum(crowd.kinds.values()), "kinds": dict(crowd.kinds),
        "failures": len(crowd.failures), "first_failures": crowd.failures[:5],
        "one_client_tokens_per_s": single, "read_tokens_per_s": crowd.tokens / seconds,
        "first_text_s": {"median": statistics.median(crowd.first or [0]), "max": max(crowd.first or [0])},
        "left_running": stats["dsv4_running"] + stats["dsv4_waiting"], "memory": memory.report(begin) if memory else None,
        "server": stats,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--growth", type=float, default=32, help="MiB that memory may grow after the first tenth")
    parser.add_argument("--serve", default="", help="options of the server that is started")
    parser.add_argument("--url", help="of a server that runs already; then no memory is measured")
    parser.add_argument("--key", help="its API key")
    parser.add_argument("--model", default="nano", help="its model's name")
    args = parser.parse_args()
    process, address = None, args.url
    if not address:
        line = [sys.executable, "-m", "dsv4", "serve", "--port", "0", *args.serve.split()]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        said = process.stdout.readline()
        if "http://" not in said:
            sys.exit("the server did not start")
        address = said.split()[3]
    try:
        report = load(Client(address, args.key), args.model, args, process and process.pid)
    finally:
        if process:
            process.terminate()
            status = process.wait(60)
    if process:
        report["exit_status"] = status
    print(json.dumps(report, indent=1))
    grown = bool(report["memory"]) and report["memory"]["growth_mib"] > args.growth
    return int(bool(report["failures"] or report["left_running"] or grown or report.get("exit_status")))


if __name__ == "__main__":
    sys.exit(main())
