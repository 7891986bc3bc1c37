//! Timeouts of torch that expire before `run.hang_timeout`: the failure names the collective and
//! the ranks that have not entered it.
use crate::support::{self, JobDirectory};
use serde_json::{Value, json};
use std::{fs, path::Path};

/// A program that behaves like torch with NCCL after a timeout: every rank writes the dump of its
/// flight recorder, and the watchdogs of ranks 0 and 2 log the timeout and abort the process. The
/// dumps are recorded, and rank 1 has not entered the third collective.
const NCCL_PROGRAM: &str = r#"
dump="$TORCH_FR_DUMP_TEMP_FILE"
cp "$1/never_entered-$RANK.dump" "$dump$RANK.new" && mv "$dump$RANK.new" "$dump$RANK"
if [ "$RANK" = 1 ]; then sleep 600; fi
while [ ! -e "${dump}0" ] || [ ! -e "${dump}1" ] || [ ! -e "${dump}2" ]; do sleep 0.1; done
echo "[rank$RANK]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank $RANK] Watchdog caught" \
  "collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, NumelIn=4, NumelOut=4," \
  "Timeout(ms)=600000) ran for 600020 milliseconds before timing out." >&2
echo "terminate called after throwing an instance of 'c10::DistBackendError'" >&2
ulimit -c 0
kill -ABRT $$
"#;

/// A script in which rank 1 never enters the fourth collective, and the timeout of Gloo is 15 s.
/// The same timeout applies to the wait for the other rank at the start, which may take some
/// seconds.
const GLOO_SCRIPT: &str = r#"
import datetime, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=15))
x = torch.ones(4)
for _ in range(3):
    dist.all_reduce(x)

def hold_up():
    time.sleep(600)

if dist.get_rank() == 1:
    hold_up()
dist.all_reduce(x)
"#;

/// Runs `job` in the job's directory, checks that a timeout of torch has ended it, and returns the
/// verdict.
fn run_until_timeout(job_dir: &JobDirectory, job: &str) -> Value {
    fs::write(job_dir.path("job.yaml"), job).unwrap();
    let ran = job_dir.run(&[]);
    assert_eq!(ran.failure_code(), "torch-collective-timeout");
    let failure = ran.expect_failure();
    assert_eq!(failure["reason"]["kind"], "collective_timeout", "{failure:#}");
    let run_dir = ran.events_named("start")[0]["run_dir"].as_str().unwrap().to_owned();
    let file = fs::read(job_dir.path(&run_dir).join("hang-0.json")).unwrap();
    let file: Value = serde_json::from_slice(&file).unwrap();
    assert_eq!(file["verdict"], failure["reason"]["verdict"]);
    failure["reason"]["verdict"].clone()
}

#[test]
fn the_dumps_of_nccl_name_the_rank_that_never_entered_the_collective() {
    let job_dir = JobDirectory::new();
    fs::write(job_dir.path("program.sh"), NCCL_PROGRAM).unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/hangs");
    let golden = serde_json::to_string(&fs::canonicalize(golden).unwrap()).unwrap();
    let verdict = run_until_timeout(
        &job_dir,
        &format!(
            "name: timeout\ncluster: {{workers_per_host: 3}}\n\
             run: {{command: [sh, program.sh, {golden}], grace_period: 1s, hang_timeout: 300s}}\n"
        ),
    );
    assert_eq!(verdict["kind"], "not_entered", "{verdict:#}");
    let collective = json!({"group": "0", "seq": 3, "operation": "nccl:all_reduce"});
    assert_eq!((&verdict["collective"], &verdict["entered"]), (&collective, &json!([0, 2])), "{verdict:#}");
    assert_eq!(verdict["undetermined"], json!([]), "{verdict:#}");
    let places = verdict["not_entered"].as_array().unwrap();
    assert_eq!((places.len(), &places[0]["rank"]), (1, &json!(1)), "{verdict:#}");
    assert_ne!(places[0]["activity"]["kind"], "ended", "{verdict:#}");
    let timeouts = verdict["collective_timeouts"].as_array().unwrap();
    assert!(timeouts.iter().all(|t| t["seq"] == 3 && t["operation"] == "ALLREDUCE"), "{verdict:#}");
    assert!(timeouts.iter().any(|t| t["rank"] == 0 || t["rank"] == 2), "{verdict:#}");
}

#[test]
fn the_exception_of_gloo_names_the_rank_that_never_entered_the_collective() {
    let test = "the_exception_of_gloo_names_the_rank_that_never_entered_the_collective";
    let Some(python) = support::find_python_or_skip(test) else { return };
    let job_dir = JobDirectory::new();
    fs::write(job_dir.path("script.py"), GLOO_SCRIPT).unwrap();
    let python = serde_json::to_string(&python).unwrap();
    let verdict = run_until_timeout(
        &job_dir,
        &format!(
            "name: timeout\ncluster: {{workers_per_host: 2}}\n\
             run: {{command: [{python}, script.py], grace_period: 1s, hang_timeout: 300s}}\n"
        ),
    );
    assert_eq!(verdict["kind"], "not_entered", "{verdict:#}");
    let collective = json!({"group": "0", "seq": 4, "operation": "gloo:all_reduce"});
    assert_eq!((&verdict["collective"], &verdict["entered"]), (&collective, &json!([0])), "{verdict:#}");
    let place = &verdict["not_entered"][0];
    assert_eq!((&place["rank"], &place["activity"]["kind"]), (&json!(1), &json!("sleeps")), "{verdict:#}");
    assert_eq!(place["frame"]["function"], "hold_up", "{verdict:#}");
    let timeout = json!([{"rank": 0, "seq": 4, "operation": "gloo:all_reduce"}]);
    assert_eq!(verdict["collective_timeouts"], timeout, "{verdict:#}");
}
