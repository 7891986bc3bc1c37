//! Describes what a checkpoint contains, and where the bytes of each tensor are stored.
mod external;
mod model;
mod passthrough;
mod tensor_source;
mod training_state;

pub use external::{ExternalCheckpoint, ExternalFacts, StatePart};
pub(crate) use external::{
    ExternalCheckpointBuilder, ExternalTensor, FusedExperts, FusedMember, GLOBALS, StepValue, StoredFile,
    TensorPart, TrainedNames, parse_expert_matrix, to_whole_step, verify_all_spans,
};
pub use model::{ModelSpec, RunFacts, TensorInfo, TextFile, TiedWeight, WeightShape};
pub(crate) use model::{STEP_LAG_KEY, ShapedWeight, borrow_weights, require_same_model};
pub use passthrough::{ParamGroup, PassthroughState};
pub(crate) use tensor_source::request_spans;
pub use tensor_source::{ReadRequest, TensorSource};
pub use training_state::{LossScale, ParamGroupInfo, TrainingState};
