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
# The functions that dump torch's flight recorders: that of NCCL, and that of other backends.
_RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")
# The name and the backend of each process group, by its recorder and its number in this process.
_group_names = {}


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


def _dump_json(recorder, *arguments):
    text = _dump(recorder + "_json", *arguments)
    return _load(text) if text else {}


def _name_group(entry):
    """Returns the name and the backend of the process group of an entry of a flight recorder. A
    group may have several backends, each of which numbers its collectives."""
    backend, separator, _ = entry["profiling_name"].rpartition(":")
    return str(entry["process_group"][0]), backend if separator else ""


def _list_counters():
    """Returns the numbers of the last entered and completed collective of each process group, by
    its name and backend, and a sum that changes with them."""
    counters, count = {}, 0
    for recorder in _RECORDERS:
        status = _dump_json(recorder, False, False).get("pg_status") or {}
        # The status has the numbers of the groups in this process, which are not their names. Only
        # the entries have both.
        if any((recorder, number) not in _group_names for number in status):
            for entry in _dump_json(recorder, True, False).get("entries") or []:
                _group_names[recorder, str(entry["pg_id"])] = _name_group(entry)
            for number in status:
                _group_names.setdefault((recorder, number), None)
        # A group that was destroyed may have had the same name. The newest one has the last number.
        for number in sorted(status, key=int):
            pair = [int(status[number].get("last_%s_collective" % word, -1)) for word in ("enqueued", "completed")]
            count += sum(max(value, 0) for value in pair)
            if _group_names[recorder, number]:
                counters[_group_names[recorder, number]] = pair
    return counters, count


def _is_recording():
    """Returns whether torch's flight recorders are on."""
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    sizes = [os.environ[name] for name in names if os.environ.get(name)]
    return sizes[:1] != ["0"]


def _list_status(c10d):
    """Returns the numbers of collectives of every process group of this process, and a number that
    changes with them."""
    counters, count = _list_counters()
    groups = []
    world = c10d._world
    for group, (declared, _) in list(world.pg_map.items())[:_MAX_GROUPS]:
        name = str(world.pg_names.get(group, ""))
        ranks = list(world.pg_group_ranks.get(group, {}))
        declared = str(declared)
        recorded = {backend: pair for (known, backend), pair in counters.items() if known == name}
        if not recorded:
            # A group with several backends has only the sequence number of one of them.
            has_one = declared.isalnum() and declared != "undefined"
            recorded = {declared if has_one else "": [0, 0] if _is_recording() else [-1, -1]}
        try:
            sequence = int(group._get_sequence_number_for_group())
        except Exception:
            sequence = -1
        count += max(sequence, 0)
        for backend, (enqueued, completed) in recorded.items():
            # The sequence number of NCCL includes a collective that waits for the connections and is
            # not recorded yet. That of Gloo also counts transfers between two ranks.
            if sequence >= 0 and len(recorded) == 1 and (backend.startswith("nccl") or not _is_recording()):
                enqueued = sequence
            groups.append({"name": name[:_MAX_TEXT], "backend": backend[:_MAX_TEXT], "ranks": ranks,
                           "enqueued": enqueued, "completed": completed})
    return groups, count


def _is_waiting():
    """Returns whether the flight recorder has a collective that is not complete."""
    for recorder in _RECORDERS:
        # Only with the entries that are active. Entries of Gloo always count as active.
        for entry in _dump_json(recorder, True, True).get("entries") or []:
            if not _is_complete(entry):
                return True
    return False


def _is_complete(entry):
    return bool(entry.get("retired")) or entry["state"] == "completed"


def _describe_status(c10d, previous):
    """Returns the status as JSON, and the number that shows a progress of collectives. `previous`
    is the number of the status before."""
    import json

    groups, count = _list_status(c10d)
    status = {"count": count if groups else None, "waiting": count == previous and _is_waiting()}
    text = json.dumps({**status, "groups": groups})
    # The lists of ranks may be long.
    return (text if len(text) < _STATUS_BYTES else json.dumps({**status, "groups": []})), count


def _select_entries(entries):
    """Returns the entries of groups that exist: all if there are few, else the newest ones and the
    oldest ones that are not complete."""
    numbers = {}
    for entry in entries:
        name = _name_group(entry)
        numbers[name] = max(numbers.get(name, -1), entry["pg_id"])
    entries = [entry for entry in entries if entry["pg_id"] == numbers[_name_group(entry)]]
    if len(entries) <= _MAX_ENTRIES:
        return entries
    half = _MAX_ENTRIES // 2
    return [entry for entry in entries[:-half] if not _is_complete(entry)][:half] + entries[-half:]


def _list_entries():
    """Returns the newest entries of torch's flight recorders."""
    import pickle

    entries = []
    for recorder in _RECORDERS:
        data = _dump(recorder, True, False, False)
        # The pickle was made by torch in this process.
        dump = pickle.loads(data) if data else {}
        for entry in _select_entries(dump.get("entries") or []):
            entries.append({
                "group": str(entry["process_group"][0])[:_MAX_TEXT],
                "seq": entry["collective_seq_id"], "p2p": bool(entry.get("is_p2p")),
                "operation": entry["profiling_name"][:_MAX_TEXT],
                "retired": _is_complete(entry),
                "inputs": str(entry.get("input_sizes"))[:_MAX_TEXT],
                "dtypes": str(entry.get("input_dtypes"))[:_MAX_TEXT],
                "outputs": str(entry.get("output_sizes"))[:_MAX_TEXT],
                "output_dtypes": str(entry.get("output_dtypes"))[:_MAX_TEXT],
            })
    return entries


def _describe_collectives(c10d):
    """Returns the process groups and the newest entries of torch's flight recorders."""
    groups, entries = _list_status(c10d)[0], _list_entries()
    # NCCL may have stored the number of a transfer instead of that of a collective.
    with_transfers = {entry["group"] for entry in entries if entry["p2p"]}
    for group in groups:
        if group["name"] in with_transfers:
            group["completed"] = -1
    return {"groups": groups, "entries": entries}


def _find_transfer(c10d):
    """Returns the call of send or recv in which the main thread waits, with the other rank."""
    import threading

    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None and frame.f_code.co_filename.endswith("/torch/distributed/c10d_logger.py"):
        frame = frame.f_back
    name = frame.f_code.co_name if frame is not None else None
    if name not in ("send", "recv") or frame.f_code.co_filename != c10d.__file__:
        return None
    values, key = frame.f_locals, "dst" if name == "send" else "src"
    peer, number = values.get(key), values.get("group_" + key)
    if peer is None and number is not None:
        peer = c10d.get_global_rank(values.get("group") or c10d.GroupMember.WORLD, number)
    return {"operation": name, "peer": peer} if isinstance(peer, int) and peer >= 0 else None


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
            try:
                transfer = _find_transfer(c10d)
            except Exception:
                transfer = None
            _write(base + ".evidence", {**_describe_collectives(c10d), "stacks": stacks,
                                        "in_call": in_call, "transfer": transfer})


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
    collectives = _describe_collectives(c10d)
    groups, entries = collectives["groups"], collectives["entries"]
    # Gloo counts a collective that has failed as completed. It is the newest one.
    for failed in [entry for entry in entries if not entry["p2p"]][-1:]:
        failed["retired"] = False
        for group in groups:
            backend = failed["operation"].rpartition(":")[0]
            if (group["name"], group["backend"]) == (failed["group"], backend):
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
