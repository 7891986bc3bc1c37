//! What a checkpoint contains, and where the bytes of each tensor are.
mod external;
mod model;
mod passthrough;
mod tensor_source;
mod training_state;

pub use external::{ExternalCheckpoint, ExternalFacts, StatePart};
pub(crate) use external::{
    ExternalCheckpointBuilder, ExternalTensor, FusedExperts, FusedMember, GLOBALS, StoredFile, StoredFiles,
    TensorPart, TrainedNames, parse_optimizer_state_role, to_whole_step,
};
pub use model::{ModelSpec, RunFacts, TensorInfo, TextFile, TiedWeight, WeightShape};
pub(crate) use model::{STEP_LAG_KEY, ShapedWeight, require_same_model};
pub use passthrough::{ParamGroup, PassthroughState};
pub use tensor_source::{ReadRequest, TensorSource};
pub use training_state::{LossScale, ParamGroupInfo, TrainingState};
