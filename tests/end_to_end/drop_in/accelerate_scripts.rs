//! Runs the test scripts that Accelerate ships, unmodified, with `launch` in front of the original
//! command lines. The scripts check their results themselves.
use crate::support::{self, JobDirectory, environment::clean_command, output_to_text};
use std::path::{Path, PathBuf};

/// The command lines, without the directory of the scripts, and a text in the output. The script
/// `test_merge_weights.py` is not among them, because Accelerate rejects FSDP on CPUs.
const COMMAND_LINES: [(&str, &str); 5] = [
    ("torchrun --nproc-per-node 2 test_ops.py", "testing gather_object"),
    ("accelerate launch --multi_gpu --num_processes 2 test_ops.py", "testing gather_object"),
    ("torchrun --nproc-per-node 2 test_sync.py", "Test Distributed `no_sync` context manager"),
    ("python -m torch.distributed.run --nproc-per-node 2 test_script.py", "Training"),
    ("accelerate launch --cpu test_script.py", "Training"),
];

/// Returns the directory of Accelerate's test scripts in the environment of `python`.
fn find_scripts(python: &Path) -> PathBuf {
    let code = "import importlib.util as u; print(u.find_spec('accelerate').origin)";
    let output = clean_command(python).args(["-c", code]).output().expect("Python starts");
    let module = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    module.parent().expect("a package").join("test_utils/scripts")
}

#[test]
fn the_test_scripts_of_accelerate_pass() {
    let test = "drop_in::accelerate_scripts::the_test_scripts_of_accelerate_pass";
    let Some(python) = support::find_deepspeed_python_or_skip(test) else { return };
    let scripts = find_scripts(&python);
    let path = format!("{}:/usr/bin:/bin", python.parent().expect("a directory").display());
    for (line, expected) in COMMAND_LINES {
        let job_dir = JobDirectory::new();
        let word = |word: &str| match word.ends_with(".py") {
            true => scripts.join(word).display().to_string(),
            false => word.to_owned(),
        };
        let words: Vec<String> = line.split_whitespace().map(word).collect();
        let mut command = job_dir.launch_command(&words.iter().map(String::as_str).collect::<Vec<_>>());
        command.env("PATH", &path).env("ACCELERATE_USE_CPU", "true");
        let ran = command.output().expect("launch starts");
        let text = output_to_text(&ran);
        assert!(ran.status.success() && text.contains(expected), "{line}: {text}");
    }
}
