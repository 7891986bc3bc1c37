//! Repairs checkpoints: rebuilds files that can be derived from the remaining files, and reports
//! files that are lost.
//!
//! All work happens in a hidden copy made of hard links (the [`repair_dir::RepairDir`]). A repair
//! replaces files of the copy and never modifies a hard link, so the original stays unchanged. The
//! complete copy gets its final name at the end.
mod bit_flips;
mod external;
mod lost_model_files;
mod model_files;
mod native;
mod repair_checkpoints;
mod repair_dir;
mod repair_loss;
mod sound_checkpoint;
mod universal;
mod weights;

pub use repair_checkpoints::{RepairOptions, RepairReport, repair_checkpoints};
