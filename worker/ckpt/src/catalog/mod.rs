//! Describes what a checkpoint contains, and where the bytes of each tensor are stored.
mod external;
mod model;
mod passthrough;
mod tensor_source;
mod training_state;

pub(crate) use external::{
    ALLOWED_GLOBALS, ExternalCheckpointBuilder, ExternalTensor, FusedExperts, SeparateExpertTensor,
    StepValue, StoredFile, TensorPart, TrainedWeightNames, convert_step_to_integer, parse_expert_matrix_name,
    verify_all_spans,
};
pub use external::{ExternalCheckpoint, ExternalFacts, TrainingStatePart};
pub(crate) use model::{BorrowedWeightShape, STEP_LAG_KEY, borrow_weight_shapes, require_same_model};
pub use model::{ModelSpec, RunFacts, TensorInfo, TextFile, TiedWeight, WeightShape};
pub use passthrough::{ParamGroup, PassthroughState};
pub(crate) use tensor_source::build_f32_read_requests;
pub use tensor_source::{F32ReadRequest, TensorSource};
pub use training_state::{LossScale, ParamGroupInfo, TrainingState};
