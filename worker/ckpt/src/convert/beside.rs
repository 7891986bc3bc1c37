//! What lies beside a state in a folder of HF Trainer or Accelerate, so that the result is such a folder as well.
use super::Plan;
use super::file::{Content, FilePlan};
use super::state::State;
use crate::disk::{Folder, exists};
use crate::error::Result;
use crate::source::Source;

/// Files that are written anew, or that say of the source what isn't so of the result.
const MADE: [&str; 6] =
    ["latest", "latest_universal", "converted.json", "optimizer.pt", "optimizer.bin", ".metadata"];
/// How the folders are known whose other files a program needs to go on.
const KNOWN: [&str; 3] = ["trainer_state.json", "random_states_0.pkl", "zero_to_fp32.py"];

/// Adds the files beside the source's state to the plan, as links where that can be.
pub(super) fn add(source: &dyn Source, state: &mut State, plan: &mut Plan) -> Result<()> {
    let path = source.path();
    if !KNOWN.iter().any(|name| exists(&path.join(name))) {
        return Ok(());
    }
    let folder = Folder::open(path)?;
    let (mut links, mut random) = (Vec::new(), false);
    for name in folder.names()? {
        let file = path.join(&name);
        let regular = file.symlink_metadata().is_ok_and(|m| m.is_file());
        let fits = regular && !MADE.contains(&name.as_str()) && !name.ends_with(".distcp");
        if fits {
            random |= name.starts_with("rng_state") || name.starts_with("random_states_");
            links.push(FilePlan { path: name, content: Content::Same(file) });
        }
    }
    plan.files.extend(links);
    if let Some(world) = state.wrote.filter(|&w| random && w != plan.world) {
        state.notices.push(format!(
            "the files of random states are those of {world} ranks; `launch ckpt rng` makes them for {}",
            plan.world
        ));
    }
    Ok(())
}
