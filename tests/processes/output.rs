//! What workers say.
use super::*;

#[test]
fn a_flood_of_output_blocks_nobody_and_takes_no_memory() {
    let script = "yes 0123456789012345678901234567890123456789 | head -c 100000000; echo > flooded; until [ -e go ]; do sleep 0.01; done; echo the end";
    let job = Job::shell(1, script, &["logs: {prefix: false}"]);
    let running = job.start(&[]);
    wait_for(&job.path("flooded")); // although nobody reads our stdout
    for (pid, line) in job.alive().into_iter().filter(|(_, line)| line.contains("launch")) {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let peak = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).unwrap();
        let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
        assert!(peak < 64 << 10, "{line} took {peak} kB");
    }
    fs::write(job.path("go"), "").unwrap();
    let ended = running.end();
    assert_eq!(ended.code(), 0);
    assert!(ended.stdout.ends_with("the end\n"), "{}", &ended.stdout[ended.stdout.len() - 300..]);
    assert!(ended.stderr.contains("lines"), "lost lines are told: {}", ended.stderr);
    let log = fs::metadata(job.run_dir().join("logs/rank-0.log")).unwrap().len();
    assert_eq!(log, 100_000_000 + "the end\n".len() as u64);
}

#[test]
fn a_log_keeps_its_size() {
    let job = Job::shell(1, "yes 123456789 | head -n 1000", &["logs: {max_size: 5000B}"]);
    assert_eq!(job.run(&[]).code(), 0);
    let log = job.log(0);
    assert!(log.starts_with(&"123456789\n".repeat(500)) && log.lines().count() == 501, "{}", log.len());
    assert!(log.lines().last().unwrap().contains("max_size"));
}

#[test]
fn nobody_reading_stdout_or_stderr_changes_nothing() {
    for args in [&[][..], &["--json"][..]] {
        let job = Job::shell(
            2,
            "for i in 1 2 3 4 5 6 7 8 9; do echo $i; echo $i >&2; done; echo > done.$RANK",
            &[],
        );
        let mut child = job.command(args).spawn().unwrap();
        drop((child.stdout.take(), child.stderr.take()));
        assert_eq!(child.wait().unwrap().code(), Some(0));
        assert!(job.path("done.0").exists() && job.path("done.1").exists());
        assert_eq!(job.alive(), BTreeMap::new());
    }
}

#[test]
fn last_words_are_kept_even_without_a_line_end() {
    let job = Job::shell(1, "printf 'half a line' >&2; kill -KILL $$", &[]);
    let ended = job.run(&["--json"]);
    assert_eq!(ended.event("failure")["tail"], serde_json::json!(["half a line"]));
}
