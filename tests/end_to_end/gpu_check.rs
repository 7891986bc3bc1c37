//! Tests `launch gpu-check`, `scripts/gpu-check` and the benchmark against PyTorch, with an
//! emulated GPU and without a GPU.

use crate::{
    emulated_gpu, emulated_nccl,
    support::{
        self,
        environment::{LAUNCH_EXECUTABLE, create_test_directory, isolated_command, launch_command},
        output_to_text,
    },
};
use serde_json::Value;
use std::{ffi::OsString, fs, os::unix::fs::PermissionsExt, path::Path};

/// The result of a `gpu-check`.
struct CheckResult {
    code: Option<i32>,
    /// stdout followed by stderr.
    text: String,
    /// The file of `--report`, if the check wrote it.
    report: Option<Value>,
}

/// A `gpu-check` of the executable under test: libraries, arguments and environment variables.
struct Check {
    libraries: OsString,
    variables: Vec<(&'static str, OsString)>,
}

/// A row of the table that `launch gpu-check` prints: part, subject, values and result.
type TableRow<'a> = [&'a str; 4];

impl Check {
    /// Creates a check with the emulated CUDA libraries, without cuDNN and NCCL.
    fn new() -> Check {
        Check { libraries: emulated_gpu::library_directory().into(), variables: Vec::new() }
    }

    /// Creates a check with the emulated CUDA libraries, cuDNN, and a NCCL that supports several
    /// ranks on one GPU.
    fn with_all_libraries() -> Check {
        let cuda = emulated_gpu::library_directory();
        let directories = [cuda.to_owned(), cuda.join("cudnn"), emulated_nccl::build_library().to_owned()];
        let libraries = std::env::join_paths(directories).expect("paths");
        Check { libraries, variables: Vec::new() }.set_variable("FAKE_NCCL_VERSION", "23007")
    }

    /// Sets an environment variable, such as a setting of the emulated GPU.
    fn set_variable(mut self, name: &'static str, value: impl Into<OsString>) -> Check {
        self.variables.push((name, value.into()));
        self
    }

    /// Runs `launch gpu-check` with these arguments, and `--report` in addition.
    fn run(&self, arguments: &[&str]) -> CheckResult {
        let directory = create_test_directory();
        self.run_in(directory.path(), arguments)
    }

    /// Runs `launch gpu-check` in a directory, in which it writes `report.json`.
    fn run_in(&self, directory: &Path, arguments: &[&str]) -> CheckResult {
        let output = launch_command(directory, &["gpu-check", "--report", "report.json"])
            .args(arguments)
            .env("LD_LIBRARY_PATH", &self.libraries)
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .output()
            .expect("launch starts");
        let report = fs::read(directory.join("report.json")).ok();
        let report = report.map(|bytes| serde_json::from_slice(&bytes).expect("JSON"));
        CheckResult { code: output.status.code(), text: output_to_text(&output), report }
    }
}

impl CheckResult {
    /// Returns the rows of the table.
    fn rows(&self) -> Vec<TableRow<'_>> {
        let rows = self.text.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
        let cells = rows.map(|row| row.split(" | ").collect::<Vec<_>>());
        cells.filter_map(to_row).filter(|row| row[0] != "part").collect()
    }

    /// Returns the row of a part. Panics if there is not exactly one.
    #[track_caller]
    fn row(&self, part: &str) -> TableRow<'_> {
        let rows: Vec<_> = self.rows().into_iter().filter(|row| row[0] == part).collect();
        assert_eq!(rows.len(), 1, "rows of {part}: {}", self.text);
        rows[0]
    }

    /// Returns the number of rows whose result is `result`.
    fn count_rows(&self, result: &str) -> usize {
        self.rows().iter().filter(|row| row[3] == result).count()
    }

    /// Returns the part with this name in the file of `--report`.
    #[track_caller]
    fn part(&self, name: &str) -> &Value {
        let parts = self.report.as_ref().expect("a report")["parts"].as_array().expect("parts");
        parts.iter().find(|part| part["name"] == name).unwrap_or_else(|| panic!("no part {name}"))
    }

    /// Asserts that the check ended with this exit code.
    #[track_caller]
    fn expect_code(self, code: i32) -> CheckResult {
        assert_eq!(self.code, Some(code), "{}", self.text);
        self
    }
}

/// Converts the cells of a line of the table to a row, without the time. Returns `None` for other
/// tables.
fn to_row(cells: Vec<&str>) -> Option<TableRow<'_>> {
    cells.get(1..)?.try_into().ok()
}

/// Runs `scripts/gpu-check` with the executable under test. Returns the exit code, and stdout
/// followed by stderr.
fn run_script(libraries: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let directory = create_test_directory();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/gpu-check");
    let output = isolated_command(script, directory.path())
        .args(["--launch", LAUNCH_EXECUTABLE])
        .args(arguments)
        .env("LD_LIBRARY_PATH", libraries)
        .output()
        .expect("the script runs");
    (output.status.code(), output_to_text(&output))
}

/// Extracts the codes of the error messages in a text. An error is a line that starts with
/// `error[CODE]`.
fn extract_error_codes(text: &str) -> Vec<&str> {
    text.lines().filter_map(|line| Some(line.strip_prefix("error[")?.split_once(']')?.0)).collect()
}

/// Returns the part of a text that begins with the first error.
fn skip_to_first_error(text: &str) -> String {
    text.lines().skip_while(|line| !line.starts_with("error[")).collect::<Vec<_>>().join("\n")
}

#[test]
fn without_a_gpu_the_missing_library_and_its_search_path_are_reported() {
    let directory = create_test_directory();
    let (code, text) = run_script(directory.path(), &["--quick"]);
    if code == Some(0) {
        return eprintln!("this machine has a GPU:\n{text}");
    }
    assert_eq!((code, extract_error_codes(&text)), (Some(3), vec!["device-library-missing"]), "{text}");
    support::assert_snapshot(directory.path(), "no_gpu", &skip_to_first_error(&text), &[]);
}

#[test]
fn gpu_check_rejects_unknown_options_and_prints_help() {
    let directory = create_test_directory();
    for arguments in [
        &["--nonsense"][..],
        &["--device", "x"],
        &["--ops", "--profile", "0"],
        &["--launch", "/no/such/file"],
        &["--only", "no-such-part"],
        &["--seconds", "0"],
        &["--continue", "/no/such/file"],
    ] {
        let (code, text) = run_script(directory.path(), arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {text}");
    }
    let help = launch_command(directory.path(), &["gpu-check", "--help"]).output();
    let help = help.expect("launch starts");
    assert!(help.status.success());
    support::assert_snapshot(directory.path(), "help", &output_to_text(&help), &[]);
}

#[test]
fn the_list_of_parts_begins_with_the_most_valuable_ones() {
    let directory = create_test_directory();
    let list = |arguments: &[&str]| {
        let output = launch_command(directory.path(), &["gpu-check", "--list"]).args(arguments).output();
        let text = output_to_text(&output.expect("launch starts"));
        text.lines().map(ToOwned::to_owned).collect::<Vec<String>>()
    };
    let parts = list(&[]);
    assert_eq!(parts[..4], ["environment", "kernels", "ceilings", "ops/matmul"]);
    let position = |name: &str| parts.iter().position(|part| part == name).expect(name);
    let order = ["ops/cudnn", "curves/llama-bf16", "models/gpt2-124m", "nccl/gpt2-fp8", "saves/gpt2-124m"];
    let positions = order.map(position);
    assert!(positions.is_sorted(), "{positions:?}");
    assert!(parts[parts.len() - 1].starts_with("nccl-2/"), "{parts:?}");
    assert!(!parts.iter().any(|part| part.starts_with("profiles/")));
    assert_eq!(list(&["--only", "curves,kernels", "--tiny"]).len(), 5);
    assert!(list(&["--quick"]).iter().all(|part| !part.starts_with("models/")));
}

#[test]
fn gpu_check_passes_on_an_emulated_gpu() {
    let (code, text) = run_script(emulated_gpu::library_directory(), &["--quick", "--part-seconds", "240"]);
    let check = CheckResult { code, text, report: None }.expect_code(0);
    for expected in ["driver", "NVRTC", "cuBLASLt", "GPU 0", "loading all kernels"] {
        let is_expected = |row: &TableRow| row[1] == expected && row[3] == "measured";
        assert!(check.rows().iter().any(is_expected), "no {expected}: {}", check.text);
    }
    // missing libraries that are optional are skipped rows, with the reason
    for (part, library) in [("ops/cudnn", "libcudnn.so.9"), ("environment", "libnccl.so.2")] {
        let is_skipped =
            |row: &TableRow| row[0] == part && row[3].starts_with("skipped: ") && row[3].contains(library);
        assert!(check.rows().iter().any(is_skipped), "no {library}: {}", check.text);
    }
    assert_eq!(check.count_rows("ok"), 12, "{}", check.text);
}

#[test]
fn the_attention_of_cudnn_is_checked_where_it_is_installed() {
    let check = Check::with_all_libraries().run(&["--quick", "--only", "ops/cudnn"]).expect_code(0);
    let [_, subject, values, result] = check.row("ops/cudnn");
    assert_eq!((subject, result), ("attention by cuDNN", "ok"));
    assert!(values.starts_with("6 shapes"), "{values}");
    let check = Check::with_all_libraries().set_variable("EMULATED_GPU_FAILS", "cudnnCreate");
    let check = check.run(&["--quick", "--only", "ops/cudnn,ops/embedding"]).expect_code(1);
    let result = check.row("ops/cudnn")[3];
    assert!(result.starts_with("FAILED: cuda-call-failed: cudnnCreate"), "{result}");
    assert_eq!(check.row("ops/embedding")[3], "ok");
}

/// Checks all kernels while the emulated GPU executes the threads of each block in reverse order. A
/// kernel that lacks a barrier then computes other numbers.
#[test]
fn the_order_of_threads_does_not_change_results() {
    Check::new()
        .set_variable("EMULATED_GPU_ORDER", "1")
        .run(&["--quick", "--part-seconds", "240"])
        .expect_code(0);
}

#[test]
fn unusable_drivers_and_libraries_end_the_check() {
    let mut messages = String::new();
    for (name, value, code) in [
        ("EMULATED_GPU_COUNT", "0", "gpu-not-found"),
        ("EMULATED_GPU_VERSION", "11080", "device-library-too-old"),
        ("EMULATED_GPU_VERSION", "12080", "device-library-unusable"),
    ] {
        let check = Check::new().set_variable(name, value).run(&["--quick"]).expect_code(3);
        assert_eq!(extract_error_codes(&check.text), [code], "{}", check.text);
        // every part has a row, although none was started
        let skipped = check.count_rows("skipped: the GPU is not usable");
        assert_eq!(skipped, 14, "{}", check.text);
        messages += &format!("{name}={value}\n{}\n\n", skip_to_first_error(&check.text));
    }
    support::assert_snapshot(emulated_gpu::library_directory(), "unusable_gpus", &messages, &[]);
}

#[test]
fn failures_of_kernels_and_calls_are_reported_with_their_reason() {
    for (name, value, part, reason) in [
        (
            "NVRTC_FAILS",
            "1",
            "kernels",
            "FAILED: kernel-compile-failed: cannot compile the kernels of elementwise.cu",
        ),
        (
            "EMULATED_GPU_FAILS",
            "cuModuleLoadData:2",
            "kernels",
            "FAILED: cuda-call-failed: cuModuleLoadData of norm.cu",
        ),
        (
            "EMULATED_GPU_FAILS",
            "cuLaunchKernel:40",
            "ops/matmul",
            "FAILED: cuda-call-failed: cuLaunchKernel of cast (grid",
        ),
        (
            "EMULATED_GPU_MEMORY",
            "1000",
            "ops/embedding",
            "FAILED: gpu-out-of-memory: out of GPU memory: 0.00 GiB more",
        ),
    ] {
        let check = Check::new().set_variable(name, value).run(&["--quick", "--only", part]).expect_code(1);
        let result = check.row(part)[3];
        assert!(result.starts_with(reason), "{value}: {result}");
    }
}

/// The part that launches the kernel with an injected fault, and parts that do not.
const FAULTY_PART: &str = "ops/activations";
const OTHER_PARTS: [&str; 3] = ["ops/norms-bias", "ops/embedding", "curves/llama-fp32"];

/// Runs the faulty part and others with a fault of the emulated GPU, and checks that the rows of
/// the others are complete.
#[track_caller]
fn run_with_fault(fault: &str, exit_code: i32) -> CheckResult {
    let check = Check::new().set_variable("EMULATED_GPU_KERNEL_FAULT", format!("geglu_forward:{fault}"));
    let only = [&[FAULTY_PART], &OTHER_PARTS[..]].concat().join(",");
    let check =
        check.run(&["--quick", "--tiny", "--part-seconds", "6", "--only", &only]).expect_code(exit_code);
    for part in OTHER_PARTS {
        assert_eq!(check.row(part)[3], "ok", "{fault}: {part}: {}", check.text);
    }
    check
}

#[test]
fn a_kernel_that_hangs_is_found() {
    let check = run_with_fault("hang", 1);
    assert_eq!(check.row(FAULTY_PART)[3], "FAILED: hung: killed after 6 s");
    // with blocking launches, the last call is the one that hangs
    let repeats = check.part(FAULTY_PART)["repeats"].as_array().expect("repeats");
    let calls = repeats[0]["launches"].as_array().expect("launches");
    let last = calls[calls.len() - 1].as_str().expect("a text");
    assert!(last.contains(" geglu_forward grid "), "{calls:?}");
    assert!(calls.len() == 32 && check.text.contains(last), "{}", check.text);
}

#[test]
fn an_illegal_access_of_a_kernel_is_found() {
    let check = run_with_fault("illegal", 1);
    let result = check.row(FAULTY_PART)[3];
    assert!(result.starts_with("FAILED: ") && result.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{result}");
    let result = check.row("ops/activations, blocking launches")[3];
    assert!(result.contains("cuLaunchKernel of geglu_forward (grid"), "{result}");
}

#[test]
fn a_wrong_result_of_a_kernel_is_found() {
    let check = run_with_fault("wrong", 1);
    for row in [FAULTY_PART, "ops/activations, blocking launches"] {
        let result = check.row(row)[3];
        assert!(result.starts_with("FAILED: ") && result.contains("has a relative error of"), "{result}");
    }
}

#[test]
fn crashes_and_missing_results_are_found() {
    for (fault, result) in [
        ("crash", "FAILED: the process was killed by SIGSEGV"),
        ("exit", "FAILED: the process ended with exit code 0 and without a result"),
    ] {
        let check = run_with_fault(fault, 1);
        assert_eq!(check.row(FAULTY_PART)[3], result, "{fault}");
        let calls = check.part(FAULTY_PART)["launches"].as_array().expect("launches");
        let last = calls[calls.len() - 1].as_str().expect("a text");
        assert!(last.contains(" geglu_forward grid "), "{calls:?}");
    }
}

/// Checks that output of libraries is not mistaken for results.
#[test]
fn other_output_of_a_part_changes_no_row() {
    let check = run_with_fault("noise", 0);
    assert_eq!(check.row(FAULTY_PART)[3], "ok");
}

#[test]
fn a_failed_part_is_repeated_under_compute_sanitizer() {
    let directory = create_test_directory();
    let tool = directory.path().join("compute-sanitizer");
    let script = "#!/bin/sh\necho '========= COMPUTE-SANITIZER' \"$1 $2\"\nwhile [ \"${1#--}\" != \"$1\" ]; do shift 2; done\nexec \"$@\"\n";
    fs::write(&tool, script).expect("written");
    fs::set_permissions(&tool, fs::Permissions::from_mode(0o755)).expect("permissions");
    let path = std::env::var_os("PATH").expect("a PATH");
    let paths = [directory.path().to_owned()].into_iter().chain(std::env::split_paths(&path));
    let check = Check::new()
        .set_variable("PATH", std::env::join_paths(paths).expect("paths"))
        .set_variable("EMULATED_GPU_KERNEL_FAULT", "geglu_forward:wrong")
        .run(&["--quick", "--only", FAULTY_PART])
        .expect_code(1);
    assert!(check.text.contains("    ========= COMPUTE-SANITIZER --tool memcheck"), "{}", check.text);
    let result = check.row("ops/activations, compute-sanitizer")[3];
    assert!(result.starts_with("FAILED: "), "{result}");
    assert_eq!(check.part(FAULTY_PART)["repeats"].as_array().map(Vec::len), Some(2));
}

#[test]
fn parts_that_do_not_fit_are_skipped_and_a_later_check_continues() {
    let directory = create_test_directory();
    let only = ["--quick", "--only", "ops/embedding,ops/classifier,kernels"];
    let first =
        Check::new().run_in(directory.path(), &[&only[..], &["--seconds", "4"]].concat()).expect_code(0);
    let result = first.row("kernels")[3];
    assert!(result.starts_with("skipped: takes about 5 s, and"), "{result}");
    assert_eq!(first.row("ops/embedding")[3], "ok", "{}", first.text);
    fs::rename(directory.path().join("report.json"), directory.path().join("first.json")).expect("renamed");
    let second = [&only[..], &["--continue", "first.json"]].concat();
    let second = Check::new().run_in(directory.path(), &second).expect_code(0);
    assert_eq!(second.row("ops/embedding")[3], "skipped: passed in the earlier check");
    let kernels = |row: &&TableRow| row[0] == "kernels" && row[3] == "measured";
    assert!(second.rows().iter().any(|row| kernels(&row)), "{}", second.text);
    // the report contains the rows of both
    assert_eq!(second.part("ops/embedding")["rows"][0]["result"], "ok");
    let kernels = second.part("kernels")["details"]["kernels"].as_array().expect("kernels");
    assert!(kernels.len() > 50 && kernels[0]["registers"].as_i64() > Some(0), "{kernels:?}");
    let tiny = [&only[..], &["--continue", "first.json", "--tiny"]].concat();
    let other = Check::new().run_in(directory.path(), &tiny).expect_code(2);
    assert!(other.text.contains("one check has --tiny and the other has not"), "{}", other.text);
}

/// Compares training on the emulated GPU with training on the CPU, with models that are small
/// enough for the emulator.
#[test]
fn training_on_an_emulated_gpu_agrees_with_the_cpu() {
    let groups = "curves,ranks,nccl,restart,models,saves,shapes";
    let check = Check::with_all_libraries().run(&["--tiny", "--only", groups]).expect_code(0);
    for (part, subject) in [
        ("curves/llama-fp32", "a tiny Llama, fp32, 1 rank"),
        ("curves/llama-fp16", "a tiny Llama, fp16, 1 rank"),
        ("ranks/llama-fp32", "a tiny Llama, fp32, 4 ranks on this GPU"),
        ("ranks/llama-bf16", "a tiny Llama, bf16, 2 ranks on this GPU"),
        ("nccl/llama-bf16", "a tiny Llama, bf16, 1 rank, NCCL"),
        ("restart", "a tiny Llama, after an abort, NCCL"),
        ("ranks/llama-fp8", "a tiny Llama, fp8, 2 ranks on this GPU"),
        ("shapes/tensors-over-2-bytes", "tensors over 2³¹ bytes"),
    ] {
        let is_passed = |row: &TableRow| row[..2] == [part, subject] && row[3] == "ok";
        assert!(check.rows().iter().any(is_passed), "{part} {subject} is missing in: {}", check.text);
    }
    for (part, subject) in [
        ("models/llama", "a tiny Llama, 1 × 6"),
        ("models/llama-offload", "a tiny Llama, optimizer states on the host"),
        ("models/llama-fp8", "a tiny Llama, fp8 matmuls"),
        ("models/llama-fast", "a tiny Llama, deterministic: false, no master weights"),
        ("models/llama-graphs", "a tiny Llama, CUDA graphs"),
        ("saves/llama", "a tiny Llama, 1 × 6"),
    ] {
        let is_measured = |row: &TableRow| row[..2] == [part, subject] && row[3] == "measured";
        assert!(check.rows().iter().any(is_measured), "{part} is missing in: {}", check.text);
    }
    assert_eq!(check.count_rows("ok"), 3 * 4 + 1 + 1 + 15, "{}", check.text);
    let details = &check.part("models/llama")["details"];
    for name in ["launched_kernels", "matmul_algorithms", "operations"] {
        assert!(details[name].as_array().is_some_and(|list| !list.is_empty()), "{name}: {details}");
    }
    assert_eq!(details["matmul_algorithms"][0]["algorithm"]["tile"], 1);
    assert!(details["launched_kernels"][0]["launch"]["active_blocks"].as_i64() > Some(0), "{details}");
    assert!(details["clocks"]["after"]["nvml"].is_string(), "{details}");
}

/// Checks that a part whose ranks never join each other is ended. The emulated NCCL does not
/// connect processes.
#[test]
fn two_ranks_that_never_join_are_ended() {
    let only = "nccl-2/llama-fp32,ops/embedding";
    let check = Check::with_all_libraries();
    let check = check.run(&["--tiny", "--part-seconds", "6", "--only", only]).expect_code(1);
    assert_eq!(check.row("nccl-2/llama-fp32")[3], "FAILED: hung: killed after 6 s");
    assert_eq!(check.row("ops/embedding")[3], "ok");
    let old = Check::with_all_libraries().set_variable("FAKE_NCCL_VERSION", "22809");
    let old = old.run(&["--tiny", "--only", "nccl-2/llama-fp32"]).expect_code(0);
    let result = old.row("nccl-2/llama-fp32")[3];
    assert!(
        result.starts_with("skipped: ") && result.contains("does not support two ranks on one GPU"),
        "{result}"
    );
}

#[test]
fn a_profile_has_a_row_for_each_kernel_of_a_step() {
    let check = Check::new().run(&["--tiny", "--profile", "0"]).expect_code(0);
    let rows = check.rows();
    let operations: Vec<_> =
        rows.iter().filter_map(|row| Some((row[1].strip_prefix("- ")?, row[2]))).collect();
    for kernel in ["adamw", "cross_entropy", "rmsnorm_forward_bf16"] {
        assert!(operations.iter().any(|(name, _)| *name == kernel), "{kernel} is missing in: {}", check.text);
    }
    let is_matmul = |(name, _): &(&str, &str)| name.ends_with("(bf16 · bf16 → f32)");
    assert!(operations.iter().any(is_matmul), "no matmul in: {}", check.text);
    let share = |values: &str| values.rsplit(", ").next()?.strip_suffix(" %")?.parse::<f64>().ok();
    let sum: f64 = operations.iter().filter_map(|(_, values)| share(values)).sum();
    assert!((98.0..102.0).contains(&sum), "{sum} %: {}", check.text);
    let check = Check::new().run(&["--tiny", "--profile", "9"]).expect_code(2);
    let error = skip_to_first_error(&check.text);
    support::assert_snapshot(emulated_gpu::library_directory(), "profile_of_no_model", &error, &[]);
}

/// Checks that the benchmark against PyTorch trains the models that `launch gpu-check --models`
/// describes, that its table has the results of both, and that results of PyTorch are reused.
#[test]
fn the_benchmark_trains_the_same_models_with_pytorch() {
    let Some(python) = support::find_python_or_skip("the_benchmark_trains_the_same_models_with_pytorch")
    else {
        return;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/bench/compare_torch");
    let directory = create_test_directory();
    let run = |arguments: &[&str]| {
        let output = isolated_command(&python, directory.path())
            .arg(&script)
            .args(["--launch", LAUNCH_EXECUTABLE, "--tiny", "--device", "cpu", "--eager"])
            .args(arguments)
            .env("LD_LIBRARY_PATH", emulated_gpu::library_directory())
            .output()
            .expect("Python starts");
        (output.status.code(), output_to_text(&output))
    };
    let cells = |text: &str, model: &str| {
        let row = text.lines().filter_map(|line| line.strip_prefix("| ")).find(|row| row.starts_with(model));
        let row = row.unwrap_or_else(|| panic!("no row: {text}"));
        row.split(" | ").map(ToOwned::to_owned).collect::<Vec<String>>()
    };
    let (code, text) = run(&["--models", "0,3", "--cache", "torch.json"]);
    assert_eq!(code, Some(0), "{text}");
    let [first, fast] =
        ["a tiny Llama, 1 × 6", "a tiny Llama, deterministic: false"].map(|row| cells(&text, row));
    let number = |cell: &String| cell.parse::<f64>().unwrap_or_else(|e| panic!("{e}: {text}"));
    assert!(first[1..4].iter().all(|cell| number(cell) > 0.0), "{text}");
    // both rows have the same configuration of PyTorch
    assert_eq!(first[2], fast[2], "{text}");
    let (code, text) = run(&["--models", "0", "--cache", "torch.json"]);
    assert_eq!((code, &cells(&text, "a tiny Llama, 1 × 6")[2]), (Some(0), &first[2]), "{text}");
    let (code, text) = run(&["--models", "7"]);
    assert_eq!(code, Some(1), "{text}");
    let emulated = emulated_gpu::library_directory();
    support::assert_snapshot(emulated, "benchmark_of_no_model", text.lines().last().unwrap_or(""), &[]);
}
