"""What the benchmarks share: building and running `launch`, reading its events, measuring processes. Standard library only."""
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 900  # seconds any one command may take
MIB = 1 << 20


def say(text):
    print(text, file=sys.stderr, flush=True)


def build_launch():
    """Builds the release executable and returns its path."""
    subprocess.run(["cargo", "build", "--release", "--quiet", "--bin", "launch"], cwd=ROOT, check=True)
    folder = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return (folder if folder.is_absolute() else ROOT / folder) / "release/launch"


def descendants(pid):
    """Every process below `pid`."""
    children = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text()
            except OSError:
                continue  # it ended
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def peak_rss(pid):
    """The kernel's high-water mark of a process's resident set, bytes; 0 when it is gone."""
    try:
        for line in Path("/proc", str(pid), "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def run_launch(launch, job, sets, cwd, measure_memory=False):
    """Runs a job with --json. Returns its events, each with `at`: seconds from the start to its arrival,
    and, with `measure_memory`, the largest resident set of any process below the controller (looked at whenever an event arrives)."""
    command = [str(launch), "--json", str(job)]
    for item in sets:
        command += ["--set", item]
    began = time.perf_counter()
    events, memory = [], 0
    with tempfile.TemporaryFile("w+") as talk:
        process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=talk, text=True)
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            events.append(json.loads(line) | {"at": time.perf_counter() - began})
            if measure_memory and events[-1]["event"] == "step":
                memory = max([memory, *map(peak_rss, descendants(process.pid))])
        if process.wait(LIMIT) != 0:
            talk.seek(0)
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{talk.read()[-3000:]}")
    return events, memory


def of_kind(events, kind):
    return [e for e in events if e["event"] == kind]


def run_peer(command, env, cwd=None):
    """Runs another program and returns the last JSON object it printed, or None with a word on stderr when it fails."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=cwd, env=os.environ | env)
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode != 0 or not lines:
        say(f"  {' '.join(map(str, command))} failed ({result.returncode}): {result.stderr.strip()[-400:]}")
        return None
    return json.loads(lines[-1])


def has_module(python, module):
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", probe]).returncode == 0


def median(values):
    return statistics.median(values) if values else None


def table(header, rows):
    """A markdown table."""
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")


def spread(values, digits=0):
    """`median (min–max)`."""
    if not values:
        return "–"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def machine():
    model = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                  if line.startswith("model name")), "unknown CPU")
    load = os.getloadavg()[0]
    busy = "; NOT IDLE: only ratios within a round mean anything" if load > 0.3 else ""
    return f"{model}, {len(os.sched_getaffinity(0))} CPUs, load {load:.1f} at the start{busy}"
