"""Records hangs of three ranks over Gloo, and what torch's own analyzer of flight recorders finds.

Usage: hangs.py [DIRECTORY]   (default tests/golden/hangs)

Each file NAME.json contains the evidence that the agents of launch would collect (without the state
of threads), and the findings of torch.distributed.flight_recorder.fr_trace. The files
NAME-RANK.dump are the dumps that these findings come from.
"""
import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOOK = ROOT / "launcher/src/agent/hang/sitecustomize.py"
WORLD = 3
# The calls of each rank after two common calls of all_reduce with four elements.
SCENARIOS = {
    "never_entered": {0: ["sum4"], 1: [], 2: ["sum4"]},
    "two_never_entered": {0: ["sum4", "gather"], 1: ["sum4"], 2: ["sum4"]},
    "different_order": {0: ["sum4", "gather"], 1: ["gather", "sum4"], 2: ["gather", "sum4"]},
    "different_shapes": {0: ["sum4"], 1: ["sum0"], 2: ["sum0"]},
}


def run_rank(scenario, directory):
    """Runs one rank, which records its dump and its evidence while its main thread hangs."""
    import threading

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _dump_fr_trace

    spec = importlib.util.spec_from_file_location("hook", HOOK)
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def record():
        time.sleep(8)
        dump = pickle.loads(_dump_fr_trace(True, True, False))
        # Gloo records the configuration of the default group without its name.
        dump["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(WORLD)))}}
        for entry in dump["entries"]:
            entry["profiling_name"] = entry["profiling_name"].replace("gloo:", "nccl:")
            for frame in entry["frames"]:
                frame["filename"] = frame["filename"].replace(str(ROOT) + "/", "").replace(sys.prefix, "")
        # The protocol of torch.
        Path(directory, f"rank-{rank}").write_bytes(pickle.dumps(dump, protocol=2))
        stacks, in_call = hook._list_stacks()
        main = next(stack for stack in stacks if stack["main"])
        for frame in main["frames"]:
            frame["file"] = frame["file"].replace(str(ROOT) + "/", "").replace(sys.prefix, "")
        evidence = {"rank": rank, **hook._describe_collectives(dist.distributed_c10d), "answered": True, "stack": main["frames"], "in_native_call": in_call,
                    "thread": {"state": "S", "wait_channel": "", "wait": "futex", "busy": False}}
        Path(directory, f"evidence-{rank}.json").write_text(json.dumps(evidence))
        time.sleep(4)  # the other ranks record, too
        os._exit(0)

    x = torch.ones(4)
    for _ in range(2):
        dist.all_reduce(x)
    threading.Thread(target=record).start()
    calls = {
        "sum4": lambda: dist.all_reduce(torch.ones(4)),
        "sum0": lambda: dist.all_reduce(torch.ones(0)),
        "gather": lambda: dist.all_gather([torch.zeros(4) for _ in range(WORLD)], x),
    }
    for call in SCENARIOS[scenario][rank]:
        calls[call]()
    time.sleep(600)


def analyze(directory):
    """Returns what torch's analyzer finds: the first collective that does not match."""
    from torch.distributed.flight_recorder import fr_trace

    output = Path(directory, "output")
    fr_trace.main([str(directory), "-p", "rank-", "-o", str(output)])
    _, database = pickle.loads(output.read_bytes())
    for collective in database.collectives:
        if not collective.pass_check or collective.missing_ranks:
            different = collective.mismatch_collectives or {}
            return {
                "seq": collective.collective_seq_id,
                "missing": sorted(collective.missing_ranks or []),
                "culprits": {str(rank): other.type_of_mismatch.state.name for rank, other in different.items()},
            }
    return None


def record_scenario(scenario, target):
    with tempfile.TemporaryDirectory() as directory:
        port = str(20000 + os.getpid() % 10000)
        ranks = [subprocess.Popen([sys.executable, __file__, "--rank", scenario, directory],
                                  env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(WORLD),
                                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
                 for rank in range(WORLD)]
        for rank in ranks:
            rank.wait(120)
        evidence = [json.loads(Path(directory, f"evidence-{rank}.json").read_text()) for rank in range(WORLD)]
        recorded = {"evidence": evidence, "analyzer": analyze(directory)}
        for rank in range(WORLD):
            shutil.copy(Path(directory, f"rank-{rank}"), target / f"{scenario}-{rank}.dump")
    text = json.dumps(recorded, indent=1)
    (target / f"{scenario}.json").write_text(text + "\n")
    print(scenario, recorded["analyzer"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(*sys.argv[2:])
    else:
        target = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "tests/golden/hangs")
        target.mkdir(parents=True, exist_ok=True)
        for scenario in SCENARIOS:
            record_scenario(scenario, target)
