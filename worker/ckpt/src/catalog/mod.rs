//! Describes what a checkpoint contains, and where the bytes of each tensor are stored.
mod external;
mod model;
mod passthrough;
mod tensor_source;
mod training_state;

pub use external::{ExternalCheckpoint, ExternalFacts, StatePart};
pub(crate) use external::{
    ExternalCheckpointBuilder, ExternalTensor, FusedExperts, FusedMember, ALLOWED_GLOBALS, StepValue, StoredFile,
    TensorPart, TrainedWeightNames, parse_expert_matrix_name, convert_step_to_integer, verify_all_spans,
};
pub use model::{ModelSpec, RunFacts, TensorInfo, TextFile, TiedWeight, WeightShape};
pub(crate) use model::{STEP_LAG_KEY, BorrowedWeightShape, borrow_weights, require_same_model};
pub use passthrough::{ParamGroup, PassthroughState};
pub(crate) use tensor_source::build_span_requests;
pub use tensor_source::{ReadRequest, TensorSource};
pub use training_state::{LossScale, ParamGroupInfo, TrainingState};
