//! Tests `launch top` in a terminal, with a training on three hosts.
use super::*;
use crate::support::{environment::LAUNCH_EXECUTABLE, tmux_terminal::TmuxTerminal};

/// The number of workers of each host.
const WORKERS: usize = 2;

/// Returns the cells of the ranks of a host on the screen of `launch top`; `None` if the screen
/// does not show the host.
fn find_rank_cells<'s>(screen: &'s [String], host: &str) -> Option<&'s str> {
    let mut rows = screen.iter().map(|line| line.trim_start_matches('│').split_whitespace());
    rows.find_map(|mut words| (words.next() == Some(host)).then(|| words.next().unwrap_or("")))
}

/// Returns whether the screen shows that all ranks of the three hosts run. A rank that a busy
/// machine slows down has an `S`.
fn shows_running_ranks(screen: &[String]) -> bool {
    HOSTS[..3].iter().all(|host| {
        let cells = find_rank_cells(screen, host).unwrap_or("");
        cells.chars().count() == WORKERS && cells.chars().all(|cell| matches!(cell, '■' | 'S'))
    })
}

/// Returns whether a line of the screen contains a text.
fn shows(screen: &[String], text: &str) -> bool {
    screen.iter().any(|line| line.contains(text))
}

/// Checks `launch top` in a terminal with this size: all hosts and ranks are on the screen, each
/// rank can be selected, and the key `q` restores the terminal.
fn check_top(test: &str, job_dir: &JobDirectory, (columns, rows): (usize, usize)) -> Option<()> {
    let command = format!("'{LAUNCH_EXECUTABLE}' top; echo exit code $?; exec sleep 1000");
    let terminal = TmuxTerminal::start(test, &job_dir.path(""), (columns, rows), &command)?;
    let is_complete = |screen: &[String]| {
        shows_running_ranks(screen) && HOSTS[..3].iter().all(|host| shows(screen, &format!("│{host} ")))
    };
    let screen = terminal.wait_for_screen("all ranks run", is_complete);
    println!("{}", screen.join("\n"));
    assert!(screen.len() <= rows && screen.iter().all(|line| line.chars().count() <= columns));
    for text in ["hosts and ranks (6)", "events", "log of rank 0", "q quit"] {
        assert!(shows(&screen, text), "{text}:\n{}", screen.join("\n"));
    }
    // the curve of the loss needs a large terminal
    let has_curve = screen.iter().any(|line| line.starts_with("┌ loss "));
    assert_eq!(has_curve, columns >= 120, "{}", screen.join("\n"));
    for rank in 0..3 * WORKERS {
        let text = format!("rank {rank}: running");
        terminal.wait_for_screen(&text, |screen| shows(screen, &text));
        terminal.press_key("Right");
    }
    terminal.press_key("q");
    let end = terminal.wait_for_screen("the end of `launch top`", |screen| shows(screen, "exit code"));
    assert!(shows(&end, "exit code 0") && !shows(&end, "hosts and ranks"), "{}", end.join("\n"));
    Some(())
}

#[test]
fn top_shows_every_rank_of_three_hosts_in_small_and_large_terminals() {
    let test = "cluster::top::top_shows_every_rank_of_three_hosts_in_small_and_large_terminals";
    let Some((job_dir, hosts)) = start_hosts(test) else { return };
    let args = write_job(&job_dir, &hosts, "watched", TINY_JOB, "[\"h[0-2]\"]");
    let workers = format!("cluster.workers_per_host={WORKERS}");
    let set = [workers.as_str(), "train.batch.global=6", "train.steps=100000000", "checkpoint.every=never"];
    let mut run = start_run(&job_dir, &args, &set);
    run.wait_for_event("step", 3);
    let controller = Pid::from_raw(run.child.id() as i32);
    // The pipe must not fill up.
    let reader = thread::spawn(move || run.wait_for_end());
    // Without tmux, the test is reported as skipped.
    _ = [(80, 24), (200, 60)].into_iter().try_for_each(|size| check_top(test, &job_dir, size));
    kill(controller, Signal::SIGTERM).unwrap();
    let ran = reader.join().unwrap();
    assert_eq!(ran.events_named("placement")[0]["hosts"], serde_json::json!(["h0", "h1", "h2"]));
    assert_eq!(ran.code, 143, "{}", ran.stderr);
    assert_nothing_left(&hosts, &HOSTS[..3]);
}
