//! The main job over real SSH: the losses of one machine, on any number of hosts, through saves, faults and restarts; programs
//! that were written for torchrun; two jobs beside one another.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod support;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Read},
    process::{Child, ChildStdout, Stdio},
    thread,
    time::{Duration, Instant},
};
use support::{FinishedRun, JobDirectory, TINY, hosts::Hosts};

const HOSTS: [&str; 4] = ["h0", "h1", "h2", "h3"];
const LIMIT: Duration = Duration::from_secs(90);

/// A place that all hosts see under the same path, so that its checkpoint directory is shared.
fn up(test: &str) -> Option<(JobDirectory, Hosts)> {
    let place = JobDirectory::new();
    let hosts = Hosts::sharing(test, 4, &place.path(""))?;
    fs::create_dir(place.path("home")).unwrap();
    fs::create_dir(place.path("far")).unwrap();
    Some((place, hosts))
}

/// The job of `place` on these hosts, written to `far/NAME.yaml`; the settings that start it.
fn on(place: &JobDirectory, hosts: &Hosts, name: &str, job: &str, list: &str) -> Vec<String> {
    let text = job.replace("name: tiny", &format!("name: {name}"));
    fs::write(place.path(&format!("far/{name}.yaml")), text).unwrap();
    let root = place.path("").display().to_string();
    let set = [
        format!("cluster.hosts={list}"),
        format!("cluster.ssh.config={}", hosts.config().display()),
        format!("run.workdir={}", root.trim_end_matches('/')),
        "run.logs.dir=/scratch/runs/{run}".to_owned(),
    ];
    let file = [format!("far/{name}.yaml"), "--json".to_owned()];
    file.into_iter().chain(set.into_iter().flat_map(|s| ["--set".to_owned(), s])).collect()
}

struct Running {
    child: Child,
    reader: BufReader<ChildStdout>,
    out: String,
}

fn start(place: &JobDirectory, args: &[String], more: &[&str]) -> Running {
    let args: Vec<&str> =
        args.iter().map(String::as_str).chain(more.iter().flat_map(|s| ["--set", s])).collect();
    let mut command = place.command(&args);
    command.env("HOME", place.path("home")).env_remove("SSH_AUTH_SOCK");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let reader = BufReader::new(child.stdout.take().unwrap());
    Running { child, reader, out: String::new() }
}

impl Running {
    /// Reads events until one of `kind`, at or after `step`.
    fn until(&mut self, kind: &str, step: u64) -> Value {
        loop {
            let mut line = String::new();
            if self.reader.read_line(&mut line).unwrap() == 0 {
                let mut talk = String::new();
                self.child.stderr.take().unwrap().read_to_string(&mut talk).unwrap();
                panic!("no {kind} event in:\n{}\n{talk}", self.out);
            }
            self.out.push_str(&line);
            let event: Value = serde_json::from_str(&line).unwrap();
            if event["event"] == kind && event["step"].as_u64().unwrap_or(step) >= step {
                return event;
            }
        }
    }

    fn end(mut self) -> FinishedRun {
        let mut talk = self.child.stderr.take().unwrap();
        let talk = thread::spawn(move || {
            let mut text = Vec::new();
            talk.read_to_end(&mut text).map(|_| text).unwrap()
        });
        self.reader.read_to_string(&mut self.out).unwrap();
        let status = self.child.wait().unwrap();
        let stdout = std::mem::take(&mut self.out).into_bytes();
        FinishedRun::from_output(&std::process::Output { status, stdout, stderr: talk.join().unwrap() })
    }
}

/// No process of a job and no shared memory on any of the hosts.
fn nothing_stays(hosts: &Hosts, names: &[&str]) {
    let began = Instant::now();
    loop {
        let left: Vec<_> = names.iter().flat_map(|host| hosts.processes(host)).collect();
        if left.is_empty() {
            break;
        }
        assert!(began.elapsed() < LIMIT, "still there: {left:?}");
        thread::sleep(Duration::from_millis(10));
    }
    for host in names {
        let files = hosts.shell(host, "ls -A /dev/shm; ls -A /root/.cache/launch/bin | wc -l");
        assert_eq!(files, "1\n", "files on {host}");
    }
}

const ALL: &str = "[\"h[0-3]\"]";

#[test]
fn four_hosts_have_the_losses_of_one_machine_and_others_go_on() {
    let Some((place, hosts)) = up("cluster::four_hosts_have_the_losses_of_one_machine_and_others_go_on")
    else {
        return;
    };
    let whole = place.run(&["resume.from=never", "checkpoint.every=never"]).succeeded().losses();
    assert_eq!(whole.len(), 20);
    for stage in [1, 3] {
        let name = format!("stage{stage}");
        let args = on(&place, &hosts, &name, TINY, ALL);
        let stage = format!("train.zero.stage={stage}");
        let far = start(&place, &args, &[&stage, "checkpoint.keep=0"]).end().succeeded();
        assert_eq!(far.losses(), whole, "{stage}");
        assert_eq!(far.named("start")[0]["world"], 8);
        for (list, workers) in [("[h0, h1, h3]", 1), ("[h2]", 4)] {
            let args = on(&place, &hosts, &name, TINY, list);
            let from = format!("resume.from=runs/{name}/checkpoints/step-00000010");
            let workers = format!("cluster.workers_per_host={workers}");
            let more = [stage.as_str(), &from, &workers, "checkpoint.dir=elsewhere-{name}"];
            let rest = start(&place, &args, &more).end().succeeded();
            assert_eq!(rest.losses(), whole[10..], "{stage}, {list}");
            assert_eq!(rest.named("resume")[0]["world"], 8);
        }
    }
    nothing_stays(&hosts, &HOSTS);
}

/// Kills a worker of host 1 from outside: which of its processes doesn't matter to anyone.
fn kill_a_worker(hosts: &Hosts) {
    let all = hosts.processes("h1");
    let worker = all.iter().find(|(_, line)| line.contains(" worker") || line.ends_with("worker"));
    kill(Pid::from_raw(worker.unwrap_or_else(|| panic!("{all:?}")).0), Signal::SIGKILL).unwrap();
}

#[test]
fn a_job_that_loses_a_worker_and_a_host_has_the_losses_of_an_undisturbed_one() {
    let test = "cluster::a_job_that_loses_a_worker_and_a_host_has_the_losses_of_an_undisturbed_one";
    let Some((place, hosts)) = up(test) else { return };
    let long = "train.steps=150";
    let whole = place.run(&[long, "resume.from=never", "checkpoint.every=never"]).succeeded().losses();
    let args = on(&place, &hosts, "again", TINY, ALL);
    let set = [long, "checkpoint.every=10", "run.restarts=2", "run.min_hosts=3"];
    let mut job = start(&place, &args, &set);
    job.until("checkpoint", 10);
    kill_a_worker(&hosts);
    let first = job.until("restart", 0);
    assert_eq!((first["host"].as_str(), first["restarts_left"].as_u64()), (Some("h1"), Some(1)), "{first}");
    assert_eq!(first["reason"]["name"], "SIGKILL", "{first}");
    job.until("checkpoint", 30);
    hosts.command(&["crash", "h2"]);
    let second = job.until("restart", 0);
    assert_eq!((second["host"].as_str(), second["restarts_left"].as_u64()), (Some("h2"), Some(0)), "{second}");
    let ran = job.end().succeeded();
    let placed: Vec<_> =
        ran.named("placement").iter().map(|e| (e["attempt"].clone(), e["world"].clone())).collect();
    assert_eq!(placed, [(0.into(), 8.into()), (1.into(), 8.into()), (2.into(), 6.into())]);
    assert_eq!(ran.named("placement")[2]["hosts"], serde_json::json!(["h0", "h1", "h3"]));
    assert_eq!(ran.named("resume").len(), 2);
    for step in ran.losses() {
        assert_eq!(step, whole[step.0 as usize - 1]);
    }
    assert_eq!(ran.losses().last().unwrap().0, 150);
    nothing_stays(&hosts, &["h0", "h1", "h3"]);
}

#[test]
fn hosts_come_and_go_with_the_hostfile_of_a_job_that_runs() {
    let Some((place, hosts)) = up("cluster::hosts_come_and_go_with_the_hostfile_of_a_job_that_runs") else {
        return;
    };
    let list = |text: &str| fs::write(place.path("hosts.txt"), text).unwrap();
    list("h0\nh1\nh2\n");
    let args = on(&place, &hosts, "listed", TINY, "{file: hosts.txt}");
    let mut job = start(&place, &args, &["train.steps=1000000", "run.min_hosts=2"]);
    let notice = |job: &mut Running, part: &str| {
        while !job.until("notice", 0)["message"].as_str().unwrap().contains(part) {}
    };
    job.until("step", 3);
    // Half written, and broken for good: told, and nothing else.
    list("h0\nh2 slots=");
    notice(&mut job, "is not valid, and the run continues unchanged");
    // One goes and another comes.
    list("h0\nh2\nh3\n");
    notice(&mut job, "added: h3; no longer listed: h1");
    let placed = job.until("placement", 0);
    assert_eq!((&placed["attempt"], &placed["world"]), (&1.into(), &6.into()), "{placed}");
    assert_eq!(placed["hosts"], serde_json::json!(["h0", "h2", "h3"]));
    let resumed = job.until("resume", 0)["step"].as_u64().unwrap();
    job.until("step", resumed + 3);
    nothing_stays(&hosts, &["h1"]);
    // The fewest that the job may have: it keeps one that isn't listed.
    list("h0\n");
    notice(&mut job, "stays in use");
    let placed = job.until("placement", 0);
    assert_eq!(placed["hosts"], serde_json::json!(["h0", "h2"]));
    let resumed = job.until("resume", 0)["step"].as_u64().unwrap();
    job.until("step", resumed + 3);
    kill(Pid::from_raw(job.child.id() as i32), Signal::SIGINT).unwrap();
    let ran = job.end();
    assert_eq!(ran.code, 130, "{}", ran.stderr);
    assert!(ran.named("restart").is_empty() && ran.named("failure").is_empty(), "{}", ran.stderr);
    nothing_stays(&hosts, &["h0", "h2", "h3"]);
    let steps = ran.losses();
    let undisturbed = format!("train.steps={}", steps.last().unwrap().0);
    let whole =
        place.run(&[&undisturbed, "resume.from=never", "checkpoint.every=never"]).succeeded().losses();
    assert_eq!(steps, whole, "every step once, with the bits of one machine");
}

/// Both hosts live and the controller hears both: only their ranks miss each other.
#[test]
fn hosts_that_no_longer_reach_each_other_end_the_job_and_are_named() {
    let test = "cluster::hosts_that_no_longer_reach_each_other_end_the_job_and_are_named";
    let Some((place, hosts)) = up(test) else { return };
    let args = on(&place, &hosts, "apart", TINY, ALL);
    let mut job = start(&place, &args, &["train.steps=100000"]);
    job.until("step", 3);
    hosts.command(&["partition", "h1", "h2"]);
    let began = Instant::now();
    let ran = job.end();
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    let cause = ran.failure_message();
    println!("after {:?}: {cause}", began.elapsed());
    assert_eq!(ran.code, 1);
    // Ranks 2 and 3 are on h1, 4 and 5 on h2. Whoever tells it, the two ranks that miss each other are named.
    let ends = |near: [u32; 2], far: [u32; 2]| {
        let one =
            |near: u32, far: u32| cause.contains(&format!("rank {near} is silent: rank {far} has heard"));
        near.iter().any(|near| far.iter().any(|far| one(*near, *far)))
    };
    assert!(ends([2, 3], [4, 5]) || ends([4, 5], [2, 3]), "{cause}");
    nothing_stays(&hosts, &HOSTS);
}

#[test]
fn a_run_is_seen_from_another_host_which_says_where_it_can_be_stopped() {
    let test = "cluster::a_run_is_seen_from_another_host_which_says_where_it_can_be_stopped";
    let Some((place, hosts)) = up(test) else { return };
    let job =
        "name: tiny\ncluster: {workers_per_host: 1}\nrun: {command: [sleep, '1000'], grace_period: 1s}\n";
    let mut run =
        start(&place, &on(&place, &hosts, "seen", job, "[h0, h1]"), &["run.logs.dir=runs/{name}/{run}"]);
    run.until("placement", 0);
    // The very executable that runs there, asked on the host of its last rank.
    let root = place.path("").display().to_string();
    let asked = |args: &str| {
        let own = "exe=$(ls -d /root/.cache/launch/bin/* | head -n 1)";
        hosts.shell("h1", &format!("cd {root}; {own}; \"$exe\" {args} 2>&1; echo $?"))
    };
    let seen = asked("ps");
    assert!(seen.contains("elsewhere"), "{seen}");
    let here = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    for (args, command) in [("stop", "launch stop "), ("stop --now", "launch stop --now ")] {
        let refused = asked(args);
        assert!(refused.ends_with("3\n"), "{refused}");
        let help = format!("ssh {} {command}", here.trim());
        assert!(refused.contains("can be stopped there") && refused.contains(&help), "{refused}");
    }
    // And here it is.
    let stopped = place.launch(&["stop"]);
    assert!(stopped.status.success(), "{}", String::from_utf8_lossy(&stopped.stderr));
    assert_eq!(run.end().code, 143);
    nothing_stays(&hosts, &["h0", "h1"]);
}

#[test]
fn two_jobs_on_the_same_hosts_never_touch_each_other() {
    let Some((place, hosts)) = up("cluster::two_jobs_on_the_same_hosts_never_touch_each_other") else {
        return;
    };
    let long = "train.steps=300";
    let whole = place.run(&[long, "resume.from=never", "checkpoint.every=never"]).succeeded().losses();
    let [left, right] = ["left", "right"].map(|name| on(&place, &hosts, name, TINY, ALL));
    let (mut left, mut right) =
        (start(&place, &left, &["train.steps=100000"]), start(&place, &right, &[long]));
    left.until("step", 3);
    right.until("step", 3);
    kill(Pid::from_raw(left.child.id() as i32), Signal::SIGINT).unwrap();
    let left = left.end();
    assert_eq!(left.code, 130, "{}", left.stderr);
    assert_eq!(right.end().succeeded().losses(), whole);
    nothing_stays(&hosts, &HOSTS);
}

#[test]
fn fifty_starts_in_a_row_leave_nothing_on_the_hosts() {
    let Some((place, hosts)) = up("cluster::fifty_starts_in_a_row_leave_nothing_on_the_hosts") else {
        return;
    };
    let script = "exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT && echo $WORLD_SIZE > met.$RANK";
    let job =
        format!("name: tiny\ncluster: {{workers_per_host: 2}}\nrun: {{command: [bash, -c, '{script}']}}\n");
    let args = on(&place, &hosts, "row", &job, ALL);
    for n in 0..50 {
        let ran = start(&place, &args, &[]).end();
        assert_eq!(ran.code, 0, "start {n}: {}", ran.stderr);
        for rank in 0..8 {
            let met = place.path(&format!("met.{rank}"));
            assert_eq!(fs::read_to_string(&met).unwrap(), "8\n", "start {n}, rank {rank}");
            fs::remove_file(met).unwrap();
        }
        nothing_stays(&hosts, &HOSTS);
    }
    for host in HOSTS {
        assert_eq!(hosts.shell(host, "ls -A /tmp | grep -v '^[.]tmp' || true"), "", "{host}");
    }
}

#[test]
fn the_store_outlives_the_ranks_of_its_host() {
    let Some((place, hosts)) = up("cluster::the_store_outlives_the_ranks_of_its_host") else { return };
    let script = "[ $RANK -lt 2 ] && exit; until [ -e go ]; do sleep 0.05; done; exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT";
    let job =
        format!("name: tiny\ncluster: {{workers_per_host: 2}}\nrun: {{command: [bash, -c, '{script}']}}\n");
    let mut run = start(&place, &on(&place, &hosts, "store", &job, ALL), &[]);
    run.until("placement", 0);
    let shells =
        |host: &str| hosts.processes(host).iter().filter(|(_, l)| l.contains("until [ -e go ]")).count();
    let began = Instant::now();
    while HOSTS.iter().map(|host| shells(host)).ne([0, 2, 2, 2]) {
        assert!(began.elapsed() < LIMIT);
        thread::sleep(Duration::from_millis(10));
    }
    fs::write(place.path("go"), "").unwrap();
    run.end().succeeded();
    nothing_stays(&hosts, &HOSTS);
}

/// What torchrun (torch 2.15) and DeepSpeed's launcher (0.19) give every worker on a machine without GPUs, as dumped by workers under
/// them. `accelerate launch` adds names of its own (`ACCELERATE_*`) that only carry its configuration file: see [`ACCELERATED`].
const GIVEN: [(&str, &str); 2] = [
    (
        "torchrun",
        "RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME LOCAL_WORLD_SIZE WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE MASTER_ADDR \
         MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE \
         TORCHELASTIC_ERROR_FILE TORCH_NCCL_ASYNC_ERROR_HANDLING OMP_NUM_THREADS",
    ),
    ("deepspeed", "MASTER_ADDR MASTER_PORT WORLD_SIZE CROSS_RANK CROSS_SIZE LOCAL_SIZE RANK LOCAL_RANK"),
];

#[test]
fn every_rank_on_every_host_has_what_torchrun_and_deepspeed_give() {
    let test = "cluster::every_rank_on_every_host_has_what_torchrun_and_deepspeed_give";
    let Some((place, hosts)) = up(test) else { return };
    let job = "name: tiny\ncluster: {workers_per_host: 2}\nrun: {command: [sh, -c, 'env > env.$RANK']}\n";
    start(&place, &on(&place, &hosts, "env", job, ALL), &[]).end().succeeded();
    let mut same = Vec::new();
    for rank in 0..8 {
        let text = fs::read_to_string(place.path(&format!("env.{rank}"))).unwrap();
        let env: BTreeMap<&str, &str> = text.lines().filter_map(|l| l.split_once('=')).collect();
        for (who, names) in GIVEN {
            let missing: Vec<_> = names.split_whitespace().filter(|n| !env.contains_key(n)).collect();
            assert!(missing.is_empty(), "{who} gives {missing:?}, rank {rank} has {text}");
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
        same.push([env["MASTER_ADDR"], env["MASTER_PORT"], env["TORCHELASTIC_RUN_ID"]].map(str::to_owned));
    }
    assert!(same.iter().all(|s| *s == same[0]), "{same:?}");
    nothing_stays(&hosts, &HOSTS);
}

#[test]
fn fifty_starts_in_a_row_leave_nothing_on_this_machine() {
    let place = JobDirectory::new();
    let (temporary, cache) = (place.path("temporary"), place.path("home"));
    for dir in [&temporary, &cache] {
        fs::create_dir(dir).unwrap();
    }
    let marker = format!("{}", place.path("").display());
    for n in 0..50 {
        let script = "exec 3<>/dev/tcp/$MASTER_ADDR/$MASTER_PORT && echo met";
        let args = ["run", "--workers", "3", "--json", "--", "bash", "-c", script];
        let mut command = place.command(&args);
        command.env("TMPDIR", &temporary).env("HOME", &cache).env("LAUNCH_TEST_MARKER", &marker);
        let ran = FinishedRun::from_output(&command.output().unwrap());
        assert_eq!(ran.code, 0, "start {n}: {}", ran.stderr);
        let marked = |pid: &str| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            String::from_utf8_lossy(&environment).contains(&format!("LAUNCH_TEST_MARKER={marker}"))
        };
        let pids = fs::read_dir("/proc").unwrap().flatten().map(|e| e.file_name());
        let left: Vec<_> = pids.filter(|pid| marked(&pid.to_string_lossy())).collect();
        assert!(left.is_empty(), "start {n}: {left:?}");
        assert_eq!(support::files_below(&temporary), Vec::<String>::new());
    }
}

/// Data-parallel training as PyTorch's own examples write it.
const DDP: &str = r#"
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
mine = torch.cat([p.detach().flatten() for p in model.parameters()])
all = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
dist.all_gather(all, mine)
equal = sum(torch.equal(a, mine) for a in all)
open(f"equal.{rank}", "w").write(f"{equal} on {os.uname().nodename}")
# as torch's documentation has it: everybody is done before anybody leaves, and nothing outlives the group
dist.barrier()
del model
dist.destroy_process_group()
# torch's threads that still want Python's lock while the interpreter ends abort the process (Python up to 3.13); nothing is left to do
sys.stdout.flush()
os._exit(0)
"#;

#[test]
fn a_ddp_script_runs_unchanged_on_four_hosts() {
    let test = "cluster::a_ddp_script_runs_unchanged_on_four_hosts";
    let Some(python) = support::python(test) else { return };
    let Some((place, hosts)) = up(test) else { return };
    fs::write(place.path("ddp.py"), DDP).unwrap();
    let python = serde_json::to_string(&python).unwrap();
    let job = format!(
        "name: tiny\ncluster: {{workers_per_host: 2}}\nrun: {{command: [{python}, ddp.py], grace_period: 5s, env: {{OMP_NUM_THREADS: '1'}}}}\n"
    );
    start(&place, &on(&place, &hosts, "ddp", &job, ALL), &[]).end().succeeded();
    for rank in 0..8 {
        let said = fs::read_to_string(place.path(&format!("equal.{rank}"))).unwrap();
        assert_eq!(said, format!("8 on h{}", rank / 2));
    }
    nothing_stays(&hosts, &HOSTS);
}

/// What `accelerate launch --multi_gpu` (Accelerate 1.15, no configuration file) gives beside torchrun's names: the defaults of the
/// library, as names. launch sets none, so that what a person sets for a job is never hidden: the library must come to the same.
const ACCELERATED: &str = r#"
import json, os, sys
import accelerate, torch
accelerator = accelerate.Accelerator(cpu=True)
state, dynamo = accelerator.state, accelerator.state.dynamo_plugin
total = accelerator.reduce(torch.tensor([float(accelerator.process_index)]), "sum").item()
said = dict(
    total=total, index=accelerator.process_index, local=accelerator.local_process_index, world=accelerator.num_processes,
    type=str(accelerator.distributed_type), backend=state.backend, debug=state.debug, on=os.uname().nodename,
    ACCELERATE_MIXED_PRECISION=accelerator.mixed_precision, ACCELERATE_DYNAMO_BACKEND=dynamo.backend.value,
    ACCELERATE_DYNAMO_MODE=dynamo.mode, ACCELERATE_DYNAMO_USE_FULLGRAPH=dynamo.fullgraph,
    ACCELERATE_DYNAMO_USE_DYNAMIC=dynamo.dynamic, ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=dynamo.use_regional_compilation)
json.dump(said, open(f"said.{accelerator.process_index}", "w"))
accelerator.wait_for_everyone()
accelerator.end_training()
os._exit(0)  # as above
"#;

/// DeepSpeed finds everything in the environment: it doesn't ask MPI.
const DEEPSPED: &str = r#"
import json, os, sys
import deepspeed, torch
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # would be compiled first
deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
rank = deepspeed.comm.get_rank()
total = torch.tensor([float(rank)])
deepspeed.comm.all_reduce(total)
said = dict(
    total=total.item(), index=rank, local=deepspeed.comm.get_local_rank(), world=deepspeed.comm.get_world_size(),
    on=os.uname().nodename)
json.dump(said, open(f"said.{rank}", "w"))
deepspeed.comm.barrier()
deepspeed.comm.destroy_process_group()
os._exit(0)  # as above
"#;

/// Runs `script` on all hosts; what each rank has said, once it is right about who it is.
fn libraries(
    place: &JobDirectory,
    hosts: &Hosts,
    python: &std::path::Path,
    name: &str,
    script: &str,
) -> Vec<Value> {
    fs::write(place.path("script.py"), script).unwrap();
    let python = serde_json::to_string(python).unwrap();
    let job = format!(
        "name: tiny\ncluster: {{workers_per_host: 2}}\nrun: {{command: [{python}, script.py], grace_period: 5s, env: {{OMP_NUM_THREADS: '1'}}}}\n"
    );
    start(place, &on(place, hosts, name, &job, ALL), &[]).end().succeeded();
    let said = |rank: u64| {
        let text = fs::read_to_string(place.path(&format!("said.{rank}"))).unwrap();
        fs::remove_file(place.path(&format!("said.{rank}"))).unwrap();
        let said: Value = serde_json::from_str(&text).unwrap();
        let right = serde_json::json!([28.0, rank, rank % 2, 8, format!("h{}", rank / 2)]);
        let own = ["total", "index", "local", "world", "on"].map(|key| said[key].clone());
        assert_eq!(Value::from(own.to_vec()), right, "{name}, rank {rank}: {said}");
        said
    };
    (0..8).map(said).collect()
}

#[test]
fn scripts_of_accelerate_and_deepspeed_run_unchanged_on_four_hosts() {
    let test = "cluster::scripts_of_accelerate_and_deepspeed_run_unchanged_on_four_hosts";
    let Some(python) = support::deepspeed(test) else { return };
    let Some((place, hosts)) = up(test) else { return };
    for said in libraries(&place, &hosts, &python, "accelerate", ACCELERATED) {
        for (name, value) in [
            ("type", "DistributedType.MULTI_CPU".into()),
            ("backend", "gloo".into()),
            ("debug", Value::from(false)),
            ("ACCELERATE_MIXED_PRECISION", "no".into()),
            ("ACCELERATE_DYNAMO_BACKEND", "NO".into()),
            ("ACCELERATE_DYNAMO_MODE", "default".into()),
            ("ACCELERATE_DYNAMO_USE_FULLGRAPH", false.into()),
            // `accelerate launch` says False: only torch.compile asks, which nobody has asked for
            ("ACCELERATE_DYNAMO_USE_DYNAMIC", Value::Null),
            ("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", false.into()),
        ] {
            assert_eq!(said[name], value, "{name}: {said}");
        }
    }
    libraries(&place, &hosts, &python, "deepspeed", DEEPSPED);
    nothing_stays(&hosts, &HOSTS);
}
