//! Warns about ranks that a job names, but does not have.
use diagnostic::{Code, Diagnostic, codes::host as codes, quantity::format_count};
use jobspec::JobSpec;

/// The largest number of warnings about absent ranks of one key. One more warning reports the
/// number of the other absent ranks.
const MAX_WARNINGS_PER_KEY: usize = 16;

/// Returns warnings about the ranks in `run.logs.show` and `run.wrap` that a job with `world`
/// workers does not have.
pub(super) fn find_absent_rank_warnings(job: &JobSpec, world: u32) -> Vec<Diagnostic> {
    let shown = job.run.logs.show.iter().enumerate();
    let shown = shown.filter(|(_, rank)| **rank >= world);
    let shown = shown.map(|(i, rank)| (format!("run.logs.show[{i}]"), *rank));
    let wrapped = job.run.wrap.iter().enumerate();
    let wrapped = wrapped.filter_map(|(i, wrap)| Some((i, wrap.ranks.largest_rank()?)));
    let wrapped = wrapped.filter(|(_, rank)| *rank >= world);
    let wrapped = wrapped.map(|(i, rank)| (format!("run.wrap[{i}].ranks"), rank));
    let mut warnings = create_warnings(codes::LOG_RANK_UNKNOWN, "run.logs.show", "to show", shown, world);
    warnings.extend(create_warnings(codes::WRAP_RANK_UNKNOWN, "run.wrap", "to wrap", wrapped, world));
    warnings
}

/// Creates warnings with the code `code` about the ranks `absent` of the key `key`, each with its
/// position in the job. `purpose` is the reason why the job names the ranks.
fn create_warnings(
    code: Code,
    key: &str,
    purpose: &str,
    mut absent: impl Iterator<Item = (String, u32)>,
    world: u32,
) -> Vec<Diagnostic> {
    let workers = format_count(world, "worker");
    let create = |(subject, rank): (String, u32)| {
        let message = format!("there is no rank {rank} {purpose}: the job has {workers}");
        Diagnostic::warning(code, message)
            .with_subject(subject)
            .with_field("rank", rank)
            .with_field("world_size", world)
            .with_help("ranks count from 0")
    };
    let mut warnings: Vec<Diagnostic> = absent.by_ref().take(MAX_WARNINGS_PER_KEY).map(create).collect();
    if let omitted @ 1.. = absent.count() {
        let ranks = format_count(omitted, "further absent rank");
        let message = format!("`{key}` names {ranks}: the job has {workers}");
        warnings.push(
            Diagnostic::warning(code, message)
                .with_subject(key)
                .with_field("omitted", omitted)
                .with_field("world_size", world)
                .with_help("ranks count from 0"),
        );
    }
    warnings
}
