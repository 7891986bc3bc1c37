//! Tests of the CUDA backend with drivers and libraries that lack functions, memory pools or
//! memory, on the emulated GPU. These tests configure the emulated GPU, so each runs in a separate
//! process.

use crate::call_counts::call_count;
use crate::emulated_gpu;
use crate::own_process::is_own_process;
use device::cuda::LibrarySearchPaths;
use device::ops::{MatmulOps, VectorOps, WriteMode};
use device::storage::BackendNotice;
use device::{Buf, Cuda, Dtype, Storage};
use diagnostic::codes::device::CUDA_GRAPHS_DISABLED;
use std::{fs, path::Path, time::Duration};

/// Opens the emulated GPU with the libraries in `directory`.
fn open_gpu_in(directory: &Path) -> Cuda {
    let configured = vec![directory.to_owned()];
    Cuda::open(&LibrarySearchPaths { configured, ..LibrarySearchPaths::default() }, 0, None)
        .expect("the emulated GPU")
}

/// Opens the emulated GPU.
fn open_gpu() -> Cuda {
    open_gpu_in(emulated_gpu::library_directory())
}

/// Sets a variable of this process that configures the emulated GPU.
fn set_emulator_variable(variable: &str, value: impl ToString) {
    // SAFETY: no other thread runs.
    unsafe { std::env::set_var(variable, value.to_string()) };
}

/// Copies the emulated libraries to a new directory, with a driver that lacks the function `name`:
/// its name is overwritten in the symbol table.
fn make_libraries_without(name: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    for library in ["libcuda.so.1", "libnvrtc.so.13", "libcublasLt.so.13"] {
        let mut bytes = fs::read(emulated_gpu::library_directory().join(library)).expect("a library");
        if library == "libcuda.so.1" {
            let text = [b"\0", name.as_bytes(), b"\0"].concat();
            let found: Vec<_> =
                (0..bytes.len() - text.len()).filter(|at| bytes[*at..].starts_with(&text)).collect();
            assert!(!found.is_empty(), "the driver has no {name}");
            found.iter().for_each(|at| bytes[at + 1] = b'x');
        }
        fs::write(directory.path().join(library), bytes).expect("written");
    }
    directory
}

/// Runs steps with graphs on, and returns the sums that a buffer contains afterwards.
fn run_steps_with_graphs(cuda: &Cuda) -> Vec<f32> {
    cuda.set_graphs_enabled(true);
    let mut buf = cuda.zeroed(Dtype::F32, 8);
    for step in 0..6u8 {
        (0..5).for_each(|_| cuda.add_scalar(buf.view_mut(), 1.0));
        cuda.add_scalar(buf.view_mut(), f32::from(step));
        cuda.synchronize().expect("no call failed");
    }
    cuda.clone_to_host(buf.view()).host_slice().to_vec()
}

#[test]
fn a_driver_without_graph_functions_trains_without_graphs() {
    if !is_own_process("cuda_library_faults::a_driver_without_graph_functions_trains_without_graphs") {
        return;
    }
    let directory = make_libraries_without("cuGraphInstantiateWithFlags");
    let cuda = open_gpu_in(directory.path());
    assert_eq!(run_steps_with_graphs(&cuda), [45.0; 8]);
    let Some(BackendNotice::Degraded(warning)) = cuda.record_step_duration(Duration::ZERO) else {
        panic!("no notice")
    };
    assert_eq!(warning.code(), CUDA_GRAPHS_DISABLED);
    assert!(format!("{warning:?}").contains("cuGraphInstantiateWithFlags"), "{warning:?}");
}

#[test]
fn either_version_of_the_capture_info_suffices() {
    if !is_own_process("cuda_library_faults::either_version_of_the_capture_info_suffices") {
        return;
    }
    for version in ["cuStreamGetCaptureInfo_v2", "cuStreamGetCaptureInfo_v3"] {
        let directory = make_libraries_without(version);
        let cuda = open_gpu_in(directory.path());
        assert_eq!(run_steps_with_graphs(&cuda), [45.0; 8]);
        let stats = cuda.graph_stats();
        assert!(stats.enabled && stats.updated_kernels > 0, "without {version}: {stats:?}");
    }
}

#[test]
fn libraries_stay_loaded_after_the_gpu_is_closed() {
    if !is_own_process("cuda_library_faults::libraries_stay_loaded_after_the_gpu_is_closed") {
        return;
    }
    drop(open_gpu());
    let maps = fs::read_to_string("/proc/self/maps").expect("this process's mappings");
    for library in ["libcuda.so.1", "libnvrtc.so.13", "libcublasLt.so.13"] {
        assert!(maps.contains(library), "{library} was unloaded");
    }
}

#[test]
fn a_gpu_without_memory_pools_keeps_freed_blocks() {
    if !is_own_process("cuda_library_faults::a_gpu_without_memory_pools_keeps_freed_blocks") {
        return;
    }
    set_emulator_variable("EMULATED_GPU_POOLS", 0);
    set_emulator_variable("EMULATED_GPU_MEMORY", 64 << 20);
    let cuda = open_gpu();
    let free = || cuda.query_memory_info().expect("memory info").0;
    let before = free();
    drop(cuda.zeroed(Dtype::F32, 6 << 20));
    let allocations = call_count("cuMemAlloc");
    for _ in 0..10 {
        let mut buf = cuda.zeroed(Dtype::F32, 6 << 20);
        cuda.add_scalar(buf.view_mut(), 1.0);
    }
    assert_eq!((call_count("cuMemAlloc"), call_count("cuMemFree")), (allocations, 0), "one block is reused");
    assert!(before - free() >= 24 << 20);
    // The kept block is returned for an allocation that does not fit otherwise.
    let large = cuda.try_zeroed("a test", Dtype::F32, 13 << 20).expect("52 of 64 MiB");
    assert!(cuda.try_zeroed("a test", Dtype::F32, 13 << 20).is_err(), "104 of 64 MiB");
    drop(large);
    assert_eq!(multiply_ones(&cuda), [8.0; 64]);
    assert_eq!(run_steps_with_graphs(&cuda), [45.0; 8]);
    drop(cuda);
    assert_eq!(call_count("cuMemAlloc"), call_count("cuMemFree"), "every block is freed");
}

/// Runs a kernel and a matmul of ones, and returns the result.
fn multiply_ones(cuda: &Cuda) -> Vec<f32> {
    let mut buffers: [Buf; 3] = std::array::from_fn(|_| cuda.zeroed(Dtype::F32, 64));
    let [x, w, y] = &mut buffers;
    cuda.add_scalar(x.view_mut(), 1.0);
    cuda.add_scalar(w.view_mut(), 1.0);
    // The pool keeps memory that the library lacks.
    drop(cuda.zeroed(Dtype::F32, 1 << 19));
    cuda.matmul_forward(y.view_mut(), x.view(), w.view(), 8, 8, 8, WriteMode::Overwrite);
    cuda.synchronize().expect("no call failed");
    cuda.clone_to_host(y.view()).host_slice().to_vec()
}

#[test]
fn libraries_get_memory_that_the_pool_keeps() {
    if !is_own_process("cuda_library_faults::libraries_get_memory_that_the_pool_keeps") {
        return;
    }
    set_emulator_variable("EMULATED_GPU_MEMORY", 8 << 20);
    set_emulator_variable("EMULATED_GPU_LIBRARY_BYTES", 3 << 20);
    let cuda = open_gpu();
    // The pool keeps 6 of 8 MiB, and loading the first kernel takes 3. Then the pool keeps 2 of the
    // other 5 MiB with one block, and the first matmul takes 3.
    drop(cuda.zeroed(Dtype::F32, 6 << 18));
    assert_eq!(multiply_ones(&cuda), [8.0; 64]);
    assert!(call_count("cuCtxSynchronize") >= 2);
    let full = cuda.try_zeroed("a test", Dtype::F32, 1 << 20).expect_err("4 MiB of less than 2");
    assert_eq!(full.code(), diagnostic::codes::device::GPU_OUT_OF_MEMORY);
}

#[test]
fn memory_that_another_stream_frees_is_waited_for() {
    if !is_own_process("cuda_library_faults::memory_that_another_stream_frees_is_waited_for") {
        return;
    }
    set_emulator_variable("EMULATED_GPU_MEMORY", 8 << 20);
    set_emulator_variable("EMULATED_GPU_LAG", "side:20000");
    let cuda = open_gpu();
    cuda.with_separate_stream(&mut || {
        let mut buf = cuda.zeroed(Dtype::F32, 6 << 18);
        (0..4).for_each(|_| cuda.fill_with_zeros(buf.view_mut()));
        drop(buf); // reached after 80 ms or more
        std::thread::scope(|threads| {
            let allocate = || cuda.try_zeroed("a test", Dtype::F32, 6 << 18).map(drop);
            threads.spawn(allocate).join().expect("no panic").expect("the memory of the other stream");
        });
    });
}
