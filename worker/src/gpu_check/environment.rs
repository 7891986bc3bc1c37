//! Describes the machine for `launch gpu-check`: the GPU, its libraries and environment variables,
//! and the kernels.
use super::{
    check_job::OpenGpu,
    message::{PartOutput, Row},
};
use crate::gpu::{collect_library_search_paths, probe_libraries};
use device::Cuda;
use serde_json::{Map, Value, json};
use std::{path::Path, time::Instant};

/// The starts of the names of environment variables that CUDA's libraries read.
const VARIABLE_PREFIXES: [&str; 5] = ["CUDA_", "NCCL_", "NVIDIA_", "CUBLAS", "CUDNN_"];

/// Reports the environment variables and libraries, and the properties of the GPU. Fails with the
/// category `Cluster` if the GPU is not usable.
pub(super) fn describe_environment(output: &PartOutput, open: OpenGpu) -> diagnostic::Result<()> {
    let is_listed = |name: &str| VARIABLE_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    let variables =
        std::env::vars_os().map(|(name, value)| [name, value].map(|s| s.to_string_lossy().into()));
    let variables: Map<String, Value> = variables
        .filter_map(|[name, value]: [String; 2]| is_listed(&name).then_some((name, Value::String(value))))
        .collect();
    output.details("variables", Value::Object(variables));
    for library in probe_libraries(&collect_library_search_paths(&[], Path::new(""))) {
        output.row(match library.result {
            Ok((version, path)) => {
                let data = json!({"version": version, "path": path});
                Row::measured(library.name, format!("{version} ({})", path.display()), data)
            }
            Err(error) if library.required => Row::failed(library.name, error.to_string()),
            Err(error) => Row::skipped(library.name, format!("not available: {error}")),
        });
    }
    let cuda = open()?;
    let (gpu, (free, total)) = (cuda.properties(), cuda.query_memory_info()?);
    let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
    let values = format!(
        "{}, {} multiprocessors, {:.1} of {:.1} GiB free",
        cuda.describe_gpu(),
        gpu.multiprocessor_count,
        gib(free),
        gib(total)
    );
    let data = json!({
        "name": gpu.name, "capability": gpu.capability, "multiprocessors": gpu.multiprocessor_count,
        "memory_bytes": total, "free_bytes": free, "shared_memory_per_block": gpu.shared_memory_per_block,
        "l2_cache_bytes": gpu.l2_cache_bytes, "driver": gpu.driver_version,
    });
    output.row(Row::measured(format!("GPU {}", gpu.index), values, data));
    Ok(())
}

/// Compiles and loads every kernel, and reports the time.
pub(super) fn load_kernels(output: &PartOutput, cuda: &Cuda) -> diagnostic::Result<()> {
    let began = Instant::now();
    cuda.load_kernels()?;
    let seconds = began.elapsed().as_secs_f64();
    output.row(Row::measured("loading all kernels", format!("{seconds:.2} s"), json!({"seconds": seconds})));
    if let Some(why) = cuda.kernel_cache_error() {
        output.row(Row::failed("writing the kernel cache", why.to_string()));
    }
    Ok(())
}
