"""Runs scripts in processes forked from one that has imported what they need: starting Python and importing torch, transformers and
DeepSpeed takes five seconds of a processor for each process, and tests start dozens.

    fork_server.py serve SOCKET MODULE…         until its stdin ends
    fork_server.py run SOCKET SCRIPT ARGUMENT…  in place of `python SCRIPT ARGUMENT…`

The script gets the arguments, environment, directory, stdin, stdout and stderr of `run`, which ends as the script does, hands
signals on to it, and takes it along when it is killed. What is read from the environment while modules are imported is that of `serve`.
"""
import json
import os
import signal
import socket
import struct
import sys

LIMIT = 1 << 22  # bytes of arguments and environment
HANDED_ON = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


def run(path, script, *arguments):
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    what = json.dumps(dict(script=script, arguments=arguments, directory=os.getcwd(), environment=dict(os.environ))).encode()
    socket.send_fds(server, [struct.pack("<I", len(what))], [0, 1, 2])
    server.sendall(what)
    for number in HANDED_ON:
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    status = struct.unpack("<i", server.recv(4, socket.MSG_WAITALL) or sys.exit("the server is gone"))[0]
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code in HANDED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def become(what, descriptors):
    """In the child: the script."""
    import runpy

    for number in [*HANDED_ON, signal.SIGCHLD]:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for wanted, given in enumerate(descriptors):
        os.dup2(given, wanted)
        os.close(given)
    os.chdir(what["directory"])
    os.environ.clear()
    os.environ.update(what["environment"])
    sys.argv = [what["script"], *what["arguments"]]
    sys.path[0] = os.path.dirname(os.path.abspath(what["script"]))
    code = 0
    try:
        runpy.run_path(what["script"], run_name="__main__")
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def receive(client):
    """What to run, and with which descriptors; nothing when the other side is gone."""
    size, descriptors, _, _ = socket.recv_fds(client, 4, 3)
    length = struct.unpack("<I", size)[0] if len(size) == 4 else 0
    if not 0 < length <= LIMIT or len(descriptors) != 3:
        return None, descriptors
    return json.loads(client.recv(length, socket.MSG_WAITALL)), descriptors


def serve(path, *modules):
    import importlib
    import selectors

    for module in modules:
        importlib.import_module(module)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    ended, wake = socket.socketpair()
    wake.setblocking(False), ended.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    waiting, ready = {}, selectors.DefaultSelector()
    for what in (listening, ended, sys.stdin):
        ready.register(what, selectors.EVENT_READ)
    print("ready", flush=True)

    def start():
        client, _ = listening.accept()
        what, descriptors = receive(client)
        child = os.fork() if what else None
        if child == 0:
            signal.set_wakeup_fd(-1)
            for other in [client, listening, ended, wake, *(c for c, _ in waiting.values())]:
                other.close()
            become(what, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if child:
            waiting[client.fileno()] = (client, child)
            ready.register(client, selectors.EVENT_READ)

    while True:
        for key, _ in ready.select():
            if key.fileobj is sys.stdin:
                for _, child in waiting.values():
                    os.kill(child, signal.SIGKILL)
                return
            if key.fileobj is listening:
                start()
            elif key.fileobj is ended:
                ended.recv(4096)
            elif key.fd in waiting:
                # a signal to hand on, or the end of `run`
                number = key.fileobj.recv(1)
                os.kill(waiting[key.fd][1], number[0] if number else signal.SIGKILL)
        for descriptor, (client, child) in list(waiting.items()):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                del waiting[descriptor]
                ready.unregister(client)
                try:
                    client.sendall(struct.pack("<i", status))
                except OSError:
                    pass  # it is gone
                client.close()


if __name__ == "__main__":
    {"serve": serve, "run": run}[sys.argv[1]](*sys.argv[2:])
