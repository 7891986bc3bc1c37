//! Names of files, and sizes and limits of formats, that both readers and error messages name.

/// Name of the manifest's file. A directory without this file is not a native checkpoint.
pub(crate) const MANIFEST_FILE: &str = "manifest.json";
/// Name of the file with the configuration of an adapter.
pub(crate) const ADAPTER_CONFIG_FILE: &str = "adapter_config.json";
/// Name of the file in which `launch ckpt convert` lists the files that it wrote.
pub(crate) const CONVERT_RECORD_FILE: &str = "converted.json";
/// Name of the directory in which a run stores its gathered weights, next to its checkpoints.
pub(crate) const RUN_WEIGHTS_DIR: &str = "weights";
/// Accelerate's file with the state of the learning rate scheduler.
pub(crate) const SCHEDULER_FILE: &str = "scheduler.bin";
/// Limit on the size of the header of a safetensors file, in bytes. The safetensors library has the
/// same limit.
pub(crate) const SAFETENSORS_HEADER_MAX: u64 = 100_000_000;
/// Limit on the size of the central directory of a zip container, in bytes.
pub(crate) const ZIP_DIRECTORY_MAX: u64 = 64 << 20;
/// Limit on the size of one pickle, in bytes.
pub(crate) const PICKLE_BYTES_MAX: u64 = 64 << 20;
/// Limit on the nesting of values in a pickle, in levels.
pub(crate) const PICKLE_DEPTH_MAX: u32 = 128;
/// Limit on the number of tensors of a checkpoint. Each role of a weight counts as one tensor.
pub(crate) const TENSORS_MAX: usize = 1 << 19;
/// Limit on the length of a name in a pickle, in bytes. Names of tensors have a lower limit.
pub(crate) const NAME_BYTES_MAX: usize = 4096;
/// Limit on the number of values in the hyper-parameters of all parameter groups of a checkpoint.
pub(crate) const HYPER_VALUES_MAX: usize = 1 << 20;
/// Words in the state of a Mersenne Twister (MT19937).
pub(crate) const TWISTER_WORDS: usize = 624;
/// Bytes in the state of torch's CPU generator.
pub(crate) const CPU_STATE_BYTES: usize = 5056;
/// Bytes in the state of a CUDA generator of torch: the seed (u64) and the Philox offset (i64).
pub(crate) const CUDA_STATE_BYTES: usize = 16;
