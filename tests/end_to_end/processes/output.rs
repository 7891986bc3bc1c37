//! Tests the output of workers on the terminal and in logs.
use super::*;
use std::collections::BTreeSet;

#[test]
fn a_flood_of_output_blocks_no_worker_and_takes_little_memory() {
    // The last line follows when the queues for the console have space again.
    let script = "yes 0123456789012345678901234567890123456789 | head -c 100000000; echo > flooded; until [ -e go ]; do sleep 0.01; done; sleep 1; echo the end";
    let job = MarkedJob::with_shell_script(1, script, &["logs: {prefix: false}"]);
    let running = job.start(&[]);
    // the worker proceeds although the test does not read the controller's stdout
    wait_for_file(&job.path("flooded"));
    for (pid, line) in job.list_processes().into_iter().filter(|(_, line)| line.contains("launch")) {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
        let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
        assert!(peak < 64 << 10, "{line} took {peak} kB");
    }
    fs::write(job.path("go"), "").unwrap();
    let ended = running.wait_for_end();
    assert_eq!(ended.exit_code(), 0);
    assert!(ended.stdout.ends_with("the end\n"), "{}", &ended.stdout[ended.stdout.len() - 300..]);
    // how often lines are omitted depends on time: keep one notice of each kind
    let count = regex::Regex::new(r"\d+ lines?( is| are)?").unwrap();
    let notices: BTreeSet<_> = ended.stderr.lines().map(|line| count.replace(line, "[N] lines")).collect();
    job.assert_snapshot("omitted_lines", &notices.into_iter().collect::<Vec<_>>().join("\n"));
    let log = fs::metadata(job.find_newest_run_dir().join("logs/rank-0.log")).unwrap().len();
    assert_eq!(log, 100_000_000 + "the end\n".len() as u64);
}

#[test]
fn a_log_ends_at_its_maximum_size() {
    let job = MarkedJob::with_shell_script(1, "yes 123456789 | head -n 1000", &["logs: {max_size: 5000B}"]);
    assert_eq!(job.run(&[]).exit_code(), 0);
    let log = job.read_rank_log(0);
    assert!(log.starts_with(&"123456789\n".repeat(500)) && log.lines().count() == 501, "{}", log.len());
    job.assert_snapshot("last_line_of_a_full_log", log.lines().last().unwrap());
}

#[test]
fn closed_stdout_and_stderr_do_not_disturb_the_job() {
    for args in [&[][..], &["--json"][..]] {
        let job = MarkedJob::with_shell_script(
            2,
            "for i in 1 2 3 4 5 6 7 8 9; do echo $i; echo $i >&2; done; echo > done.$RANK",
            &[],
        );
        let mut child = job.launch_command(args).spawn().unwrap();
        drop((child.stdout.take(), child.stderr.take()));
        assert_eq!(child.wait().unwrap().code(), Some(0));
        assert!(job.path("done.0").exists() && job.path("done.1").exists());
        assert_eq!(job.list_processes(), BTreeMap::new());
    }
}

#[test]
fn output_without_a_line_break_is_part_of_the_tail() {
    let job = MarkedJob::with_shell_script(1, "printf 'half a line' >&2; kill -KILL $$", &[]);
    let ended = job.run(&["--json"]);
    assert_eq!(ended.expect_one_event("failure")["tail"], json!(["half a line"]));
}
