//! Recognizes and opens the checkpoints of any program.
mod detect;
mod diagnose;
mod opened;

pub(crate) use detect::open_external_checkpoint;
pub(crate) use diagnose::diagnose_directory;
pub use opened::{
    NewestCheckpoint, OpenedCheckpoint, open_checkpoint, open_checkpoint_for_training, open_newest_native,
};
