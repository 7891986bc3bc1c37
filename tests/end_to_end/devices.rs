//! Tests accelerators of each vendor in `launch plan` and `launch check`, and the variables by
//! which frameworks find their processes, with the real executable.
use crate::support::{JobDirectory, find_deepspeed_python_or_skip, output_to_text, parse_rejection};
use serde_json::Value;
use std::fs;

/// Writes job.yaml and runs launch with `args` on a machine whose accelerators `LAUNCH_GPUS`
/// describes. Returns the object that the command prints.
fn run_json(job_dir: &JobDirectory, job: &str, accelerators: &str, args: &[&str]) -> Value {
    let output = run_launch(job_dir, job, accelerators, args);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {}", output_to_text(&output)))
}

fn run_launch(job_dir: &JobDirectory, job: &str, accelerators: &str, args: &[&str]) -> std::process::Output {
    fs::write(job_dir.path("job.yaml"), job).unwrap();
    job_dir.launch_command(args).env("LAUNCH_GPUS", accelerators).output().unwrap()
}

const ONE_DEVICE_JOB: &str = "run: {command: [python, a.py], visible_devices: one}";

#[test]
fn each_worker_gets_an_accelerator_of_every_vendor() {
    let job_dir = JobDirectory::new();
    for (accelerators, device, variable, value) in [
        ("3", "gpu 2", "CUDA_VISIBLE_DEVICES", "2"),
        ("rocm:3", "gpu 2", "HIP_VISIBLE_DEVICES", "2"),
        ("mig:3", "mig MIG-2", "CUDA_VISIBLE_DEVICES", "MIG-2"),
        ("xpu:3", "xpu 2", "ZE_AFFINITY_MASK", "2"),
        ("npu:3", "npu 2", "ASCEND_RT_VISIBLE_DEVICES", "2"),
        ("hpu:3", "hpu 2", "HABANA_VISIBLE_MODULES", "2"),
        ("neuron:3", "neuron 2", "NEURON_RT_VISIBLE_CORES", "2"),
    ] {
        let plan = run_json(&job_dir, ONE_DEVICE_JOB, accelerators, &["plan", "job.yaml", "--json"]);
        let rank = &plan["ranks"][2];
        assert_eq!((&plan["world"], &rank["device"]), (&3.into(), &device.into()), "{accelerators}");
        assert_eq!(rank["env"][variable], value, "{accelerators}: {rank}");
        assert_eq!(rank["env"]["LOCAL_RANK"], "0");
        assert_eq!(rank["env"].get("ACCELERATE_USE_CPU"), None);
    }
}

#[test]
fn accelerators_that_do_not_suffice_are_reported() {
    let job_dir = JobDirectory::new();
    for (job, accelerators, code) in [
        ("cluster: {devices: npu}\nrun: {command: [a]}", "4", "gpu-required"),
        ("cluster: {devices: npu, workers_per_host: 3}\nrun: {command: [a]}", "npu:2", "gpus-too-few"),
        ("cluster: {devices: [4]}\nrun: {command: [a]}", "xpu:2", "gpu-index-unknown"),
        ("run: {command: [a]}", "cuda:2,xpu:1", "accelerators-mixed"),
        ("run: {command: [a]}", "mig:2", "mig-instances-shared"),
        ("cluster: {devices: cpu}\nrun: {command: [a]}", "hpu:2", "accelerators-not-hidden"),
        ("cluster: {devices: npu}\ntrain: {data: {files: [a]}}", "npu:2", "job-key-has-no-effect"),
    ] {
        let output = run_launch(&job_dir, job, accelerators, &["plan", "job.yaml", "--json"]);
        let (exit_code, error) = parse_rejection(&output);
        // Mistakes with a position in the job file are details of one error.
        let mistake = error["details"].get(0).unwrap_or(&error);
        assert_eq!((exit_code, &mistake["code"]), (2, &code.into()), "{job}: {error}");
    }
    let shared = "cluster: {workers_per_host: 3}\nrun: {command: [a]}";
    let plan = run_json(&job_dir, shared, "npu:2", &["plan", "job.yaml", "--json"]);
    let codes: Vec<&Value> = plan["warnings"].as_array().unwrap().iter().map(|w| &w["code"]).collect();
    assert!(codes.contains(&&"accelerators-shared".into()), "{plan}");
}

#[test]
fn check_shows_accelerators() {
    let job_dir = JobDirectory::new();
    let report = run_json(&job_dir, "run: {command: [a]}", "npu:8", &["check", "job.yaml", "--json"]);
    let host = &report["hosts"][0];
    let check = host["checks"].as_array().unwrap().iter().find(|c| c["check"] == "accelerators");
    assert_eq!(check.unwrap()["found"], "8 NPUs (Ascend)");
    assert_eq!(host["node"]["accelerators"].as_array().unwrap().len(), 8);
    let text = output_to_text(&run_launch(&job_dir, "run: {command: [a]}", "xpu:4", &["check", "job.yaml"]));
    assert!(text.contains("4 XPUs (Intel)"), "{text}");
}

/// Checks that the workers of a program on CPUs get the variables of Accelerate and JAX, that the
/// port of JAX's coordinator is free, and that values of the user win.
#[test]
fn programs_get_the_variables_of_frameworks() {
    let job_dir = JobDirectory::new();
    let script = "echo \"$JAX_COORDINATOR_ADDRESS $JAX_NUM_PROCESSES $JAX_PROCESS_ID $JAX_LOCAL_DEVICE_IDS \
                  $ACCELERATE_USE_CPU $MASTER_PORT $NODE_RANK\" > out.$RANK";
    let launch = |accelerators: &str, set: &[(&str, &str)]| {
        let args = ["run", "--workers", "2", "--", "sh", "-c", script];
        let mut command = job_dir.launch_command(&args);
        command.env("LAUNCH_GPUS", accelerators).envs(set.iter().copied());
        let ran = command.output().unwrap();
        assert!(ran.status.success(), "{}", output_to_text(&ran));
        let line = |rank: u32| fs::read_to_string(job_dir.path(&format!("out.{rank}"))).unwrap();
        [line(0), line(1)].map(|line| line.trim_end().split(' ').map(str::to_owned).collect::<Vec<_>>())
    };
    for (rank, words) in launch("0", &[]).into_iter().enumerate() {
        let port: u16 = words[5].parse().unwrap();
        let coordinator = format!("127.0.0.1:{}", port.checked_add(1).unwrap_or(port - 1));
        let expected = [&coordinator, "2", &rank.to_string(), "", "true", &words[5], "0"];
        assert_eq!(words, expected, "rank {rank}");
    }
    let gpus = launch("2", &[]);
    assert_eq!((&gpus[1][3], &gpus[1][4]), (&"1".to_owned(), &String::new()));
    let user = launch("0", &[("ACCELERATE_USE_CPU", "0"), ("JAX_COORDINATOR_ADDRESS", "h:9")]);
    assert_eq!((user[1][0].as_str(), user[1][4].as_str()), ("h:9", "0"));
}

/// Checks that the workers of an unmodified script of Accelerate train together on CPUs.
#[test]
fn workers_of_accelerate_find_each_other_on_cpus() {
    let test = "devices::workers_of_accelerate_find_each_other_on_cpus";
    let Some(python) = find_deepspeed_python_or_skip(test) else { return };
    let job_dir = JobDirectory::new();
    let script = "import os, accelerate\na = accelerate.Accelerator()\n\
                  open(f'out.{os.environ[\"RANK\"]}', 'w').write(f'{a.num_processes} {a.process_index} {a.device.type}')\n";
    fs::write(job_dir.path("a.py"), script).unwrap();
    let python = python.to_str().unwrap();
    let ran = job_dir.run_launch(&["run", "--workers", "2", "--", python, "a.py"]);
    assert!(ran.status.success(), "{}", output_to_text(&ran));
    for rank in 0..2 {
        let text = fs::read_to_string(job_dir.path(&format!("out.{rank}"))).unwrap();
        assert_eq!(text, format!("2 {rank} cpu"));
    }
}
