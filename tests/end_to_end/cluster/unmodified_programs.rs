//! Runs unmodified programs for torchrun, Accelerate and DeepSpeed on four hosts.
use super::*;
use std::collections::BTreeMap;

/// The environment variables that torchrun (torch 2.15) and DeepSpeed's launcher (0.19) set for
/// every worker on a machine without GPUs, as recorded by workers that these launchers started.
/// `accelerate launch` also sets `ACCELERATE_*` from its configuration file (see
/// [`ACCELERATE_SCRIPT`]).
const LAUNCHER_VARIABLES: [(&str, &str); 2] = [
    (
        "torchrun",
        "RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME LOCAL_WORLD_SIZE WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE MASTER_ADDR \
         MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE \
         TORCHELASTIC_ERROR_FILE TORCH_NCCL_ASYNC_ERROR_HANDLING OMP_NUM_THREADS",
    ),
    ("deepspeed", "MASTER_ADDR MASTER_PORT WORLD_SIZE CROSS_RANK CROSS_SIZE LOCAL_SIZE RANK LOCAL_RANK"),
];

#[test]
fn every_rank_on_every_host_has_the_variables_of_torchrun_and_deepspeed() {
    let test =
        "cluster::unmodified_programs::every_rank_on_every_host_has_the_variables_of_torchrun_and_deepspeed";
    let Some((job_dir, hosts)) = start_hosts(test) else { return };
    let job = "name: tiny\ncluster: {workers_per_host: 2}\nrun: {command: [sh, -c, 'env > env.$RANK']}\n";
    start_run(&job_dir, &write_job(&job_dir, &hosts, "env", job, ALL_HOSTS), &[])
        .wait_for_end()
        .expect_success();
    let mut rendezvous = Vec::new();
    for rank in 0..8 {
        let text = fs::read_to_string(job_dir.path(&format!("env.{rank}"))).unwrap();
        let env: BTreeMap<&str, &str> = text.lines().filter_map(|l| l.split_once('=')).collect();
        for (launcher, names) in LAUNCHER_VARIABLES {
            let missing: Vec<_> = names.split_whitespace().filter(|n| !env.contains_key(n)).collect();
            assert!(missing.is_empty(), "{launcher} sets {missing:?}, rank {rank} has {text}");
        }
        let (host, local) = ((rank / 2).to_string(), (rank % 2).to_string());
        for (name, value) in [
            ("RANK", rank.to_string().as_str()),
            ("LOCAL_RANK", &local),
            ("GROUP_RANK", &host),
            ("CROSS_RANK", &host),
            ("WORLD_SIZE", "8"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("LOCAL_SIZE", "2"),
            ("GROUP_WORLD_SIZE", "4"),
            ("CROSS_SIZE", "4"),
            ("ROLE_NAME", "default"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ] {
            assert_eq!(env[name], value, "{name} of rank {rank}");
        }
        let names = ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"];
        rendezvous.push(names.map(|name| env[name].to_owned()));
    }
    assert!(rendezvous.iter().all(|values| *values == rendezvous[0]), "{rendezvous:?}");
    assert_nothing_left(&hosts, &HOSTS);
}

/// A data-parallel training script as in PyTorch's examples. Each rank writes the number of ranks
/// with equal parameters to a file.
const DDP_SCRIPT: &str = r#"
import os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(5):
    x = torch.randn(4, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
gathered = [torch.empty_like(parameters) for _ in range(dist.get_world_size())]
dist.all_gather(gathered, parameters)
equal = sum(torch.equal(g, parameters) for g in gathered)
open(f"equal.{rank}", "w").write(f"{equal} on {os.uname().nodename}")
# as torch's documentation recommends: a barrier, and no object that outlives the group
dist.barrier()
del model
dist.destroy_process_group()
# torch's threads that want Python's lock while the interpreter ends abort the process (Python up to 3.13)
sys.stdout.flush()
os._exit(0)
"#;

#[test]
fn a_ddp_script_runs_unchanged_on_four_hosts() {
    let test = "cluster::unmodified_programs::a_ddp_script_runs_unchanged_on_four_hosts";
    let Some(python) = support::find_python_or_skip(test) else { return };
    let Some((job_dir, hosts)) = start_hosts(test) else { return };
    fs::write(job_dir.path("ddp.py"), DDP_SCRIPT).unwrap();
    let python = serde_json::to_string(&python).unwrap();
    let job = format!(
        "name: tiny\ncluster: {{workers_per_host: 2}}\nrun: {{command: [{python}, ddp.py], grace_period: 5s, env: {{OMP_NUM_THREADS: '1'}}}}\n"
    );
    start_run(&job_dir, &write_job(&job_dir, &hosts, "ddp", &job, ALL_HOSTS), &[])
        .wait_for_end()
        .expect_success();
    for rank in 0..8 {
        let equal = fs::read_to_string(job_dir.path(&format!("equal.{rank}"))).unwrap();
        assert_eq!(equal, format!("8 on h{}", rank / 2));
    }
    assert_nothing_left(&hosts, &HOSTS);
}

/// A Python script that writes to a file which ranks, devices and settings Accelerate has found.
/// `accelerate launch --multi_gpu` (1.15, without a configuration file) sets variables to the
/// defaults of the library. launch does not set these variables, because they would hide the user's
/// values; the library must choose the same defaults without them.
const ACCELERATE_SCRIPT: &str = r#"
import json, os, sys
import accelerate, torch
accelerator = accelerate.Accelerator(cpu=True)
state, dynamo = accelerator.state, accelerator.state.dynamo_plugin
total = accelerator.reduce(torch.tensor([float(accelerator.process_index)]), "sum").item()
report = dict(
    total=total, index=accelerator.process_index, local=accelerator.local_process_index, world=accelerator.num_processes,
    type=str(accelerator.distributed_type), backend=state.backend, debug=state.debug, on=os.uname().nodename,
    ACCELERATE_MIXED_PRECISION=accelerator.mixed_precision, ACCELERATE_DYNAMO_BACKEND=dynamo.backend.value,
    ACCELERATE_DYNAMO_MODE=dynamo.mode, ACCELERATE_DYNAMO_USE_FULLGRAPH=dynamo.fullgraph,
    ACCELERATE_DYNAMO_USE_DYNAMIC=dynamo.dynamic, ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=dynamo.use_regional_compilation)
json.dump(report, open(f"report.{accelerator.process_index}", "w"))
accelerator.wait_for_everyone()
accelerator.end_training()
os._exit(0)  # as above
"#;

/// A Python script that writes to a file which ranks and addresses DeepSpeed has found. DeepSpeed
/// reads ranks and addresses from the environment, not from MPI.
const DEEPSPEED_SCRIPT: &str = r#"
import json, os, sys
import deepspeed, torch
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # avoids a compilation
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
rank = deepspeed.comm.get_rank()
total = torch.tensor([float(rank)])
deepspeed.comm.all_reduce(total)
report = dict(
    total=total.item(), index=rank, local=deepspeed.comm.get_local_rank(), world=deepspeed.comm.get_world_size(),
    on=os.uname().nodename)
json.dump(report, open(f"report.{rank}", "w"))
deepspeed.comm.barrier()
deepspeed.comm.destroy_process_group()
os._exit(0)  # as above
"#;

/// Runs `script` as two workers on each host. Checks rank, host and the result of a collective in
/// the report of each rank, and returns the reports.
fn run_reporting_script(
    job_dir: &JobDirectory,
    hosts: &SimulatedHosts,
    python: &std::path::Path,
    name: &str,
    script: &str,
) -> Vec<Value> {
    fs::write(job_dir.path("script.py"), script).unwrap();
    let python = serde_json::to_string(python).unwrap();
    let job = format!(
        "name: tiny\ncluster: {{workers_per_host: 2}}\nrun: {{command: [{python}, script.py], grace_period: 5s, env: {{OMP_NUM_THREADS: '1'}}}}\n"
    );
    start_run(job_dir, &write_job(job_dir, hosts, name, &job, ALL_HOSTS), &[])
        .wait_for_end()
        .expect_success();
    let read_report = |rank: u64| {
        let file = job_dir.path(&format!("report.{rank}"));
        let report: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        fs::remove_file(file).unwrap();
        let expected = serde_json::json!([28.0, rank, rank % 2, 8, format!("h{}", rank / 2)]);
        let values = ["total", "index", "local", "world", "on"].map(|key| report[key].clone());
        assert_eq!(Value::from(values.to_vec()), expected, "{name}, rank {rank}: {report}");
        report
    };
    (0..8).map(read_report).collect()
}

#[test]
fn scripts_of_accelerate_and_deepspeed_run_unchanged_on_four_hosts() {
    let test =
        "cluster::unmodified_programs::scripts_of_accelerate_and_deepspeed_run_unchanged_on_four_hosts";
    let Some(python) = support::find_deepspeed_python_or_skip(test) else { return };
    let Some((job_dir, hosts)) = start_hosts(test) else { return };
    for report in run_reporting_script(&job_dir, &hosts, &python, "accelerate", ACCELERATE_SCRIPT) {
        for (name, value) in [
            ("type", "DistributedType.MULTI_CPU".into()),
            ("backend", "gloo".into()),
            ("debug", Value::from(false)),
            ("ACCELERATE_MIXED_PRECISION", "no".into()),
            ("ACCELERATE_DYNAMO_BACKEND", "NO".into()),
            ("ACCELERATE_DYNAMO_MODE", "default".into()),
            ("ACCELERATE_DYNAMO_USE_FULLGRAPH", false.into()),
            // `accelerate launch` sets False; only torch.compile reads this value and is not in use
            ("ACCELERATE_DYNAMO_USE_DYNAMIC", Value::Null),
            ("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", false.into()),
        ] {
            assert_eq!(report[name], value, "{name}: {report}");
        }
    }
    run_reporting_script(&job_dir, &hosts, &python, "deepspeed", DEEPSPEED_SCRIPT);
    assert_nothing_left(&hosts, &HOSTS);
}
