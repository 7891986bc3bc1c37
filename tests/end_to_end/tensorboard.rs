//! Checks that the event file of a run has the steps and evaluations that the run reported. An
//! independent reader reads the file: TensorBoard if the package is installed, otherwise
//! scripts/oracle/event_files.py itself.
use crate::support::{self, JobDirectory, environment::isolated_command};
use serde_json::{Value, json};

#[test]
fn event_files_have_the_values_of_the_metrics() {
    let Some(python) = support::find_python_or_skip("event_files_have_the_values_of_the_metrics") else {
        return;
    };
    let job_dir = JobDirectory::new();
    let evaluated = ["train.eval={every: 4, files: [corpus.txt], samples: 8}", "checkpoint.every=never"];
    let ran = job_dir.run(&evaluated).expect_success();
    let run_dir = ran.events_named("start")[0]["run_dir"].as_str().unwrap().to_owned();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/oracle/event_files.py");
    let output =
        isolated_command(python, &job_dir.path("")).arg(script).arg(job_dir.path(&run_dir)).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let contents: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(contents["version"], "brain.Event:2");
    assert_eq!(contents["marks"], json!([1]), "training starts with step 1");

    let mut expected = Vec::new();
    let tags = [
        ("step", ["loss", "grad_norm", "lr", "tokens_per_s", "exposed_comm_s"].as_slice(), "train"),
        ("eval", &["loss", "perplexity"], "eval"),
    ];
    for event in &ran.events {
        let Some((_, names, group)) = tags.iter().find(|(kind, ..)| event["event"] == **kind) else {
            continue;
        };
        for name in *names {
            let value = f64::from(event[*name].as_f64().unwrap() as f32);
            expected.push(json!([event["step"], format!("{group}/{name}"), value]));
        }
    }
    assert_eq!(expected.len(), 20 * 5 + 5 * 2);
    assert_eq!(contents["scalars"], Value::Array(expected));
}
