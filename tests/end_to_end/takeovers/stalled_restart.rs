//! Tests that a host whose file system stalls while workers are started is not lost.
use super::*;

/// How long the working directory stalls. A host may be silent for `run.host_lease`.
const STALL: Duration = Duration::from_secs(6);

/// Restarts a program while its working directory stalls for longer than a host may be silent.
/// Checks that the restart is delayed, and that no host is lost.
#[test]
fn a_stalled_working_directory_delays_a_restart_and_loses_no_host() {
    let test = "takeovers::stalled_restart::a_stalled_working_directory_delays_a_restart_and_loses_no_host";
    let Some(hosts) = RunHosts::start_with_stalling_directory(test) else { return };
    let root = hosts.job_dir.path("").display().to_string();
    let root = root.trim_end_matches('/');
    let script = format!(
        "[ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0; touch {root}/up.$RANK; \
         until [ -e {root}/fail ]; do sleep 0.1; done; exit 7"
    );
    let command = serde_json::to_string(&["sh", "-c", &script]).unwrap();
    let job = format!("name: tiny\ncluster: {{workers_per_host: 1}}\nrun: {{command: {command}}}\n");
    let set = ["run.restarts=1", "run.host_lease=3s", &format!("run.workdir={root}/stalling")];
    let run = hosts.start_run("program", &job, &set);
    let path = |name: &str| hosts.job_dir.path(name);
    wait_until("the program runs", || (0..3).all(|rank| path(&format!("up.{rank}")).exists()));
    let stalling = hosts.stalling.as_ref().unwrap();
    stalling.set_stalled(true);
    fs::write(path("fail"), "").unwrap();
    wait_until("a restart", || !run.read_journal().events_named("restart").is_empty());
    thread::sleep(STALL);
    assert!(run.read_journal().events_named("done").is_empty(), "the restart waits for the directory");
    stalling.set_stalled(false);
    let ran = run.wait_for_end();
    let counts = ["restart", "failure", "placement"].map(|name| ran.events_named(name).len());
    assert_eq!((ran.code, counts), (0, [1, 0, 2]), "{:?}", ran.events);
    hosts.wait_for_no_process();
}
