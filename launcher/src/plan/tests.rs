//! Tests of plans: ranks, environments, GPUs, addresses and rejected jobs.
mod several_hosts;

use super::*;
use jobspec::{InterfaceSelector, JobSource};
use proptest::prelude::*;
use protocol::{
    control::InterfaceAddress,
    hardware::{Accelerator, CpuTopology},
};
use serde_json::json;

/// Loads a job.yaml from its text. Panics if the job is rejected.
fn load_job_text(text: &str) -> JobSpec {
    let source = JobSource::Text { name: "demo.yaml".to_owned(), text: text.to_owned() };
    jobspec::load_job(source, &[]).expect("a job").0
}

/// Returns the inventory of a host with the CPUs `cpus`, each of which is a separate core. `quota`
/// is the limit on CPU time, as a number of CPUs.
fn build_inventory(cpus: &[u32], quota: Option<f64>) -> HostInventory {
    let topology = CpuTopology::with_one_core_per_cpu(cpus);
    HostInventory {
        host: "here".to_owned(),
        cpus: cpus.to_vec(),
        quota,
        memory: 1 << 30,
        topology,
        ..HostInventory::default()
    }
}

/// Loads a job that runs a program with `workers` workers per host.
fn job_with_workers(workers: u32) -> JobSpec {
    load_job_text(&format!(
        "cluster: {{workers_per_host: {workers}, master_port: 4000}}\nrun: {{command: [true], workdir: /w, env: {{A: b}}}}"
    ))
}

/// Plans the first attempt of a job on one host, which is the controller's machine.
fn plan_local(job: &JobSpec, inventory: &HostInventory) -> Result<Plan, Vec<Diagnostic>> {
    let host = JobHost {
        name: inventory.host.clone(),
        slots: None,
        selected_slots: None,
        local: true,
        inventory: inventory.clone(),
    };
    plan_attempt(job, &[host], &RunId("R".to_owned()), &Attempt::default())
}

/// Plans the first attempt of a job on one host, which is the controller's machine. Panics if the
/// plan is rejected.
fn expect_plan(job: &JobSpec, inventory: &HostInventory) -> Plan {
    plan_local(job, inventory).expect("a plan")
}

/// Returns the job key that is the subject of `diagnostic`, or an empty text if there is none.
fn subject_key(diagnostic: &Diagnostic) -> &str {
    diagnostic.subject().unwrap_or_default()
}

#[test]
fn two_workers_get_separate_cpus_and_the_environment_of_torchrun() {
    let plan = expect_plan(&job_with_workers(2), &build_inventory(&[0, 1, 4, 5, 6], None));
    assert_eq!((plan.world, plan.run_dir.to_str()), (2, Some("/w/runs/demo/R")));
    assert!(plan.warnings.is_empty());
    let [node] = &plan.host_plans[..] else { panic!("one node") };
    let [first, second] = &node.workers[..] else { panic!("two workers") };
    assert_eq!((&first.cpus[..], &second.cpus[..]), (&[0, 1][..], &[4, 5][..]));
    assert_eq!((second.rank, second.local_rank, second.local_world, second.threads), (1, 1, 2, 2));
    assert_eq!(second.log.to_str(), Some("/w/runs/demo/R/logs/rank-1.log"));
    let mut env = second.env.clone();
    plan.insert_rendezvous(&mut env);
    let env: Vec<String> = env.iter().map(|(n, v)| format!("{n}={v}")).collect();
    assert_eq!(
        env,
        [
            "RANK=1",
            "LOCAL_RANK=1",
            "WORLD_SIZE=2",
            "LOCAL_WORLD_SIZE=2",
            "MASTER_ADDR=127.0.0.1",
            "MASTER_PORT=4000",
            "GROUP_RANK=0",
            "GROUP_WORLD_SIZE=1",
            "ROLE_RANK=1",
            "ROLE_WORLD_SIZE=2",
            "ROLE_NAME=default",
            "NODE_RANK=0",
            "LOCAL_SIZE=2",
            "CROSS_RANK=0",
            "CROSS_SIZE=1",
            "TORCHELASTIC_RUN_ID=R",
            "TORCHELASTIC_RESTART_COUNT=0",
            "TORCHELASTIC_MAX_RESTARTS=0",
            "TORCHELASTIC_USE_AGENT_STORE=True",
            "TORCHELASTIC_ERROR_FILE=/w/runs/demo/R/logs/rank-1.error.json",
            "JAX_NUM_PROCESSES=2",
            "JAX_PROCESS_ID=1",
            "OMP_NUM_THREADS=2",
            "PYTHONUNBUFFERED=1",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
            "JAX_COORDINATOR_ADDRESS=127.0.0.1:4001",
            "ACCELERATE_USE_CPU=true",
            "A=b"
        ]
    );
}

#[test]
fn more_workers_than_cpus_run_unbound_and_are_warned_about() {
    let plan = expect_plan(&job_with_workers(3), &build_inventory(&[0, 1], None));
    assert!(plan.host_plans[0].workers.iter().all(|w| w.cpus.is_empty() && w.threads == 1));
    assert_eq!(plan.warnings.len(), 1);
    assert_eq!(subject_key(&plan.warnings[0]), "cluster.workers_per_host");
}

#[test]
fn a_cpu_time_limit_lowers_the_threads() {
    let plan = expect_plan(&job_with_workers(1), &build_inventory(&[0, 1, 2, 3], Some(2.5)));
    assert_eq!((plan.host_plans[0].workers[0].threads, plan.host_plans[0].workers[0].cpus.len()), (2, 4));
    assert!(
        !expect_plan(&job_with_workers(3), &build_inventory(&[0, 1, 2, 3], Some(2.0))).warnings.is_empty()
    );
}

#[test]
fn the_job_may_set_the_threads() {
    let job = load_job_text("run: {command: [true], env: {OMP_NUM_THREADS: 3}}");
    let plan = expect_plan(&job, &build_inventory(&[0], None));
    let worker = &plan.host_plans[0].workers[0];
    assert_eq!(worker.threads, 3);
    assert_eq!(worker.env.iter().filter(|(n, _)| n == "OMP_NUM_THREADS").count(), 1);
}

#[test]
fn the_job_and_the_inherited_environment_override_defaults() {
    let chosen = [("OMP_NUM_THREADS", "7"), ("PYTHONUNBUFFERED", "x")].map(|(n, v)| (n.into(), v.into()));
    let inventory = HostInventory { inherited_env: chosen.to_vec(), ..build_inventory(&[0, 1], None) };
    let values = |text: &str| {
        let env = expect_plan(&load_job_text(text), &inventory).host_plans[0].workers[0].env.clone();
        let values_of = |name: &str| {
            let found: Vec<_> = env.iter().filter(|(n, _)| n == name).map(|(_, v)| v.clone()).collect();
            found.join(" and ")
        };
        ["OMP_NUM_THREADS", "PYTHONUNBUFFERED", "TORCHELASTIC_USE_AGENT_STORE"].map(values_of)
    };
    assert_eq!(values("run: {command: [true]}"), ["7", "x", "True"]);
    let text = "cluster: {store: rank0}\nrun: {command: [true], env: {OMP_NUM_THREADS: 3}}";
    assert_eq!(values(text), ["3", "x", "False"]);
    assert_eq!(
        values("train: {data: {files: [a]}}"),
        ["2", "", ""],
        "the built-in runtime has its own rules"
    );
}

#[test]
fn the_built_in_training_rejects_a_list_of_threads() {
    let inventory = build_inventory(&[0, 1], None);
    let program = load_job_text("run: {command: [true], env: {OMP_NUM_THREADS: '4,2'}}");
    assert_eq!(expect_plan(&program, &inventory).host_plans[0].workers[0].threads, 2);
    let trained = load_job_text("run: {env: {OMP_NUM_THREADS: '4,2'}}\ntrain: {data: {files: [a]}}");
    let errors = plan_local(&trained, &inventory).expect_err("a list of threads");
    assert_eq!(subject_key(&errors[0]), "run.env.OMP_NUM_THREADS");
}

#[test]
fn an_absent_rank_is_warned_about() {
    let plan = expect_plan(
        &load_job_text("run: {command: [true], logs: {show: [0, 2]}}"),
        &build_inventory(&[0, 1], None),
    );
    let paths: Vec<&str> = plan.warnings.iter().map(subject_key).collect();
    assert_eq!(paths, ["run.logs.show[1]"]);
}

#[test]
fn the_number_of_further_absent_ranks_is_reported() {
    let ranks: Vec<String> = (0..1000).map(|rank| rank.to_string()).collect();
    let wraps = "{ranks: 2, command: [nsys]}, ".repeat(20);
    let job = format!("run: {{command: [true], logs: {{show: [{}]}}, wrap: [{wraps}]}}", ranks.join(", "));
    let plan = expect_plan(&load_job_text(&job), &build_inventory(&[0, 1], None));
    // The job has one worker.
    for (code, key, omitted) in
        [(codes::LOG_RANK_UNKNOWN, "run.logs.show", 983), (codes::WRAP_RANK_UNKNOWN, "run.wrap", 4)]
    {
        let warnings: Vec<_> = plan.warnings.iter().filter(|warning| warning.code() == code).collect();
        assert_eq!(warnings.len(), 17);
        let last = warnings[16].to_json();
        assert_eq!((subject_key(warnings[16]), &last["fields"]["omitted"]), (key, &json!(omitted)));
    }
}

#[test]
fn a_port_that_is_not_fixed_is_unknown_and_shown_as_auto() {
    let mut plan = expect_plan(&load_job_text("run: {command: [true]}"), &build_inventory(&[0], None));
    let find_port = |plan: &Plan| {
        let mut env = plan.host_plans[0].workers[0].env.clone();
        assert!(env.iter().all(|(name, _)| name != "MASTER_PORT"));
        plan.insert_rendezvous(&mut env);
        env.into_iter().find(|(name, _)| name == "MASTER_PORT").map(|(_, value)| value)
    };
    assert_eq!((plan.master_port, find_port(&plan).as_deref()), (None, Some("auto")));
    plan.master_port = Some(7);
    assert_eq!(find_port(&plan).as_deref(), Some("7"));
}

/// Checks the variables by which Accelerate, JAX and Lightning find their processes, and that those
/// of the user win.
#[test]
fn frameworks_get_their_variables() {
    let cpus = build_inventory(&[0, 1, 2, 3], None);
    let worker_env = |job: &JobSpec, inventory: &HostInventory, address: &str| {
        let mut plan = expect_plan(job, inventory);
        (plan.master_address, plan.master_port) = (address.parse().ok(), Some(4000));
        let mut env = plan.host_plans[0].workers[1].env.clone();
        plan.insert_rendezvous(&mut env);
        env
    };
    let value = |env: &[(String, String)], name: &str| {
        env.iter().rev().find(|(n, _)| n == name).map(|(_, value)| value.clone())
    };
    let job = job_with_workers(2);
    let env = worker_env(&job, &cpus, "10.0.0.1");
    for (name, expected) in [
        ("ACCELERATE_USE_CPU", Some("true")),
        ("JAX_COORDINATOR_ADDRESS", Some("10.0.0.1:4001")),
        ("JAX_NUM_PROCESSES", Some("2")),
        ("JAX_PROCESS_ID", Some("1")),
        ("JAX_LOCAL_DEVICE_IDS", None),
        // Lightning's TorchElasticEnvironment and LightningEnvironment.
        ("TORCHELASTIC_RUN_ID", Some("R")),
        ("GROUP_RANK", Some("0")),
        ("NODE_RANK", Some("0")),
        ("LOCAL_RANK", Some("1")),
        ("MASTER_ADDR", Some("10.0.0.1")),
        ("MASTER_PORT", Some("4000")),
    ] {
        assert_eq!(value(&env, name).as_deref(), expected, "{name}");
    }
    let v6 = worker_env(&job, &cpus, "fd00::1");
    assert_eq!(value(&v6, "JAX_COORDINATOR_ADDRESS").as_deref(), Some("[fd00::1]:4001"));
    let gpus = HostInventory { accelerators: vec![new_gpu(0), new_gpu(0)], ..cpus.clone() };
    let env = worker_env(&job, &gpus, "10.0.0.1");
    assert_eq!(value(&env, "JAX_LOCAL_DEVICE_IDS").as_deref(), Some("1"));
    assert_eq!(value(&env, "ACCELERATE_USE_CPU"), None);
    let mut user = cpus.clone();
    user.inherited_env = vec![("ACCELERATE_USE_CPU".into(), "no".into())];
    let mut given = job;
    given.run.env.push(("JAX_COORDINATOR_ADDRESS".into(), "c:1".into()));
    let env = worker_env(&given, &user, "10.0.0.1");
    assert_eq!(value(&env, "ACCELERATE_USE_CPU").as_deref(), Some("no"));
    assert_eq!(value(&env, "JAX_COORDINATOR_ADDRESS").as_deref(), Some("c:1"));
    assert_eq!(env.iter().filter(|(name, _)| name == "JAX_COORDINATOR_ADDRESS").count(), 1);
    // Accelerate would ignore DeepSpeed.
    user.inherited_env = vec![("DS_ACCELERATOR".into(), "cpu".into())];
    let mut deepspeed = job_with_workers(2);
    assert_eq!(value(&worker_env(&deepspeed, &user, "10.0.0.1"), "ACCELERATE_USE_CPU"), None);
    deepspeed.run.local_rank_argument = true;
    assert_eq!(value(&worker_env(&deepspeed, &cpus, "10.0.0.1"), "ACCELERATE_USE_CPU"), None);
    let trained = load_job_text("cluster: {workers_per_host: 2}\ntrain: {data: {files: [a]}}");
    let env = worker_env(&trained, &cpus, "10.0.0.1");
    assert!(!env.iter().any(|(name, _)| name.starts_with("JAX_") || name.starts_with("ACCELERATE_")));
}

/// Checks that Accelerate gets the variable for CPUs only if no host has accelerators.
#[test]
fn a_job_with_a_gpu_on_one_host_is_not_on_cpus() {
    let job = load_job_text("run: {command: [true]}");
    let on_cpus = |hosts: &[JobHost]| {
        let plan = plan_hosts(&job, hosts, &Attempt::default()).expect("a plan");
        let env = &plan.host_plans[0].workers[0].env;
        env.contains(&("ACCELERATE_USE_CPU".to_owned(), "true".to_owned()))
    };
    assert!(on_cpus(&[remote_host("a", None, 0), remote_host("b", None, 0)]));
    assert!(!on_cpus(&[remote_host("a", None, 0), remote_host("b", None, 1)]));
}

/// Checks in which jobs hangs are detected, after which time, and whether only while a rank waits
/// in a collective.
#[test]
fn hangs_are_detected_by_default_if_a_host_has_gpus() {
    let detection = |text: &str, gpus: u32| {
        let hosts = [remote_host("a", None, 0), remote_host("b", None, gpus)];
        let plan = plan_hosts(&load_job_text(text), &hosts, &Attempt::default()).expect("a plan");
        let detections: Vec<_> = plan.host_plans.iter().map(|plan| plan.hang_detection).collect();
        assert_eq!(detections[0], detections[1], "the hosts agree");
        let reason = HangDetectionReason::explain(&load_job_text(text), detections[0]);
        (detections[0].map(|d| (d.timeout_ms, d.only_in_collectives)), reason)
    };
    let program = |settings: &str| format!("run: {{command: [a]{settings}}}");
    let by_default = Some((600_000, true));
    for (text, gpus, expected) in [
        (program(""), 1, (by_default, HangDetectionReason::HasAccelerators)),
        (program(""), 0, (None, HangDetectionReason::HasNoAccelerators)),
        (program("}\ncluster: {devices: cpu"), 1, (None, HangDetectionReason::HasNoAccelerators)),
        (program(", hang_timeout: off"), 1, (None, HangDetectionReason::Requested)),
        (program(", hang_timeout: 9s"), 0, (Some((9000, false)), HangDetectionReason::Requested)),
        (program(", terminal: 0"), 1, (None, HangDetectionReason::HasTerminal)),
        (program(", container: {image: i, runtime: podman}"), 1, (None, HangDetectionReason::InContainer)),
        ("train: {data: {files: [a]}}".to_owned(), 1, (None, HangDetectionReason::HasNoAccelerators)),
    ] {
        assert_eq!(detection(&text, gpus), expected, "{text}");
    }
    let inventory = HostInventory { accelerators: vec![new_gpu(0)], ..build_inventory(&[0, 1], None) };
    for devices in ["cuda", "[0]"] {
        let job = load_job_text(&format!("cluster: {{devices: {devices}}}\ntrain: {{data: {{files: [a]}}}}"));
        let plan = expect_plan(&job, &inventory);
        let detection = plan.host_plans[0].hang_detection;
        assert_eq!(detection.map(|d| (d.timeout_ms, d.only_in_collectives)), Some((600_000, false)));
        assert_eq!(HangDetectionReason::explain(&job, detection), HangDetectionReason::TrainsOnGpus);
    }
}

#[test]
fn each_worker_gets_its_own_gpu() {
    let inventory =
        HostInventory { accelerators: vec![new_gpu(0), new_gpu(0)], ..build_inventory(&[0, 1, 2, 3], None) };
    let script = "run: {command: [python, a.py], visible_devices: one, local_rank_argument: true}";
    let plan = expect_plan(&load_job_text(script), &inventory);
    assert_eq!(plan.world, 2, "as many workers as GPUs");
    let second = &plan.host_plans[0].workers[1];
    let variable = |name: &str| second.env.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str());
    assert_eq!(
        ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"].map(variable),
        [Some("1"), Some("0"), Some("2"), Some("1")]
    );
    assert_eq!(second.command.as_deref().map(|c| c.join(" ")).as_deref(), Some("python a.py --local_rank=0"));
    assert_eq!((second.local_rank, &second.cpus[..]), (1, &[0, 1, 2, 3][..]));
    let rejected_key = |text: &str| {
        subject_key(&plan_local(&load_job_text(text), &inventory).expect_err("rejected")[0]).to_owned()
    };
    assert_eq!(
        rejected_key("cluster: {workers_per_host: 3}\nrun: {command: [a], visible_devices: one}"),
        "run.visible_devices"
    );
    assert_eq!(rejected_key("cluster: {devices: [2]}\nrun: {command: [a]}"), "cluster.devices");
    let trained =
        expect_plan(&load_job_text("cluster: {devices: cuda}\ntrain: {data: {files: [a]}}"), &inventory);
    let device = |rank: usize| {
        let env = &trained.host_plans[0].workers[rank].env;
        env.iter().find(|(name, _)| name == "CUDA_VISIBLE_DEVICES").map(|(_, value)| value.clone())
    };
    assert_eq!((trained.world, device(0).as_deref(), device(1).as_deref()), (2, Some("0"), Some("1")));
    let shared = |backend: &str| {
        let cluster = format!("cluster: {{devices: cuda, workers_per_gpu: 2, comm_backend: {backend}}}");
        let plan =
            expect_plan(&load_job_text(&format!("{cluster}\ntrain: {{data: {{files: [a]}}}}")), &inventory);
        assert_eq!(plan.world, 4);
        plan.host_plans[0].workers[3].env.contains(&("NCCL_MULTI_RANK_GPU_ENABLE".to_owned(), "1".to_owned()))
    };
    assert!(shared("nccl") && !shared("host") && !shared("auto"));
    let none = HostInventory { accelerators: Vec::new(), ..inventory.clone() };
    let errors = plan_local(&load_job_text("cluster: {devices: cuda}\ntrain: {data: {files: [a]}}"), &none)
        .expect_err("no GPU");
    assert_eq!(subject_key(&errors[0]), "cluster.devices");
    assert_eq!(
        rejected_key("cluster: {workers_per_host: 9}\nrun: {command: [a], cpu_bind: cores}"),
        "run.cpu_bind"
    );
}

fn new_gpu(node: u32) -> Accelerator {
    Accelerator { numa_node: Some(node), ..Accelerator::default() }
}

/// Returns a host other than the controller's machine. It has `slots` slots, four CPUs and `gpus`
/// GPUs.
fn remote_host(name: &str, slots: Option<u32>, gpus: u32) -> JobHost {
    let address = |interface: &str, ip: &str| InterfaceAddress {
        interface: interface.into(),
        address: ip.parse().expect("ip"),
    };
    let addresses = vec![
        address("lo", "127.0.0.1"),
        address("eth0", "fe80::1"),
        address("eth0", "2001:db8::7"),
        address("eth0", "10.0.0.7"),
        address("ib0", "10.9.0.7"),
    ];
    let accelerators = (0..gpus).map(|_| new_gpu(0)).collect();
    let inventory = HostInventory { accelerators, addresses, ..build_inventory(&[0, 1, 2, 3], None) };
    JobHost { name: name.to_owned(), slots, selected_slots: None, local: false, inventory }
}

/// Plans an attempt of a job on these hosts.
fn plan_hosts(job: &JobSpec, hosts: &[JobHost], attempt: &Attempt) -> Result<Plan, Vec<Diagnostic>> {
    plan_attempt(job, hosts, &RunId("R".to_owned()), attempt)
}
