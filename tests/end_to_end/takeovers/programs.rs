//! Tests runs of programs that lose controllers and agents: the program continues, its logs are
//! complete, and the journal is that of an undisturbed run.
use super::*;

/// The shell command of each rank: prints increasing numbers and appends them to the file
/// `count.RANK`, until a file named `finish` exists. A restarted rank continues with the last
/// number in the file. Rank 2 fails if a file named `fail` exists.
const RESUMING_SCRIPT: &str = "i=$(tail -n 1 count.$RANK 2>/dev/null); i=${i:-0}; echo from $i; \
    until [ -e finish ]; do [ -e fail ] && [ $RANK = 2 ] && exit 7; \
    i=$((i+1)); echo tick $i; echo $i >> count.$RANK; sleep 0.1; done";

/// A run of [`RESUMING_SCRIPT`] on three hosts.
struct ProgramRun<'a> {
    run: BackgroundRun<'a>,
}

impl ProgramRun<'_> {
    /// Starts the run with these settings.
    fn start<'a>(hosts: &'a RunHosts, set: &[&str]) -> ProgramRun<'a> {
        let command = serde_json::to_string(&["sh", "-c", RESUMING_SCRIPT]).unwrap();
        let job = format!("name: tiny\ncluster: {{workers_per_host: 1}}\nrun: {{command: {command}}}\n");
        let run = ProgramRun { run: hosts.start_run("program", &job, set) };
        run.wait_for_progress();
        run
    }

    /// Reads the numbers in the file of a rank.
    fn read_counts(&self, rank: usize) -> Vec<u64> {
        let path = self.run.hosts.job_dir.path(&format!("count.{rank}"));
        let text = fs::read_to_string(path).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// Waits until every rank has counted further.
    #[track_caller]
    fn wait_for_progress(&self) {
        let before = [0, 1, 2].map(|rank| self.read_counts(rank).len());
        wait_until("every rank counts", || (0..3).all(|rank| self.read_counts(rank).len() > before[rank]));
    }

    /// Creates a file in the working directory of the ranks.
    fn create_file(&self, name: &str) {
        fs::write(self.run.hosts.job_dir.path(name), "").unwrap();
    }

    /// Checks that each rank has counted without a gap or repetition, and that the log of the rank
    /// has a line for each number. `is_restarted` states whether agents were killed, with the lines
    /// that they had not written.
    #[track_caller]
    fn check_counts_and_logs(&self, is_restarted: bool) {
        for rank in 0..3 {
            let counts = self.read_counts(rank);
            let expected: Vec<u64> = (1..=counts.len() as u64).collect();
            assert_eq!(counts, expected, "rank {rank} counts once");
            let log = self.run.directory.join(format!("logs/rank-{rank}.log"));
            let log = fs::read_to_string(log).unwrap();
            let mut last = 0;
            for line in log.lines() {
                let (kind, number) = line.split_once(' ').unwrap_or_else(|| panic!("{line}"));
                let number: u64 = number.parse().unwrap_or_else(|_| panic!("{line}"));
                match kind {
                    // A killed rank may have printed a number that it has not counted.
                    "from" => {
                        let is_complete = last == number || last == number + 1;
                        assert!(is_complete || is_restarted && last < number, "{last}, then {line}: {log}");
                        last = number;
                    }
                    "tick" => {
                        assert_eq!(number, last + 1, "rank {rank} after {last}: {log}");
                        last = number;
                    }
                    _ => panic!("{line}"),
                }
            }
            assert_eq!(Some(&last), counts.last(), "the log of rank {rank} is complete: {log}");
        }
    }
}

/// Kills two controllers of a program. The third one shows its output, and ends with its exit code.
#[test]
fn a_program_outlives_its_controllers() {
    let test = "takeovers::programs::a_program_outlives_its_controllers";
    let Some(hosts) = RunHosts::start(test, 3, false) else { return };
    let mut program = ProgramRun::start(&hosts, &["run.logs.show=[0,1,2]"]);
    for _ in 0..2 {
        program.run.signal_controller(Signal::SIGKILL);
        program.wait_for_progress();
        thread::sleep(Duration::from_secs(1));
        program.wait_for_progress();
        let began = Instant::now();
        let (code, text) = program.run.attach_in_background();
        assert_eq!(code, 0, "{text}");
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        let (code, text) = program.run.attach_in_background();
        assert!(code == 3 && text.contains("run-has-controller"), "one controller at a time: {code} {text}");
        program.wait_for_progress();
    }
    program.run.signal_controller(Signal::SIGKILL);
    let attached = program.run.start_attach();
    wait_until("the third takeover", || program.run.read_journal().events_named("takeover").len() == 3);
    program.wait_for_progress();
    program.create_file("finish");
    let shown = attached.wait_with_output().unwrap();
    let text = output_to_text(&shown);
    assert!(shown.status.success(), "{text}");
    let last = program.read_counts(0).len();
    assert!(text.contains(&format!("tick {last}")), "the last number of rank 0 is shown: {text}");
    let ran = program.run.wait_for_end();
    let count = |name: &str| ran.events_named(name).len();
    let counts = ["start", "placement", "restart", "failure", "done", "takeover"].map(count);
    assert_eq!((ran.code, counts), (0, [1, 1, 0, 0, 1, 3]), "{:?}", ran.notice_messages());
    program.check_counts_and_logs(false);
    hosts.wait_for_no_process();
}

/// Checks that the failure of a rank while the run has no controller is the failure that the next
/// controller reports.
#[test]
fn a_failure_without_a_controller_is_the_root_cause_of_the_next_one() {
    let test = "takeovers::programs::a_failure_without_a_controller_is_the_root_cause_of_the_next_one";
    let Some(hosts) = RunHosts::start(test, 3, false) else { return };
    let program = ProgramRun::start(&hosts, &["run.restarts=0", "run.grace_period=1s"]);
    program.run.signal_controller(Signal::SIGKILL);
    program.create_file("fail");
    wait_until("rank 2 has failed", || {
        !hosts.hosts.list_processes("h2").iter().any(|(_, line)| line.starts_with("sh -c"))
    });
    let attached = program.run.start_attach().wait_with_output().unwrap();
    let text = output_to_text(&attached);
    assert_eq!(attached.status.code(), Some(1), "{text}");
    let ran = program.run.wait_for_end();
    let failure = ran.expect_failure();
    assert_eq!((&failure["rank"], &failure["reason"]["code"]), (&2.into(), &7.into()), "{failure}");
    assert_eq!((ran.code, ran.events_named("takeover").len()), (1, 1), "{:?}", ran.events);
    hosts.wait_for_no_process();
}

/// Checks that killing controllers and agents of a program at random times neither ends the run nor
/// repeats or loses a step of the program.
#[test]
fn random_kills_of_controllers_and_agents_repeat_no_step_of_a_program() {
    let test = "takeovers::programs::random_kills_of_controllers_and_agents_repeat_no_step_of_a_program";
    let Some(hosts) = RunHosts::start(test, 3, false) else { return };
    let kills = read_kill_count(6);
    let mut program = ProgramRun::start(&hosts, &["run.restarts=1000"]);
    // With this seed, one of the first six kills is that of an agent.
    let (mut random, mut controllers, mut agents) = (read_kill_seed(15), 0, 0);
    for _ in 0..kills {
        program.wait_for_progress();
        thread::sleep(Duration::from_millis(draw_number(&mut random, 700)));
        let host = HOSTS[draw_number(&mut random, 3) as usize];
        if draw_number(&mut random, 6) == 0 {
            kill(hosts.find_agent(host, "sh -c"), Signal::SIGKILL).unwrap();
            agents += 1;
        } else {
            program.run.kill_and_replace_controller(&mut random);
            controllers += 1;
        }
    }
    program.wait_for_progress();
    program.create_file("finish");
    let ran = program.run.wait_for_end();
    println!("killed {controllers} controllers and {agents} agents");
    assert!(agents > 0 && controllers > 0, "{agents} agents and {controllers} controllers");
    let counts = ["start", "takeover", "restart", "failure", "done"].map(|name| ran.events_named(name).len());
    assert_eq!(counts, [1, controllers, agents, 0, 1], "{:?}", ran.notice_messages());
    assert_eq!(ran.code, 0);
    program.check_counts_and_logs(true);
    hosts.wait_for_no_process();
}
