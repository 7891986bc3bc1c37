"""Runs Python scripts in processes that are forked from a server, which has imported their modules.

The tests use this server because they start dozens of processes, and starting Python with torch,
transformers and DeepSpeed takes five seconds of CPU time.

    fork_server.py serve SOCKET MODULE…         serves until its stdin is closed
    fork_server.py run SOCKET SCRIPT ARGUMENT…  replaces `python SCRIPT ARGUMENT…`

The script gets the arguments, environment, directory, stdin, stdout and stderr of `run`. `run` exits
with the status of the script and forwards signals to it. If `run` is killed, the script is killed,
too. Modules see the environment of `serve` while they are imported.
"""
import json
import os
import signal
import socket
import struct
import sys

MAX_REQUEST_BYTES = 1 << 22  # bytes of arguments and environment
FORWARDED_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


def run_in_server(path, script, *arguments):
    """Runs a script in the server at the socket `path`, and ends this process with the status of
    the script."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    request = json.dumps(dict(script=script, arguments=arguments, directory=os.getcwd(), environment=dict(os.environ))).encode()
    socket.send_fds(server, [struct.pack("<I", len(request))], [0, 1, 2])
    server.sendall(request)
    for number in FORWARDED_SIGNALS:
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    status = struct.unpack("<i", server.recv(4, socket.MSG_WAITALL) or sys.exit("fork_server: the server closed the connection"))[0]
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code in FORWARDED_SIGNALS:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def run_script(request, descriptors):
    """Runs the script of a request in this forked child, and exits."""
    import runpy

    for number in [*FORWARDED_SIGNALS, signal.SIGCHLD]:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, received in enumerate(descriptors):
        os.dup2(received, number)
        os.close(received)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["script"], *request["arguments"]]
    sys.path[0] = os.path.dirname(os.path.abspath(request["script"]))
    code = 0
    try:
        runpy.run_path(request["script"], run_name="__main__")
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def receive_request(client):
    """Receives a request and its descriptors. The request is None if the client closed the
    connection."""
    size, descriptors, _, _ = socket.recv_fds(client, 4, 3)
    length = struct.unpack("<I", size)[0] if len(size) == 4 else 0
    if not 0 < length <= MAX_REQUEST_BYTES or len(descriptors) != 3:
        return None, descriptors
    return json.loads(client.recv(length, socket.MSG_WAITALL)), descriptors


def serve(path, *modules):
    """Imports the modules, and runs scripts for clients until stdin is closed. Then kills the
    running scripts."""
    import gc
    import importlib
    import selectors

    for module in modules:
        importlib.import_module(module)
    # Scripts such as those with DeepSpeed collect garbage often, which would visit all objects of the
    # modules, and copy their pages.
    gc.freeze()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    ended, wake = socket.socketpair()
    wake.setblocking(False), ended.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children, ready = {}, selectors.DefaultSelector()  # children: client's descriptor to (client, pid)
    for source in (listening, ended, sys.stdin):
        ready.register(source, selectors.EVENT_READ)
    print("ready", flush=True)

    def start_child():
        """Accepts a client and forks the child that runs its script."""
        client, _ = listening.accept()
        request, descriptors = receive_request(client)
        child = os.fork() if request else None
        if child == 0:
            signal.set_wakeup_fd(-1)
            for other in [client, listening, ended, wake, *(c for c, _ in children.values())]:
                other.close()
            run_script(request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if child:
            children[client.fileno()] = (client, child)
            ready.register(client, selectors.EVENT_READ)

    while True:
        for key, _ in ready.select():
            if key.fileobj is sys.stdin:
                for _, child in children.values():
                    os.kill(child, signal.SIGKILL)
                return
            if key.fileobj is listening:
                start_child()
            elif key.fileobj is ended:
                ended.recv(4096)
            elif key.fd in children:
                # a signal to forward, or the end of `run`
                number = key.fileobj.recv(1)
                os.kill(children[key.fd][1], number[0] if number else signal.SIGKILL)
        for descriptor, (client, child) in list(children.items()):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                del children[descriptor]
                ready.unregister(client)
                try:
                    client.sendall(struct.pack("<i", status))
                except OSError:
                    pass  # `run` has ended
                client.close()


if __name__ == "__main__":
    {"serve": serve, "run": run_in_server}[sys.argv[1]](*sys.argv[2:])
