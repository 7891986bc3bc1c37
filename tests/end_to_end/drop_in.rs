//! Compares `launch torchrun`, `launch accelerate launch` and `launch deepspeed` with the original
//! programs: the same command line gives each worker the same arguments and environment.
mod accelerate_scripts;
mod cases;

use crate::support::{self, JobDirectory, output_to_text};
use cases::{CASES, Case, REJECTED_COMMAND_LINES};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::Stdio,
};

/// A Python script that, as a worker, writes its arguments, the interpreter's options and its
/// environment to a file.
const DUMP_SCRIPT: &str = r#"
import json, os, sys, time
name = os.path.join(os.environ["DUMP"], os.environ.get("RANK", "none") + ".json")
facts = dict(argv=sys.argv, command=sys.orig_argv, prefix=sys.prefix, env=dict(os.environ))
assert not os.path.exists(name), name
with open(name + ".new", "w") as file:
    json.dump(facts, file)
os.rename(name + ".new", name)
if "EXIT_CODE" in os.environ:
    # A worker that fails ends the others, which must have written their files.
    while len([f for f in os.listdir(os.environ["DUMP"]) if f.endswith(".json")]) < int(os.environ.get("WORLD_SIZE", "1")):
        time.sleep(0.01)
    sys.exit(int(os.environ["EXIT_CODE"]))
"#;

/// The environment variables that the test does not compare, because their values depend on the
/// run, the port or the shell.
const RUN_VARIABLES: [&str; 9] = [
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_USE_AGENT_STORE",
    "DUMP",
    "PWD",
    "_",
    "LC_CTYPE",
];

/// The environment variables that launch sets for every program, although some of the original
/// launchers do not set them.
const LAUNCH_VARIABLES: [&str; 19] = [
    "CROSS_RANK",
    "CROSS_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "OMP_NUM_THREADS",
    "PYTHONUNBUFFERED",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "CUDA_DEVICE_ORDER",
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
];

/// The environment variables that the original launchers set in these tests, and that launch does
/// not set.
const ORIGINAL_VARIABLES: [&str; 2] = ["CUDA_VISIBLE_DEVICES", "TORCHELASTIC_SIGNALS_TO_HANDLE"];

/// Writes to `directory` the files that the command lines of the test cases name.
fn write_files(directory: &Path) {
    fs::write(directory.join("dump.py"), DUMP_SCRIPT).unwrap();
    let program = directory.join("dump.sh");
    fs::write(&program, "#!/bin/sh\nexec python3 dump.py \"$@\"\n").unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    for (name, text) in cases::FILES {
        fs::write(directory.join(name), text).unwrap();
    }
    fs::create_dir_all(directory.join("hf")).unwrap();
}

/// Returns the environment variables with which the command line of a case runs.
fn build_environment(case: &Case, python: &Path, job_dir: &JobDirectory) -> BTreeMap<String, String> {
    let path = format!("{}:/usr/bin:/bin", python.parent().unwrap().display());
    let text = |path: std::path::PathBuf| path.to_str().unwrap().to_owned();
    let mut environment: BTreeMap<String, String> = [
        ("PATH", path),
        ("HOME", text(job_dir.path(".home"))),
        ("TMPDIR", text(job_dir.path(".tmp"))),
        ("XDG_STATE_HOME", text(job_dir.path(".state"))),
        ("HF_HOME", text(job_dir.path("hf"))),
        ("DS_ACCELERATOR", "cpu".to_owned()),
        ("ACCELERATE_USE_CPU", "true".to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    environment.extend(case.variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    environment
}

/// Writes the Accelerate configuration of `case` to the place where Accelerate looks for its
/// default configuration.
fn install_config(case: &Case, hf_home: &Path) {
    let file = hf_home.join("accelerate/default_config.yaml");
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    match case.default_config {
        Some(text) => fs::write(file, text).unwrap(),
        None => _ = fs::remove_file(file),
    }
}

/// Runs the command lines of all test cases with the original launchers: torchrun, accelerate and
/// deepspeed. The facts about the workers of case N are written to the directory `originals/N`.
/// Returns the exit codes.
fn run_originals(python: &Path, job_dir: &JobDirectory) -> Vec<i64> {
    let mut requests = Vec::new();
    for (number, case) in CASES.iter().enumerate() {
        let dump = job_dir.path(&format!("originals/{number}"));
        fs::create_dir_all(&dump).unwrap();
        let mut environment = build_environment(case, python, job_dir);
        let hf_home = dump.join("hf");
        install_config(case, &hf_home);
        environment.insert("DUMP".to_owned(), dump.to_str().unwrap().to_owned());
        environment.insert("HF_HOME".to_owned(), hf_home.to_str().unwrap().to_owned());
        requests.push(json!({
            "words": case.line.split_whitespace().collect::<Vec<_>>(),
            "environment": environment,
            "directory": job_dir.path(""),
        }));
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/oracle/original_launchers.py");
    let mut command = support::environment::isolated_command(python, &job_dir.path(""));
    command
        .arg(script)
        .env("DS_ACCELERATOR", "cpu")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut originals = command.spawn().unwrap();
    originals.stdin.take().unwrap().write_all(Value::from(requests).to_string().as_bytes()).unwrap();
    let output = originals.wait_with_output().unwrap();
    let text = output_to_text(&output);
    let codes = text.lines().find_map(|line| line.strip_prefix("codes ")).expect(&text);
    serde_json::from_str(codes).unwrap()
}

/// Reads the files in `directory` that [`DUMP_SCRIPT`] wrote, one for each worker, and returns
/// their contents by file name.
fn read_worker_dumps(directory: &Path) -> BTreeMap<String, Value> {
    let files = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let json = files.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    json.map(|path| {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap())
    })
    .collect()
}

/// Compares what a worker of the original program (`original`) and a worker of launch (`ours`)
/// recorded about themselves. Returns the differences.
fn compare_workers(case: &Case, original: &Value, ours: &Value) -> Vec<String> {
    let mut differences = Vec::new();
    for key in ["argv", "command", "prefix"] {
        if original[key] != ours[key] {
            differences.push(format!("{key}: {} instead of {}", ours[key], original[key]));
        }
    }
    let (original, ours) = (original["env"].as_object().unwrap(), ours["env"].as_object().unwrap());
    for name in original.keys().chain(ours.keys()) {
        let (expected, found) = (original.get(name), ours.get(name));
        let ignored = RUN_VARIABLES.contains(&name.as_str()) && !case.compared.contains(&name.as_str())
            || found.is_none() && ORIGINAL_VARIABLES.contains(&name.as_str())
            || expected.is_none() && LAUNCH_VARIABLES.contains(&name.as_str())
            || name == "HF_HOME";
        if expected != found && !ignored {
            differences.push(format!("{name}: {found:?} instead of {expected:?}"));
        }
    }
    differences
}

#[test]
fn workers_have_the_arguments_and_environment_of_the_original_programs() {
    let test = "workers_have_the_arguments_and_environment_of_the_original_programs";
    let Some(python) = support::find_deepspeed_python_or_skip(test) else { return };
    let directory = python.parent().unwrap().canonicalize().unwrap();
    let python = directory.join("python");
    let job_dir = JobDirectory::new();
    write_files(&job_dir.path(""));
    let codes = run_originals(&python, &job_dir);
    let mut failures = Vec::new();
    for (number, (case, code)) in CASES.iter().zip(codes).enumerate() {
        let dump = job_dir.path(&format!("launch/{number}"));
        fs::create_dir_all(&dump).unwrap();
        install_config(case, &job_dir.path("hf"));
        let words: Vec<&str> = case.line.split_whitespace().collect();
        let mut command = job_dir.launch_command(&words);
        command.env_clear().envs(build_environment(case, &python, &job_dir)).env("DUMP", &dump);
        let ran = command.output().unwrap();
        let (original, ours) =
            (read_worker_dumps(&job_dir.path(&format!("originals/{number}"))), read_worker_dumps(&dump));
        let mut differences = Vec::new();
        if (code == 0) != ran.status.success() {
            differences.push(format!("exit code {:?} instead of {code}", ran.status.code()));
        }
        if original.keys().ne(ours.keys()) || original.is_empty() {
            let (ours, original) = (ours.keys().collect::<Vec<_>>(), original.keys().collect::<Vec<_>>());
            differences.push(format!("workers {ours:?} instead of {original:?}: {}", output_to_text(&ran)));
        }
        for (name, original) in &original {
            let ours = ours.get(name).into_iter();
            differences.extend(ours.flat_map(|ours| compare_workers(case, original, ours)));
        }
        if !differences.is_empty() {
            failures.push(format!("{}\n  {}", case.line, differences.join("\n  ")));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn options_without_counterpart_are_rejected_by_name() {
    let job_dir = JobDirectory::new();
    write_files(&job_dir.path(""));
    for (line, option) in REJECTED_COMMAND_LINES {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (code, error) = job_dir.expect_rejection(&words);
        assert_eq!(code, 2, "{line}: {error}");
        assert!(error.to_string().contains(option), "{line}: {error}");
    }
    assert!(!job_dir.path("runs").exists(), "nothing was started");
}

#[test]
fn links_with_the_names_of_other_launchers_run_launch() {
    let job_dir = JobDirectory::new();
    write_files(&job_dir.path(""));
    let bin = job_dir.path("shims");
    let shims = job_dir.run_launch(&["shims", "shims"]);
    assert!(shims.status.success(), "{}", output_to_text(&shims));
    let run = |program: &str, words: &[&str]| {
        let mut linked = support::environment::isolated_command(bin.join(program), &job_dir.path(""));
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
        linked.args(words).env("PATH", path).output().unwrap()
    };
    // A script may have the name of an internal role of the executable.
    fs::write(job_dir.path("worker"), "#!/bin/sh\necho \"$RANK\" > worker.$RANK\n").unwrap();
    fs::set_permissions(job_dir.path("worker"), fs::Permissions::from_mode(0o755)).unwrap();
    let ran = run("torchrun", &["--nproc-per-node", "2", "--no-python", "./worker"]);
    assert!(ran.status.success(), "{}", output_to_text(&ran));
    assert!(job_dir.path("worker.0").exists() && job_dir.path("worker.1").exists());
    let help = output_to_text(&run("torchrun", &["--help"]));
    assert!(help.contains("launch torchrun [OPTION OF TORCHRUN]"), "{help}");
    let help = output_to_text(&run("accelerate-launch", &["--help"]));
    assert!(help.contains("launch accelerate launch [OPTION OF ACCELERATE]"), "{help}");
    let missing = run("accelerate", &["env"]);
    assert_eq!(missing.status.code(), Some(2), "{}", output_to_text(&missing));
    assert!(output_to_text(&missing).contains("drop-in-original-missing"), "{}", output_to_text(&missing));
    let original = job_dir.path("original");
    fs::create_dir(&original).unwrap();
    fs::write(original.join("accelerate"), "#!/bin/sh\necho \"original $*\"; exit 7\n").unwrap();
    fs::set_permissions(original.join("accelerate"), fs::Permissions::from_mode(0o755)).unwrap();
    symlink(original.join("accelerate"), job_dir.path("accelerate")).unwrap();
    let mut command = job_dir.launch_command(&["accelerate", "env", "--config_file", "x"]);
    let path = format!("{}:{}:/usr/bin:/bin", bin.display(), original.display());
    let passed = command.env("PATH", path).output().unwrap();
    assert_eq!(passed.status.code(), Some(7), "{}", output_to_text(&passed));
    assert!(output_to_text(&passed).contains("original env --config_file x"), "{}", output_to_text(&passed));
}

#[test]
fn torch_reduces_under_launch_torchrun() {
    let Some(python) = support::find_python_or_skip("torch_reduces_under_launch_torchrun") else { return };
    let job_dir = JobDirectory::new();
    let script = "import os, torch, torch.distributed as dist\n\
                  dist.init_process_group('gloo')\n\
                  x = torch.tensor([float(dist.get_rank() + 1)])\n\
                  dist.all_reduce(x)\n\
                  open(f'sum.{dist.get_rank()}', 'w').write(str(x.item()))\n\
                  dist.barrier()\n\
                  os._exit(0)\n";
    fs::write(job_dir.path("reduce.py"), script).unwrap();
    let mut command =
        job_dir.launch_command(&["torchrun", "--standalone", "--nproc-per-node=2", "reduce.py"]);
    let ran = command.env("PYTHON_EXEC", python).output().unwrap();
    assert!(ran.status.success(), "{}", output_to_text(&ran));
    for rank in 0..2 {
        assert_eq!(fs::read_to_string(job_dir.path(&format!("sum.{rank}"))).unwrap(), "3.0");
    }
}

#[test]
fn deepspeed_saves_the_process_id_and_reports_failures() {
    let job_dir = JobDirectory::new();
    let script = "import os\nparent = open('pid').read().strip() if os.path.exists('pid') else ''\n\
                  import glob\nfiles = [f for f in glob.glob('/tmp/*.deepspeed')]\n\
                  open('found', 'w').write('\\n'.join(open(f).read() for f in files))\nraise SystemExit(3)\n";
    fs::write(job_dir.path("fail.py"), script).unwrap();
    let launch =
        job_dir.launch_command(&["deepspeed", "--num_gpus", "1", "--save_pid", "fail.py"]).spawn().unwrap();
    let pid = launch.id();
    let ended = launch.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(1));
    let found = fs::read_to_string(job_dir.path("found")).unwrap();
    assert!(found.lines().any(|line| line == pid.to_string()), "{found}");
    assert!(!Path::new(&format!("/tmp/{pid}.deepspeed")).exists());
}
