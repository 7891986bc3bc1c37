//! Tests the CUDA backend on the emulated GPU: its results compared with those of the CPU, the
//! search for libraries, and the kernel cache.

use crate::cubin::{KernelResources, read_kernel_resources};
use crate::{emulated_gpu, own_process::run_test_alone};
use device::cuda::{self, CudaError, CudaLibrary, LibrarySearchPaths};
use device::ops::{
    ActivationOps, AttentionOps, AttentionShape, ClassifierGrads, ClassifierOps, ClassifierShape,
    EmbeddingOps, MatmulOps, VectorOps, WriteMode,
};
use device::{Buf, Cuda, Dtype, Storage, View, conformance};
use std::{collections::BTreeSet, fs, sync::OnceLock};

/// Returns a search path for the CUDA libraries that contains only the emulated ones.
fn library_paths() -> LibrarySearchPaths {
    LibrarySearchPaths {
        configured: vec![emulated_gpu::library_directory().to_owned()],
        ..LibrarySearchPaths::default()
    }
}

/// Returns the emulated GPU that all tests of this process share, and opens it first if needed.
fn open_shared_gpu() -> &'static Cuda {
    static CUDA: OnceLock<Cuda> = OnceLock::new();
    CUDA.get_or_init(|| Cuda::open(&library_paths(), 0, None).expect("the emulated GPU"))
}

#[test]
fn every_op_matches_the_cpu() {
    let rows = conformance::compare_ops_with_cpu(open_shared_gpu(), 1, 5);
    assert_eq!(rows.len(), 12);
    assert!(rows.iter().all(|row| row.failure.is_none() && row.cases >= 5), "{rows:#?}");
    // The 16-bit cases show rounding, so they did run in 16 bits. Only the embedding rounds
    // nothing.
    let rounded = rows
        .iter()
        .filter(|row| row.max_errors.bf16 > row.max_errors.f16 && row.max_errors.f16 > row.max_errors.f32);
    assert_eq!(rounded.count(), 11, "{rows:#?}");
    // Only a real GPU may sum fp8 terms with less precision.
    let fp8 = rows.iter().find(|row| row.family == "fp8 matmul").expect("the GPU has fp8");
    assert!(fp8.max_errors.f32 < 1e-5, "{fp8:?}");
}

/// Converts the elements of a GPU buffer to `f32`, and copies them to the host.
fn download_as_f32(from: View) -> Vec<f32> {
    let mut wide = open_shared_gpu().zeroed(Dtype::F32, from.len());
    open_shared_gpu().cast(wide.view_mut(), from);
    open_shared_gpu().clone_to_host(wide.view()).host_slice().to_vec()
}

/// Rounds values to `dtype` on the GPU, and returns them as `f32`.
fn round_on_gpu(dtype: Dtype, values: &[f32]) -> Vec<f32> {
    let wide = open_shared_gpu().clone_to_device(values.into());
    let mut buf = open_shared_gpu().zeroed(dtype, values.len());
    open_shared_gpu().cast(buf.view_mut(), wide.view());
    download_as_f32(buf.view())
}

/// Checks that a classifier with an odd vocabulary runs as matmuls over a padded one, and that
/// other vocabularies and types are not padded.
#[test]
fn classifier_pads_an_odd_vocabulary() {
    let list_matmuls = |v: usize, dtype: Dtype| {
        let cuda = Cuda::open(&library_paths(), 0, None).expect("the emulated GPU");
        let (m, d) = (16, 8);
        let draw = |n: usize| (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) / 64.0).collect::<Vec<f32>>();
        let upload = |n: usize| {
            let mut buf = cuda.zeroed(dtype, n);
            cuda.cast(buf.view_mut(), cuda.clone_to_device((&draw(n)[..]).into()).view());
            buf
        };
        let (x, w) = (upload(m * d), upload(v * d));
        let [mut loss, mut dw] = [m, v * d].map(|n| cuda.zeroed(Dtype::F32, n));
        let mut dx = cuda.zeroed(dtype, m * d);
        let labels: Vec<u32> = (0..m as u32).collect();
        let grads = ClassifierGrads {
            dx: dx.view_mut(),
            dw: dw.view_mut(),
            dw_write: WriteMode::Overwrite,
            scale: 1.0,
        };
        cuda.start_profiling();
        let shape = ClassifierShape { m, d, v, softcap: Some(30.0) };
        cuda.compute_classifier_loss(loss.view_mut(), x.view(), w.view(), &labels, shape, Some(grads));
        let calls = cuda.stop_profiling().expect("times").into_iter().map(|entry| entry.name);
        let mut matmuls: Vec<_> = calls.filter(|name| name.starts_with("matmul")).collect();
        matmuls.sort();
        assert!(cuda.clone_to_host(dw.view()).host_slice().iter().all(|x| f32::is_finite(*x)));
        matmuls
    };
    let forward = |v| format!("matmul 16 × {v} × 8 (bf16 · bf16 → f32)");
    let input = |v| format!("matmul 16 × 8 × {v} (bf16 · bf16 → bf16)");
    let weight = |v| format!("matmul {v} × 8 × 16 (bf16 · bf16 → f32)");
    assert_eq!(list_matmuls(259, Dtype::Bf16), [forward(320), input(320), weight(259)]);
    assert_eq!(list_matmuls(264, Dtype::Bf16), [forward(264), input(264), weight(264)]);
    let unpadded = list_matmuls(259, Dtype::F32);
    assert!(unpadded.iter().all(|name| name.contains("259")), "{unpadded:?}");
}

/// Checks that ops on empty shapes launch no kernel, because a grid without blocks is an error.
#[test]
fn empty_shapes_have_no_effect() {
    let poisoned = open_shared_gpu().clone_to_device((&[f32::NAN; 12][..]).into());
    let (mut none, mut dw) = (open_shared_gpu().zeroed(Dtype::F32, 0), poisoned);
    let (none2, w) = (open_shared_gpu().zeroed(Dtype::F32, 0), open_shared_gpu().zeroed(Dtype::F32, 12));
    open_shared_gpu().matmul_forward(none.view_mut(), none2.view(), w.view(), 0, 3, 4, WriteMode::Overwrite);
    open_shared_gpu().matmul_backward_weight(
        dw.view_mut(),
        none2.view(),
        none2.view(),
        0,
        3,
        4,
        WriteMode::Overwrite,
    );
    open_shared_gpu().add(none.view_mut(), none2.view());
    open_shared_gpu().embedding_forward(none.view_mut(), w.view(), &[], 4);
    open_shared_gpu().sum_squares_by_block(&mut [], none2.view());
    open_shared_gpu().swiglu_forward(none.view_mut(), none2.view(), 0, 7);
    assert_eq!(download_as_f32(dw.view()), [0.0; 12]);
}

#[test]
fn casts_round_to_the_nearest_even() {
    let values = [
        1.0,
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
        -3.0e38,
        3.4e38,
        65504.0,
        65519.9,
        65520.0,
        6.0e-8,
        2.0e-8,
        -0.0,
        f32::INFINITY,
    ];
    let bf16 = round_on_gpu(Dtype::Bf16, &values);
    let f16 = round_on_gpu(Dtype::F16, &values);
    assert_eq!(bf16[..3], [1.0, 1.0, 1.015625]);
    assert!(
        bf16[4].is_infinite() && bf16[11].is_infinite() && round_on_gpu(Dtype::Bf16, &[f32::NAN])[0].is_nan()
    );
    assert_eq!(f16[5..8], [65504.0, 65504.0, f32::INFINITY]);
    assert_eq!((f16[8], f16[9], f16[10].to_bits()), (2f32.powi(-24), 0.0, (-0.0f32).to_bits()));
    assert!(round_on_gpu(Dtype::F16, &[f32::NAN])[0].is_nan());
}

#[test]
fn missing_libraries_are_reported_with_the_searched_directories() {
    let empty = tempfile::tempdir().expect("a directory");
    let paths = LibrarySearchPaths {
        ld_library_path: vec![empty.path().to_owned()],
        ..LibrarySearchPaths::default()
    };
    match Cuda::open(&paths, 0, None).map(|_| ()) {
        Err(CudaError::LibraryNotFound { library, file_names, searched }) => {
            assert_eq!((library, file_names.as_str()), (CudaLibrary::Driver, "libcuda.so.1"));
            for directory in [&*empty.path().display().to_string(), "/usr/local/nvidia/lib64"] {
                assert!(searched.iter().any(|s| s == directory), "{directory} is missing in {searched:?}");
            }
        }
        other => eprintln!("this machine has a driver: {other:?}"),
    }
    // With a driver only, the next library is missing.
    let driver = emulated_gpu::library_directory().join("libcuda.so.1");
    std::os::unix::fs::symlink(driver, empty.path().join("libcuda.so.1")).expect("a link");
    if let Err(CudaError::LibraryNotFound { library, .. }) = Cuda::open(&paths, 0, None).map(|_| ()) {
        assert_eq!(library, CudaLibrary::Nvrtc);
    }
}

#[test]
fn properties_and_libraries_are_reported() {
    let properties = open_shared_gpu().properties();
    assert_eq!(
        (properties.name.as_str(), properties.architecture().as_str(), properties.driver_version),
        ("Emulated GPU", emulated_gpu::architecture(), (13, 0))
    );
    let libraries = open_shared_gpu().loaded_libraries();
    assert_eq!((libraries.nvrtc.0, libraries.cublas_lt.0), ((13, 0), 130_100));
    assert_eq!(libraries.cublas_lt.1, emulated_gpu::library_directory().join("libcublasLt.so.13"));
    let error = Cuda::open(&library_paths(), 3, None).map(|_| ()).expect_err("there is one GPU");
    assert_eq!(error, CudaError::GpuNotFound { index: 3, count: 1 });
}

#[test]
fn compiled_kernels_are_cached() {
    let cache = tempfile::tempdir().expect("a directory");
    let open = || Cuda::open(&library_paths(), 0, Some(cache.path().join("kernels"))).expect("opened");
    open().load_kernels().expect("compiled");
    let files = || {
        let mut names: Vec<_> = fs::read_dir(cache.path().join("kernels"))
            .expect("the cache")
            .map(|e| e.expect("entry").path())
            .collect();
        names.sort();
        names
    };
    let cached = files();
    assert_eq!(cached.len(), 8, "{cached:?}");
    for file in &cached {
        fs::write(file, "damaged").expect("written");
    }
    open().load_kernels().expect("compiled again");
    assert_eq!(files(), cached);
    assert!(cached.iter().all(|f| fs::metadata(f).expect("a file").len() > 48));
}

/// Runs attention with heads of `head_dim` elements on the GPU, forward and backward, and returns
/// the names of all kernels that the GPU has launched so far.
fn run_attention(cuda: &Cuda, dtype: Dtype, head_dim: usize) -> Vec<String> {
    let shape = AttentionShape::new(1, 5, 2, 1, head_dim);
    let [mut o, d_o] = [0; 2].map(|_| cuda.zeroed(dtype, 5 * 2 * head_dim));
    let [qkv, mut dqkv] = [0; 2].map(|_| cuda.zeroed(dtype, 5 * 4 * head_dim));
    let mut lse = cuda.zeroed(Dtype::F32, 2 * 5);
    cuda.attention_forward(o.view_mut(), lse.view_mut(), qkv.view(), &[0; 5], shape);
    cuda.attention_backward(dqkv.view_mut(), d_o.view(), o.view(), lse.view(), qkv.view(), &[0; 5], shape);
    let launched = cuda.report_launched_kernel_resources().expect("kernels");
    launched.into_iter().map(|kernel| kernel.name).collect()
}

/// Kernels that few jobs need: element type and head dimension of the attention that uses them,
/// their source file without `.cu`, and their names without `flash_`.
const RARELY_USED_KERNELS: [(Dtype, usize, &str, &[&str]); 3] = [
    (Dtype::F16, 64, "flash_f16", &["backward_kv_64_f16", "backward_q_64_f16", "forward_64_f16"]),
    (Dtype::Bf16, 136, "flash_256", &["backward_k_256", "backward_q_256", "backward_v_256", "forward_256"]),
    (
        Dtype::F16,
        256,
        "flash_256_f16",
        &["backward_k_256_f16", "backward_q_256_f16", "backward_v_256_f16", "forward_256_f16"],
    ),
];

/// Checks that kernels which few jobs need are compiled at their first use, and that attention uses
/// the kernels for the type and the width of the heads.
#[test]
fn rarely_used_kernels_are_compiled_at_their_first_use() {
    for (dtype, head_dim, file, kernels) in RARELY_USED_KERNELS {
        let cache = tempfile::tempdir().expect("a directory");
        let cuda = Cuda::open(&library_paths(), 0, Some(cache.path().to_owned())).expect("opened");
        let list_files = || {
            let files = fs::read_dir(cache.path()).expect("the cache").map(|e| e.expect("entry"));
            files.map(|file| file.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        cuda.load_kernels().expect("compiled");
        let is_rare = |name: &String| name.starts_with(&format!("{file}-"));
        let before = list_files();
        assert!(!before.iter().any(is_rare), "{before:?}");
        let launched = run_attention(&cuda, dtype, head_dim);
        let expected = kernels.iter().map(|kernel| format!("flash_{kernel}"));
        assert_eq!(
            launched,
            std::iter::once("attention_delta".to_owned()).chain(expected).collect::<Vec<_>>()
        );
        let after = list_files();
        assert!(after.len() == before.len() + 1 && after.iter().any(is_rare), "{after:?}");
        cuda.load_all_kernels().expect("compiled");
        assert_eq!(list_files().len(), before.len() + 3);
    }
}

/// Checks that autotuning selects and stores the fastest algorithm. The emulated cuBLASLt suggests
/// a slow algorithm, a fast one, and one that fails.
#[test]
fn the_fastest_algorithm_is_found_and_stored() {
    let cache = tempfile::tempdir().expect("a directory");
    let run_matmul = |write| {
        let cuda = Cuda::open(&library_paths(), 0, Some(cache.path().to_owned())).expect("opened");
        cuda.enable_matmul_autotuning();
        let mut buffers = [1.0f32, 2.0, 3.0].map(|x| {
            let mut buf = cuda.zeroed(Dtype::F32, 64);
            cuda.add_scalar(buf.view_mut(), x);
            buf
        });
        let [y, x, w] = &mut buffers;
        cuda.matmul_forward(y.view_mut(), x.view(), w.view(), 8, 8, 8, write);
        cuda.clone_to_host(y.view()).host_slice().to_vec()
    };
    let stored_choices = || {
        let files = fs::read_dir(cache.path()).expect("the cache").map(|e| e.expect("entry").path());
        let choices = files.filter(|f| f.extension().is_some_and(|e| e == "algorithm"));
        choices.map(|f| (fs::read(&f).expect("read"), f)).collect::<Vec<_>>()
    };
    assert_eq!(run_matmul(WriteMode::Overwrite), [48.0; 64]);
    let [(bytes, file)] = &stored_choices()[..] else { panic!("not one choice: {:?}", stored_choices()) };
    let which = u64::from_ne_bytes(bytes[48 + 5 * 8..][..8].try_into().expect("eight bytes"));
    assert_eq!(which, 1, "the fast one");
    // A file that is damaged, or names an algorithm that is not suggested, is replaced.
    for damaged in [&bytes[..60], b"", &[0; 112]] {
        fs::write(file, damaged).expect("written");
        assert_eq!(run_matmul(WriteMode::Overwrite), [48.0; 64]);
        assert_eq!(fs::read(file).expect("read"), *bytes);
    }
    // Timing does not change a result that is added to.
    assert_eq!(run_matmul(WriteMode::Accumulate), [49.0; 64]);
    assert_eq!(stored_choices().len(), 2);
}

/// Checks matmuls for which cuBLASLt has no algorithm: unaligned 16-bit operands, and a bias. Other
/// algorithms and kernels are used then.
#[test]
fn matmuls_work_without_algorithms_for_unaligned_operands_and_biases() {
    for lacking in ["", "odd", "invalid"] {
        let test = "cuda::unaligned_matmuls_with_a_bias_match_the_definition";
        let output = run_test_alone(test, "BLAS_LACKS", lacking);
        assert!(output.status.success(), "{lacking}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Compares unaligned matmuls with a bias with their definition. Runs in a child process of
/// `matmuls_work_without_algorithms_for_unaligned_operands_and_biases`.
#[test]
fn unaligned_matmuls_with_a_bias_match_the_definition() {
    if std::env::var_os("BLAS_LACKS").is_none() {
        return;
    }
    let number = |i: usize| ((i * 37 + 11) % 29) as f32 / 16.0 - 0.75;
    for (dtype, shift) in [(Dtype::Bf16, 0), (Dtype::Bf16, 1), (Dtype::F16, 0), (Dtype::F32, 1)] {
        for [m, n, k] in [[3, 5, 7], [8, 16, 24], [2, 8, 3]] {
            let put = |len: usize, from: usize| {
                let values: Vec<f32> = (0..len).map(|i| number(i + from)).collect();
                let (wide, mut buf) = (
                    open_shared_gpu().clone_to_device((&values[..]).into()),
                    open_shared_gpu().zeroed(dtype, len + shift),
                );
                open_shared_gpu().cast(buf.view_mut().slice(shift..len + shift), wide.view());
                (values, buf)
            };
            let ((x, x_buf), (w, w_buf), (bias, bias_buf)) = (put(m * k, 0), put(n * k, 5), put(n, 9));
            let mut y = open_shared_gpu().zeroed(dtype, m * n);
            let [x_view, w_view, bias_view] = [&x_buf, &w_buf, &bias_buf].map(|buf| {
                let view = buf.view();
                view.slice(shift..view.len())
            });
            open_shared_gpu().matmul_bias_forward(y.view_mut(), x_view, w_view, Some(bias_view), m, n, k);
            open_shared_gpu().matmul_forward(y.view_mut(), x_view, w_view, m, n, k, WriteMode::Accumulate);
            for (i, result) in download_as_f32(y.view()).into_iter().enumerate() {
                let sum: f32 = (0..k).map(|j| x[i / n * k + j] * w[i % n * k + j]).sum();
                let expected = 2.0 * sum + bias[i % n];
                assert!(
                    (result - expected).abs() < 0.02 * (1.0 + expected.abs()),
                    "{dtype:?} {m} {n} {k}: {result}, expected {expected}"
                );
            }
        }
    }
}

#[test]
fn an_unwritable_kernel_cache_is_reported_and_harmless() {
    let cache = tempfile::tempdir().expect("a directory");
    let file = cache.path().join("kernels");
    fs::write(&file, "not a directory").expect("written");
    let cuda = Cuda::open(&library_paths(), 0, Some(file.clone())).expect("opened");
    cuda.load_kernels().expect("compiled");
    let Some(CudaError::KernelCacheWrite { path, .. }) = cuda.kernel_cache_error() else {
        panic!("{:?}", cuda.kernel_cache_error());
    };
    let name = path.file_name().expect("a name").to_string_lossy();
    assert!(
        path.starts_with(&file) && name.contains(&format!("-{}-nvrtc", emulated_gpu::architecture())),
        "{}",
        path.display()
    );
    assert_eq!(fs::read(&file).expect("untouched"), b"not a directory");
}

#[test]
fn host_and_gpu_memory_are_not_interchangeable() {
    let (host, device) = (Buf::zeroed(4), open_shared_gpu().zeroed(Dtype::F32, 4));
    let panics = |f: &dyn Fn()| std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).is_err();
    assert!(panics(&|| assert_eq!(device.view().host_slice(), [0.0; 4])));
    assert!(panics(&|| open_shared_gpu().scale(Buf::zeroed(4).view_mut(), 1.0)));
    assert!(!panics(&|| assert_eq!(host.view().host_slice(), [0.0; 4])));
}

/// Returns the kernels that NVIDIA's NVRTC, which needs no GPU, compiles for an architecture: the
/// name of each source file, and its image. Images of unchanged sources are taken from the cache of
/// the tests. Returns `None` if NVRTC is not installed; panics in that case if
/// `LAUNCH_TEST_REQUIRE=all`.
fn compile_kernels(architecture: &str) -> Option<Vec<(String, Vec<u8>)>> {
    let nvrtc = emulated_gpu::nvrtc_directory()?;
    let sources = emulated_gpu::find_device_crate().join("src/cuda");
    // These sources contain the compiler's options and what is removed from the kernels.
    let [options, kernel_text] =
        ["compile.rs", "kernel_text.rs"].map(|file| fs::read(sources.join(file)).expect("a source"));
    let libraries = fs::read_dir(&nvrtc).expect("libraries").map(|entry| {
        let entry = entry.expect("an entry");
        (entry.file_name(), entry.metadata().expect("a size").len())
    });
    let version = format!("{:?}", libraries.collect::<BTreeSet<_>>());
    let inputs = [version.as_bytes(), &options, &kernel_text, architecture.as_bytes()];
    let inputs = emulated_gpu::hash_inputs(&[&sources.join("kernels")], &inputs);
    let directory = emulated_gpu::find_or_create("kernel-images", inputs, |new| {
        let paths = LibrarySearchPaths { configured: vec![nvrtc], ..LibrarySearchPaths::default() };
        for (file, image) in cuda::compile_kernel_sources(&paths, architecture).expect("compiles") {
            fs::write(new.join(file), image).expect("written");
        }
    });
    let images = fs::read_dir(directory).expect("images").map(|entry| {
        let path = entry.expect("an entry").path();
        let file = path.file_name().expect("a name").to_string_lossy().into_owned();
        (file, fs::read(path).expect("an image"))
    });
    Some(images.collect())
}

/// Compiles the kernels for an architecture with NVIDIA's NVRTC and checks their shared memory and
/// their registers, which it prints.
fn assert_kernels_compile(architecture: &str) {
    let Some(images) = compile_kernels(architecture) else { return };
    assert_eq!(images.len(), if architecture == "sm_90" { 12 } else { 11 });
    let reserved = if architecture == "sm_80" { 0 } else { 1024 };
    for (file, image) in &images {
        assert!(image.starts_with(b"\x7fELF"), "{file}");
        let kernels = read_kernel_resources(image);
        let has_array = |kernel: &KernelResources| kernel.static_shared_bytes > reserved;
        // A kernel with dynamic shared memory may use the GPU's maximum, so it must have no static
        // arrays.
        let is_dynamic = file.starts_with("flash") || file == "attention.cu";
        assert!(!is_dynamic || !kernels.iter().any(has_array), "{file}: {kernels:?}");
        assert!(file != "norm.cu" || kernels.iter().any(has_array), "{file}: {kernels:?}");
        for kernel in &kernels {
            println!("{file}: {kernel:?}");
            assert!((1..=255).contains(&kernel.registers), "{kernel:?}");
            // Kernels of flash_hopper.cu spill registers once per block, outside of loops.
            let keeps_registers = file.starts_with("flash") && file != "flash_hopper.cu";
            assert!(!keeps_registers || kernel.local_bytes == 0, "{kernel:?}");
        }
    }
}

#[test]
fn kernels_compile_for_ampere() {
    assert_kernels_compile("sm_80");
}

#[test]
fn kernels_compile_for_hopper() {
    assert_kernels_compile("sm_90");
}

#[test]
fn kernels_compile_for_blackwell() {
    assert_kernels_compile("sm_100");
}

#[test]
fn an_unknown_architecture_is_rejected_by_the_compiler() {
    let Some(directory) = emulated_gpu::nvrtc_directory() else { return };
    let paths = LibrarySearchPaths { configured: vec![directory], ..LibrarySearchPaths::default() };
    let error = cuda::compile_kernel_sources(&paths, "sm_12").expect_err("sm_12 does not exist");
    assert!(matches!(error, CudaError::KernelCompile { .. }), "{error:?}");
}
