//! HF Trainer with real DeepSpeed inside: saved by two ranks, resumed by one and by four. The script and its config are the
//! same in every run; plain Trainer refuses such a folder.
#![allow(clippy::unwrap_used)] // a test that panics has failed
mod support;
use serde_json::{Value, json};
use std::{
    fs,
    path::{Path, PathBuf},
};
use support::{Place, Ran, files_below};

/// Losses of the same batches in fp32, split over another number of ranks.
const CLOSE: f64 = 1e-5;

/// A directory for the script with one stage of ZeRO.
struct Trained {
    place: Place,
    python: PathBuf,
}

impl Trained {
    fn new(python: &Path, stage: u8) -> Trained {
        let place = Place::new();
        let mut zero = json!({"stage": stage, "overlap_comm": false, "reduce_bucket_size": 20000});
        if stage == 3 {
            // several sub-groups in each group, which the new cut must have as well
            zero["sub_group_size"] = 3000.into();
            zero["stage3_param_persistence_threshold"] = 0.into();
        }
        let config = json!({
            "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
            "zero_optimization": zero, "zero_allow_untested_optimizer": true, "zero_force_ds_cpu_optimizer": false,
            "steps_per_print": 1_000_000_000,
        });
        fs::write(place.path("ds.json"), config.to_string()).unwrap();
        Trained { place, python: python.to_owned() }
    }

    /// Runs the script as `workers`; its history of losses.
    fn run(&self, workers: u32, report: &str, resume: &str) -> (Ran, Vec<Value>) {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/oracle/trainer.py");
        let python = self.python.display();
        let job = format!(
            "name: tiny\ncluster: {{workers_per_host: {workers}}}\nrun:\n  command: [{python}, {script}, out-{report}, {report}, '6', \
             --deepspeed, ds.json, --resume_from_checkpoint, '{{resume}}']\n  \
             env: {{HF_HUB_OFFLINE: '1', OMP_NUM_THREADS: '1', DS_ACCELERATOR: cpu}}\n{resume}\n"
        );
        fs::write(self.place.path("job.yaml"), job).unwrap();
        let ran = self.place.run(&[]).succeeded();
        let history = fs::read(self.place.path(&format!("{report}/history.json"))).unwrap_or_default();
        (ran, serde_json::from_slice(&history).unwrap_or_default())
    }

    fn first_step(&self, report: &str, rank: u32) -> Value {
        let text = fs::read(self.place.path(&format!("{report}/rank-{rank}.json"))).unwrap();
        serde_json::from_slice(&text).unwrap()
    }
}

fn contents(dir: &Path) -> Vec<Vec<u8>> {
    files_below(dir).iter().map(|f| fs::read(dir.join(f)).unwrap()).collect()
}

fn told(ran: &Ran) -> String {
    let notices = ran.kind("notice");
    notices.iter().map(|e| e["message"].as_str().unwrap()).collect::<Vec<_>>().join("\n")
}

fn goes_on(python: &Path, stage: u8) {
    let trained = Trained::new(python, stage);
    let (_, whole) = trained.run(2, "whole", "");
    assert_eq!(whole.len(), 6, "six steps");
    let saved = trained.place.path("out-whole/checkpoint-3");
    let before = contents(&saved);
    let expected = trained.first_step("whole", 0)["weight_decay"].clone();
    assert_eq!(expected, json!([0.1, 0.0]));
    for workers in [1, 4] {
        let report = format!("w{workers}");
        let resume = "resume: {from: out-whole/checkpoint-3}";
        let (ran, rest) = trained.run(workers, &report, resume);
        let said = told(&ran);
        let cut = format!(
            "saved by 2 ranks and goes on with {workers}; its DeepSpeed state (ZeRO-{stage}) is cut anew for {workers}"
        );
        assert!(said.contains(&cut) && said.contains("random states of 2 ranks"), "{said}");
        let folder = trained.place.path(&format!("out-whole/launch-w{workers}/checkpoint-3"));
        assert!(said.contains(&format!("resumes from {}", folder.display())), "{said}");
        assert_eq!(rest.len(), 6, "three steps of before, three more: {rest:?}");
        for (got, want) in rest.iter().zip(&whole) {
            let number = |v: &Value, key: &str| v[key].as_f64().unwrap();
            assert_eq!(
                (&got["step"], number(got, "learning_rate")),
                (&want["step"], number(want, "learning_rate"))
            );
            for key in ["loss", "grad_norm"] {
                let (got, want) = (number(got, key), number(want, key));
                assert!(
                    (got - want).abs() <= CLOSE * want,
                    "{workers} ranks, {key} {got}, uninterrupted {want}"
                );
            }
        }
        for rank in 0..workers {
            let seen = trained.first_step(&report, rank);
            assert_eq!((&seen["step"], &seen["weight_decay"]), (&3.into(), &expected));
        }
        // what did not change is the same file, what did is another
        let same = |name: &str| links(&folder.join(name)) > 1;
        assert!(same("trainer_state.json") && same("config.json") && !same("latest"), "{workers} ranks");
    }
    assert!(before == contents(&saved), "the original was changed");
    // the next start with as many ranks uses what was made, whatever program it is
    let folder = trained.place.path("out-whole/launch-w1/checkpoint-3");
    let made = inode(&folder.join("latest"));
    let job = "cluster: {workers_per_host: 1}\nrun: {command: [sh, -c, exit 0]}\nresume: {from: out-whole/checkpoint-3}\n";
    fs::write(trained.place.path("job.yaml"), job).unwrap();
    let again = trained.place.run(&[]).succeeded();
    assert!(told(&again).contains("(done at an earlier start)"), "{}", told(&again));
    assert_eq!(made, inode(&folder.join("latest")));
}

fn links(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::nlink(&fs::metadata(path).unwrap())
}

fn inode(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap())
}

#[test]
fn a_trainer_script_with_stage_2_goes_on_with_another_number_of_ranks() {
    let test = "a_trainer_script_with_stage_2_goes_on_with_another_number_of_ranks";
    let Some(python) = support::deepspeed(test) else { return };
    goes_on(&python, 2);
}

#[test]
fn a_trainer_script_with_stage_3_goes_on_with_another_number_of_ranks() {
    let test = "a_trainer_script_with_stage_3_goes_on_with_another_number_of_ranks";
    let Some(python) = support::deepspeed(test) else { return };
    goes_on(&python, 3);
}
