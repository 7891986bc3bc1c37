"""The hang hook of launch: lets the agent of a host ask a rank where it is.

Python imports this module at its start, because launch puts the directory of this file at the
beginning of PYTHONPATH. The hook
- imports the sitecustomize module that it hides, if there is one,
- registers faulthandler for a real-time signal, which writes the stacks of all threads to a file,
- starts a thread when torch.distributed.init_process_group returns. Once per interval, the thread
  publishes the numbers of collectives, and whether one is incomplete. On request, it writes torch's
  flight recorder and the stacks of all threads to a file,
- writes the same file at the end of a process that fails because a collective has timed out, if the
  backend raises an exception, as Gloo does.

An error of the hook never disturbs the program.
"""
import os
import sys

_TARGET = "torch.distributed.distributed_c10d"
_STATUS_BYTES = 4096  # the size of the status file
_MAX_ENTRIES = 64  # the newest entries of the flight recorder that are written
_MAX_FRAMES = 32  # the innermost frames of a stack that are written
_MAX_THREADS = 64
_MAX_GROUPS = 64
_MAX_TEXT = 300  # the longest path, name or other text
_DIRECTORY = os.environ.get("LAUNCH_HANG_DIR")
_SAMPLES = 10  # how often the main thread's position is sampled
_PAUSE = 0.01
# What the exceptions of Gloo about a timeout contain.
_TIMEOUT_TEXT = "Timed out waiting "


def _import_hidden():
    """Imports the sitecustomize module of the environment, which this file hides."""
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.abspath(__file__))
    path = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    sys.path[:] = path
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _register_signal():
    """Registers faulthandler, unless the program handles the signal already."""
    import faulthandler
    import signal

    number = int(os.environ["LAUNCH_HANG_SIGNAL"])
    if signal.getsignal(number) != signal.SIG_DFL:
        return
    path = os.path.join(_DIRECTORY, "rank-%s.stacks" % int(os.environ["RANK"]))
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    faulthandler.register(number, file=descriptor, all_threads=True)


def _load(text):
    import json

    value = json.loads(text)
    return value if isinstance(value, dict) else {}


def _dump(name, *arguments):
    """Calls a function of torch that returns a dump, if this torch has the function."""
    from torch._C import _distributed_c10d as c10d

    function = getattr(c10d, name, None)
    try:
        return function(*arguments) if function else None
    except Exception:
        return None


def _list_status(c10d):
    """Returns the numbers of collectives of every process group of this process."""
    counters = {}
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        text = _dump(name, False, False)
        for group, status in (_load(text).get("pg_status") or {}).items() if text else ():
            known = counters.setdefault(str(group), [-1, -1])
            known[0] = max(known[0], int(status.get("last_enqueued_collective", -1)))
            known[1] = max(known[1], int(status.get("last_completed_collective", -1)))
    groups = []
    world = c10d._world
    for number, (group, (backend, _)) in enumerate(list(world.pg_map.items())[:_MAX_GROUPS]):
        name = str(world.pg_names.get(group, ""))
        ranks = list(world.pg_group_ranks.get(group, {}))
        enqueued, completed = counters.get(name, (-1, -1))
        try:
            enqueued = max(enqueued, int(group._get_sequence_number_for_group()))
        except Exception:
            pass
        groups.append({"name": name[:_MAX_TEXT], "backend": str(backend)[:_MAX_TEXT], "ranks": ranks,
                       "enqueued": enqueued, "completed": completed})
    return groups


def _is_waiting():
    """Returns whether the flight recorder has a collective that is not complete."""
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        # Only with the entries that are active. Entries of Gloo always count as active.
        text = _dump(name, True, True)
        for entry in (_load(text).get("entries") or []) if text else ():
            if not entry.get("retired") and entry.get("state") != "completed":
                return True
    return False


def _describe_status(c10d, previous):
    """Returns the status as JSON, and the number that shows a progress of collectives. `previous`
    is the number of the status before."""
    import json

    groups = _list_status(c10d)
    count = sum(max(group["enqueued"], 0) + max(group["completed"], 0) for group in groups)
    status = {"count": count if groups else None, "waiting": count == previous and _is_waiting()}
    text = json.dumps({**status, "groups": groups})
    # The lists of ranks may be long.
    return (text if len(text) < _STATUS_BYTES else json.dumps({**status, "groups": []})), count


def _list_entries():
    """Returns the newest entries of torch's flight recorder."""
    import pickle

    entries = []
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        data = _dump(name, True, False, False)
        # The pickle was made by torch in this process.
        dump = pickle.loads(data) if data else {}
        for entry in (dump.get("entries") or [])[-_MAX_ENTRIES:]:
            entries.append({
                "group": str(entry["process_group"][0])[:_MAX_TEXT],
                "seq": entry["collective_seq_id"], "p2p": bool(entry.get("is_p2p")),
                "operation": entry["profiling_name"][:_MAX_TEXT],
                "retired": bool(entry.get("retired")) or entry["state"] == "completed",
                "inputs": str(entry.get("input_sizes"))[:_MAX_TEXT],
                "dtypes": str(entry.get("input_dtypes"))[:_MAX_TEXT],
            })
    return entries


def _list_stacks():
    """Returns the stacks of all threads, innermost frame first, and whether the main thread is in a
    call of native code."""
    import opcode
    import threading
    import time

    main = threading.main_thread().ident
    positions = set()
    for _ in range(_SAMPLES):
        frame = sys._current_frames().get(main)
        if frame is None:
            break
        name = opcode.opname[frame.f_code.co_code[frame.f_lasti]] if frame.f_lasti >= 0 else ""
        positions.add((id(frame.f_code), frame.f_lasti, "CALL" in name))
        del frame
        time.sleep(_PAUSE)
    in_call = len(positions) == 1 and next(iter(positions))[2]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = []
    for ident, frame in list(sys._current_frames().items())[:_MAX_THREADS]:
        if ident == threading.get_ident():
            continue
        frames = []
        while frame is not None and len(frames) < _MAX_FRAMES:
            code = frame.f_code
            frames.append({"file": code.co_filename[-_MAX_TEXT:], "line": frame.f_lineno or 0,
                           "function": code.co_name[:_MAX_TEXT]})
            frame = frame.f_back
        stacks.append({"thread": names.get(ident, "?")[:_MAX_TEXT], "main": ident == main, "frames": frames})
    return stacks, in_call


def _write(path, value):
    import json

    with open(path + ".new", "w", opener=lambda p, f: os.open(p, f, 0o600)) as file:
        json.dump(value, file)
    os.replace(path + ".new", path)


def _serve(c10d):
    """Publishes the status once per interval, and answers requests of the agent."""
    import select

    interval = int(os.environ["LAUNCH_HANG_INTERVAL_MS"]) / 1000
    base = os.path.join(_DIRECTORY, "rank-%s.%s" % (int(os.environ["RANK"]), os.getpid()))
    os.mkfifo(base + ".request", 0o600)
    requests = os.open(base + ".request", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.open(base + ".status", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    count = None
    while True:
        text, count = _describe_status(c10d, count)
        os.pwrite(status, text.encode().ljust(_STATUS_BYTES), 0)
        if select.select([requests], [], [], interval)[0]:
            os.read(requests, 4096)
            stacks, in_call = _list_stacks()
            _write(base + ".evidence", {"groups": _list_status(c10d), "entries": _list_entries(),
                                        "stacks": stacks, "in_call": in_call})


def _write_timeout(c10d):
    """Writes the evidence if an exception about a timeout of a collective ends the process."""
    error = getattr(sys, "last_value", None)
    if not isinstance(error, RuntimeError) or _TIMEOUT_TEXT not in str(error):
        return
    frames = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append({"file": code.co_filename[-_MAX_TEXT:], "line": trace.tb_lineno or 0,
                       "function": code.co_name[:_MAX_TEXT]})
        trace = trace.tb_next
    stack = {"thread": "MainThread", "main": True, "frames": frames[::-1][:_MAX_FRAMES]}
    if not any("/torch/distributed/" in frame["file"] for frame in stack["frames"]):
        return
    groups, entries = _list_status(c10d), _list_entries()
    # Gloo counts a collective that has failed as completed. It is the newest one.
    for failed in [entry for entry in entries if not entry["p2p"]][-1:]:
        failed["retired"] = False
        for group in groups:
            if group["name"] == failed["group"]:
                group["completed"] = min(group["completed"], failed["seq"] - 1)
    base = os.path.join(_DIRECTORY, "rank-%s.%s" % (int(os.environ["RANK"]), os.getpid()))
    _write(base + ".evidence", {"groups": groups, "entries": entries,
                                "stacks": [stack], "in_call": True, "timeout": True})


def _register_end(c10d):
    import atexit

    def write():
        try:
            _write_timeout(c10d)
        except Exception:
            pass  # the output of the rank still names the timeout

    atexit.register(write)


def _start_thread(c10d):
    import threading

    def run():
        try:
            _serve(c10d)
        except Exception:
            pass  # the agent uses other evidence

    threading.Thread(target=run, name="launch-hang", daemon=True).start()


def _set_old_names():
    """Sets the variables of the flight recorder by the names that torch has read until 2.7."""
    import torch

    if tuple(int(number) for number in torch.__version__.split(".")[:2]) >= (2, 8):
        return
    for new, old in (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
                     ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
                     ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")):
        if new in os.environ:
            os.environ.setdefault(old, os.environ[new])


def _watch_process_groups(c10d):
    """Makes init_process_group start the thread, once per process."""
    import functools

    try:
        _set_old_names()
    except Exception:
        pass  # the flight recorder of this torch is off

    original = c10d.init_process_group
    started = set()

    @functools.wraps(original)
    def init_process_group(*args, **kwargs):
        result = original(*args, **kwargs)
        if os.getpid() not in started:
            started.add(os.getpid())
            _start_thread(c10d)
            _register_end(c10d)
        return result

    c10d.init_process_group = init_process_group


class _Finder:
    """Finds torch.distributed.distributed_c10d, and changes the module after its execution."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != _TARGET:
            return None
        sys.meta_path.remove(cls)
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                try:
                    _watch_process_groups(module)
                except Exception:
                    pass

            spec.loader.exec_module = exec_module
        return spec


_import_hidden()
if _DIRECTORY and os.environ.get("RANK"):
    try:
        _register_signal()
    except Exception:
        pass
    sys.meta_path.insert(0, _Finder)
