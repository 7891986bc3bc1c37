//! Describes the machine for `launch gpu-check`: the GPU, its libraries and environment variables,
//! and the kernels.
use super::{
    check_job::GpuOpener,
    message::{PartOutput, ResultRow},
    part_process::query_nvidia_smi,
};
use crate::gpu::{collect_library_search_paths, probe_gpu_libraries};
use device::{
    Cuda,
    cuda::{GpuSensorReadings, KernelReport},
};
use diagnostic::quantity::format_count;
use serde_json::{Map, Value, json};
use std::{path::Path, time::Instant};

/// The starts of the names of environment variables that CUDA's libraries read.
const VARIABLE_PREFIXES: [&str; 5] = ["CUDA_", "NCCL_", "NVIDIA_", "CUBLAS", "CUDNN_"];

/// Reports the environment variables, the libraries and the properties of the GPU as rows of the
/// table that `launch gpu-check` prints. Fails with the category `Cluster` if the GPU is not
/// usable.
pub(super) fn report_environment(output: &PartOutput, open: GpuOpener) -> diagnostic::Result<()> {
    let is_listed = |name: &str| VARIABLE_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    let variables =
        std::env::vars_os().map(|(name, value)| [name, value].map(|s| s.to_string_lossy().into()));
    let variables: Map<String, Value> = variables
        .filter_map(|[name, value]: [String; 2]| is_listed(&name).then_some((name, Value::String(value))))
        .collect();
    output.send_details("variables", Value::Object(variables));
    for library in probe_gpu_libraries(&collect_library_search_paths(&[], Path::new(""))) {
        output.send_row(match library.result {
            Ok((version, path)) => {
                let data = json!({"version": version, "path": path});
                ResultRow::measured(library.name, format!("{version} ({})", path.display()), data)
            }
            Err(error) if library.required => ResultRow::failed(library.name, error.to_string()),
            Err(error) => ResultRow::skipped(library.name, format!("not available: {error}")),
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
    let attributes: Map<String, Value> =
        cuda.query_attributes().into_iter().map(|(name, value)| (name, value.into())).collect();
    let data = json!({
        "name": gpu.name, "capability": gpu.capability, "multiprocessors": gpu.multiprocessor_count,
        "memory_bytes": total, "free_bytes": free, "shared_memory_per_block": gpu.shared_memory_per_block,
        "l2_cache_bytes": gpu.l2_cache_bytes, "driver": gpu.driver_version,
        "attributes": attributes, "clocks": query_clocks(&cuda).1,
    });
    output.send_row(ResultRow::measured(format!("GPU {}", gpu.index), values, data));
    Ok(())
}

/// Compiles and loads every GPU kernel, and reports the time that this took and the kernels that
/// use local memory.
pub(super) fn report_kernel_loading(output: &PartOutput, cuda: &Cuda) -> diagnostic::Result<()> {
    let began = Instant::now();
    cuda.load_all_kernels()?;
    let seconds = began.elapsed().as_secs_f64();
    let compiled = cuda.kernel_compile_seconds();
    let values = match compiled.len() {
        0 => format!("{seconds:.2} s, from the cache"),
        count => format!("{seconds:.2} s, {} compiled", format_count(count, "source")),
    };
    let data = json!({"seconds": seconds, "compile_seconds": compiled});
    output.send_row(ResultRow::measured("loading all kernels", values, data));
    for (file, seconds) in compiled {
        output.send_row(ResultRow::measured(format!("- {file}"), format!("{seconds:.2} s"), Value::Null));
    }
    if let Some(why) = cuda.kernel_cache_error() {
        output.send_row(ResultRow::failed("writing the kernel cache", why.to_string()));
    }
    let kernels = cuda.report_kernel_resources()?;
    output.send_details("kernels", kernels.iter().map(to_kernel_json).collect());
    let spilling = kernels.iter().filter(|kernel| kernel.local_bytes > 0);
    let spilling: Vec<_> = spilling.map(|k| format!("{} {} B", k.name, k.local_bytes)).collect();
    let subject = format!("{} of {} use local memory", spilling.len(), format_count(kernels.len(), "kernel"));
    output.send_row(ResultRow::measured(subject, spilling.join(", "), Value::Null));
    Ok(())
}

/// Sends the GPU kernels and the matmul algorithms that were used so far to the parent process, for
/// the JSON report.
pub(super) fn report_used_kernels(output: &PartOutput, cuda: &Cuda) -> diagnostic::Result<()> {
    let kernels = cuda.report_launched_kernel_resources()?;
    output.send_details("launched_kernels", kernels.iter().map(to_kernel_json).collect());
    let plans = cuda.report_matmul_plans().into_iter().map(|plan| {
        let algorithm: Option<Map<String, Value>> = plan.algorithm.map(|attributes| {
            attributes.into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect()
        });
        json!({"matmul": plan.matmul, "algorithm": algorithm, "workspace_bytes": plan.workspace_bytes})
    });
    output.send_details("matmul_algorithms", plans.collect());
    Ok(())
}

/// Converts the report about one GPU kernel (registers, local memory, launches) to JSON.
fn to_kernel_json(kernel: &KernelReport) -> Value {
    let launch = kernel.launch.map(|launch| {
        json!({
            "grid": launch.grid, "block": launch.block, "shared_bytes": launch.shared_bytes,
            "active_blocks": launch.active_blocks,
        })
    });
    json!({
        "name": kernel.name, "registers": kernel.registers, "local_bytes": kernel.local_bytes,
        "static_shared_bytes": kernel.static_shared_bytes, "max_threads": kernel.max_threads, "launch": launch,
    })
}

/// Returns the GPU's clocks, temperature and power as text and as JSON.
pub(super) fn query_clocks(cuda: &Cuda) -> (String, Value) {
    let state = match cuda.query_sensor_readings() {
        Ok(state) => state,
        Err(why) => {
            let reported = cuda
                .query_pci_bus_id()
                .ok()
                .map(|id| query_nvidia_smi(&id.to_string_lossy()).unwrap_or_else(|error| error.to_string()));
            return (String::new(), json!({"nvml": why.to_string(), "nvidia_smi": reported}));
        }
    };
    let GpuSensorReadings { sm_mhz, memory_mhz, temperature, power_watts, throttle_reasons } = &state;
    let mut text = sm_mhz.map_or_else(String::new, |mhz| format!("{mhz} MHz"));
    for reason in throttle_reasons.iter().flatten().filter(|reason| **reason != "idle") {
        text = format!("{text}, {reason}");
    }
    let data = json!({
        "sm_mhz": sm_mhz, "memory_mhz": memory_mhz, "temperature": temperature, "power_watts": power_watts,
        "throttle_reasons": throttle_reasons,
    });
    (text, data)
}
