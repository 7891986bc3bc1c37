//! Adds the source checkpoint's files with scheduler states, RNG states and the like to a converted
//! checkpoint as links, so that its program can resume.
use super::file_plan::{FileContent, FilePlan, OutputPlan};
use super::notice::ConvertNotice;
use super::source_state::SourceState;
use crate::catalog::TensorSource;
use crate::codec::disk::{Directory, path_exists};
use crate::error::Result;

/// Names of files of the source checkpoint that a conversion must not link into its result. The
/// conversion writes such a file itself, or the file describes the source and would be wrong in the
/// result.
const EXCLUDED_FILES: [&str; 6] =
    ["latest", "latest_universal", "converted.json", "optimizer.pt", "optimizer.bin", ".metadata"];
/// Names of files whose presence shows that HF Trainer, Accelerate or DeepSpeed wrote the source
/// checkpoint, so that scheduler and RNG files are linked, too.
const COMPANION_FILE_MARKERS: [&str; 3] = ["trainer_state.json", "random_states_0.pkl", "zero_to_fp32.py"];

/// Adds links to files of the source checkpoint that hold scheduler states, RNG states and similar
/// data to the list of files that a conversion will write. Adds a notice to `state` if the source
/// has RNG state files for a different number of ranks than the plan. Does nothing if the source
/// has no file of [`COMPANION_FILE_MARKERS`].
pub(super) fn add_companion_files(
    source: &dyn TensorSource,
    state: &mut SourceState,
    plan: &mut OutputPlan,
) -> Result<()> {
    let path = source.path();
    if !COMPANION_FILE_MARKERS.iter().any(|name| path_exists(&path.join(name))) {
        return Ok(());
    }
    let directory = Directory::open(path)?;
    let (mut links, mut has_rng_files) = (Vec::new(), false);
    for name in directory.list_names()? {
        let file = path.join(&name);
        let regular = file.symlink_metadata().is_ok_and(|m| m.is_file());
        if regular && !EXCLUDED_FILES.contains(&name.as_str()) && !name.ends_with(".distcp") {
            has_rng_files |= name.starts_with("rng_state") || name.starts_with("random_states_");
            links.push(FilePlan { path: name, content: FileContent::LinkTo(file) });
        }
    }
    plan.files.extend(links);
    if let Some(from_world) = state.source_world.filter(|&w| has_rng_files && w != plan.world) {
        state.notices.push(ConvertNotice::RngFilesUnchanged { from_world, world: plan.world });
    }
    Ok(())
}
