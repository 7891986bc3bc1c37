//! Runs unmodified scripts with HF Trainer or Accelerate as jobs of launch.
#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]
use super::{FinishedRun, JobDirectory, assert_snapshot, list_files_below};
use serde_json::{Value, json};
use std::{fs, path::Path};

/// A script of scripts/oracle, and a directory in which it runs.
pub(crate) struct TrainerScript {
    pub(crate) job_dir: JobDirectory,
    /// The command that runs a script, instead of `python`.
    python: Vec<String>,
    script: &'static str,
    /// The number of optimizer steps of every run of the script.
    steps: u32,
    arguments: &'static [&'static str],
}

impl TrainerScript {
    /// Creates an empty directory in which `script` can run, to train `steps` steps. `python` is
    /// the command that runs a script.
    pub(crate) fn new(python: &[String], script: &'static str, steps: u32) -> TrainerScript {
        TrainerScript { job_dir: JobDirectory::new(), python: python.to_vec(), script, steps, arguments: &[] }
    }

    /// Makes the script use DeepSpeed at this ZeRO stage. `bf16` selects training in bf16 instead
    /// of fp32.
    pub(crate) fn with_deepspeed(self, stage: u8, bf16: bool) -> TrainerScript {
        let mut zero = json!({"stage": stage, "overlap_comm": false, "reduce_bucket_size": 20000});
        if stage == 3 {
            // several sub-groups in each group, which resharding must preserve
            zero["sub_group_size"] = 3000.into();
            zero["stage3_param_persistence_threshold"] = 0.into();
        }
        let config = json!({
            "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
            "bf16": {"enabled": bf16}, "zero_optimization": zero, "zero_allow_untested_optimizer": true,
            "zero_force_ds_cpu_optimizer": false, "steps_per_print": 1_000_000_000,
        });
        fs::write(self.job_dir.path("ds.json"), config.to_string()).unwrap();
        let arguments: &[&str] = match (self.script, bf16) {
            ("trainer.py", true) => &["--deepspeed", "ds.json", "--bf16"],
            _ => &["--deepspeed", "ds.json"],
        };
        TrainerScript { arguments, ..self }
    }

    /// Makes the script use FSDP. `kind` is the state that FSDP saves: `full` or `sharded`.
    pub(crate) fn with_fsdp(self, kind: &str) -> TrainerScript {
        let arguments: &[&str] = match kind {
            "full" => &["--fsdp", "full"],
            _ => &["--fsdp", "sharded"],
        };
        TrainerScript { arguments, ..self }
    }

    /// Runs the script as `workers` workers, with `resume` as the `resume:` section of the job.
    /// Returns the run and the log entry of each step. There are no log entries if the script did
    /// not finish.
    ///
    /// `report` is the name of the directory to which the ranks write their reports. The script
    /// saves checkpoints to `out-REPORT`. `more` are further arguments of the script.
    pub(crate) fn run(
        &self,
        workers: u32,
        report: &str,
        resume: &str,
        more: &[&str],
    ) -> (FinishedRun, Vec<Value>) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/oracle").join(self.script);
        let steps = self.steps.to_string();
        let output = format!("out-{report}");
        let mut command: Vec<&str> = self.python.iter().map(String::as_str).collect();
        command.extend([script.to_str().unwrap(), &output, report, &steps]);
        command.extend(self.arguments.iter().chain(more));
        let environment = json!({"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"});
        let run = json!({"command": command, "env": environment});
        let job = format!("name: tiny\ncluster: {{workers_per_host: {workers}}}\nrun: {run}\n{resume}\n");
        fs::write(self.job_dir.path("job.yaml"), job).unwrap();
        let ran = self.job_dir.run(&[]);
        let history = fs::read(self.job_dir.path(&format!("{report}/history.json"))).unwrap_or_default();
        (ran, serde_json::from_slice(&history).unwrap_or_default())
    }

    /// Compares the messages of a run's `notice` events with the snapshot `name`. Ignores the
    /// notice about workers that share CPU cores, which depends on the machine.
    #[track_caller]
    pub(crate) fn assert_notices(&self, name: &str, ran: &FinishedRun) {
        let filters = [(r"(?m)^\S+ \S+ \d+ workers share \d+ CPU cores.*\n?", "")];
        assert_snapshot(&self.job_dir.path(""), name, &ran.notice_messages().join("\n"), &filters);
    }

    /// Reads the JSON file that a rank wrote to the directory `report` before its first step.
    pub(crate) fn read_rank_report(&self, report: &str, rank: u32) -> Value {
        let text = fs::read(self.job_dir.path(&format!("{report}/rank-{rank}.json"))).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    /// Counts the distinct values of `key` in the files that the ranks wrote to the directory
    /// `report` before their first step. `workers` is the number of ranks.
    pub(crate) fn count_distinct_values(&self, report: &str, workers: u32, key: &str) -> usize {
        let mut values: Vec<String> =
            (0..workers).map(|rank| self.read_rank_report(report, rank)[key].to_string()).collect();
        values.sort_unstable();
        values.dedup();
        values.len()
    }
}

/// Reads the names and contents of all files below a directory.
pub(crate) fn read_files_below(dir: &Path) -> Vec<(String, Vec<u8>)> {
    list_files_below(dir).into_iter().map(|f| (f.clone(), fs::read(dir.join(f)).unwrap())).collect()
}

/// Checks the steps `got` of a resumed run: their learning rates must equal those of the
/// uninterrupted run `whole`, and losses and gradient norms must agree within the relative
/// difference `close`.
#[track_caller]
pub(crate) fn assert_losses_continue(got: &[Value], whole: &[Value], close: f64) {
    assert!(!got.is_empty() && got.last().unwrap()["step"] == whole.last().unwrap()["step"], "{got:?}");
    for got in got {
        let want = whole.iter().find(|w| w["step"] == got["step"]).unwrap();
        assert_eq!(got["learning_rate"], want["learning_rate"], "step {}", got["step"]);
        for key in ["loss", "grad_norm"] {
            let (Some(g), Some(w)) = (got[key].as_f64(), want[key].as_f64()) else { continue };
            assert!((g - w).abs() <= close * w, "{key} of step {}: {g}, uninterrupted {w}", got["step"]);
        }
    }
}
