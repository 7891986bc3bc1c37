"""Common code of the benchmarks: builds and runs `launch`, reads its events and measures processes.

Uses only the standard library.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND_TIMEOUT_S = 900  # seconds that a command may take
MIB = 1 << 20


def log(text):
    """Prints a line to stderr."""
    print(text, file=sys.stderr, flush=True)


def build_launch():
    """Builds the release executable with cargo and returns its path."""
    subprocess.run(["cargo", "build", "--release", "--quiet", "--bin", "launch"], cwd=ROOT, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return (target if target.is_absolute() else ROOT / target) / "release/launch"


def list_descendants(pid):
    """Returns the pids of all descendants of the process `pid`."""
    children = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text()
            except OSError:
                continue  # the process has ended
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry))
    pids, todo = [], [pid]
    while todo:
        found = children.get(todo.pop(), [])
        pids += found
        todo += found
    return pids


def read_peak_rss(pid):
    """Returns the largest resident set of a process so far, in bytes. Returns 0 if the process has
    ended."""
    try:
        for line in Path("/proc", str(pid), "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def run_launch(launch, job, overrides, cwd, measure_memory=False):
    """Runs a job with --json. Returns its events and a size of memory.

    Each event gets the field `at`: the seconds from the start of the command to its arrival. With
    `measure_memory`, the memory is the largest resident set of any descendant of the controller,
    measured at each step event; otherwise it is 0.
    """
    command = [str(launch), "--json", str(job)]
    for item in overrides:
        command += ["--set", item]
    began = time.perf_counter()
    events, memory = [], 0
    with tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=stderr, text=True)
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            events.append(json.loads(line) | {"at": time.perf_counter() - began})
            if measure_memory and events[-1]["event"] == "step":
                memory = max([memory, *map(read_peak_rss, list_descendants(process.pid))])
        if process.wait(COMMAND_TIMEOUT_S) != 0:
            stderr.seek(0)
            raise SystemExit(f"{' '.join(command)} exited with code {process.returncode}:\n{stderr.read()[-3000:]}")
    return events, memory


def select_events(events, kind):
    """Returns the events of one kind."""
    return [e for e in events if e["event"] == kind]


def run_peer_program(command, env, cwd=None):
    """Runs a program that launch is compared with, and returns the last JSON object that the
    program prints. If the program fails, logs the reason and returns None."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, cwd=cwd, env=os.environ | env)
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode != 0 or not lines:
        log(f"  {' '.join(map(str, command))} failed (exit code {result.returncode}): {result.stderr.strip()[-400:]}")
        return None
    return json.loads(lines[-1])


def has_module(python, module):
    """Returns whether the Python interpreter `python` can import `module`."""
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", probe]).returncode == 0


def median(values):
    """Returns the median, or None if there are no values."""
    return statistics.median(values) if values else None


def print_table(header, rows):
    """Prints a Markdown table."""
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")


def format_median_and_range(values, digits=0):
    """Formats values as `median (min–max)`."""
    if not values:
        return "–"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def describe_machine():
    """Returns CPU model, number of CPUs and load as text. The text has a warning if the machine is
    not idle."""
    model = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), "unknown CPU")
    load = os.getloadavg()[0]
    busy = "; NOT IDLE: only ratios within a round are meaningful" if load > 0.3 else ""
    return f"{model}, {len(os.sched_getaffinity(0))} CPUs, load {load:.1f} at the start{busy}"
