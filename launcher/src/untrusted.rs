//! Everything of the launcher that reads what strangers wrote, each behind one function: what fuzz targets and hostile
//! tests call. Checkpoints have theirs in crate `ckpt`.
//!
//! Each returns what is wrong, or nothing. None may panic, loop, or take memory beyond its caps.
use contract::{
    control::{FromAgent, FromWorker, ToAgent, ToWorker},
    frame::{self, HEADER},
    hosts, job,
};
use serde::{Serialize, de::DeserializeOwned};

type Said = Result<(), String>;

/// Lines of a hostfile that are tried as filters.
const MOST_FILTERS: usize = 8;

/// A control stream: frames one after another, read as each of the four kinds of messages.
pub fn control(bytes: &[u8]) -> Said {
    let read = [frames::<FromAgent>, frames::<ToAgent>, frames::<FromWorker>, frames::<ToWorker>];
    // One kind is enough for a stream to be sound.
    read.iter().map(|read| read(bytes)).reduce(|one, other| one.or(other)).unwrap_or(Ok(()))
}

fn frames<T: Serialize + DeserializeOwned>(mut bytes: &[u8]) -> Said {
    while let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() {
        let length = frame::body_length(*header).map_err(|e| e.to_string())? as usize;
        let body = rest.get(..length).ok_or_else(|| frame::LinkError::Truncated.to_string())?;
        let message = frame::decode::<T>(body).map_err(|e| e.to_string())?;
        frame::encode(&message).map_err(|e| e.to_string())?;
        bytes = &rest[length..];
    }
    if bytes.is_empty() { Ok(()) } else { Err(frame::LinkError::Truncated.to_string()) }
}

/// A hostfile, and the text as a list of hosts with DeepSpeed's filters of them.
pub fn hostfile(bytes: &[u8]) -> Said {
    let text = text(bytes)?;
    if text.len() > hosts::MAX_HOSTFILE {
        return Err("too large".to_owned());
    }
    let found = hosts::parse_hostfile(text).map_err(|faults| match faults.first() {
        Some(fault) => format!("line {}: {}", fault.line, fault.message),
        None => "no fault was named".to_owned(),
    })?;
    let slots = |slots: Option<u32>| slots.map_or(hosts::Slots::Auto, hosts::Slots::Count);
    let named: Vec<_> = found.into_iter().map(|host| (host.host.name(), slots(host.slots))).collect();
    for text in text.lines().take(MOST_FILTERS) {
        for (include, exclude) in [(vec![text.to_owned()], vec![]), (vec![], vec![text.to_owned()])] {
            // A line of a hostfile is seldom a filter.
            _ = hosts::filter(&named, &include, &exclude);
        }
    }
    Ok(())
}

/// Hosts as `cluster.hosts` has them: users, ports, ranges.
pub fn host_list(bytes: &[u8]) -> Said {
    hosts::parse_hosts(text(bytes)?).map(drop).map_err(|fault| fault.message)
}

/// What Slurm's variables say: the node list on the first line, the number of tasks on the second, the rest the same
/// for CPUs.
pub fn slurm(bytes: &[u8]) -> Said {
    let text = text(bytes)?;
    let mut lines = text.lines();
    let names = ["SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE", "SLURM_HET_SIZE"];
    let set: Vec<(&str, &str)> = names.iter().copied().zip(&mut lines).collect();
    let get = |name: &str| match name {
        "SLURM_JOB_ID" | "SLURM_NTASKS" => Some("1".to_owned()),
        _ => set.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()),
    };
    crate::discover::slurm::allocation(&get).map(drop).map_err(|e| e.message)
}

/// A job.yaml; one that is read is printed and read again.
pub fn job(bytes: &[u8]) -> Said {
    let load = |text: String| {
        let source = job::Source::Text { name: "job.yaml".to_owned(), text };
        job::load(source, &[]).map_err(|problems| match problems.first() {
            Some(problem) => problem.message.clone(),
            None => "no problem was named".to_owned(),
        })
    };
    let (spec, ..) = load(text(bytes)?.to_owned())?;
    let (again, ..) = load(spec.to_yaml()).unwrap_or_else(|why| panic!("its own print is refused: {why}"));
    assert_eq!(spec, again, "its own print says something else");
    Ok(())
}

/// What clients of the rendezvous store send: see the seeds of `tests/corpus`.
pub fn store(bytes: &[u8]) -> Said {
    crate::controller::hostile_store(bytes)
}

/// The first message of an agent that connects back: the invitation it was given.
pub fn invitation(bytes: &[u8]) -> Said {
    crate::link::join::Invitation::read(&mut &bytes[..]).map(drop).map_err(|e| e.to_string())
}

fn text(bytes: &[u8]) -> Result<&str, String> {
    str::from_utf8(bytes).map_err(|_| "it isn't UTF-8 text".to_owned())
}
