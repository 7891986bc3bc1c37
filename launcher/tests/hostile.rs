//! What strangers write: a corpus, changed in every way a seed gives, through everything of the launcher that reads such
//! bytes. Nothing panics, and memory stays below a cap that has nothing to do with what the bytes claim.
#[path = "../../tests/support/strangers.rs"]
mod strangers;

use contract::{
    control::{ExitStatus, FromAgent, HostInventory, ToAgent, VERSION},
    frame,
};
use std::path::Path;
use strangers::{Memory, Numbers};

/// Most memory that reading a few kilobytes may take at any time, bytes.
const CAP: usize = 64 << 20;
/// Changed copies of each file for each reader.
const CHANGES: u64 = 1000;

/// Signs that mean something to one of the readers.
const SIGNS: &[u8] = b"[]-,:@=&*!{}\n \t#\"'|%\0\xff\x80\xdd\xdf\xc6";

type Reader = fn(&[u8]) -> Result<(), String>;

/// By the ending of the files that each of them takes.
const READERS: [(&str, Reader); 7] = [
    ("control", launcher::untrusted::control),
    ("hostfile", launcher::untrusted::hostfile),
    ("hosts", launcher::untrusted::host_list),
    ("slurm", launcher::untrusted::slurm),
    ("job", launcher::untrusted::job),
    ("store", launcher::untrusted::store),
    ("invitation", launcher::untrusted::invitation),
];

/// A few messages of an agent, and of a controller.
fn streams() -> [Vec<u8>; 2] {
    let found = HostInventory { host: "n1".into(), cpus: vec![0, 1], ..HostInventory::default() };
    let status = ExitStatus::Signal(11, true);
    let exited = FromAgent::Exited {
        epoch: 0,
        rank: 1,
        pid: 2,
        status,
        oom: false,
        tail: vec!["last".into()],
        error: None,
    };
    let agent = [FromAgent::Hello { version: VERSION, pid: 77, found }, exited, FromAgent::Heartbeat];
    let kill = ToAgent::Kill { epoch: 0, reason: "a peer failed".into(), grace_ms: 5, stacks: false };
    let controller = [ToAgent::Hello { version: VERSION }, kill, ToAgent::Heartbeat];
    [
        agent.iter().flat_map(|m| frame::encode(m).expect("sent")).collect(),
        controller.iter().flat_map(|m| frame::encode(m).expect("sent")).collect(),
    ]
}

fn corpus() -> Vec<(String, Vec<u8>)> {
    let mut files = strangers::corpus(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus"));
    let [agent, controller] = streams();
    files.push(("agent.control".into(), agent));
    files.push(("controller.control".into(), controller));
    let invitation = format!("launch-join-1 {} 127.0.0.1:7000 [::1]:7000\n", "0f".repeat(32));
    files.push(("one.invitation".into(), invitation.into_bytes()));
    files.sort();
    files
}

fn changed(sound: &[u8], numbers: &mut Numbers) -> Vec<u8> {
    strangers::changed(sound, numbers, SIGNS, |numbers| b'0' + numbers.next(10) as u8)
}

#[test]
fn nothing_panics_and_memory_stays_below_the_cap() {
    let memory = Memory::from_now();
    let (mut refused, mut read) = (0u64, 0u64);
    for (name, sound) in corpus() {
        for (reader, run) in READERS {
            // Its own files count most.
            let changes = if name.ends_with(reader) { CHANGES } else { CHANGES / 20 };
            let mut numbers = Numbers(name.len() as u64 * 7 + reader.len() as u64);
            for _ in 0..changes {
                match run(&changed(&sound, &mut numbers)) {
                    Ok(()) => read += 1,
                    Err(why) => {
                        assert!(!why.is_empty(), "{reader} of {name}");
                        refused += 1;
                    }
                }
            }
        }
    }
    let peak = memory.peak();
    assert!(peak < CAP, "{peak} bytes at the peak");
    assert!(read > 500 && refused > 2000, "{read} read, {refused} refused: the changes reach the readers");
}

#[test]
fn sound_files_are_read() {
    for (name, bytes) in corpus() {
        let (_, run) = READERS.iter().find(|(ending, _)| name.ends_with(&format!(".{ending}"))).expect(&name);
        assert_eq!(run(&bytes), Ok(()), "{name}");
    }
}

/// Few bytes that ask for much.
#[test]
fn claims_cost_the_claimer() {
    let memory = Memory::from_now();
    let long = "n".repeat(100_000);
    let texts = [
        format!("{long}[0-16383]"),
        "n[0-16383][0-16383]".to_owned(),
        "n[0-127][0-127]".repeat(2),
        format!("n[{}0-{}9]", "0".repeat(200), "0".repeat(200)),
        "n[0-16383],".repeat(2000),
        format!("[{long}"),
    ];
    for text in &texts {
        for (reader, run) in &READERS[1..4] {
            assert!(run(text.as_bytes()).is_err(), "{reader} takes {:.40}…", text);
        }
    }
    // A frame and a key that are as long as can be said, and never come.
    assert!(launcher::untrusted::control(&[0xff; 16]).is_err());
    assert!(launcher::untrusted::control(&[0, 0, 0, 1, 0xdd, 0xff, 0xff, 0xff, 0xff]).is_err());
    let mut key = vec![0, 9, 1];
    key.extend([0xff; 8]);
    assert!(launcher::untrusted::store(&key).is_err());
    let peak = memory.peak();
    assert!(peak < CAP, "{peak} bytes at the peak");
}
