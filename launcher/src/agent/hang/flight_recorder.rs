//! [`FlightRecorderDump`]: parses the file to which torch's flight recorder writes (dumps) a rank's
//! last collectives after a timeout.
use super::hook_directory::{MAX_ENTRIES_PER_RANK, MAX_ITEMS_PER_RANK, MAX_TEXT_BYTES};
use crate::private_files::open_own_file_without_links;
use jobspec::ids::Rank;
use protocol::hang::{CollectiveEntry, GroupCounters, StackFrame};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::{collections::BTreeMap, io::Read, path::Path};

/// The largest dump of a flight recorder, in bytes, that the agent reads. A dump with 2000 entries
/// and their stacks has a few megabytes.
const MAX_DUMP_BYTES: u64 = 32 << 20;
/// The largest number of collectives of a flight recorder's dump that the agent examines. Fewer are
/// kept as evidence.
const MAX_DUMPED_ENTRIES: usize = 4096;

/// The process groups, the newest collectives and the stack of one rank, as torch's flight recorder
/// has recorded them.
#[derive(Debug, PartialEq)]
pub(super) struct FlightRecorderDump {
    /// The process groups of the rank.
    pub(super) groups: Vec<GroupCounters>,
    /// The newest collectives, oldest first.
    pub(super) entries: Vec<CollectiveEntry>,
    /// The place in the program where the newest collective was entered, innermost frame first.
    /// Empty if this collective is complete, because the rank is elsewhere then.
    pub(super) stack: Vec<StackFrame>,
}

/// The fields of a flight recorder's dump that the agent reads, in the form in which torch writes
/// them. torch changes the others from version to version.
#[derive(Default, Deserialize)]
#[serde(default)]
struct RawDump {
    entries: Vec<RawEntry>,
    pg_config: Map<String, Value>,
    pg_status: Map<String, Value>,
}

/// One collective in a flight recorder's dump, with its process group, state, input sizes and
/// stack.
#[derive(Default, Deserialize)]
#[serde(default)]
struct RawEntry {
    /// The number of the process group in the process that has written the dump. It differs from
    /// the name of the group if the process is not in all groups of the job.
    pg_id: i64,
    process_group: Vec<Value>,
    collective_seq_id: i64,
    is_p2p: bool,
    profiling_name: String,
    state: String,
    retired: bool,
    input_sizes: Value,
    input_dtypes: Value,
    output_sizes: Value,
    output_dtypes: Value,
    frames: Vec<RawFrame>,
}

/// One stack frame (function, file and line) of a collective in a flight recorder's dump.
#[derive(Default, Deserialize)]
#[serde(default)]
struct RawFrame {
    name: String,
    filename: String,
    line: u32,
}

/// The name and the backend of a process group.
type GroupKey = (String, String);

impl FlightRecorderDump {
    /// Reads and parses the file `path`, to which torch's flight recorder has written a rank's last
    /// collectives. Returns `None` if there is no file, or no valid one. The dump is untrusted
    /// input, which the reader of crate `ckpt` parses without executing it.
    pub(super) fn read(path: &Path, world: u32) -> Option<FlightRecorderDump> {
        let mut bytes = Vec::new();
        let file = open_own_file_without_links(path).ok()?;
        file.take(MAX_DUMP_BYTES + 1).read_to_end(&mut bytes).ok()?;
        if bytes.len() as u64 > MAX_DUMP_BYTES {
            return None;
        }
        FlightRecorderDump::parse(&bytes, world)
    }

    /// Parses the flight recorder's dump of one rank, and ignores rank numbers in the dump that are
    /// not below `world`, the number of ranks in the job. Returns `None` if it is invalid.
    pub(super) fn parse(bytes: &[u8], world: u32) -> Option<FlightRecorderDump> {
        let value = ckpt::parse_plain_pickle(bytes, MAX_DUMPED_ENTRIES).ok()?;
        // serde would also read a list as a dump.
        let mut dump: RawDump = value.is_object().then(|| serde_json::from_value(value).ok()).flatten()?;
        let groups = dump.number_groups();
        // An earlier group of the process may have had the same name.
        dump.entries.retain(|e| e.group_key().is_some_and(|key| groups.get(&key) == Some(&e.pg_id)));
        let stack = dump.entries.last().filter(|e| !e.is_complete()).map(RawEntry::list_frames);
        Some(FlightRecorderDump {
            groups: dump.list_groups(&groups, world),
            entries: select_entries(&dump.entries).filter_map(RawEntry::to_entry).collect(),
            stack: stack.unwrap_or_default(),
        })
    }
}

impl RawDump {
    /// Returns the number of each process group in the dump, by the name of the group and its
    /// backend. Of several groups with the same name, only the newest one exists.
    fn number_groups(&self) -> BTreeMap<GroupKey, i64> {
        let mut numbers = BTreeMap::new();
        for entry in &self.entries {
            let Some(key) = entry.group_key() else { continue };
            let newest = numbers.entry(key).or_insert(entry.pg_id);
            *newest = entry.pg_id.max(*newest);
        }
        numbers
    }

    /// Returns each process group in the dump, with the numbers of its last enqueued and last
    /// completed collective. `numbers` are the numbers of the groups in the process.
    fn list_groups(&self, numbers: &BTreeMap<GroupKey, i64>, world: u32) -> Vec<GroupCounters> {
        let build = |((name, backend), number): (&GroupKey, &i64)| {
            let status = self.pg_status.get(&number.to_string());
            let count = |key: &str| status.and_then(|status| status.get(key)?.as_i64()).unwrap_or(-1);
            let counters = (count("last_enqueued_collective"), count("last_completed_collective"));
            let of_group = self.entries.iter().filter(|entry| entry.pg_id == *number);
            let (transfers, collectives): (Vec<_>, Vec<_>) = of_group.partition(|entry| entry.is_p2p);
            let (enqueued, completed) = match transfers.is_empty() {
                true => counters,
                // The counters of NCCL may be the numbers of transfers instead of collectives.
                false => (collectives.iter().map(|entry| entry.collective_seq_id).max().unwrap_or(0), -1),
            };
            GroupCounters {
                name: truncate(name),
                backend: truncate(backend),
                ranks: self.list_ranks(name, world),
                enqueued,
                completed,
            }
        };
        let recorded = numbers.iter().map(build);
        // The process is in these groups, but has not called their collectives.
        let is_recorded = |name: &String| numbers.keys().any(|(recorded, _)| recorded == name);
        let unused = self.pg_config.keys().filter(|name| !name.is_empty() && !is_recorded(name));
        let unused = unused.map(|name| GroupCounters {
            name: truncate(name),
            backend: String::new(),
            ranks: self.list_ranks(name, world),
            enqueued: 0,
            completed: 0,
        });
        recorded.chain(unused).take(MAX_ITEMS_PER_RANK).collect()
    }

    /// Returns the ranks in the process group `name`, as the flight recorder's dump lists them. The
    /// dump contains them as a text, such as `[0, 1]`. Gloo records them without a name.
    fn list_ranks(&self, name: &str, world: u32) -> Vec<Rank> {
        let config = self.pg_config.get(name).or_else(|| self.pg_config.get(""));
        let text = config.and_then(|config| config.get("ranks")?.as_str()).unwrap_or_default();
        let numbers = text.trim_matches(['[', ']']).split(',');
        numbers.filter_map(|number| number.trim().parse().ok()).filter(|rank| *rank < world).collect()
    }
}

/// Selects the entries of a dump that are kept as evidence: all if there are few, else the newest
/// ones and the oldest ones that are not complete.
fn select_entries(entries: &[RawEntry]) -> impl Iterator<Item = &RawEntry> {
    let is_short = entries.len() <= MAX_ENTRIES_PER_RANK;
    let kept = if is_short { entries.len() } else { MAX_ENTRIES_PER_RANK / 2 };
    let (older, newest) = entries.split_at(entries.len() - kept);
    older.iter().filter(|entry| !entry.is_complete()).take(kept).chain(newest)
}

impl RawEntry {
    fn group_name(&self) -> Option<&str> {
        self.process_group.first().and_then(Value::as_str)
    }

    /// Returns the name of the process group, and the backend of the collective.
    fn group_key(&self) -> Option<GroupKey> {
        let backend = self.profiling_name.rsplit_once(':').map_or("", |(backend, _)| backend);
        Some((self.group_name()?.to_owned(), backend.to_owned()))
    }

    fn is_complete(&self) -> bool {
        self.retired || self.state == "completed"
    }

    /// Converts a collective in the flight recorder's dump to the form in which the agent reports
    /// collectives of a hanging rank. Returns `None` for an entry without a process group.
    fn to_entry(&self) -> Option<CollectiveEntry> {
        Some(CollectiveEntry {
            group: truncate(self.group_name()?),
            seq: self.collective_seq_id,
            p2p: self.is_p2p,
            operation: truncate(&self.profiling_name),
            retired: self.is_complete(),
            inputs: truncate(&format_as_python(&self.input_sizes)),
            dtypes: truncate(&format_as_python(&self.input_dtypes)),
            outputs: truncate(&format_as_python(&self.output_sizes)),
            output_dtypes: truncate(&format_as_python(&self.output_dtypes)),
        })
    }

    fn list_frames(&self) -> Vec<StackFrame> {
        let convert = |frame: &RawFrame| StackFrame {
            file: truncate(&frame.filename),
            line: frame.line,
            function: truncate(&frame.name),
        };
        self.frames.iter().map(convert).collect()
    }
}

/// Truncates a text from a flight recorder's dump, such as the name of a process group, to
/// [`MAX_TEXT_BYTES`] bytes.
fn truncate(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_TEXT_BYTES)].to_owned()
}

/// Formats a list or text from a flight recorder's dump in Python's notation, such as `[[4]]` or
/// `['Float']`, to match the notation of the hang hook.
fn format_as_python(value: &Value) -> String {
    match value {
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(format_as_python).collect();
            format!("[{}]", items.join(", "))
        }
        Value::String(text) => format!("'{text}'"),
        Value::Null => "None".to_owned(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::hang::RankEvidence;
    use std::path::PathBuf;

    /// Returns the path of a golden file about hangs.
    fn find_golden_file(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/hangs").join(name)
    }

    /// The evidence about the ranks of a hang, as a golden file contains it.
    #[derive(Deserialize)]
    struct RecordedHang {
        evidence: Vec<RankEvidence>,
    }

    #[test]
    fn dumps_of_nccl_contain_groups_and_collectives() {
        let directory = find_golden_file("nccl");
        let files = std::fs::read_dir(&directory).expect("a directory").flatten().map(|entry| entry.path());
        let mut dumps = 0;
        for file in files.filter(|file| file.extension().is_some_and(|ending| ending == "json")) {
            let recorded = std::fs::read(&file).expect("a golden file");
            let recorded: RecordedHang = serde_json::from_slice(&recorded).expect("valid");
            for expected in recorded.evidence {
                let name = file.with_extension("").display().to_string();
                let path = PathBuf::from(format!("{name}-{}.dump", expected.rank));
                let dump = FlightRecorderDump::read(&path, 4).expect("valid");
                assert_eq!((dump.groups, dump.entries), (expected.groups, expected.entries), "{name}");
                dumps += 1;
            }
        }
        assert!(dumps >= 40, "{dumps}");
    }

    #[test]
    fn long_dumps_keep_the_newest_and_the_oldest_pending_entries_of_the_newest_group() {
        let entry = |seq: i64, pg_id: i64, state: &str| RawEntry {
            pg_id,
            process_group: vec!["0".into(), "default_pg".into()],
            collective_seq_id: seq,
            profiling_name: "nccl:all_reduce".into(),
            state: state.into(),
            ..RawEntry::default()
        };
        let state = |seq| if seq >= 100 { "started" } else { "completed" };
        let entries: Vec<RawEntry> = (0..500).map(|seq| entry(seq, 1, state(seq))).collect();
        let kept: Vec<i64> = select_entries(&entries).map(|entry| entry.collective_seq_id).collect();
        assert_eq!((kept.len(), kept[0], kept[63], kept[64]), (MAX_ENTRIES_PER_RANK, 100, 163, 436));
        let mut dump = RawDump { entries, ..RawDump::default() };
        dump.entries.insert(0, entry(999, 0, "completed"));
        assert_eq!(dump.number_groups().into_values().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn recorded_dumps_contain_what_the_hook_reports() {
        for scenario in ["never_entered", "two_never_entered", "different_order", "different_shapes"] {
            let text = std::fs::read(find_golden_file(&format!("{scenario}.json"))).expect("a golden file");
            let recorded: RecordedHang = serde_json::from_slice(&text).expect("valid");
            for of_hook in recorded.evidence {
                let file = find_golden_file(&format!("{scenario}-{}.dump", of_hook.rank));
                let dump = FlightRecorderDump::read(&file, 3).expect("valid");
                let strip = |entries: Vec<CollectiveEntry>| -> Vec<CollectiveEntry> {
                    let strip = |e: CollectiveEntry| CollectiveEntry {
                        operation: e.operation.rsplit(':').next().unwrap_or_default().to_owned(),
                        ..e
                    };
                    entries.into_iter().map(strip).collect()
                };
                assert_eq!(strip(dump.entries), strip(of_hook.entries), "{scenario} {}", of_hook.rank);
                let counters = |groups: &[GroupCounters]| -> Vec<(String, Vec<Rank>, i64, i64)> {
                    let groups = groups.iter();
                    groups.map(|g| (g.name.clone(), g.ranks.clone(), g.enqueued, g.completed)).collect()
                };
                assert_eq!(counters(&dump.groups), counters(&of_hook.groups), "{scenario}");
            }
        }
    }

    #[test]
    fn the_stack_is_that_of_a_pending_collective() {
        let read = |rank| {
            FlightRecorderDump::read(&find_golden_file(&format!("never_entered-{rank}.dump")), 3)
                .expect("valid")
                .stack
        };
        let frames = read(0);
        assert!(frames.first().is_some_and(|f| f.file.contains("/torch/distributed/")), "{frames:?}");
        assert!(frames.iter().any(|f| f.file == "scripts/golden/hangs.py" && f.line > 0), "{frames:?}");
        assert_eq!(read(1), [], "rank 1 is in no collective");
    }

    #[test]
    fn damaged_dumps_are_no_evidence_and_cause_no_panic() {
        let bytes = std::fs::read(find_golden_file("different_order-1.dump")).expect("a golden file");
        for cut in 0..bytes.len() {
            assert_eq!(FlightRecorderDump::parse(&bytes[..cut], 3), None, "{cut}");
        }
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x21;
            _ = FlightRecorderDump::parse(&damaged, 3);
        }
        assert_eq!(FlightRecorderDump::parse(b"\x80\x02]q\x00.", 3), None, "a list");
        let directory = tempfile::tempdir().expect("a directory");
        std::os::unix::fs::symlink(find_golden_file("different_order-1.dump"), directory.path().join("0"))
            .expect("a link");
        assert_eq!(FlightRecorderDump::read(&directory.path().join("0"), 3), None, "a link");
        assert_eq!(FlightRecorderDump::read(&directory.path().join("1"), 3), None, "there is no file");
    }

    #[test]
    fn ranks_outside_of_the_job_are_left_out() {
        let file = find_golden_file("never_entered-0.dump");
        let dump = FlightRecorderDump::read(&file, 2).expect("valid");
        assert_eq!(dump.groups[0].ranks, [0, 1]);
    }
}
