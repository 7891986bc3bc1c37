//! Tests that NVIDIA's cuDNN accepts and compiles the graphs of attention. No GPU is needed: cuDNN
//! makes plans for a GPU's properties.

use crate::emulated_gpu;
use device::cuda::{
    CudaError, CudaLibrary, LibrarySearchPaths, RejectReason, compute_cudnn_plan_workspaces,
    estimate_cudnn_workspace_bytes,
};
use device::ops::AttentionShape;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Returns the directory of NVIDIA's cuDNN. Returns `None` if cuDNN is not installed. Panics in
/// that case if `LAUNCH_TEST_REQUIRE=all`.
fn find_cudnn_directory() -> Option<PathBuf> {
    let nvrtc = emulated_gpu::nvrtc_directory()?;
    let directory = nvrtc.ancestors().nth(4).expect("the cache").join("cudnn/nvidia/cudnn/lib");
    if directory.exists() {
        return Some(directory);
    }
    let reason = "skipped: cuDNN is not installed (scripts/setup-tests --all installs it)";
    assert!(std::env::var("LAUNCH_TEST_REQUIRE").as_deref() != Ok("all"), "{reason}");
    eprintln!("{reason}");
    None
}

/// Loads the libraries that cuDNN looks up by name in its process. They stay loaded until the
/// process ends.
fn load_dependencies(directory: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulated_gpu/no_gpu_stub.c");
    for (name, define) in [("libcuda.so.1", "-DDRIVER"), ("libcublasLt.so.13", "-DBLAS")] {
        let library = directory.join(name);
        let output = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", define])
            .arg(format!("-Wl,-soname,{name}"))
            .arg("-o")
            .arg(&library)
            .arg(&source)
            .output()
            .expect("a C compiler (scripts/setup-tests installs one)");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // SAFETY: the stub has no initializers.
        std::mem::forget(unsafe { libloading::Library::new(&library) }.expect("loaded"));
    }
    let paths = LibrarySearchPaths {
        configured: vec![emulated_gpu::nvrtc_directory().expect("NVRTC")],
        ..LibrarySearchPaths::default()
    };
    std::mem::forget(paths.open_library(CudaLibrary::Nvrtc).expect("NVRTC"));
}

/// The properties of a GPU for which cuDNN makes plans, with the names that they have in cuDNN's
/// JSON description of a GPU.
struct GpuDescription {
    name: &'static str,
    /// Compute capability times 100: 900 is sm_90.
    version: u64,
    multiprocessors: u64,
    /// Bytes of shared memory per block.
    shared: u64,
    memory: u64,
    l2_cache: u64,
}

const A100: GpuDescription = GpuDescription {
    name: "NVIDIA A100-SXM4-80GB",
    version: 800,
    multiprocessors: 108,
    shared: 166_912,
    memory: 80 << 30,
    l2_cache: 40 << 20,
};
const H200: GpuDescription = GpuDescription {
    name: "NVIDIA H200",
    version: 900,
    multiprocessors: 132,
    shared: 232_448,
    memory: 141 << 30,
    l2_cache: 50 << 20,
};
const B200: GpuDescription = GpuDescription {
    name: "NVIDIA B200",
    version: 1000,
    multiprocessors: 148,
    shared: 232_448,
    memory: 180 << 30,
    l2_cache: 126 << 20,
};

impl GpuDescription {
    /// Returns the GPU's properties as JSON in cuDNN's form.
    fn to_json(&self) -> String {
        let GpuDescription { name, version, multiprocessors, shared, memory, l2_cache } = self;
        format!(
            r#"{{"deviceVer": {version}, "multiProcessorCount": {multiprocessors}, "warpSize": 32,
            "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": {shared},
            "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536, "maxCtasPerSM": 32,
            "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "regsPerBlock": 65536,
            "totalGlobalMem": {memory}, "smClockRateKHz": 1980000, "l2CacheSize": {l2_cache},
            "maxBlockSize": [1024, 1024, 64], "memClockRateKHz": 2619000,
            "maxGridSize": [2147483647, 65535, 65535], "supportCoopLaunch": 1, "pciDeviceId": 0,
            "isTccDriver": 0, "cudaDeviceId": 0, "driverVer": 13000, "deviceName": "{name}"}}"#
        )
    }
}

#[test]
fn cudnn_has_plans_for_the_attention_of_every_model() {
    let Some(cudnn) = find_cudnn_directory() else { return };
    let directory = tempfile::tempdir().expect("a directory");
    load_dependencies(directory.path());
    let paths = LibrarySearchPaths { configured: vec![cudnn], ..LibrarySearchPaths::default() };
    let workspaces = |gpu: &GpuDescription, shape, window| {
        compute_cudnn_plan_workspaces(&paths, &gpu.to_json(), shape, window)
    };
    // GPT-2 124M, Qwen2.5-0.5B and 1.5B, Llama-3.2-1B, Llama-3.1-8B
    let models = [
        (16, 1024, 12, 12, 64),
        (8, 2048, 14, 2, 64),
        (8, 2048, 12, 2, 128),
        (8, 2048, 32, 8, 64),
        (2, 2048, 32, 8, 128),
    ];
    let unusual = [(1, 1000, 4, 4, 64), (3, 37, 4, 1, 16), (1, 2, 1, 1, 8), (2, 700, 6, 2, 80)];
    for gpu in [A100, H200, B200] {
        for (i, (b, t, heads, kv_heads, dim)) in models.into_iter().chain(unusual).enumerate() {
            let is_skipped = gpu.name != H200.name && i % 2 == 0; // each takes a second
            let window = (i % 3 == 2 && t > 100).then_some(t / 8);
            let case = format!("{}, {b} × {t}, {heads}/{kv_heads} × {dim}, window {window:?}", gpu.name);
            if is_skipped {
                continue;
            }
            let shape = AttentionShape::new(b, t, heads, kv_heads, dim);
            let bytes = workspaces(&gpu, shape, window).unwrap_or_else(|e| panic!("{case}: {e}"));
            let bytes = bytes.map(|bytes| bytes.unwrap_or_else(|| panic!("{case}: no plan")));
            // the estimate of `launch plan`
            let estimate = estimate_cudnn_workspace_bytes(shape) + 4096;
            assert!(bytes.iter().all(|bytes| *bytes <= estimate), "{case}: {bytes:?}");
        }
    }
    // An unsupported shape has no plan, or is an error.
    let wide = workspaces(&H200, AttentionShape::new(1, 64, 2, 2, 512), None);
    assert!(wide.as_ref().map_or(true, |bytes| bytes.contains(&None)), "{wide:?}");
    let error = compute_cudnn_plan_workspaces(&paths, "{}", AttentionShape::new(1, 64, 2, 2, 64), None)
        .expect_err("no properties");
    // cuDNN's own message names the first property that is missing
    assert!(
        matches!(&error, CudaError::Call { message, .. } if message.contains("maxGridSize")),
        "{error:?}"
    );
}

#[test]
fn an_unusable_cudnn_is_reported_with_its_path() {
    let directory = tempfile::tempdir().expect("a directory");
    let paths =
        LibrarySearchPaths { configured: vec![directory.path().to_owned()], ..LibrarySearchPaths::default() };
    let file = directory.path().join("libcudnn.so.9");
    fs::write(&file, "not a library").expect("a file");
    let shape = AttentionShape::new(1, 64, 2, 2, 64);
    let error = compute_cudnn_plan_workspaces(&paths, "{}", shape, None).expect_err("not a library");
    let CudaError::LibraryUnusable { library: CudaLibrary::Cudnn, rejected, .. } = &error else {
        panic!("{error:?}")
    };
    assert!(rejected[0].path == file && matches!(rejected[0].reason, RejectReason::Loader(_)), "{error:?}");
}
