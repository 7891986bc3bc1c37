//! Tests `launch check` and training jobs on GPUs, with an emulated GPU and without a GPU.

use crate::{
    emulated_gpu, emulated_nccl,
    support::{self, FinishedRun, JobDirectory},
};
use std::{fs, path::Path};

/// An environment variable (name and value) that configures the emulated GPU.
type EmulatorSetting = (&'static str, &'static str);

/// The setting of an emulated GPU without faults.
const DEFAULT_SETTING: EmulatorSetting = ("EMULATED_GPU_COUNT", "1");

/// Returns a library search path that contains the emulated CUDA libraries, including cuDNN.
fn join_libraries_with_cudnn() -> std::ffi::OsString {
    let directory = emulated_gpu::library_directory();
    std::env::join_paths([directory.to_owned(), directory.join("cudnn")]).expect("paths")
}

/// Settings of a job whose model is small enough for the emulator.
const SMALL_JOB_SETTINGS: [&str; 8] = [
    "train.model.hidden_size=12",
    "train.model.intermediate_size=17",
    "train.model.num_hidden_layers=1",
    "train.data.seq_len=8",
    "train.batch.global=4",
    "train.steps=3",
    "checkpoint.every=2",
    "checkpoint.gather_16bit_weights_on_model_save=true",
];

/// Runs the small job on the emulated GPU with this setting and waits for its end.
fn run_on_emulated_gpu(job_dir: &JobDirectory, set: &[&str], setting: (&str, &str)) -> FinishedRun {
    let set = SMALL_JOB_SETTINGS.iter().chain(set).flat_map(|s| ["--set", s]);
    let output = job_dir
        .launch_command(&["job.yaml", "--json"])
        .args(set)
        .env("LD_LIBRARY_PATH", emulated_gpu::library_directory())
        .env("LAUNCH_GPUS", "1")
        .env(setting.0, setting.1)
        .output()
        .expect("launch starts");
    FinishedRun::from_output(&output)
}

/// Checks that the plan of a job compares the estimated memory with that of the smallest GPU.
#[test]
fn a_plan_warns_if_the_gpus_have_too_little_memory() {
    let job_dir = JobDirectory::new();
    let set = SMALL_JOB_SETTINGS.iter().chain(&["cluster.devices=cuda", "cluster.workers_per_host=1"]);
    let set: Vec<&str> = set.flat_map(|s| ["--set", s]).collect();
    let plan = |memory: u64| -> serde_json::Value {
        let output = job_dir
            .launch_command(&["plan", "job.yaml", "--json"])
            .args(&set)
            .env("LD_LIBRARY_PATH", emulated_gpu::library_directory())
            .env("LAUNCH_GPUS", "1")
            .env("EMULATED_GPU_MEMORY", memory.to_string())
            .output()
            .expect("launch starts");
        assert!(output.status.success(), "{output:?}");
        let plan: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a plan");
        assert_eq!(plan["host"]["smallest_gpu_memory"], memory, "{plan}");
        plan
    };
    let warnings = |plan: &serde_json::Value| plan["warnings"].as_array().expect("a list").clone();
    assert_eq!(warnings(&plan(8 << 30)), [] as [serde_json::Value; 0]);
    let too_small = plan(1 << 29);
    let [warning] = &warnings(&too_small)[..] else { panic!("{too_small}") };
    assert_eq!(warning["code"], "memory-insufficient");
    let required = &too_small["ranks"][0]["memory"]["total"];
    let expected = serde_json::json!({
        "memory": "gpu", "required_bytes": required, "available_bytes": 1 << 29
    });
    assert_eq!(warning["fields"], expected);
}

/// Returns the largest relative difference between the losses of two runs of three steps.
fn compute_loss_difference(a: &FinishedRun, b: &FinishedRun) -> f64 {
    let losses =
        |ran: &FinishedRun| ran.collect_losses().iter().map(|l| f64::from_bits(l.1)).collect::<Vec<_>>();
    let (a, b) = (losses(a), losses(b));
    assert_eq!((a.len(), b.len()), (3, 3));
    a.iter().zip(&b).map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f64::max)
}

/// Checks that workers with `deterministic: false` keep the same choice of algorithm for each
/// matmul, although each of them times the algorithms. By default no worker autotunes.
#[test]
fn a_job_that_is_not_deterministic_autotunes_matmuls() {
    let job_dir = JobDirectory::new();
    let cached_choices = || {
        let files = fs::read_dir(job_dir.path(".home/.cache/launch/kernels")).expect("a kernel cache");
        let names = files.map(|f| f.expect("entry").file_name().to_string_lossy().into_owned());
        names.filter(|name| name.ends_with(".algorithm")).count()
    };
    let shared = ["cluster.devices=cuda", "cluster.workers_per_host=2", "cluster.workers_per_gpu=2"];
    let deterministic = run_on_emulated_gpu(&job_dir, &shared, DEFAULT_SETTING).expect_success();
    assert_eq!(cached_choices(), 0);
    job_dir.delete_checkpoints();
    let autotuning = [&shared[..], &["train.deterministic=false"]].concat();
    let autotuned = run_on_emulated_gpu(&job_dir, &autotuning, DEFAULT_SETTING).expect_success();
    assert!(cached_choices() > 3, "{} choices", cached_choices());
    // the emulated algorithms compute equal results; gradients are summed in another order
    let difference = compute_loss_difference(&autotuned, &deterministic);
    assert!(difference < 1e-5, "{difference}");
}

/// Compares the losses of a run without CUDA graphs with those of three other runs: one that uses
/// graphs, one in which the creation of a graph fails, and one that uses graphs only if they are
/// faster in a measurement.
#[test]
fn cuda_graphs_do_not_change_losses_and_their_use_is_reported() {
    let job_dir = JobDirectory::new();
    let one_worker = ["cluster.devices=cuda", "cluster.workers_per_host=1"];
    let losses_and_notices = |set: &[&str], setting| {
        job_dir.delete_checkpoints();
        let ran = run_on_emulated_gpu(&job_dir, &[&one_worker[..], set].concat(), setting).expect_success();
        (ran.collect_losses(), ran.notice_messages())
    };
    let (losses, notices) = losses_and_notices(&["train.cuda_graphs=false"], DEFAULT_SETTING);
    assert_eq!(
        losses_and_notices(&["train.cuda_graphs=true"], DEFAULT_SETTING),
        (losses.clone(), notices.clone())
    );
    let failing = ("EMULATED_GPU_FAILS", "cuGraphInstantiate:1");
    let (with_failure, failure_notices) = losses_and_notices(&["train.cuda_graphs=true"], failing);
    assert_eq!(with_failure, losses);
    let added: Vec<_> = failure_notices.iter().filter(|n| !notices.contains(n)).cloned().collect();
    job_dir.assert_snapshot("failed_cuda_graphs", &added.join("\n"));
    let (measured, measured_notices) = losses_and_notices(&["train.steps=32"], DEFAULT_SETTING);
    assert_eq!(measured.len(), 32);
    // the measured times of an emulated GPU may decide either way
    assert_eq!(measured_notices.len(), notices.len() + 1, "{measured_notices:?}");
    let without = losses_and_notices(&["train.steps=32", "train.cuda_graphs=false"], DEFAULT_SETTING);
    assert_eq!(without.0, measured);
}

/// Checks that training computes attention with cuDNN if the job requests this, reports which
/// kernels were faster if it does not, and reports that cuDNN is not used if it fails or computes
/// wrong results.
#[test]
fn attention_by_cudnn_is_used_if_it_is_requested_or_faster() {
    let job_dir = JobDirectory::new();
    let list = join_libraries_with_cudnn();
    let libraries = list.to_str().expect("text").replace(':', ", ");
    let libraries = format!("cluster.cuda_library_paths=[{libraries}]");
    let base = [
        "cluster.devices=cuda",
        "cluster.workers_per_host=1",
        "train.model.hidden_size=32",
        "train.model.num_attention_heads=2",
        "train.model.num_key_value_heads=1",
        "train.precision=bf16",
        "train.deterministic=false",
    ];
    let run = |set: &[&str], setting| {
        job_dir.delete_checkpoints();
        run_on_emulated_gpu(&job_dir, &[&base[..], set].concat(), setting)
    };
    let flash = run(&["train.attention=flash", &libraries], DEFAULT_SETTING).expect_success();
    let other_notices = flash.notice_messages();
    let attention_notices = |ran: &FinishedRun| {
        let notices = ran.notice_messages().into_iter().filter(|notice| !other_notices.contains(notice));
        notices.collect::<Vec<_>>()
    };
    let cudnn = run(&["train.attention=cudnn", &libraries], DEFAULT_SETTING).expect_success();
    let difference = compute_loss_difference(&cudnn, &flash);
    assert!(cudnn.collect_losses() != flash.collect_losses() && difference < 5e-3, "{difference:e}");
    let faster = run(&[&libraries], DEFAULT_SETTING).expect_success();
    assert!(compute_loss_difference(&faster, &flash) < 5e-3);
    // the measured times may decide either way
    assert_eq!(attention_notices(&faster).len(), 2, "forward and backward: {:?}", faster.notice_messages());
    // without an explicit request a failure of cuDNN is reported, and cuDNN is not used
    for (failure, name) in [
        ("cudnnBackendExecute", "cudnn_fails"),
        ("cuDNN is wrong", "cudnn_is_wrong"),
        ("cuDNN has no plan", "cudnn_has_no_plan"),
    ] {
        let ran = run(&[&libraries], ("EMULATED_GPU_FAILS", failure)).expect_success();
        assert_eq!(ran.collect_losses(), flash.collect_losses(), "{failure}");
        job_dir.assert_snapshot(name, &attention_notices(&ran).join("\n"));
    }
    let old_cudnn = ("EMULATED_GPU_CUDNN", "90800");
    let old = run(&[&libraries], old_cudnn).expect_success();
    assert_eq!(old.collect_losses(), flash.collect_losses());
    let start = &old.events_named("start")[0];
    let log = Path::new(start["run_dir"].as_str().expect("a directory")).join("logs/rank-0.log");
    let log = fs::read_to_string(log).expect("a log");
    let filters = [(list.to_str().expect("text"), "[LIBRARIES]")];
    support::assert_snapshot(emulated_gpu::library_directory(), "log_with_an_old_cudnn", &log, &filters);
    assert_eq!(run(&[], DEFAULT_SETTING).expect_success().collect_losses(), flash.collect_losses());
    // a failure of cuDNN after an explicit request is an error
    for (set, setting, exit_code, code) in [
        (&[][..], DEFAULT_SETTING, 3, "device-library-missing"),
        (&[&*libraries], old_cudnn, 3, "device-library-too-old"),
        (&[&*libraries], ("EMULATED_GPU_FAILS", "cudnnBackendExecute"), 1, "cuda-call-failed"),
        (&[&*libraries], ("EMULATED_GPU_FAILS", "cuDNN has no plan"), 1, "cudnn-attention-unsupported"),
        (&[&*libraries, "train.model.dropout=0.1"], DEFAULT_SETTING, 1, "cudnn-attention-unsupported"),
    ] {
        let ran = run(&[&["train.attention=cudnn"], set].concat(), setting);
        let codes: Vec<_> = ran.failure_diagnostics().iter().map(|d| d["code"].clone()).collect();
        assert_eq!((ran.code, codes), (exit_code, vec![code.into()]), "{setting:?}: {}", ran.stderr);
    }
}

#[test]
fn a_job_trains_on_a_gpu_and_resumes_on_the_cpu() {
    let job_dir = JobDirectory::new();
    let one_worker = ["cluster.devices=cuda", "cluster.workers_per_host=1"];
    let one = run_on_emulated_gpu(&job_dir, &one_worker, DEFAULT_SETTING).expect_success();
    assert!(job_dir.checkpoint_dir().join("weights/config.json").exists());
    job_dir.delete_checkpoints();
    let shared = ["cluster.devices=cuda", "cluster.workers_per_host=2", "cluster.workers_per_gpu=2"];
    let two = run_on_emulated_gpu(&job_dir, &shared, DEFAULT_SETTING).expect_success();
    assert_eq!(two.collect_losses(), one.collect_losses(), "two workers on one GPU");
    job_dir.delete_checkpoints();
    // slow streams of collectives do not change the losses, and the time of waiting is reported
    let lagging = run_on_emulated_gpu(&job_dir, &shared, ("EMULATED_GPU_LAG", "side:2000")).expect_success();
    assert_eq!(lagging.collect_losses(), one.collect_losses(), "two workers on one GPU with slow streams");
    let exposed = |ran: &FinishedRun| {
        let steps = ran.events_named("step").into_iter();
        steps.map(|e| e["exposed_comm_s"].as_f64().expect("seconds")).sum::<f64>()
    };
    assert!(exposed(&lagging) > 0.01 && exposed(&one) == 0.0, "{} {}", exposed(&lagging), exposed(&one));
    let resumed =
        run_on_emulated_gpu(&job_dir, &["train.steps=4", "cluster.workers_per_host=1"], DEFAULT_SETTING)
            .expect_success();
    assert_eq!(resumed.events_named("resume").len(), 1);
    job_dir.delete_checkpoints();
    let cpu =
        run_on_emulated_gpu(&job_dir, &["cluster.workers_per_host=1"], DEFAULT_SETTING).expect_success();
    let difference = compute_loss_difference(&one, &cpu);
    assert!(difference < 1e-5, "{difference:e}");
    let too_many = run_on_emulated_gpu(
        &job_dir,
        &["cluster.devices=cuda", "cluster.workers_per_host=2"],
        DEFAULT_SETTING,
    );
    assert_eq!(too_many.code, 2, "{}", too_many.stderr);
    assert_eq!(too_many.failure_diagnostics()[0]["code"], "gpus-too-few", "{}", too_many.expect_failure());
    job_dir.assert_snapshot("more_workers_than_gpus", &too_many.stderr);
}

#[test]
fn check_reports_the_version_and_path_of_each_cuda_library() {
    let job_dir = JobDirectory::new();
    let check_with = |devices: &str, libraries: &Path, path: &str| {
        let output = job_dir
            .launch_command(&["check", "job.yaml", "--json", "--set", &format!("cluster.devices={devices}")])
            .env("LD_LIBRARY_PATH", libraries)
            .env("PATH", path)
            .output()
            .expect("launch starts");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let checks = report["hosts"][0]["checks"].as_array().expect("checks").clone();
        let lines = checks.iter().filter(|c| c["check"] == "cuda" || c["check"] == "nccl");
        let lines = lines.map(|c| {
            let hint = c["hint"].as_str().map_or_else(String::new, |hint| format!("; {hint}"));
            let (name, result, found) = (c["check"].as_str()?, c["result"].as_str()?, c["found"].as_str()?);
            Some(format!("{name} {result} {found}{hint}"))
        });
        (output.status.code(), lines.collect::<Option<Vec<String>>>().expect("texts"))
    };
    let path = std::env::var("PATH").expect("a PATH");
    let check = |devices: &str, libraries: &Path| check_with(devices, libraries, &path);
    let directories = [
        emulated_gpu::library_directory().to_owned(),
        emulated_gpu::library_directory().join("cudnn"),
        emulated_nccl::build_library().to_owned(),
    ];
    let list = std::env::join_paths(&directories).expect("paths");
    let libraries = regex::escape(&directories[0].display().to_string());
    let nccl = regex::escape(&directories[2].display().to_string());
    let filters = [(libraries.as_str(), "[LIBRARIES]"), (nccl.as_str(), "[NCCL]")];
    let (_, checks) = check("cuda", Path::new(&list));
    support::assert_snapshot(&job_dir.path(""), "check_of_cuda_libraries", &checks.join("\n"), &filters);
    // a driver, and NVIDIA's packages of a Python that is in PATH but not activated
    let (driver, python) = (job_dir.path("driver"), job_dir.path("python"));
    let packages = python.join("lib/python3.12/site-packages/nvidia/cu13/lib");
    for directory in [&driver, &python.join("bin"), &packages] {
        fs::create_dir_all(directory).expect("a directory");
    }
    fs::write(python.join("bin/python3"), "").expect("a file");
    for (name, directory) in
        [("libcuda.so.1", &driver), ("libnvrtc.so.13", &packages), ("libcublasLt.so.13", &packages)]
    {
        fs::copy(emulated_gpu::library_directory().join(name), directory.join(name)).expect("copied");
    }
    let path_with_python = format!("{}:{path}", python.join("bin").display());
    let (_, checks) = check_with("cuda", &driver, &path_with_python);
    // the checks after the first four depend on whether this machine has NCCL
    job_dir.assert_snapshot("check_of_libraries_in_python_packages", &checks[..4].join("\n"));
    let (code, checks) = check("cuda", &job_dir.path("nowhere"));
    if checks[0].split(' ').nth(1) != Some("ok") {
        assert_eq!(code, Some(3), "{checks:#?}");
        job_dir.assert_snapshot("check_without_cuda", &checks[0]);
    }
    let (_, checks) = check("cpu", Path::new(&list));
    let names: Vec<_> = checks.iter().filter_map(|check| check.split(' ').next()).collect();
    assert_eq!(names, ["nccl"], "{checks:#?}");
}

#[test]
fn failures_of_gpus_and_their_libraries_are_reported_once() {
    let job_dir = JobDirectory::new();
    let one_worker = ["cluster.devices=cuda", "cluster.workers_per_host=1"];
    let codes =
        |ran: &FinishedRun| ran.failure_diagnostics().iter().map(|d| d["code"].clone()).collect::<Vec<_>>();
    let mut messages = String::new();
    for (setting, exit_code, code) in [
        (("EMULATED_GPU_MEMORY", "20000"), 1, "gpu-out-of-memory"),
        (("EMULATED_GPU_FAILS", "cuLaunchKernel:200"), 1, "cuda-call-failed"),
        (("EMULATED_GPU_COUNT", "0"), 3, "gpu-not-found"),
        (("LD_LIBRARY_PATH", "/nowhere"), 3, "device-library-missing"),
    ] {
        let ran = run_on_emulated_gpu(&job_dir, &one_worker, setting);
        assert_eq!((ran.code, codes(&ran)), (exit_code, vec![code.into()]), "{setting:?}: {}", ran.stderr);
        messages += &format!("{}={}\n{}\n", setting.0, setting.1, ran.failure_message());
        for help in ran.expect_failure()["help"].as_array().into_iter().flatten() {
            messages += &format!("  help: {}\n", help.as_str().expect("text"));
        }
    }
    job_dir.assert_snapshot("gpu_failures", &messages);
    // a GPU without fp8
    let fp8 = ["train.precision=fp8", "train.model.hidden_size=48", "train.model.intermediate_size=32"];
    let ran =
        run_on_emulated_gpu(&job_dir, &[&one_worker[..], &fp8].concat(), ("EMULATED_GPU_CAPABILITY", "80"));
    assert_eq!((ran.code, codes(&ran)), (2, vec!["gpu-unsupported".into()]), "{}", ran.stderr);
    assert!(ran.events_named("step").is_empty());
    job_dir.assert_snapshot("gpu_without_fp8", ran.failure_message());
    // two workers on a GPU, and a version of NCCL that does not support that
    let libraries = format!(
        "cluster.cuda_library_paths=[{}, {}]",
        emulated_gpu::library_directory().display(),
        emulated_nccl::build_library().display()
    );
    let two = ["cluster.devices=cuda", "cluster.workers_per_host=2", "cluster.workers_per_gpu=2"];
    let set = [&two[..], &["cluster.comm_backend=nccl", &libraries]].concat();
    let ran = run_on_emulated_gpu(&job_dir, &set, DEFAULT_SETTING);
    assert_eq!((ran.code, codes(&ran)), (3, vec!["device-library-too-old".into()]), "{}", ran.stderr);
    let nccl = regex::escape(&emulated_nccl::build_library().display().to_string());
    let filters = [(nccl.as_str(), "[NCCL]")];
    support::assert_snapshot(&job_dir.path(""), "nccl_without_shared_gpus", ran.failure_message(), &filters);
    // the directories of the job come before those of the machine
    let libraries = format!("cluster.cuda_library_paths=[{}]", emulated_gpu::library_directory().display());
    let set = ["cluster.devices=cuda", "cluster.workers_per_host=1", &libraries];
    run_on_emulated_gpu(&job_dir, &set, ("LD_LIBRARY_PATH", "/nowhere")).expect_success();
}
