"""Writes dumps of NCCL's flight recorder for jobs that hang, and what torch's own analyzer finds.

Usage: nccl_dumps.py [DIRECTORY]   (default tests/golden/hangs/nccl)

NCCL needs GPUs, so the dumps are built from the description of their format: the comment of
build_collectives in torch/distributed/flight_recorder/components/builder.py, and a dump of Gloo,
which has the same fields. Each file NAME.json contains the evidence that the agents of launch would
collect from the dumps NAME-RANK.dump, and all findings of
torch.distributed.flight_recorder.fr_trace.
"""
import json
import pickle
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORLD = 4
# The ranks of each process group by its name, which a process numbers in this order.
GROUPS = {"0": [0, 1, 2, 3], "1": [0, 1], "2": [2, 3], "3": [1, 3]}
FRAMES = [
    {"name": "all_reduce", "filename": "/x/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", "line": 3000},
    {"name": "step", "filename": "/home/me/train.py", "line": 41},
]


class Recorder:
    """The flight recorder of one rank."""

    def __init__(self, rank, version):
        self.rank, self.version = rank, version
        self.groups = [name for name, ranks in GROUPS.items() if rank in ranks]
        self.entries, self.collectives, self.transfers = [], {}, {}

    def call(self, group, operation, inputs, outputs=None, *, dtype="Float", state="completed",
             same_number=False, is_p2p=False):
        """Records a collective, or a transfer such as `send 0->1`."""
        counters = self.transfers if is_p2p else self.collectives
        if not same_number:
            counters[group] = counters.get(group, 0) + 1
        outputs = inputs if outputs is None else outputs
        self.entries.append({
            "frames": FRAMES, "record_id": len(self.entries), "pg_id": self.groups.index(group),
            "process_group": (group, "default_pg" if group == "0" else "undefined"),
            "collective_seq_id": self.collectives.get(group, 0), "p2p_seq_id": self.transfers.get(group, 0),
            "op_id": len(self.entries) + 1, "profiling_name": "nccl:" + operation,
            "time_created_ns": 1_700_000_000_000_000_000 + len(self.entries),
            "input_sizes": inputs, "input_dtypes": [dtype] * len(inputs),
            "output_sizes": outputs, "output_dtypes": [dtype] * len(outputs),
            "state": state, "time_discovered_started_ns": None if state == "scheduled" else 1,
            "time_discovered_completed_ns": 2 if state == "completed" else None,
            "retired": state == "completed", "timeout_ms": 600000, "is_p2p": is_p2p,
        })

    def status(self, group):
        of_group = [e for e in self.entries if e["process_group"][0] == group and not e["is_p2p"]]
        done = [e["collective_seq_id"] for e in of_group if e["retired"]]
        return max([e["collective_seq_id"] for e in of_group], default=0), max(done, default=0)

    def dump(self):
        recorded = [name for name in self.groups if any(e["process_group"][0] == name for e in self.entries)]
        status = {}
        for name in recorded:
            entered, completed = self.status(name)
            status[str(self.groups.index(name))] = {
                "last_enqueued_collective": entered, "last_started_collective": entered,
                "last_completed_collective": completed}
        return {
            "version": self.version, "entries": self.entries, "pg_status": status,
            "pg_config": {name: {"name": name, "desc": "default_pg" if name == "0" else "undefined",
                                 "ranks": str(GROUPS[name])} for name in self.groups},
            "nccl_comm_state": {}, "comm_lib_version": "2.27.5", "rank": self.rank, "host_name": ""}

    def evidence(self):
        """Returns what an agent finds in the dump."""
        groups = []
        for name in self.groups:
            backend = "nccl" if any(e["process_group"][0] == name for e in self.entries) else ""
            entered, completed = self.status(name)
            if name in self.transfers:
                completed = -1  # NCCL may count transfers, too
            groups.append({"name": name, "backend": backend, "ranks": GROUPS[name],
                           "enqueued": entered, "completed": completed})
        entries = [{
            "group": e["process_group"][0], "seq": e["collective_seq_id"], "p2p": e["is_p2p"],
            "operation": e["profiling_name"], "retired": e["retired"],
            "inputs": str(e["input_sizes"]), "dtypes": str(e["input_dtypes"]),
            "outputs": str(e["output_sizes"]), "output_dtypes": str(e["output_dtypes"]),
        } for e in self.entries]
        # Recorded groups come first.
        return {"rank": self.rank, "groups": sorted(groups, key=lambda group: group["backend"] == ""),
                "entries": entries, "answered": True, "stack": [], "in_native_call": False, "thread": None}


def train(recorder):
    """Two steps without a failure: collectives of all groups."""
    for _ in range(2):
        recorder.call("0", "all_reduce", [[16, 4]])
        for group in recorder.groups[1:]:
            recorder.call(group, "_all_gather_base", [[8]], [[16]])
            recorder.call(group, "_reduce_scatter_base", [[16]], [[8]])


def subgroup_missing(rank, call):
    """Rank 3 does not enter a collective of ranks 2 and 3, and the others wait for both."""
    if rank == 2:
        call("2", "all_reduce", [[8]], state="started")
    if rank in (0, 1):
        call("0", "all_reduce", [[16, 4]], state="started")


def two_missing(rank, call):
    """Ranks 1 and 3 do not enter a collective of all ranks."""
    if rank in (0, 2):
        call("0", "barrier", [[1]], state="started")


def dtypes(rank, call):
    call("0", "all_reduce", [[8]], dtype="BFloat16" if rank == 2 else "Float", state="started")


def output_sizes(rank, call):
    call("0", "broadcast", [[8]], [[8]])
    call("0", "_reduce_scatter_base", [[16]], [[8 if rank == 3 else 4]], state="started")


def subgroup_order(rank, call):
    """Rank 2 calls two collectives of ranks 2 and 3 in another order."""
    if rank in (2, 3):
        first, second = ("all_reduce", "broadcast")[::1 if rank == 3 else -1]
        call("2", first, [[8]], state="started")
        call("2", second, [[8]], state="scheduled")


def all_to_all_totals(rank, call):
    call("0", "all_to_all", [[8 + (rank == 1)]], [[8]], state="started")


def all_to_all_missing(rank, call):
    if rank != 1:
        call("0", "all_to_all", [[8 + rank]], [[9]], state="started")


def coalesced_sizes(rank, call):
    """The second part of a reduce-scatter with uneven sizes differs on rank 1."""
    if rank in (0, 1):
        call("1", "_reduce_oop", [[4]], state="scheduled")
        call("1", "_reduce_oop", [[5 if rank == 1 else 4]], state="scheduled", same_number=True)
        call("1", "REDUCE_SCATTER_coalesced", [[]], state="scheduled", same_number=True)


def coalesced_missing(rank, call):
    if rank == 0:
        call("1", "_broadcast_oop", [[4]], state="started")
        call("1", "_broadcast_oop", [[4]], state="started", same_number=True)
        call("1", "ALLGATHER_coalesced", [[]], state="started", same_number=True)


def send_without_recv(rank, call):
    """Rank 3, which is rank 1 of the group, does not receive from rank 2."""
    if rank == 2:
        call("2", "send 0->1", [[8]], state="started", is_p2p=True)


def batch_without_peer(rank, call):
    """Rank 1 does not take part in a batch of transfers with rank 3."""
    if rank == 3:
        call("3", "send 1->0", [[8]], state="started", is_p2p=True)
        call("3", "recv 1<-0", [[8]], state="started", same_number=True, is_p2p=True)
        call("3", "coalesced", [[]], state="started", same_number=True, is_p2p=True)


SCENARIOS = [subgroup_missing, two_missing, dtypes, output_sizes, subgroup_order, all_to_all_totals,
             all_to_all_missing, coalesced_sizes, coalesced_missing, send_without_recv, batch_without_peer]


def analyze(directory):
    """Returns all collectives that the analyzer of torch does not find complete."""
    from torch.distributed.flight_recorder import fr_trace

    output = Path(directory, "output")
    try:
        fr_trace.main([str(directory), "-p", "rank-", "-o", str(output)])
    except KeyError as error:
        # The analyzer of torch 2.15 fails if a rank does not take part in a batch of transfers.
        print("the analyzer fails: KeyError", error)
        return []
    _, database = pickle.loads(output.read_bytes())
    findings = []
    for collective in database.collectives:
        if not collective.pass_check or collective.missing_ranks:
            different = collective.mismatch_collectives or {}
            findings.append({
                "group": str(collective.group_id), "seq": collective.collective_seq_id,
                "missing": sorted(collective.missing_ranks or []),
                "culprits": {str(rank): other.type_of_mismatch.state.name for rank, other in different.items()},
            })
    return findings


def write_scenario(scenario, version, target):
    name = scenario.__name__
    with tempfile.TemporaryDirectory() as directory:
        recorders = [Recorder(rank, version) for rank in range(WORLD)]
        for recorder in recorders:
            train(recorder)
            scenario(recorder.rank, recorder.call)
            dump = pickle.dumps(recorder.dump(), protocol=2)  # the protocol of torch
            Path(directory, f"rank-{recorder.rank}").write_bytes(dump)
            (target / f"{name}-{recorder.rank}.dump").write_bytes(dump)
        recorded = {"evidence": [recorder.evidence() for recorder in recorders], "analyzer": analyze(directory)}
    (target / f"{name}.json").write_text(json.dumps(recorded) + "\n")
    print(name, recorded["analyzer"])


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "tests/golden/hangs/nccl")
    target.mkdir(parents=True, exist_ok=True)
    # The versions of the dumps of torch 2.8 and of torch 2.15.
    for number, scenario in enumerate(SCENARIOS):
        write_scenario(scenario, ("2.9", "2.10")[number % 2], target)
