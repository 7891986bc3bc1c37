//! [`DistributedType`]: the kind of job that a configuration of Accelerate describes.

/// The kind of job that a configuration of Accelerate describes by its key `distributed_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DistributedType {
    Single,
    Cpu,
    Gpu,
    DeepSpeed,
    Fsdp,
    Megatron,
}
