//! Crate `ckpt`: state at rest. A leaf: it depends on none of our crates and knows no collectives.
//!
//! A checkpoint is a folder `step-00000010` with one safetensors file per rank and a `manifest.json` that says which
//! byte ranges hold which logical tensor, with a BLAKE3 per block. It is complete or absent:
//!
//! 1. rank 0: [`Staging::begin`] makes a hidden folder beside the checkpoints,
//! 2. every rank: [`write_shard`] writes its own file there and returns a small [`ShardReport`],
//! 3. rank 0: [`commit`] checks that the shards hold every tensor exactly once, writes the manifest, renames the folder,
//!    and moves `latest`; [`prune`] afterwards removes the oldest.
//!
//! [`Checkpoint::open`] reads one, at any number of ranks; [`verify`] checks every byte; [`gather`] writes a Hugging
//! Face folder. Checkpoints of other programs are read where they lie ([`find`], [`Foreign`]).
#[cfg(target_endian = "big")]
compile_error!("checkpoints are little-endian, and so must the machine be");

mod catalog;
mod checkpoint;
mod commit;
mod convert;
mod cut;
mod diff;
mod disk;
mod dtype;
mod elsewhere;
mod error;
mod passthrough;
pub mod fault;
mod external;
pub mod formats;
mod gather;
mod hash;
mod host;
#[doc(hidden)]
pub mod untrusted;
mod manifest;
mod parity;
pub mod peft;
mod pickle;
mod repair;
pub mod rng_files;
mod root;
mod save;
pub mod host_local;
mod diagnosis;
mod source;
mod state;
mod stripes;
#[cfg(test)]
mod tests;
mod verify;
mod watch;

pub use catalog::{Facts, ModelCard, Role, TensorInfo, TextFile, Tie, WeightShape};
pub use checkpoint::{Checkpoint, Fetch, Run, Sink};
pub use commit::{Committed, Staging, commit, commit_parity, prune};
pub use convert::{ConvertOptions, ConvertReport, Target, Ungrouped, convert, ungrouped};
pub use diff::{
    At, BytesDiff, Cast, DiffOptions, DiffReport, DtypeDiff, ShapeDiff, Side, TensorDiff, Values, diff,
};
pub use dtype::Dtype;
pub use error::{CkptError, Damage, Result};
pub use passthrough::{Extras, ParamGroup};
pub use external::{Foreign, ForeignFacts};
pub use gather::{GatherOptions, GatherReport, GatheredFile, gather};
pub use hash::Hash;
pub use parity::{ParityReport, write_parity};
pub use pickle::Object;
pub use repair::{RepairOptions, RepairReport, repair};
pub use root::{Found, Newest, find, find_trained, latest, list, newest, step_name};
pub use save::{Elements, Piece, PieceReport, ShardReport, write_shard};
pub use source::{Request, Source};
pub use state::{Group, LossScale, TrainingState};
pub use verify::{CheckpointReport, Shard, VerifyOptions, VerifyReport, verify, verify_with};
pub use watch::{Landed, Sighting, Watch};
