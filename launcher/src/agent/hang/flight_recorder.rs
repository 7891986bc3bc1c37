//! [`FlightRecorderDump`]: parses the file to which torch's flight recorder writes (dumps) a rank's
//! last collectives after a timeout.
use super::hook_directory::{MAX_ITEMS_PER_RANK, MAX_TEXT_BYTES};
use crate::private_files::open_own_file_without_links;
use jobspec::ids::Rank;
use protocol::hang::{CollectiveEntry, GroupCounters, StackFrame};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::{io::Read, path::Path};

/// The largest dump of a flight recorder, in bytes, that the agent reads. A dump with 2000 entries
/// and their stacks has a few megabytes.
const MAX_DUMP_BYTES: u64 = 32 << 20;

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
    process_group: Vec<Value>,
    collective_seq_id: i64,
    is_p2p: bool,
    profiling_name: String,
    state: String,
    retired: bool,
    input_sizes: Value,
    input_dtypes: Value,
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
        let value = ckpt::parse_plain_pickle(bytes, MAX_ITEMS_PER_RANK).ok()?;
        // serde would also read a list as a dump.
        let dump: RawDump = value.is_object().then(|| serde_json::from_value(value).ok()).flatten()?;
        let stack = dump.entries.last().filter(|e| !e.is_complete()).map(RawEntry::list_frames);
        Some(FlightRecorderDump {
            groups: dump.list_groups(world),
            entries: dump.entries.iter().filter_map(RawEntry::to_entry).collect(),
            stack: stack.unwrap_or_default(),
        })
    }
}

impl RawDump {
    /// Returns each process group in the dump, with the numbers of its last enqueued and last
    /// completed collective.
    fn list_groups(&self, world: u32) -> Vec<GroupCounters> {
        let build = |(name, status): (&String, &Value)| {
            let count = |key: &str| status.get(key).and_then(Value::as_i64).unwrap_or(-1);
            let enqueued = count("last_enqueued_collective");
            let of_group = |e: &&RawEntry| e.group_name() == Some(name);
            let operation = self.entries.iter().rfind(of_group).map_or("", |e| &e.profiling_name);
            let backend = operation.split_once(':').map_or("", |(backend, _)| backend);
            GroupCounters {
                name: truncate(name),
                backend: truncate(backend),
                ranks: self.list_ranks(name, world),
                enqueued,
                completed: count("last_completed_collective"),
            }
        };
        self.pg_status.iter().take(MAX_ITEMS_PER_RANK).map(build).collect()
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

impl RawEntry {
    fn group_name(&self) -> Option<&str> {
        self.process_group.first().and_then(Value::as_str)
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

    #[test]
    fn recorded_dumps_contain_what_the_hook_reports() {
        #[derive(Deserialize)]
        struct RecordedHang {
            evidence: Vec<RankEvidence>,
        }
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
