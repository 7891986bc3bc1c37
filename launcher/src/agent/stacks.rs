//! Where workers are when they hang, written into their logs: what `/proc` tells of every thread, and the Python stack
//! where py-spy is installed.
use super::{process, watch};
use std::{
    fmt::Write as _,
    fs::{self, OpenOptions},
    io::Write as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// For one dump of py-spy.
const PY_SPY_LIMIT: Duration = Duration::from_secs(2);
/// For all of them.
const ALL_LIMIT: Duration = Duration::from_secs(6);
/// Most processes of a worker, most threads of a process.
const MOST: usize = 64;
/// Most bytes of one `/proc` file, of one dump.
const MOST_BYTES: usize = 64 << 10;

/// A worker to look at.
#[derive(Clone, Debug)]
pub(super) struct Subject {
    pub(super) pid: u32,
    pub(super) log: PathBuf,
}

/// Writes where each worker is at the end of its log. Takes at most [`ALL_LIMIT`] and a little; what can't be read or
/// written is left out.
pub(super) fn write(subjects: &[Subject]) {
    // What costs no time first, for all.
    for subject in subjects {
        let text: String = watch::family(subject.pid).into_iter().take(MOST).map(of_process).collect();
        append(&subject.log, &format!("launch: no progress; where the processes are:\n{text}"));
    }
    let until = Instant::now() + ALL_LIMIT;
    for subject in subjects {
        for pid in watch::family(subject.pid).into_iter().take(MOST) {
            let left = until.saturating_duration_since(Instant::now()).min(PY_SPY_LIMIT);
            if left.is_zero() {
                return;
            }
            match process::py_spy(pid, left, MOST_BYTES) {
                Some(text) if !text.is_empty() => append(&subject.log, &text),
                Some(_) => {}
                None => return, // not installed
            }
        }
    }
}

/// State, wait channel and kernel stack of every thread.
fn of_process(pid: i32) -> String {
    let root = PathBuf::from(format!("/proc/{pid}"));
    let command = read(&root.join("cmdline")).replace('\0', " ");
    let mut text = format!("  process {pid}: {}\n", command.trim());
    let threads = fs::read_dir(root.join("task")).into_iter().flatten().flatten().take(MOST);
    for thread in threads {
        let status = read(&thread.path().join("status"));
        let field = |name: &str| {
            let line = status.lines().find_map(|l| l.strip_prefix(name));
            line.unwrap_or("?").trim().to_owned()
        };
        let channel = read(&thread.path().join("wchan"));
        let call = read(&thread.path().join("syscall"));
        let call = call.split_whitespace().next().unwrap_or("?").to_owned();
        // Writing to a String can't fail.
        _ = writeln!(
            text,
            "    thread {} ({}): state {}, waits in {}, system call {call}",
            thread.file_name().to_string_lossy(),
            field("Name:"),
            field("State:"),
            if channel.is_empty() || channel == "0" { "-" } else { &channel },
        );
        for frame in read(&thread.path().join("stack")).lines().take(MOST) {
            _ = writeln!(text, "      {frame}");
        }
    }
    text
}

fn read(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes[..bytes.len().min(MOST_BYTES)]).trim_end().to_owned()
}

fn append(log: &Path, text: &str) {
    // The log is open for appending elsewhere too: one write each, so that lines stay whole.
    let file = OpenOptions::new().append(true).open(log);
    _ = file.and_then(|mut file| file.write_all(format!("{}\n", text.trim_end()).as_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_can_be_looked_at() {
        let directory = tempfile::tempdir().expect("a directory");
        let log = directory.path().join("rank-0.log");
        fs::write(&log, "its own output\n").expect("written");
        write(&[Subject { pid: std::process::id(), log: log.clone() }]);
        let text = fs::read_to_string(&log).expect("read");
        assert!(text.starts_with("its own output\nlaunch: no progress"), "{text}");
        assert!(text.contains(&format!("process {}:", std::process::id())), "{text}");
        assert!(text.contains("state R") || text.contains("state S"), "{text}");
    }
}
