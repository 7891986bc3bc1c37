//! Reads torch distributed checkpoints (DCP), the format of sharded FSDP states. A checkpoint has a
//! file `.metadata` and data files `__RANK_N.distcp`.
mod item_kind;
mod items;
pub(crate) mod metadata;
mod tensor_value;

pub(crate) use items::{METADATA_FILE, add_dcp_directory};
