//! [`ConvertOptions`]: the format to which a checkpoint is converted, and further options.
use crate::error::{CkptError, OptionProblem, Result};
use crate::tensor::Dtype;
use std::collections::BTreeMap;

/// The format into which a checkpoint is converted, such as DeepSpeed's ZeRO checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvertTarget {
    /// A native checkpoint of `launch`.
    Native,
    /// A ZeRO checkpoint in DeepSpeed's layout.
    DeepSpeed,
    /// DeepSpeed's universal format, which ZeRO stages 1 to 3 load.
    Universal,
}

/// Options of [`crate::convert_checkpoint`], such as the target format and the number of ranks.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// The format to write.
    pub target: ConvertTarget,
    /// ZeRO stage of the converted checkpoint, 1 to 3. `None` means the stage of the source, or 2
    /// for a source without a stage.
    pub stage: Option<u8>,
    /// Number of ranks of the converted checkpoint. `None` means the number of ranks of the source,
    /// or 1 if that number is unknown.
    pub world: Option<u32>,
    /// Number of elements per rank at which a ZeRO-3 sub-group is full (`sub_group_size` in
    /// DeepSpeed's config).
    pub sub_group_size: u64,
    /// Dtype of the copies of trained weights in DeepSpeed's model files. `None` means the dtype of
    /// these copies in the source, or F32 if that dtype is unknown.
    pub dtype: Option<Dtype>,
    /// Maps the name of each weight that the source doesn't assign to a group to the index of its
    /// group, from 0 (see [`crate::find_ungrouped_weights`]). If the map isn't empty, ungrouped
    /// weights without an entry belong to group 0.
    pub groups: BTreeMap<String, usize>,
    /// Memory that the conversion may use in addition to the list of planned files, in bytes.
    pub memory: u64,
    /// Whether to replace an output directory that an earlier conversion wrote.
    pub force: bool,
}

/// The smallest value in bytes of the option [`ConvertOptions::memory`], which limits the memory
/// that a conversion uses.
const MEMORY_BYTES_MIN: u64 = 64 << 20;
/// The largest number of ranks for which a checkpoint can be converted.
pub(super) const WORLD_SIZE_MAX: u32 = 65_536;

impl ConvertOptions {
    /// Returns the default options for converting to `target`.
    pub fn new(target: ConvertTarget) -> ConvertOptions {
        ConvertOptions {
            target,
            stage: None,
            world: None,
            sub_group_size: 1_000_000_000,
            dtype: None,
            groups: BTreeMap::new(),
            memory: 512 << 20,
            force: false,
        }
    }

    /// Fails with [`CkptError::InvalidOption`] if the value of an option of the conversion is out
    /// of range.
    pub(super) fn check_limits(&self) -> Result<()> {
        let problem = if let Some(stage) = self.stage.filter(|s| !(1..=3).contains(s)) {
            OptionProblem::Stage { stage }
        } else if let Some(world) = self.world.filter(|w| !(1..=WORLD_SIZE_MAX).contains(w)) {
            OptionProblem::WorldSize { world, limit: WORLD_SIZE_MAX }
        } else if self.sub_group_size == 0 {
            OptionProblem::EmptySubGroup
        } else if self.memory < MEMORY_BYTES_MIN {
            OptionProblem::Memory { needed: MEMORY_BYTES_MIN, limit: self.memory }
        } else if let Some(dtype) = self.dtype.filter(|d| !d.is_float()) {
            OptionProblem::Dtype { dtype }
        } else {
            return Ok(());
        };
        Err(CkptError::invalid_option(problem))
    }
}
