//! File names, sizes and limits of checkpoint formats, which both readers and error messages use.

/// Name of the manifest file of a checkpoint in launch's own format, which lists its tensors and
/// files. A directory without this file is not a native checkpoint.
pub(crate) const MANIFEST_FILE: &str = "manifest.json";
/// Name of the file with the configuration of a LoRA adapter.
pub(crate) const ADAPTER_CONFIG_FILE: &str = "adapter_config.json";
/// Name of the file in which `launch ckpt convert` lists the files that it wrote.
pub(crate) const CONVERT_RECORD_FILE: &str = "converted.json";
/// Name of the directory in which a run stores the full weights of the model, assembled from the
/// shards of all ranks. It is next to the run's checkpoints.
pub(crate) const RUN_WEIGHTS_DIR: &str = "weights";
/// Name of the file in which Accelerate stores the state of the learning rate scheduler.
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
/// Limit on the number of tensors of a checkpoint, where a weight and each of its optimizer states
/// count separately.
pub(crate) const TENSORS_MAX: usize = 1 << 19;
/// Limit on the length of a name in a pickle, in bytes. Names of tensors have a lower limit.
pub(crate) const NAME_BYTES_MAX: usize = 4096;
/// Limit on the number of JSON values in the hyper-parameters of all parameter groups of a
/// checkpoint.
pub(crate) const HYPER_PARAMETER_VALUES_MAX: usize = 1 << 20;
/// Number of 32-bit words in the state of a Mersenne Twister (MT19937) random generator.
pub(crate) const MERSENNE_TWISTER_WORDS: usize = 624;
/// Size in bytes of the state of torch's random generator on CPUs.
pub(crate) const CPU_RNG_STATE_BYTES: usize = 5056;
/// Size in bytes of the state of torch's random generator on a CUDA GPU: the seed (u64) and the
/// Philox offset (i64).
pub(crate) const CUDA_RNG_STATE_BYTES: usize = 16;
/// The name that error messages use for the memory file with copies of training states.
pub(crate) const MEMORY_STORE_NAME: &str = "memory copies";
