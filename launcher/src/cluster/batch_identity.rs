//! [`identify_command`]: adds a command line's hash to the id of a batch job, so that a restarted
//! batch job finds the checkpoints of this command. Reads the id of a batch job from
//! `LAUNCH_BATCH_JOB`.
use diagnostic::{Diagnostic, codes::host};
use jobspec::env;
use protocol::control::BatchJobRecord;

/// The longest name of a batch job, in bytes, that the variable `LAUNCH_BATCH_JOB` may contain.
const MAX_VALUE_BYTES: usize = 128;
/// The number of hexadecimal digits of the hash of a command line, by which commands of one batch
/// job are distinguished.
const COMMAND_HASH_DIGITS: usize = 16;

/// Reads the name that the user has given to the batch job from the environment variable
/// `LAUNCH_BATCH_JOB`; the function `get` looks up variables. The name does not contain how often
/// the scheduler has started the job again. Returns `None` if the variable is not set or empty.
/// Kubernetes sets it to an empty value if the pod does not have the label that could name the job.
pub(super) fn read_batch_job_variable(
    get: &dyn Fn(&str) -> Option<String>,
) -> diagnostic::Result<Option<BatchJobRecord>> {
    let Some(value) = get(env::LAUNCH_BATCH_JOB).filter(|value| !value.is_empty()) else { return Ok(None) };
    if value.len() > MAX_VALUE_BYTES || !value.bytes().all(|b| b.is_ascii_graphic()) {
        let excerpt: String = value.chars().take(60).flat_map(char::escape_default).collect();
        let message = format!("{} is not the id of a batch job: `{excerpt}`", env::LAUNCH_BATCH_JOB);
        return Err(Diagnostic::error(host::BATCH_JOB_ID_INVALID, message)
            .with_subject(env::LAUNCH_BATCH_JOB)
            .with_field("value", excerpt)
            .with_remedy());
    }
    let label = format!("batch job {value}");
    Ok(Some(BatchJobRecord { id: format!("job:{value}"), label, restarts: None }))
}

/// Adds the hash of a command line to the identity of a batch job, because a batch job may run
/// several commands that have different checkpoints. `command_line` begins with the name of the
/// executable, which is ignored.
pub(super) fn identify_command(batch_job: BatchJobRecord, command_line: &[String]) -> BatchJobRecord {
    let mut hasher = blake3::Hasher::new();
    for word in command_line.iter().skip(1) {
        hasher.update(&(word.len() as u64).to_le_bytes()).update(word.as_bytes());
    }
    let hash = hasher.finalize().to_hex();
    BatchJobRecord { id: format!("{}:{}", batch_job.id, &hash[..COMMAND_HASH_DIGITS]), ..batch_job }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_has_an_id_or_is_rejected() {
        let read = |value: &str| {
            read_batch_job_variable(&|name| (name == env::LAUNCH_BATCH_JOB).then(|| value.to_owned()))
        };
        let uid = "0f1c3e9a-6a43-4c1e-9df0-8b8a4b9f6f0e";
        let batch_job = read(uid).expect("valid").expect("a batch job");
        assert_eq!((batch_job.label, batch_job.restarts), (format!("batch job {uid}"), None));
        assert_eq!(read("").expect("valid"), None, "a label that the pod does not have");
        assert_eq!(read_batch_job_variable(&|_| None).expect("valid"), None);
        for invalid in ["two words", "line\nbreak", "ä", &"x".repeat(MAX_VALUE_BYTES + 1)] {
            assert_eq!(read(invalid).expect_err("invalid").code(), host::BATCH_JOB_ID_INVALID, "{invalid}");
        }
        assert!(
            read(&"x".repeat(MAX_VALUE_BYTES)).is_ok_and(|job| job.is_some_and(|j| j.has_valid_lengths()))
        );
    }

    #[test]
    fn each_command_of_a_batch_job_has_a_separate_id() {
        let identify = |job: &str, words: &[&str]| {
            let batch_job = BatchJobRecord { id: job.into(), label: "job".into(), restarts: Some(1) };
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            identify_command(batch_job, &words).id
        };
        let first = identify("7", &["launch", "job.yaml", "--set", "a=1"]);
        assert_eq!(identify("7", &["/opt/launch", "job.yaml", "--set", "a=1"]), first);
        for (job, words) in [
            ("8", &["launch", "job.yaml", "--set", "a=1"][..]),
            ("7", &["launch", "job.yaml", "--set", "a=2"]),
            ("7", &["launch", "job.yaml", "--seta=1"]),
            ("7", &["launch", "job.yaml"]),
            ("7", &[]),
        ] {
            assert_ne!(identify(job, words), first, "{job} {words:?}");
        }
    }
}
