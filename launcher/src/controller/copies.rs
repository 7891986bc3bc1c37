//! Copies of what ranks on other hosts said to the console, for `launch logs` where the hosts share no run directory:
//! `streamed-rank-N.log` beside the logs. The logs themselves, which have all of it, lie on the ranks' hosts.
use contract::ids::Rank;
use std::{
    collections::{HashMap, hash_map::Entry},
    fs::{File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
};

/// Most copies that are open at once.
const MOST_OPEN: usize = 256;

/// The copies of a run.
#[derive(Debug)]
pub(super) struct Copies {
    directory: PathBuf,
    /// Of each copy, as of a log.
    max_size: u64,
    /// Ranks of this start that run on other hosts.
    elsewhere: Vec<bool>,
    files: HashMap<Rank, Copy>,
}

#[derive(Debug)]
enum Copy {
    Open {
        file: File,
        size: u64,
    },
    /// Not needed (the log itself is here), full, or broken.
    Closed,
}

impl Copies {
    pub(super) fn new(logs: PathBuf, max_size: u64) -> Self {
        Copies { directory: logs, max_size, elsewhere: Vec::new(), files: HashMap::new() }
    }

    /// A start begins: which of its ranks run on other hosts.
    pub(super) fn begin(&mut self, elsewhere: Vec<bool>) {
        self.elsewhere = elsewhere;
        // Ranks may be elsewhere than before.
        self.files.clear();
    }

    /// Takes a line; what to tell a person when the copy can't be written.
    pub(super) fn line(&mut self, rank: Rank, text: &str) -> Option<String> {
        if !self.elsewhere.get(rank as usize).copied().unwrap_or(false) {
            return None;
        }
        let full = self.files.len() >= MOST_OPEN;
        let copy = match self.files.entry(rank) {
            Entry::Occupied(copy) => copy.into_mut(),
            Entry::Vacant(_) if full => return None,
            Entry::Vacant(place) => match open(&self.directory, rank) {
                Ok(copy) => place.insert(copy),
                Err(error) => {
                    place.insert(Copy::Closed);
                    return Some(failed(rank, &error));
                }
            },
        };
        let Copy::Open { file, size } = copy else { return None };
        *size += text.len() as u64 + 1;
        let full = *size > self.max_size;
        let line = match full {
            true => format!(
                "[launch] this copy ends here: it reached run.logs.max_size ({} bytes)\n",
                self.max_size
            ),
            false => format!("{text}\n"),
        };
        let written = file.write_all(line.as_bytes());
        if full || written.is_err() {
            *copy = Copy::Closed;
        }
        written.err().map(|error| failed(rank, &error))
    }
}

fn open(directory: &Path, rank: Rank) -> io::Result<Copy> {
    if directory.join(format!("rank-{rank}.log")).exists() {
        return Ok(Copy::Closed);
    }
    std::fs::create_dir_all(directory)?;
    let path = directory.join(format!("streamed-rank-{rank}.log"));
    let file = OpenOptions::new().append(true).create(true).open(path)?;
    let size = file.metadata()?.len();
    Ok(Copy::Open { file, size })
}

fn failed(rank: Rank, error: &io::Error) -> String {
    format!(
        "launch: what rank {rank} says can't be kept for `launch logs` ({error}); the job goes on without it"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_elsewhere_are_kept_up_to_a_size_where_their_logs_are_not() {
        let dir = tempfile::tempdir().expect("a directory");
        let logs = dir.path().join("logs");
        std::fs::create_dir(&logs).expect("a directory");
        std::fs::write(logs.join("rank-2.log"), "own").expect("a file");
        let mut copies = Copies::new(logs.clone(), 20);
        copies.begin(vec![false, true, true]);
        for rank in [0, 1, 2, 3, 1] {
            assert_eq!(copies.line(rank, &format!("said by {rank}")), None);
        }
        let names = std::fs::read_dir(&logs).expect("entries").flatten();
        let mut names: Vec<String> = names.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        assert_eq!(names, ["rank-2.log", "streamed-rank-1.log"]);
        let read = || std::fs::read_to_string(logs.join("streamed-rank-1.log")).expect("text");
        assert_eq!(read(), "said by 1\nsaid by 1\n");
        // A later start goes on in the same file, to the same size.
        copies.begin(vec![true, true]);
        assert_eq!((copies.line(1, "x"), copies.line(1, "y")), (None, None));
        assert!(read().starts_with("said by 1\nsaid by 1\n[launch] this copy ends here"), "{}", read());
        assert_eq!(read().lines().count(), 3);
    }

    #[test]
    fn a_copy_that_can_not_be_written_is_told_once() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("logs"), "a file").expect("a file");
        let mut copies = Copies::new(dir.path().join("logs"), 1 << 20);
        copies.begin(vec![true]);
        assert!(copies.line(0, "a").is_some_and(|why| why.contains("rank 0")));
        assert_eq!(copies.line(0, "b"), None);
    }
}
