//! GPUs from outside: what a machine without one says, and `scripts/gpu-check`.
#[path = "../worker/device/tests/emulated_gpu/mod.rs"]
mod emulated_gpu;
#[path = "../worker/comm/tests/nccl/stand_in.rs"]
mod stand_in;
mod support;

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};
use support::{FinishedRun, JobDirectory};

/// `scripts/gpu-check` with the executable under test, where only the named folder holds CUDA's libraries.
fn gpu_check(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    with(folder, arguments, ("EMULATED_GPU_COUNT", "1"))
}

/// As [`gpu_check`], and the emulated card is told something.
fn with(folder: &Path, arguments: &[&str], (name, value): (&str, &str)) -> (Option<i32>, String) {
    let cache = tempfile::tempdir().expect("a folder");
    let output = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/gpu-check"))
        .args(["--launch", env!("CARGO_BIN_EXE_launch")])
        .args(arguments)
        .env("LD_LIBRARY_PATH", folder)
        .env("XDG_CACHE_HOME", cache.path())
        .env(name, value)
        .env_remove("VIRTUAL_ENV")
        .env_remove("CONDA_PREFIX")
        .output()
        .expect("the script runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

#[test]
fn without_a_gpu_it_is_said_what_was_looked_for_and_where() {
    let folder = tempfile::tempdir().expect("a folder");
    let (code, said) = gpu_check(folder.path(), &["--quick"]);
    if code == Some(0) {
        return eprintln!("this machine has a GPU:\n{said}");
    }
    assert_eq!(code, Some(3), "{said}");
    let place = folder.path().display().to_string();
    for part in
        ["no GPU can be used here", "the NVIDIA driver (libcuda.so.1)", &place, "/usr/local/nvidia/lib64"]
    {
        assert!(said.contains(part), "{part} is missing in: {said}");
    }
}

#[test]
fn what_isnt_known_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    for arguments in [&["--nonsense"][..], &["--device", "x"], &["--launch", "/no/such/file"]] {
        let (code, said) = gpu_check(folder.path(), arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {said}");
    }
}

/// The whole way, from the libraries to the table: on the emulated card.
#[test]
fn an_emulated_card_passes() {
    let (code, said) = gpu_check(emulated_gpu::library_directory(), &["--quick"]);
    assert_eq!(code, Some(0), "{said}");
    for part in [
        "GPU 0: Emulated GPU, sm_90",
        "driver: CUDA 13.0 (",
        "NVRTC 13.0 (",
        "cuBLASLt 130100 (",
        "cuDNN is not available: ",
        "kernels loaded in",
    ] {
        assert!(said.contains(part), "{part} is missing in: {said}");
    }
    assert_eq!(said.matches("| ok |").count(), 11, "{said}");
}

/// Where cuDNN is, its attention is checked, too; what it can't be used for is said.
#[test]
fn cudnn_is_checked_where_it_is() {
    let list = std::env::join_paths([
        emulated_gpu::library_directory().to_owned(),
        emulated_gpu::library_directory().join("cudnn"),
    ])
    .expect("paths");
    let (code, said) = gpu_check(Path::new(&list), &["--quick"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("cuDNN 9.19.0 (/") && said.contains("| attention by cuDNN | 6 |"), "{said}");
    assert_eq!(said.matches("| ok |").count(), 12, "{said}");
    let (code, said) = with(Path::new(&list), &["--quick"], ("EMULATED_GPU_FAILS", "cudnnCreate"));
    assert!(code == Some(1) && said.contains("cudnnCreate failed: "), "{code:?}: {said}");
}

/// The threads of a block in the other order: a kernel that lacks a barrier finds other numbers.
#[test]
fn the_order_of_threads_changes_nothing() {
    let (code, said) = with(emulated_gpu::library_directory(), &["--quick"], ("EMULATED_GPU_ORDER", "1"));
    assert_eq!(code, Some(0), "{said}");
}

/// Each thing that can be wrong with a machine has its name.
#[test]
fn what_is_wrong_with_a_card_is_said() {
    for (told, code, part) in [
        (("EMULATED_GPU_COUNT", "0"), 3, "cuInit failed: CUDA_ERROR_NO_DEVICE"),
        (
            ("EMULATED_GPU_VERSION", "11080"),
            3,
            "is a driver for CUDA 11.8, but CUDA 12.0 or newer is required",
        ),
        (
            ("EMULATED_GPU_VERSION", "12080"),
            3,
            "libnvrtc.so.13 needs a newer driver than this one, which implements CUDA 12",
        ),
        (("NVRTC_FAILS", "1"), 1, "cannot compile the kernels of flat.cu"),
        (
            ("EMULATED_GPU_FAILS", "cuModuleLoadData:2"),
            1,
            "cuModuleLoadData of norm.cu failed: CUDA_ERROR_LAUNCH_FAILED",
        ),
        (("EMULATED_GPU_FAILS", "cuLaunchKernel:40"), 1, "cuLaunchKernel of"),
    ] {
        let (got, said) = with(emulated_gpu::library_directory(), &["--quick"], told);
        assert_eq!(got, Some(code), "{told:?}: {said}");
        assert!(said.contains(part), "{told:?}: {part} is missing in: {said}");
    }
}

/// Training beside the CPU's, and its table, of models that an emulated card has patience for.
#[test]
fn training_on_an_emulated_card_passes() {
    let folders = [emulated_gpu::library_directory(), stand_in::folder()];
    let list = std::env::join_paths(folders).expect("paths");
    // a version that lets ranks share a GPU
    let (code, said) = with(Path::new(&list), &["--quick", "--tiny"], ("FAKE_NCCL_VERSION", "23007"));
    assert_eq!(code, Some(0), "{said}");
    for row in [
        "| a tiny Llama | fp32 | 1 |",
        "| a tiny Llama | fp32 | 4 on this GPU |",
        "| a tiny Llama | bf16 | 2 on this GPU |",
        "| a tiny Llama | bf16 | 1, NCCL |",
        "| a tiny Llama | fp8 | 2 on this GPU |",
        "| a tiny Llama | bf16 | 2, NCCL on this GPU |",
        "| a tiny Llama, 1 × 6 |",
        "| a tiny Llama, optimizer states on the host |",
        "| a tiny Llama, fp8 matmuls |",
        "| a tiny Llama, deterministic: false, no master weights |",
        "| a tiny Llama, CUDA graphs |",
    ] {
        assert!(said.contains(row), "{row} is missing in: {said}");
    }
    assert_eq!(said.matches("| ok |").count(), 11 + 3 * 5, "{said}");
}

/// Every kernel of a step has its row, and the shares are of one whole.
#[test]
fn a_profile_shows_what_a_step_is_made_of() {
    let (code, said) =
        with(emulated_gpu::library_directory(), &["--tiny", "--profile", "0"], ("EMULATED_GPU_ORDER", "0"));
    assert_eq!(code, Some(0), "{said}");
    for part in [
        "one step takes",
        "| adamw |",
        "| cross_entropy | 1 |",
        "| rmsnorm_forward_bf16 |",
        "(bf16 · bf16 → f32)",
    ] {
        assert!(said.contains(part), "{part} is missing in: {said}");
    }
    let shares =
        said.lines().filter_map(|line| line.strip_suffix(" % |")?.rsplit("| ").next()?.parse::<f64>().ok());
    let whole: f64 = shares.sum();
    assert!((99.0..101.0).contains(&whole), "{whole} %: {said}");
    let (code, said) =
        with(emulated_gpu::library_directory(), &["--tiny", "--profile", "9"], ("EMULATED_GPU_ORDER", "0"));
    assert!(code == Some(1) && said.contains("model 9 does not exist; models are 0 to 4"), "{said}");
}

/// A job whose model an emulated card has patience for.
const SMALL: [&str; 8] = [
    "train.model.hidden_size=12",
    "train.model.intermediate_size=17",
    "train.model.num_hidden_layers=1",
    "train.data.seq_len=8",
    "train.batch.global=4",
    "train.steps=3",
    "checkpoint.every=2",
    "checkpoint.gather_16bit_weights_on_model_save=true",
];

/// The small job on the emulated card, which is told something.
fn job(place: &JobDirectory, set: &[&str], told: (&str, &str)) -> Output {
    let set = SMALL.iter().chain(set).flat_map(|s| ["--set", s]);
    place
        .command(&["job.yaml", "--json"])
        .args(set)
        .env("LD_LIBRARY_PATH", emulated_gpu::library_directory())
        .env("XDG_CACHE_HOME", place.path(".cache"))
        .env("LAUNCH_GPUS", "1")
        .env(told.0, told.1)
        .env_remove("CUDA_VISIBLE_DEVICES")
        .output()
        .expect("launch starts")
}

/// The difference of the losses of two runs, relative.
fn apart(a: &FinishedRun, b: &FinishedRun) -> f64 {
    let losses = |ran: &FinishedRun| ran.losses().iter().map(|l| f64::from_bits(l.1)).collect::<Vec<_>>();
    let (a, b) = (losses(a), losses(b));
    assert_eq!((a.len(), b.len()), (3, 3));
    a.iter().zip(&b).map(|(a, b)| ((a - b) / b).abs()).fold(0.0, f64::max)
}

/// Two workers that search at once have one choice for each product, and keep it; by default nobody searches.
#[test]
fn a_job_may_time_products() {
    let place = JobDirectory::new();
    let chosen = || {
        let files = fs::read_dir(place.path(".cache/launch/kernels")).expect("kernels are kept");
        let names = files.map(|f| f.expect("entry").file_name().to_string_lossy().into_owned());
        names.filter(|name| name.ends_with(".algorithm")).count()
    };
    let none = ("EMULATED_GPU_COUNT", "1");
    let shared = ["cluster.devices=cuda", "cluster.workers_per_host=2", "cluster.workers_per_gpu=2"];
    let one = FinishedRun::from_output(&job(&place, &shared, none)).succeeded();
    assert_eq!(chosen(), 0);
    place.delete_checkpoints();
    let fast = [&shared[..], &["train.deterministic=false"]].concat();
    let timed = FinishedRun::from_output(&job(&place, &fast, none)).succeeded();
    assert!(chosen() > 3, "{} choices", chosen());
    // The emulated library's algorithms differ in time alone, sums of gradients in their order.
    assert!(apart(&timed, &one) < 1e-5, "{}", apart(&timed, &one));
}

/// With graphs, where they fail, and where the clock decides: the same losses, and one word about it.
#[test]
fn a_job_may_use_graphs() {
    let place = JobDirectory::new();
    let alone = ["cluster.devices=cuda", "cluster.workers_per_host=1"];
    let ran = |set: &[&str], told| {
        place.delete_checkpoints();
        let ran = FinishedRun::from_output(&job(&place, &[&alone[..], set].concat(), told)).succeeded();
        let notices = ran.named("notice").into_iter();
        let said: Vec<String> = notices
            .filter_map(|e| Some(e["message"].as_str()?.to_owned()))
            .filter(|m| m.contains("graphs"))
            .collect();
        (ran.losses(), said)
    };
    let none = ("EMULATED_GPU_COUNT", "1");
    let (losses, said) = ran(&["train.cuda_graphs=false"], none);
    assert!(said.is_empty(), "{said:?}");
    assert_eq!(ran(&["train.cuda_graphs=true"], none), (losses.clone(), said));
    let (failing, said) = ran(&["train.cuda_graphs=true"], ("EMULATED_GPU_FAILS", "cuGraphInstantiate:1"));
    assert_eq!(failing, losses);
    let why = "CUDA graphs are off and training continues without them; cuGraphInstantiate failed";
    assert!(said.len() == 1 && said[0].starts_with(why), "{said:?}");
    let (all, said) = ran(&["train.steps=32"], none);
    assert_eq!(all.len(), 32);
    // What the clock says of an emulated card is one thing or the other.
    assert!(said.len() == 1 && said[0].starts_with("CUDA graphs are o"), "{said:?}");
    assert_eq!(ran(&["train.steps=32", "train.cuda_graphs=false"], none).0, all);
}

/// cuDNN's attention: asked for, found faster or not, not there, failing.
#[test]
fn a_job_may_have_cudnns_attention() {
    let place = JobDirectory::new();
    let list = std::env::join_paths([
        emulated_gpu::library_directory().to_owned(),
        emulated_gpu::library_directory().join("cudnn"),
    ])
    .expect("paths");
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
    let ran = |set: &[&str], told| {
        place.delete_checkpoints();
        let ran = FinishedRun::from_output(&job(&place, &[&base[..], set].concat(), told));
        let notices = ran.named("notice").into_iter();
        let said: Vec<String> = notices
            .filter_map(|e| Some(e["message"].as_str()?.to_owned()))
            .filter(|m| m.contains("attention of"))
            .collect();
        (ran, said)
    };
    let none = ("EMULATED_GPU_COUNT", "1");
    let (own, said) = ran(&["train.attention=flash", &libraries], none);
    let own = own.succeeded();
    assert!(said.is_empty(), "{said:?}");
    let (by_cudnn, _) = ran(&["train.attention=cudnn", &libraries], none);
    let by_cudnn = by_cudnn.succeeded();
    assert!(
        by_cudnn.losses() != own.losses() && apart(&by_cudnn, &own) < 5e-3,
        "{:e} apart",
        apart(&by_cudnn, &own)
    );
    let (either, said) = ran(&[&libraries], none);
    assert!(apart(&either.succeeded(), &own) < 5e-3);
    assert!(said.len() == 2 && said.iter().all(|s| s.contains("µs with cuDNN")), "{said:?}");
    // What fails when it is tried isn't taken, what isn't there isn't missed.
    for (told, why) in [
        ("cudnnBackendExecute", "cudnnBackendExecute failed"),
        ("cuDNN is wrong", "differ from launch's own kernels"),
        ("cuDNN has no plan", "no plan"),
    ] {
        let (failing, said) = ran(&[&libraries], ("EMULATED_GPU_FAILS", told));
        assert_eq!(failing.succeeded().losses(), own.losses(), "{told}");
        assert!(
            said.len() == 2 && said.iter().all(|s| s.contains("does not use cuDNN; ") && s.contains(why)),
            "{said:?}"
        );
    }
    let (old, _) = ran(&[&libraries], ("EMULATED_GPU_CUDNN", "90800"));
    let old = old.succeeded();
    assert_eq!(old.losses(), own.losses());
    let start = &old.named("start")[0];
    let log = Path::new(start["run_dir"].as_str().expect("a folder")).join("logs/rank-0.log");
    let log = fs::read_to_string(log).expect("a log");
    assert!(log.contains("attention runs without cuDNN: ") && log.contains("is cuDNN 9.8.0"), "{log}");
    let (without, _) = ran(&[], none);
    assert_eq!(without.succeeded().losses(), own.losses());
    // Asked for alone, it is.
    for (set, told, code, why) in [
        (&[][..], none, 3, "cuDNN (libcudnn.so.9) was not found"),
        (
            &[&*libraries],
            ("EMULATED_GPU_CUDNN", "90800"),
            3,
            "libcudnn.so.9 is cuDNN 9.8.0, but cuDNN 9.10 or newer is required",
        ),
        (&[&*libraries], ("EMULATED_GPU_FAILS", "cudnnBackendExecute"), 1, "cudnnBackendExecute failed: "),
        (
            &[&*libraries],
            ("EMULATED_GPU_FAILS", "cuDNN has no plan"),
            1,
            "cuDNN 9.19.0 has no plan for attention of 1 × 8",
        ),
        (
            &[&*libraries, "train.model.dropout=0.1"],
            none,
            1,
            "cuDNN 9.19.0 has no plan for attention with dropout",
        ),
    ] {
        let (ran, _) = ran(&[&["train.attention=cudnn"], set].concat(), told);
        assert!(
            ran.code == code && ran.stderr.contains(why),
            "{}, not {code}, {why}: {}",
            ran.code,
            ran.stderr
        );
    }
}

/// The executable from job to weights: one worker, then two that share the card; the second run goes on on the CPU.
#[test]
fn a_job_trains_on_a_card() {
    let place = JobDirectory::new();
    let none = ("EMULATED_GPU_COUNT", "1");
    let alone = ["cluster.devices=cuda", "cluster.workers_per_host=1"];
    let one = FinishedRun::from_output(&job(&place, &alone, none)).succeeded();
    assert!(place.checkpoints().join("weights/config.json").exists());
    place.delete_checkpoints();
    let shared = ["cluster.devices=cuda", "cluster.workers_per_host=2", "cluster.workers_per_gpu=2"];
    let two = FinishedRun::from_output(&job(&place, &shared, none)).succeeded();
    assert_eq!(two.losses(), one.losses(), "two workers on one card");
    place.delete_checkpoints();
    // Streams of collectives that lag: the same numbers, and what was waited for is told.
    let lagging =
        FinishedRun::from_output(&job(&place, &shared, ("EMULATED_GPU_LAG", "side:2000"))).succeeded();
    assert_eq!(lagging.losses(), one.losses(), "two workers on one card, streams lag");
    let exposed = |ran: &FinishedRun| {
        let steps = ran.named("step").into_iter();
        steps.map(|e| e["exposed_comm_s"].as_f64().expect("seconds")).sum::<f64>()
    };
    assert!(exposed(&lagging) > 0.01 && exposed(&one) == 0.0, "{} {}", exposed(&lagging), exposed(&one));
    let on = ["train.steps=4", "cluster.workers_per_host=1"];
    let went_on = FinishedRun::from_output(&job(&place, &on, none)).succeeded();
    assert_eq!(went_on.named("resume").len(), 1);
    place.delete_checkpoints();
    let cpu = FinishedRun::from_output(&job(&place, &["cluster.workers_per_host=1"], none)).succeeded();
    assert!(apart(&one, &cpu) < 1e-5, "{:e} apart", apart(&one, &cpu));
    let crowded = ["cluster.devices=cuda", "cluster.workers_per_host=2"];
    let refused = job(&place, &crowded, none);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{said}");
    assert!(said.contains("cluster.workers_per_gpu"), "{said}");
}

/// `launch check` of a job for GPUs names every library's version and path, and what is missing.
#[test]
fn check_names_the_libraries() {
    let place = JobDirectory::new();
    let check_with = |devices: &str, libraries: &Path, path: &str| {
        let output = place
            .command(&["check", "job.yaml", "--json", "--set", &format!("cluster.devices={devices}")])
            .env("LD_LIBRARY_PATH", libraries)
            .env("PATH", path)
            .env_remove("VIRTUAL_ENV")
            .env_remove("CONDA_PREFIX")
            .output()
            .expect("launch starts");
        let all: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let checks = all["hosts"][0]["checks"].as_array().expect("checks").clone();
        let lines = checks.iter().filter(|c| c["check"] == "cuda" || c["check"] == "nccl");
        let lines = lines.map(|c| {
            format!("{} {} {}", c["check"].as_str()?, c["result"].as_str()?, c["found"].as_str()?).into()
        });
        (output.status.code(), lines.collect::<Option<Vec<String>>>().expect("texts"))
    };
    let own_path = std::env::var("PATH").expect("a PATH");
    let check = |devices: &str, libraries: &Path| check_with(devices, libraries, &own_path);
    let folders = [
        emulated_gpu::library_directory().to_owned(),
        emulated_gpu::library_directory().join("cudnn"),
        stand_in::folder().to_owned(),
    ];
    let list = std::env::join_paths(folders).expect("paths");
    let (_, found) = check("cuda", Path::new(&list));
    let begins = [
        "cuda ok driver CUDA 13.0 (/",
        "cuda ok NVRTC 13.0 (/",
        "cuda ok cuBLASLt 13.1.0 (/",
        "cuda ok cuDNN 9.19.0 (/",
        "cuda ok NCCL 2.",
    ];
    assert_eq!(found.len(), begins.len(), "{found:#?}");
    for (line, begin) in found.iter().zip(begins) {
        assert!(line.starts_with(begin), "{begin}: {line}");
    }
    // A driver, and a Python on the PATH that nobody activated, with NVIDIA's packages.
    let (driver, python) = (place.path("driver"), place.path("python"));
    let packages = python.join("lib/python3.12/site-packages/nvidia/cu13/lib");
    for folder in [&driver, &python.join("bin"), &packages] {
        fs::create_dir_all(folder).expect("a folder");
    }
    fs::write(python.join("bin/python3"), "").expect("a file");
    for (name, folder) in
        [("libcuda.so.1", &driver), ("libnvrtc.so.13", &packages), ("libcublasLt.so.13", &packages)]
    {
        fs::copy(emulated_gpu::library_directory().join(name), folder.join(name)).expect("copied");
    }
    let path = format!("{}:{own_path}", python.join("bin").display());
    let (_, found) = check_with("cuda", &driver, &path);
    let there = format!("({}", packages.display());
    assert!(found[1].contains(&there) && found[2].contains(&there), "{found:#?}");
    assert_eq!(found[3], "cuda ok no cuDNN: attention is launch's own");
    let nowhere = place.path("nowhere");
    let (code, missing) = check("cuda", &nowhere);
    if !missing[0].starts_with("cuda ok") {
        assert_eq!(code, Some(3), "{missing:#?}");
        assert!(
            missing[0].starts_with("cuda failed driver: ") && missing[0].contains("libcuda.so.1"),
            "{missing:#?}"
        );
        assert!(missing[0].contains(&nowhere.display().to_string()), "{missing:#?}");
    }
    let (_, found) = check("cpu", Path::new(&list));
    assert!(found.len() == 1 && found[0].starts_with("nccl "), "{found:#?}");
}

/// A card without memory, without itself, or that fails: one message that says what, and what to do.
#[test]
fn what_ends_training_on_a_card_is_said_once() {
    let place = JobDirectory::new();
    let alone = ["cluster.devices=cuda", "cluster.workers_per_host=1"];
    for (told, code, parts) in [
        (("EMULATED_GPU_MEMORY", "20000"), 1, &["out of GPU memory: ", " needs ", "batch.micro"][..]),
        (
            ("EMULATED_GPU_FAILS", "cuLaunchKernel:200"),
            1,
            &["cuLaunchKernel of ", "CUDA_ERROR_LAUNCH_FAILED"],
        ),
        (("EMULATED_GPU_COUNT", "0"), 3, &["no GPU can be used here", "CUDA_ERROR_NO_DEVICE"]),
        (("LD_LIBRARY_PATH", "/nowhere"), 3, &["no GPU can be used here", "libcuda.so.1", "/nowhere"]),
    ] {
        let output = job(&place, &alone, told);
        let ran = FinishedRun::from_output(&output);
        assert_eq!(ran.code, code, "{told:?}: {}", ran.stderr);
        for part in parts {
            assert!(ran.stderr.contains(part), "{told:?}: `{part}` is missing in: {}", ran.stderr);
        }
        assert!(!ran.stderr.contains("panicked"), "{told:?}: {}", ran.stderr);
    }
    // a card whose tensor cores have no fp8
    let set = [
        &alone[..],
        &["train.precision=fp8", "train.model.hidden_size=48", "train.model.intermediate_size=32"],
    ]
    .concat();
    let ran = FinishedRun::from_output(&job(&place, &set, ("EMULATED_GPU_CAPABILITY", "80")));
    let why = "train.precision: GPU 0 (Emulated GPU, sm_80) does not support fp8 matmuls, which needs sm_89 (Ada) or newer";
    assert!(
        ran.code == 2 && ran.stderr.contains(why) && ran.named("step").is_empty(),
        "{}: {}",
        ran.code,
        ran.stderr
    );
    // two workers on a GPU, and an NCCL that knows no such thing
    let libs = format!(
        "cluster.cuda_library_paths=[{}, {}]",
        emulated_gpu::library_directory().display(),
        stand_in::folder().display()
    );
    let two = ["cluster.devices=cuda", "cluster.workers_per_host=2", "cluster.workers_per_gpu=2"];
    let set = [&two[..], &["cluster.comm_backend=nccl", &libs]].concat();
    let ran = FinishedRun::from_output(&job(&place, &set, ("EMULATED_GPU_COUNT", "1")));
    assert!(ran.code == 3 && ran.stderr.contains("NCCL 2.27.3 ("), "{}: {}", ran.code, ran.stderr);
    assert!(ran.stderr.contains("can't have two workers on a GPU, NCCL 2.30 or newer can"), "{}", ran.stderr);
    // the job's own folders come before the machine's
    let libs = format!("cluster.cuda_library_paths=[{}]", emulated_gpu::library_directory().display());
    let set = ["cluster.devices=cuda", "cluster.workers_per_host=1", &libs];
    FinishedRun::from_output(&job(&place, &set, ("LD_LIBRARY_PATH", "/nowhere"))).succeeded();
}

/// The benchmark beside PyTorch: the models that it is told of are those that launch trains, and its table has both.
#[test]
fn a_peer_trains_the_same_models() {
    let Some(python) = support::python("a_peer_trains_the_same_models") else { return };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/bench/compare_torch");
    let run = |models: &str| {
        let cache = tempfile::tempdir().expect("a folder");
        let output = Command::new(&python)
            .arg(&script)
            .args(["--launch", env!("CARGO_BIN_EXE_launch"), "--tiny", "--device", "cpu", "--eager"])
            .args(["--models", models])
            .env("LD_LIBRARY_PATH", emulated_gpu::library_directory())
            .env("XDG_CACHE_HOME", cache.path())
            .output()
            .expect("Python starts");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    };
    let (code, said) = run("0");
    assert_eq!(code, Some(0), "{said}");
    let row = said.lines().find(|line| line.starts_with("| a tiny Llama, 1 × 6 |"));
    let cells: Vec<&str> = row.unwrap_or_else(|| panic!("no row: {said}")).split(" | ").collect();
    let number = |cell: usize| cells[cell].parse::<f64>().unwrap_or_else(|e| panic!("{e}: {said}"));
    assert!(number(1) > 0.0 && number(2) > 0.0 && number(3) > 0.0, "{said}");
    let (code, said) = run("7");
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("there are models 0 to 4"), "{said}");
}
