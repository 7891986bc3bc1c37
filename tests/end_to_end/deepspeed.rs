//! Checks that the real DeepSpeed loads checkpoints that `launch ckpt convert` wrote. Parameters,
//! moments, frozen weights, buffers, groups and client state must be bit-equal, and the next losses
//! must equal those of the uninterrupted run.
//!
//! The losses of DeepSpeed depend on the number of ranks and the stage in the last bits, because
//! the order of its sums changes. They may differ by 1e-5 of their value in fp32 and by 1e-3 in 16
//! bits.
use crate::support::{
    self, JobDirectory,
    fork_server::{ForkServer, TRAINER_MODULES},
};
use serde_json::{Value, json};
use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
};

/// The checkpoints that DeepSpeed saves on two or three ranks for the test, as pairs of name and
/// source.
const SOURCES: [(&str, DeepSpeedSource); 6] = [
    (
        "z1",
        DeepSpeedSource {
            world: 2,
            stage: 1,
            dtype: "fp32",
            model: "llama",
            tied: true,
            groups: 2,
            freeze: &[],
        },
    ),
    (
        "z2",
        DeepSpeedSource {
            world: 2,
            stage: 2,
            dtype: "bf16",
            model: "llama",
            tied: false,
            groups: 2,
            freeze: &["layers.0.mlp"],
        },
    ),
    (
        "z3",
        DeepSpeedSource {
            world: 2,
            stage: 3,
            dtype: "fp32",
            model: "gpt2",
            tied: true,
            groups: 2,
            freeze: &[],
        },
    ),
    (
        "half",
        DeepSpeedSource {
            world: 2,
            stage: 2,
            dtype: "fp16",
            model: "llama",
            tied: false,
            groups: 2,
            freeze: &[],
        },
    ),
    (
        "z3one",
        DeepSpeedSource {
            world: 2,
            stage: 3,
            dtype: "bf16",
            model: "llama",
            tied: false,
            groups: 1,
            freeze: &[],
        },
    ),
    (
        "three",
        DeepSpeedSource {
            world: 3,
            stage: 3,
            dtype: "bf16",
            model: "llama",
            tied: true,
            groups: 2,
            freeze: &["layers.0.mlp"],
        },
    ),
];

/// A model and a DeepSpeed configuration with which the test saves a checkpoint.
struct DeepSpeedSource {
    world: u32,
    stage: u8,
    dtype: &'static str,
    model: &'static str,
    tied: bool,
    groups: u8,
    freeze: &'static [&'static str],
}

/// The conversions that the test performs. The fields are the name of the source, the ZeRO stage,
/// the world size, whether the target format is universal, and `sub_group_size` (0 for the
/// default).
const CONVERSIONS: [(&str, u8, u32, bool, u64); 17] = [
    ("z1", 1, 1, false, 0),
    ("z1", 3, 2, false, 0),
    ("z1", 2, 4, false, 0),
    ("z2", 2, 1, false, 0),
    ("z2", 3, 2, false, 2000),
    ("z2", 1, 4, false, 0),
    ("z3", 2, 1, false, 0),
    ("z3", 1, 2, false, 0),
    ("z3", 3, 4, false, 0),
    ("half", 2, 1, false, 0),
    ("half", 1, 4, false, 0),
    ("z1", 2, 1, true, 0),
    ("z3", 1, 2, true, 0),
    ("z3one", 3, 1, true, 0),
    ("z3one", 3, 4, true, 0),
    ("three", 3, 2, false, 3000),
    ("three", 2, 1, false, 0),
];

/// Describes one test case as the JSON object that tests/python/deepspeed_cycle.py expects.
fn create_case(name: &str, source: &DeepSpeedSource, stage: u8) -> Value {
    json!({"name": name, "stage": stage, "dtype": source.dtype, "model": source.model, "tied": source.tied,
           "groups": source.groups, "freeze": source.freeze})
}

/// Runs the cases with tests/python/deepspeed_cycle.py in one group of `world` processes. Returns
/// the result of each case. Panics if a result is missing.
fn run_cases(
    python: &ForkServer,
    job_dir: &JobDirectory,
    mode: &str,
    world: u32,
    cases: &[Value],
) -> Vec<Value> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let plan = job_dir.path(&format!("{mode}-{world}.json"));
    fs::write(&plan, json!({"world": world, "port": port, "cases": cases}).to_string()).unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/python/deepspeed_cycle.py");
    let ran = python.script_command(script).arg(mode).arg(&plan).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    let results: Vec<Value> =
        out.lines().filter_map(|l| serde_json::from_str(l.strip_prefix("RESULT ")?).ok()).collect();
    assert_eq!(results.len(), cases.len(), "{mode} on {world} ranks: {out}\n{err}");
    results
}

/// Runs `launch ckpt convert FROM TO ARGUMENTS…`. Panics if the command fails.
fn convert_checkpoint(job_dir: &JobDirectory, from: &Path, to: &Path, arguments: &[String]) {
    let mut command = job_dir.launch_command(&["ckpt", "convert"]);
    let ran = command.args([from, to]).args(arguments).output().unwrap();
    assert!(ran.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&ran.stderr));
}

#[test]
fn deepspeed_resumes_from_converted_checkpoints() {
    let Some(python) = support::find_deepspeed_python_or_skip("deepspeed_resumes_from_converted_checkpoints")
    else {
        return;
    };
    let python = ForkServer::start(&python, &TRAINER_MODULES);
    let job_dir = JobDirectory::new();
    let path = |name: String| -> PathBuf { job_dir.path(&name) };
    let made: Vec<Value> = SOURCES
        .iter()
        .map(|(name, source)| {
            let mut case = create_case(name, source, source.stage);
            case["dir"] = json!(path((*name).to_owned()));
            case["ref"] = json!(path(format!("{name}.pt")));
            case
        })
        .collect();
    for world in [2, 3] {
        let pairs = SOURCES.iter().zip(&made).filter(|((_, source), _)| source.world == world);
        let made: Vec<Value> = pairs.map(|(_, case)| case.clone()).collect();
        for result in run_cases(&python, &job_dir, "make", world, &made) {
            assert!(result["wrong"].is_null(), "{result}");
        }
    }
    for world in [1, 2, 4] {
        let mut cases = Vec::new();
        for &(from, stage, _, universal, sub_group_size) in CONVERSIONS.iter().filter(|t| t.2 == world) {
            let source = &SOURCES.iter().find(|(n, _)| *n == from).unwrap().1;
            let name = format!("{from}-to-{stage}-{world}-{universal}");
            let (dir, world) = (path(name.clone()), world.to_string());
            let mut arguments: Vec<String> = match universal {
                true => vec!["--to".into(), "universal".into()],
                false => vec!["--to".into(), "deepspeed".into(), "--stage".into(), stage.to_string()],
            };
            arguments.extend(["--world".into(), world]);
            let mut case = create_case(&name, source, stage);
            if sub_group_size > 0 {
                arguments.extend(["--sub-group-size".into(), sub_group_size.to_string()]);
                case["sub_group_size"] = sub_group_size.into();
            }
            convert_checkpoint(&job_dir, &path(from.to_owned()), &dir, &arguments);
            case["dir"] = json!(dir);
            case["ref"] = json!(path(format!("{from}.pt")));
            case["universal"] = universal.into();
            cases.push(case);
        }
        for (case, result) in cases.iter().zip(run_cases(&python, &job_dir, "check", world, &cases)) {
            assert_eq!(result["wrong"], json!([]), "{result}");
            let tolerance = if case["dtype"] == "fp32" { 1e-5 } else { 1e-3 };
            assert!(result["relative"].as_f64().unwrap() <= tolerance, "{result}");
        }
    }
}
