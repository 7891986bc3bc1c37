//! Crate `jobspec`: job.yaml as data, with its keys, their checks and their documentation.
//!
//! A key is declared once, in module `spec`. [`load_job`] decodes and checks a job. The table
//! [`KEYS`], `docs/job.md` and the JSON Schema come from the declarations.
//!
//! Checkpoint manifests contain the job as JSON. A field that was renamed later keeps its first
//! name in manifests by `serde(rename)`. [`JobSpec::to_key_json`] shows the field under its present
//! name.
mod accelerators;
mod check;
mod deprecated;
pub mod env;
pub mod hosts;
pub mod ids;
mod input_file;
mod key_json;
mod key_table;
mod keys;
mod load;
mod output_file;
mod overrides;
mod print;
mod reference;
mod reload;
mod schema;
mod secret_text;
mod spec;
mod url_password;
mod yaml;

pub use accelerators::{AcceleratorKind, AcceleratorTraits};
pub use input_file::read_input_file;
pub use key_table::{DEPRECATED_NAMES, DeprecatedName, KEYS};
pub use keys::key_info::{Condition, KeyDefault, KeyInfo, Rule};
pub use load::{JobSource, load_job};
pub use output_file::{OutputFile, resolve_output_file};
pub use reference::update_key_tables;
pub use reload::{ReloadChanges, ReloadTrainValues, ReloadValues, compare_jobs, list_key_values};
pub use schema::build_schema;
pub use secret_text::{hide_secret_arguments, hide_secret_values, is_value_of_secret_option};
pub use spec::{
    activation::ActivationStep,
    checkpoint::{CheckpointSpec, MemoryCopySpec, ResumeFrom, ResumeSpec, RngPolicy, SaveInterval},
    cluster::{
        ClusterSpec, CommBackend, DeviceSelection, InterfaceSelector, MasterPort, StoreHost, WorkersPerHost,
    },
    container::{ContainerMount, ContainerRuntime, ContainerSpec},
    data::{DataSpec, TokenizerSpec},
    data_source::{DataSource, LossTargets, RecordFormat},
    environment::{EnvSource, is_reserved_variable},
    experts::{ExpertPlacement, ExpertsSpec},
    hang_timeout::HangTimeout,
    host_values::HostSelection,
    job::{JobSpec, make_job_name},
    join::JoinSpec,
    lora::{LoraSpec, LoraTargets},
    model::ModelSpec,
    observe::{MAX_MLFLOW_NAME_BYTES, MetricsAddress, MlflowSpec, ObserveSpec, is_server_address},
    optimizer::{OptimizerName, OptimizerSpec},
    param_groups::ParamGroupSpec,
    ports::PortSelection,
    run::{ControllerLossAction, CpuBind, LogsSpec, MinHosts, RunSpec, VisibleDevices},
    schedule::{ScheduleName, ScheduleSpec},
    signals::{RunSignalActions, SignalAction, StopSignal},
    slurm::SlurmSpec,
    ssh::{KnownHosts, SshClient, SshConfig, SshSpec},
    straggler::StragglerSpec,
    train::TrainSpec,
    train_settings::{
        AttentionKernels, BatchSpec, CudaGraphMode, EvalSpec, GenerationSpec, LossScaleSpec, OffloadTarget,
        Precision, RecomputeMode, ZeroSpec,
    },
    wrap::{RankSelection, WrapSpec},
};
pub use url_password::hide_url_passwords;
pub use yaml::{
    document::{Document, DocumentItem, DocumentSyntax, DocumentValue},
    format::quote_yaml,
    scalar::{parse_duration, parse_size},
    source_map::{JobArgument, SourceMap},
    text_file::MAX_JOB_BYTES,
};
